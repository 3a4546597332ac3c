"""Results on the disk: one line of JSON per lab run, found again by the scenario it holds."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from skerry_tools.lab.scenario import LabScenario

from .cells import CODE

ARCHIVE = "runs.jsonl.gz"
TEXTS = ("training_text", "held_out_text")
"""What results hold digests of; older ones of neither."""


@dataclass(frozen=True, slots=True)
class Found:
    """A finished run: its scenario, and what its ``skerry_tools.lab.lab.LabResult`` said."""

    scenario: LabScenario
    result: dict[str, Any]

    @property
    def loss(self) -> float:
        """Held-out loss at the end, in nats per token."""
        return float(self.result["loss"])

    @property
    def sources(self) -> str:
        """Which sources made it; empty for what was made before that was kept."""
        return str(self.result.get("sources", ""))

    @property
    def ended_as(self) -> str:
        """What tells the parameters at its end, to the last bit, from those of other runs."""
        digests = self.result.get("params_digests")
        return json.dumps(digests) if digests else self.scenario.digest

    def like(self, other: Found) -> bool:
        """Tell whether both were trained on and judged by the same text, as far as they say."""
        texts = [(self.result.get(name), other.result.get(name)) for name in TEXTS]
        return all(ours == theirs for ours, theirs in texts if ours and theirs)

    def number(self, name: str) -> float:
        """Return one number of the result."""
        return float(self.result[name])

    def curve(self, name: str) -> list[float]:
        """Return one column of the evaluations on the way.

        Without the last one, which is on more text and so lies off the curve.
        """
        return [float(point[name]) for point in self.result["curve"][:-1]]


class Store:
    """All results in one compressed file of a folder, sorted by the digests they were stored under.

    A line is valid for a scenario if the scenario it holds, read by today's settings, equals it:
    a setting that is new and left at its default invalidates nothing, nor does one of fault drills
    that is gone; a default that has changed invalidates all runs that used it.
    """

    def __init__(self, folder: Path, code: int = CODE) -> None:
        self._folder = folder
        self._code = code

    @property
    def folder(self) -> Path:
        """The folder with the archive."""
        return self._folder

    def all(self) -> dict[str, Found]:
        """Return every result that is readable and of this code, by its scenario's digest."""
        return {found.scenario.digest: found for found in self._read()}

    def put(self, scenario: LabScenario, result: dict[str, Any]) -> Path:
        """Add a result to the archive, whole or not at all; several processes may do so at once."""
        self._folder.mkdir(parents=True, exist_ok=True)
        record = {
            "digest": scenario.digest,
            "code": self._code,
            "scenario": scenario.model_dump(mode="json"),
            "result": result,
        }
        with _alone(self._folder):
            kept = {_digest(line): line for line in self.lines()}
            kept[scenario.digest] = json.dumps(record)
            self._write("".join(f"{kept[digest]}\n" for digest in sorted(kept)))
        return self._folder / ARCHIVE

    def lines(self) -> list[str]:
        """Return the archive's lines; none if there is no archive."""
        path = self._folder / ARCHIVE
        if not path.exists():
            return []
        return gzip.decompress(path.read_bytes()).decode().splitlines()

    def _write(self, text: str) -> None:
        handle, draft = tempfile.mkstemp(dir=self._folder, suffix=".draft")
        with os.fdopen(handle, "wb") as file:
            file.write(gzip.compress(text.encode(), mtime=0))
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(self._folder / ARCHIVE)

    def _read(self) -> Iterator[Found]:
        for line in self.lines():
            try:
                record = json.loads(line)
                if record["code"] != self._code:
                    continue
                held = _as_today(record["scenario"])
                scenario = LabScenario.model_validate_json(json.dumps(held))
                yield Found(scenario, cast("dict[str, Any]", record["result"]))
            except (ValueError, KeyError, TypeError, ValidationError):
                continue  # of another release, or none of ours: the run is made again


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Keep every other process and thread that would write into this folder waiting."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _as_today(scenario: dict[str, Any]) -> dict[str, Any]:
    """Return a stored scenario without what never was of the lab, and as it read fragments."""
    run = {name: table for name, table in scenario["run"].items() if name != "chaos"}
    run["sync"] = {"delta_scheme": "none"} | run["sync"]
    return {**scenario, "run": run}


def _digest(line: str) -> str:
    """Return the digest that a line was stored under; a line without one counts as itself."""
    try:
        return str(json.loads(line)["digest"])
    except (ValueError, KeyError, TypeError):
        return line
