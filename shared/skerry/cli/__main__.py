"""``skerry``, the command: Ctrl-C ends it without a word, also while it is imported."""

from __future__ import annotations

from skerry.service import interrupts


def main() -> None:
    """Answer the command line of this process."""
    interrupts.end_at_once()
    from skerry.cli import main as command_line

    command_line.main()


if __name__ == "__main__":
    main()
