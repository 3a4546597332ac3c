"""What a new owner of a shard finds: the newest manifests, held against what the ledger says."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from skerry.bus.base import Start
from skerry.bus.ledger import append_commit, last_commits
from skerry.bus.loss import state_lost
from skerry.errors import BrokerUnavailable, WireError, WrongPlan
from skerry.wire.messages import Manifest
from skerry.wire.records import decode
from skerry.wire.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.bus.base import Bus, Record
    from skerry.core.fragments import Plan
    from skerry.wire.messages import Commit

READ_S = 20.0
"""Reading up to a fence that was just taken takes no longer than this."""


async def mend(
    bus: Bus, run: str, plan: Plan, own: Sequence[int], manifests: dict[int, Record]
) -> dict[int, Manifest]:
    """Return the manifests of the fragments ``own``, the ledger mended where it is one behind.

    Raises StateLost when the ledger knows of a version that the state does not hold.
    """
    commits = await last_commits(bus, run)
    found: dict[int, Manifest] = {}
    for fragment in own:
        held, record = commits.get(fragment), manifests.get(fragment)
        manifest = await _decoded(bus, run, plan, fragment, record, held) if record else None
        known = manifest.commit.version if manifest else 0
        if held is not None and held.version > known:
            what = (
                f"the newest manifest in the log is of version {known}"
                if known
                else "its manifest is not in the log"
            )
            raise await state_lost(bus, run, fragment, held.version, what)
        if manifest is not None:
            found[fragment] = manifest
            if held is None or held.version < known:
                await append_commit(bus, manifest.commit)
    return found


async def read_behind(
    bus: Bus, run: str, own: Sequence[int], shard: int, token: int
) -> tuple[dict[int, Record], int]:
    """Return the newest manifests of the fragments ``own``, and the shard's newest token.

    They are read in the stream's own order up to the fence ``token``, behind which no older writer
    can write: a replica that lags may answer any other question with what was true before. What
    the fence's own writer has written since comes on top.
    """
    subjects = Subjects(run)
    wanted = {subjects.manifest(fragment): fragment for fragment in own}
    found: dict[str, Record] = {}
    follower = bus.follow([subjects.fence(shard), *wanted], start=Start.LAST_PER_SUBJECT)
    newest = 0
    try:
        async with asyncio.timeout(READ_S), aclosing(follower):
            async for record in follower:
                if record.subject not in wanted:
                    newest = record.sequence
                    if newest >= token:
                        break
                found[record.subject] = record
    except TimeoutError as error:
        msg = f"The fence of shard {shard} of run {run!r} could not be read within {READ_S:g} s."
        raise BrokerUnavailable(msg) from error
    for record in await bus.last_each(subjects.manifests()):
        held = found.get(record.subject)
        if held is None or held.sequence < record.sequence:
            found[record.subject] = record
    return {wanted[s]: record for s, record in found.items() if s in wanted}, newest


async def _decoded(
    bus: Bus, run: str, plan: Plan, fragment: int, record: Record, held: Commit | None
) -> Manifest:
    try:
        return decode(Manifest, record.payload, run=run, plan_digest=plan.digest)
    except WrongPlan:
        raise
    except WireError as error:
        what = f"its manifest cannot be read ({error})"
        version = held.version if held else 1
        raise await state_lost(bus, run, fragment, version, what) from error
