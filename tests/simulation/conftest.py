"""What every simulated schedule needs: the syncer as it is, and silence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import structlog

from skerry.bus.base import Bus
from skerry.testing.simulation.cluster import Syncer
from skerry_syncer.service import candidate


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    """Log nothing: a schedule that fails is run again by hand."""
    silent = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=silent)
    yield
    structlog.reset_defaults()


@pytest.fixture
def syncer() -> Syncer:
    """The real candidate, on the clock of its machine."""

    async def serve(bus: Bus, run: str, name: str, wall_ns: Callable[[], int]) -> None:
        await candidate(bus, run, name, wall_ns=wall_ns, instance=f"{name}/{wall_ns()}")

    return serve
