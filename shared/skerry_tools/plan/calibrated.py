"""``skerry simulate --calibrate RUN``: learn from a real run, and tell it again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from skerry.cli.cluster.folder import RunFolder
from skerry.cli.status import log_of
from skerry.service.connect import bus_from
from skerry.settings import loading
from skerry.settings.loading import run_config_from_json
from skerry_tools.plan import calibrate, journal

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.settings.models import RunConfig
    from skerry_tools.plan.calibrate import Evidence


def evidence_of(run: str, nats: str | None, metrics: Path | None) -> tuple[Evidence, RunConfig]:
    """Return what the log of a run and its monitor's file say, and the run's config.

    The log is that of a cluster which runs here, or has left it in this folder, or at ``nats``.
    """
    return asyncio.run(_evidence(run, nats, metrics))


async def _evidence(run: str, nats: str | None, metrics: Path | None) -> tuple[Evidence, RunConfig]:
    given = loading.load(None, [f"nats.url={nats}"] if nats else [])
    async with (
        log_of(given, run, named=nats is not None) as log,
        bus_from(log.nats, "simulate") as bus,
    ):
        record, members, commits = await calibrate.history(bus, run)
    rows = journal.read_rows(metrics or RunFolder(run).metrics)
    known = calibrate.evidence(run, members, commits, rows)
    return known, run_config_from_json(record.config_json)
