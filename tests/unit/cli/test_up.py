"""What ``skerry up`` says about its processes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from skerry.cli.cluster.supervise import Change, Event
from skerry.cli.live import screen
from skerry.cli.up import broker_watch, tell


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


def test_a_lost_broker_is_told_once_and_so_is_its_return(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heard = broker_watch(screen(Console(file=io.StringIO())), "nats://me:secret@host:1")
    for event in ("error", "reconnected", "disconnected", "disconnected", "reconnected"):
        heard(event, {})
    away, back = capsys.readouterr().out.splitlines()
    assert away.startswith("The broker at nats://me:***@host:1 is away: learners go on training")
    assert back == "The broker is back."
