"""The health monitor's rows read back: what each learner's time went into, life by life.

A line is a moment: numbers by metric and attributes, ``skerry.learner.time{learner=..,use=..}``.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from skerry.algorithm.goodput import TRAIN, USES, Cause
from skerry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_NAME = re.compile(r"(?P<metric>[^{]+)(?:\{(?P<keys>.*)\})?")


@dataclass(frozen=True, slots=True)
class Life:
    """One incarnation of a learner, by the last row that saw it, or else as it joined.

    ``spent_s`` are seconds by use since the process started, ``seen_s`` (epoch) when it last
    pulsed, ``step_s`` the time of a step.
    """

    learner: str
    incarnation: int
    seen_s: float
    spent_s: Mapping[str, float]
    step_s: float

    @property
    def started_s(self) -> float:
        """When its process started, seconds since the epoch."""
        return self.seen_s - math.fsum(self.spent_s.values())

    @property
    def start_s(self) -> float:
        """How long it took from there to its first step."""
        return self.spent_s.get(Cause.COMPILE, 0.0) + self.spent_s.get(Cause.RECOVER, 0.0)


def read_rows(path: Path) -> Iterator[str]:
    """Yield the lines of a file of metrics, after those that were set aside before it.

    One line at a time: a long run's rows do not fit in memory. Raises ConfigError where a file
    cannot be read.
    """
    try:
        for file in (*_set_aside(path), path):
            opening = gzip.open if file.suffix == ".gz" else open
            with opening(file, "rt", encoding="utf-8") as lines:
                for line in lines:
                    yield line.rstrip("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        msg = f"The metrics {path} cannot be read ({error}): name the health monitor's file."
        raise ConfigError(msg, path="metrics") from error


def _set_aside(path: Path) -> list[Path]:
    """Return ``<name>.<number>.gz`` beside a file, the highest number, which is the oldest, first.

    Files that were unpacked by hand, ``<name>.<number>``, are read as well.
    """
    aside = re.compile(re.escape(path.name) + r"\.(\d+)(\.gz)?")
    numbered: dict[int, Path] = {}
    for file in path.parent.glob("*"):
        if found := aside.fullmatch(file.name):
            numbered[int(found[1])] = file
    return [numbered[number] for number in sorted(numbered, reverse=True)]


def parsed(line: str, run: str) -> dict[str, Any] | None:
    """Return a row of this run; a line that was cut off, or another run's, is none."""
    try:
        found: object = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    row = cast("dict[str, Any]", found)
    return row if row.get("run") == run and "time_s" in row else None


def _named(name: str) -> tuple[str, dict[str, str]]:
    found = _NAME.fullmatch(name)
    if found is None:
        return name, {}
    keys: dict[str, str] = {}
    for pair in (found["keys"] or "").split(","):
        key, equals, value = pair.partition("=")
        keys |= {key: value} if equals else {}
    return found["metric"], keys


def ratios(row: Mapping[str, Any]) -> dict[str, float]:
    """Return each use's share of all learners' time, empty where the row does not say."""
    told = dict.fromkeys(USES, 0.0)
    for name, value in row.items():
        metric, keys = _named(name)
        if metric == "skerry.goodput.ratio":
            told[TRAIN] = float(value)
        elif metric == "skerry.badput.ratio" and keys.get("cause") in told:
            told[keys["cause"]] = float(value)
    return told if math.fsum(told.values()) > 0 else {}


def lives(row: Mapping[str, Any]) -> list[Life]:
    """Return what a row says of each learner that it has heard."""
    values: dict[str, dict[str, float]] = defaultdict(dict)
    spent: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in row.items():
        metric, keys = _named(name)
        learner = keys.get("learner")
        if learner is None or not isinstance(value, int | float):
            continue
        if metric == "skerry.learner.time":
            spent[learner][keys.get("use", "")] = float(value)
        else:
            values[learner][metric] = float(value)
    at_s = float(row["time_s"])
    return [
        Life(
            learner,
            int(own.get("skerry.learner.incarnation", 1)),
            at_s - own.get("skerry.learner.silence", 0.0),
            spent[learner],
            own.get("skerry.step.time", 0.0),
        )
        for learner, own in values.items()
        if spent[learner]
    ]
