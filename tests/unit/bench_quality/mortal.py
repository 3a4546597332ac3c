"""A runner that dies, where worker processes can import it."""

from __future__ import annotations

import os
from pathlib import Path

from bench.quality.store import Store

from skerry_tools.lab.scenario import LabScenario


def killed_once(text: str, folder: str, expected: str) -> float:
    """Die as a worker that the kernel kills does, but only the first time for a seed of 1."""
    del expected
    scenario = LabScenario.model_validate_json(text)
    mark = Path(folder) / "died"
    if scenario.seed == 1 and not mark.exists():
        mark.touch()
        os._exit(9)
    Store(Path(folder)).put(scenario, {"loss": 2.0})
    return 2.0
