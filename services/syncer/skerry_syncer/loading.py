"""From the log to a shard in memory: what a syncer reads before it serves one."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import structlog

from skerry.errors import Corrupt, WireError
from skerry.log import ledger, run_records
from skerry.log.base import Deliver
from skerry.log.loss import state_lost
from skerry.log.state import MASTER, read_part
from skerry.log.state_writer import StateWriter
from skerry.protocol.contribution import ContributionRules
from skerry.protocol.messages import Commit, Round, Start
from skerry.protocol.records import decode, read
from skerry.protocol.shard import PendingFragment, Shard, StalenessRule
from skerry.protocol.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Plan
    from skerry.algorithm.outer import Outer
    from skerry.log.base import Bus, StreamInfo
    from skerry.protocol.contribution import Incarnations
    from skerry.protocol.messages import Manifest
    from skerry.settings.models import RunConfig, SyncConfig

log = structlog.get_logger()

OUTER = "outer."
READ_ATTEMPTS = 3
"""How often a part is read whose bytes are wrong: they may have been damaged on the way."""
MOST_RECENT = 2000
MOST_ATTEMPTS = 10**6
"""No honest round is opened again so often; numbers stay far from what a record can hold."""
READ_WINDOW = 16


@dataclass(slots=True)
class FragmentVectors:
    """A fragment's master f32 (padded_size,) and the outer optimizer's state of it."""

    master: NDArray[np.float32]
    outer: object


class LoadedShard(NamedTuple):
    """A shard as its log says it is, and the vectors of each fragment that has been committed."""

    shard: Shard
    vectors: dict[int, FragmentVectors]


async def load(
    bus: Bus,
    writer: StateWriter,
    plan: Plan,
    config: RunConfig,
    outer: Outer,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> LoadedShard:
    """Rebuild the writer's shard from manifests and slots; append what the ledger lacks first.

    Raises StateLost where the log lacks what its own records name.
    """
    manifests = await writer.recover()
    streams = {info.name: info for info in await bus.streams()}
    floors = _floors(writer.run, manifests, streams)
    sync, data = config.sync, config.data
    shard = Shard.of(
        writer.run,
        plan,
        StalenessRule(sync.max_staleness, sync.staleness_discount),
        ContributionRules(data.seq_len, data.batch * data.seq_len, sync.contribution_scheme),
        [
            PendingFragment(f, manifests.get(f.index), floor=floors.get(f.index, 0))
            for f in writer.fragments
        ],
    )
    vectors = {
        index: await _restore(bus, writer.run, plan, manifest, outer, on_bytes)
        for index, manifest in manifests.items()
    }
    for commit in await _recent(bus, writer.run, sync, streams):
        if commit.fragment in shard.fragments:
            shard.fragments[commit.fragment].settle_all(commit)
    await _read_starts(bus, writer.run, shard.assembler.incarnations, streams)
    shard.again = await _asked_again(bus, shard, streams, restarted=bool(manifests) and not floors)
    return LoadedShard(shard, vectors)


def _floors(
    run: str, manifests: dict[int, Manifest], streams: dict[str, StreamInfo]
) -> dict[int, int]:
    """Return each fragment's floor; none where the stream is not the one they were counted in.

    Somebody has removed it, or its end went down with the machine: sequences count from further
    down again, and what they number now is not what the floors speak of. Progress still tells what
    was consumed.
    """
    stream = streams.get(Subjects(run).stream("CONTRIB"))
    newest = stream.last_seq if stream else 0
    floors = {index: manifest.commit.contrib_floor for index, manifest in manifests.items()}
    return floors if max(floors.values(), default=0) <= newest else {}


async def _asked_again(
    bus: Bus, shard: Shard, streams: dict[str, StreamInfo], *, restarted: bool
) -> dict[int, int]:
    """Return by fragment the attempt of its next round, where contributions to it may be gone.

    The window has dropped them, somebody has removed them, or the stream restarted (``restarted``),
    before any commit resolved them. Only who has sent one can tell, and looks when the round that
    it has answered is opened again.
    """
    stream = streams.get(Subjects(shard.assembler.run).stream("CONTRIB"))
    first = stream.first_seq if stream else 0
    gone = {
        i: s for i, s in shard.fragments.items() if s.version and (restarted or s.floor + 1 < first)
    }
    if not gone:
        return {}
    log.warning(
        "contributions_gone",
        run=shard.assembler.run,
        versions={index: state.version for index, state in gone.items()},
        stream_restarted=restarted,
        first_sequence=min(state.floor for state in gone.values()) + 1,
        last_sequence=first - 1,
        hint="what no commit had resolved may be lost; who sent it and still runs offers it again:"
        " raise log.window_bytes or log.window_s, and purge no stream of a run",
    )
    opened = await run_records.newest_each(bus, shard.assembler.run, Round, shard.plan.digest)
    latest = [o for o in opened if o.fragment in gone and o.version > gone[o.fragment].version]
    asked = {o.fragment: o.attempt for o in latest}
    return {index: 1 + min(asked.get(index, 0), MOST_ATTEMPTS) for index in gone}


async def _restore(
    bus: Bus,
    run: str,
    plan: Plan,
    manifest: Manifest,
    outer: Outer,
    on_bytes: Callable[[int], None] | None,
) -> FragmentVectors:
    vectors = {
        part.name: await _read(bus, run, plan, manifest, part.name, on_bytes)
        for part in manifest.parts
        if part.name == MASTER or part.name.startswith(OUTER)
    }
    master = vectors.pop(MASTER)
    leaves = {name.removeprefix(OUTER): vector for name, vector in vectors.items()}
    return FragmentVectors(master, outer.restore(master, leaves))


async def _read(
    bus: Bus,
    run: str,
    plan: Plan,
    manifest: Manifest,
    name: str,
    on_bytes: Callable[[int], None] | None,
) -> NDArray[np.float32]:
    """Return one part; StateLost where its bytes stay wrong."""
    for attempt in range(READ_ATTEMPTS):
        try:
            return await read_part(bus, run, plan, manifest, name, on_bytes=on_bytes)
        except Corrupt as error:
            if attempt + 1 == READ_ATTEMPTS:
                commit = manifest.commit
                what = f"its {name!r} cannot be read ({error})"
                raise await state_lost(bus, run, commit.fragment, commit.version, what) from error
    raise AssertionError


async def _recent(
    bus: Bus, run: str, config: SyncConfig, streams: dict[str, StreamInfo]
) -> list[Commit]:
    """Return the newest commits: what they refused may be read again.

    What lies above a fragment's floor was sent at most ``max_staleness`` versions ago, since
    nothing older holds a floor down. A ledger holds one commit per fragment and version, and half
    as many other records at the very most.
    """
    ledger_stream = Subjects(run).stream("LEDGER")
    if (info := streams.get(ledger_stream)) is None:
        return []
    subjects = {Subjects(run).commit(fragment) for fragment in range(config.fragments)}
    count = min(MOST_RECENT, 2 * config.fragments * (config.max_staleness + 2))
    window = asyncio.Semaphore(READ_WINDOW)

    async def read(sequence: int) -> Commit | None:
        async with window:
            record = await bus.get(ledger_stream, sequence)
        if record is None or record.subject not in subjects:
            return None
        try:
            return decode(Commit, record.payload, run=run)
        except WireError:
            return None

    first = max(info.first_seq, info.last_seq - count + 1, 1)
    found = await asyncio.gather(*(read(s) for s in range(first, info.last_seq + 1)))
    return [commit for commit in found if commit is not None]


async def _read_starts(
    bus: Bus, run: str, incarnations: Incarnations, streams: dict[str, StreamInfo]
) -> None:
    """Note where in CONTRIB each learner's incarnations began.

    The ledger knows of the newest ones, also where retention has dropped their ``Start``. A start
    that no learner can have made is left out.
    """
    subjects = Subjects(run)
    stream = streams.get(subjects.stream("CONTRIB"))
    for member in (await ledger.members(bus, run)).values():
        if 0 < member.contrib_sequence <= (stream.last_seq if stream else 0):
            incarnations.note(member.learner, member.incarnation, member.contrib_sequence)
    newest = max((r.sequence for r in await bus.last_each(subjects.start())), default=0)
    if not newest:
        return
    follower = bus.follow(subjects.start(), deliver=Deliver.ALL)
    async with aclosing(follower):
        async for record in follower:
            with suppress(WireError):
                started = read(Start, record, run=run)
                incarnations.start(started, record.sequence)
            if record.sequence >= newest:
                break
