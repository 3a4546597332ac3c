"""Print one line for all stages of a CI run, in pytest's form; exit 1 unless all have passed.

The argument is a folder with ``<stage>.log``, the stage's output, and ``<stage>.status``, its exit
status. A stage that failed without a failed test, such as a linter, counts as one.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
SUMMARY = re.compile(r"^(?:=+ )?(\d+ [a-z]+(?:, \d+ [a-z]+)*) in ([\d.]+)s", re.MULTILINE)
SHOWN = ("passed", "failed", "errors", "skipped", "xfailed", "xpassed")


def counts_of(log: str) -> tuple[Counter[str], float]:
    """Return the counts of pytest's last summary in an output, and its seconds; zeros without."""
    found = SUMMARY.findall(COLOUR.sub("", log))
    if not found:
        return Counter(), 0.0
    counts, seconds = found[-1]
    pairs = (count.split() for count in counts.split(", "))
    return Counter({"errors" if w == "error" else w: int(n) for n, w in pairs}), float(seconds)


def total(folder: Path) -> tuple[str, int]:
    """Return the line that sums up every stage in ``folder``, and the exit status."""
    counts, seconds = Counter[str](), 0.0
    for status in sorted(folder.glob("*.status")):
        tests, took_s = counts_of(status.with_suffix(".log").read_text(errors="replace"))
        if int(status.read_text()) and not tests["failed"] + tests["errors"]:
            tests["failed"] += 1
        counts, seconds = counts + tests, seconds + took_s
    bad = counts["failed"] + counts["errors"]
    if not counts:
        counts["failed"] = bad = 1
    shown = [f"{counts[word]} {word}" for word in SHOWN if counts[word] or word == "passed"]
    return f"{', '.join(shown)} in {seconds:.2f}s", int(bool(bad))


def main() -> int:
    """Print the line for the folder of the first argument, and return the exit status."""
    line, status = total(Path(sys.argv[1]))
    print(line)
    return status


if __name__ == "__main__":
    sys.exit(main())
