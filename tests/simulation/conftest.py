"""What every simulated schedule needs: the syncer as it is, and silence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from skerry.log.base import Bus
from skerry_syncer.service import stand_by
from tests.support.simulation.cluster import Syncer


@pytest.fixture(autouse=True)
def quiet(silent: None) -> None:
    """Log nothing: a schedule that fails is run again by hand."""
    del silent


@pytest.fixture
def syncer() -> Syncer:
    """The real candidate, on the clock of its machine."""

    async def serve(bus: Bus, run: str, name: str, wall_ns: Callable[[], int]) -> None:
        await stand_by(bus, run, name, wall_ns=wall_ns, instance=f"{name}/{wall_ns()}")

    return serve
