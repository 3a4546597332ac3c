"""A cluster that faults could be injected into."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skerry.cli.cluster.processes import TABLE, ProcessTable
from skerry.log.memory import MemoryBroker
from skerry_tools.chaos.local import LocalRun


@pytest.fixture
def ground(tmp_path: Path) -> LocalRun:
    """A cluster of this very process, without proxy, clocks or a broker of its own."""
    table = ProcessTable(tmp_path / TABLE)
    table._kept = True
    for name in ("learner-1", "learner-2", "syncer"):
        table.started(name, name.partition("-")[0], os.getpid())
    return LocalRun("r", tmp_path, MemoryBroker().connect())
