"""``skerry hub promote``: a run whose hub is gone goes on at the broker of a region.

A standby has all of the run's state and its ledger, each up to what reached it. A checkpoint of
that, restored into a new hub, is the run: commits that did not reach the region are lost, and
contributions are not kept, as with any checkpoint.
"""

from __future__ import annotations

import asyncio
import shlex
from typing import TYPE_CHECKING

from skerry.errors import ConfigError, RunMismatch, RunNotFound
from skerry.log import ledger
from skerry.service.entry import bus_from, settings_from
from skerry.service.keyring import ACCOUNTS, Keyring, changing
from skerry.service.region import cache_of
from skerry.store.finding import store_of
from skerry.tasks import in_thread
from skerry_checkpointer.cut import last_state
from skerry_checkpointer.restore import span
from skerry_checkpointer.service import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from skerry.log.nats.bus import NatsBus
    from skerry.store.base import Store
    from skerry.store.writer import Written


async def rescue(bus: NatsBus, run: str, store: Store) -> Written:
    """Write a checkpoint of what a region's standby has of a run.

    Raises RunMismatch while the hub answers, ConfigError where the region is no standby, StateLost
    where its state is not whole: it was still catching up.
    """
    async with bus:
        if await bus.mirrors.hub_answers():
            msg = (
                f"The hub of run {run!r} is not gone, it answers region {bus.region}: two hubs of"
                " one run go two ways. Stop it for good first, or leave it the hub."
            )
            raise RunMismatch(msg)
        try:
            record = await ledger.read_run(bus, run)
        except RunNotFound as error:
            msg = (
                f"Region {bus.region} is no standby of run {run!r}, its broker has no ledger:"
                " restore the run's newest checkpoint into a new hub (`skerry checkpoints list`)."
            )
            raise ConfigError(msg, path="region") from error
        writer = Checkpointer.of(bus, record, store)
        await in_thread(writer.read_store)  # this one is to count as newer than all that are there
        return await writer.write(await last_state(bus, run, writer.plan))


def run_promote(name: str, nats: str | None, sets: Sequence[str], keys: Path) -> None:
    """Write the checkpoint, hand the region's learners to the hub, and say how to go on."""
    held = Keyring.opened(keys)
    run = held.region_of(name).run
    login = f"nats.credentials={held.seed(cache_of(name))}"
    local = settings_from(nats, None, [login, *sets]).local
    store = store_of(local.store, run)
    written = asyncio.run(rescue(bus_from(local.nats, "promote"), run, store))
    with changing(keys) as held:
        held.promote(name)
    where, versions = store.where(written.name), span(written.checkpoint.versions)
    admin = f"nats.credentials={held.seed('admin')}"
    print(f"""\
{where} has what region {name} had of run {run}: version {versions}. What came after it is lost.
1. Stop the broker of region {name}, move its store away, and start the hub's configuration there,
   with {keys / ACCOUNTS} and an empty store.
2. skerry checkpoints restore {shlex.quote(where)} --run {run} --nats {local.nats.url} --set \
{shlex.quote(admin)} --set log.replicas=1
3. Start the run's services and learners there. Other regions: name the new hub in their nats.conf,
   start their brokers again, and make their caches again.
The old hub must not come back as one: delete its store before its broker is started again.""")
