"""Folders of weights that this machine's owner has named: where a run's frozen weights may lie.

A run's config names weights by digest only. They are read from a folder that this process was given
with ``model.path``, never from one that the config of a run names.
"""

from __future__ import annotations

from pathlib import Path

_offered: list[Path] = []


def offer(folder: str) -> None:
    """Let this process read weights from a folder."""
    _offered.append(Path(folder).expanduser())


def offered() -> tuple[Path, ...]:
    """Return the folders, the newest first."""
    return tuple(reversed(_offered))
