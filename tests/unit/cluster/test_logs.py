"""The last sentence, and the last event, of a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry.cli.cluster.logs import last_event, last_sentence, size_of


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", ""),
        ("error: x is 3.\n", "x is 3."),
        ("error: first.\nerror: second.\n{}\n", "second."),
        ("error: x is 3.\nUserWarning: beware\n", "x is 3."),
        ("Traceback (most recent call last):\n  File\nValueError: no\n\n", "ValueError: no"),
        ('{"event": "stopped"}\n', ""),
    ],
)
def test_the_expected_error_comes_before_everything_else(
    tmp_path: Path, text: str, sentence: str
) -> None:
    log = tmp_path / "a.log"
    log.write_text(text)
    assert last_sentence(log, 0) == sentence


def test_earlier_starts_of_a_service_do_not_count(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("error: old.\n")
    assert last_sentence(log, log.stat().st_size) == ""


def test_a_log_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert last_sentence(tmp_path / "none.log", 0) == ""


def test_the_newest_event_of_a_name_is_found(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text('{"event": "compiled", "seconds": 9.0}\n')
    offset = size_of(log)
    with log.open("a") as file:
        file.write(
            '{"event": "compiled", "seconds": 2.5}\n{"event": "x", "of": "compiled"}\n{"compiled"\n'
        )
    assert last_event(log, offset, "compiled") == {"event": "compiled", "seconds": 2.5}
    assert last_event(log, size_of(log), "compiled") == {}
