"""Words that production Python does without."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = re.compile(r"\b(?:told|anew|whoever|nobody|of\s+late|tell\s+whether)\b", re.IGNORECASE)
TO_DO: dict[str, int] = {}
"""Rooms that still have some, and how many at most: bring the numbers down, never up."""


def uses() -> dict[Path, list[str]]:
    """Return the words of the list in each file's names, docstrings, texts and comments."""
    files = (path for top in ("shared", "services") for path in (ROOT / top).rglob("*.py"))
    found = {path: WORDS.findall(path.read_text()) for path in files if "v1" not in path.parts}
    return {path.relative_to(ROOT): words for path, words in found.items() if words}


def test_production_code_does_without_these_words() -> None:
    rooms = tuple(TO_DO)
    assert {p: w for p, w in uses().items() if not p.as_posix().startswith(rooms)} == {}


def test_rooms_that_still_have_some_get_no_more() -> None:
    counts = {
        room: sum(len(w) for p, w in uses().items() if p.as_posix().startswith(room))
        for room in TO_DO
    }
    assert {room: n for room, n in counts.items() if n > TO_DO[room]} == {}
