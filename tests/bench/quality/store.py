"""Results on the disk: one JSON file per lab run, found again by the scenario it holds."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from skerry_tools.lab.scenario import Scenario

from .cells import CODE

TEXTS = ("training_text", "held_out_text")
"""What results hold digests of; older ones of neither."""


@dataclass(frozen=True, slots=True)
class Found:
    """A finished run: its scenario, and what ``skerry_tools.lab.lab.Result.to_dict`` said."""

    scenario: Scenario
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
    """A folder of results.

    A file is valid for a scenario if the scenario it holds, read by today's settings, equals it:
    a setting that is new and left at its default invalidates nothing, a default that has changed
    invalidates all runs that used it.
    """

    def __init__(self, folder: Path, code: int = CODE) -> None:
        self._folder = folder
        self._code = code

    @property
    def folder(self) -> Path:
        """Where the files lie."""
        return self._folder

    def all(self) -> dict[str, Found]:
        """Return every result that is readable and of this code, by its scenario's digest."""
        return {found.scenario.digest: found for found in self._read()}

    def put(self, scenario: Scenario, result: dict[str, Any]) -> Path:
        """Write a result, whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{scenario.digest}.json"
        record = {
            "code": self._code,
            "scenario": scenario.model_dump(mode="json"),
            "result": result,
        }
        handle, draft = tempfile.mkstemp(dir=self._folder, suffix=".draft")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(path)
        return path

    def _read(self) -> Iterator[Found]:
        for path in sorted(self._folder.glob("*.json")):
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                if record["code"] != self._code:
                    continue
                scenario = Scenario.model_validate_json(json.dumps(record["scenario"]))
                yield Found(scenario, cast("dict[str, Any]", record["result"]))
            except (ValueError, KeyError, TypeError, ValidationError):
                continue  # of another release, or none of ours: the run is made again
