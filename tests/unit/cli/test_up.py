"""What ``skerry up`` says about its processes."""

from __future__ import annotations

import pytest

from skerry.cli.supervise import Change, Event
from skerry.cli.up import tell


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (
            Event("a", Change.CRASHED, 7, -9, 3.0, "half a line"),
            "a (pid 7) was ended by signal 9; it starts again in 3 s.",
        ),
        (
            Event("a", Change.CRASHED, 7, 1, 2.0, "Too bad."),
            "a (pid 7) ended with 1 (Too bad.); it starts again in 2 s.",
        ),
        (Event("a", Change.REFUSED, 7, 3, sentence="Taken."), "a stopped for good: Taken."),
        (Event("a", Change.STARTED, 7), ""),
    ],
)
def test_a_person_is_told_what_matters(event: Event, sentence: str) -> None:
    assert tell(event) == sentence
