"""From the log to a shard in memory: what a syncer reads before it serves one."""

from __future__ import annotations

from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import structlog

from skerry.errors import Corrupt, StateLost, WireError
from skerry.log import ledger, run_records
from skerry.log.base import Deliver
from skerry.log.global_fragments import GlobalReader, Held, Meters
from skerry.log.ledger import state_lost
from skerry.log.state import read_part
from skerry.log.state_writer import StateWriter
from skerry.protocol.contribution import ContributionRules
from skerry.protocol.messages import Commit, Round, Start
from skerry.protocol.parts import DELTA, KEYFRAME, MASTER, OUTER
from skerry.protocol.records import decode, read
from skerry.protocol.shard import PendingFragment, Shard, StalenessRule
from skerry.protocol.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    import numpy as np
    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Plan
    from skerry.algorithm.outer import Outer
    from skerry.algorithm.planes import Planes
    from skerry.log.base import Bus, Record, StreamInfo
    from skerry.log.window import Uncovered
    from skerry.protocol.contribution import Incarnations
    from skerry.protocol.messages import Manifest
    from skerry.settings.models import RunConfig, SyncConfig

log = structlog.get_logger()

READ_ATTEMPTS = 3
"""How often a part is read whose bytes are wrong: they may have been damaged on the way."""
MOST_RECENT = 2000
MOST_ATTEMPTS = 10**6
"""No honest round is opened again so often; numbers stay far from what a record can hold."""


@dataclass(slots=True)
class FragmentVectors:
    """A fragment's master f32 (padded_size,) and the outer optimizer's state of it.

    ``shared`` is the global fragment that learners have, in the run's global scheme; None where it
    is not known, and the next version is to be a keyframe. ``uncovered`` is the oldest contribution
    in them that no snapshot covers.
    """

    master: NDArray[np.float32]
    outer: object
    shared: Planes | None = None
    uncovered: Uncovered | None = None


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
    stream = streams.get(Subjects(writer.run).stream("CONTRIB"))
    floors = {index: manifest.commit.contrib_floor for index, manifest in manifests.items()}
    if max(floors.values(), default=0) > (stream.last_seq if stream else 0):
        # Not the stream in which they were counted: somebody has removed that, or its end went down
        # with the machine. What their sequences number now is something else; progress still tells
        # what was consumed.
        floors = {}
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
        index: await _restore(bus, plan, manifest, outer, sync.global_scheme, on_bytes)
        for index, manifest in manifests.items()
    }
    await _settle(bus, shard, sync, streams)
    await _read_starts(bus, writer.run, shard.assembler.incarnations, streams)
    shard.again = await _asked_again(bus, shard, streams, restarted=bool(manifests) and not floors)
    return LoadedShard(shard, vectors)


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
    plan: Plan,
    manifest: Manifest,
    outer: Outer,
    scheme: str,
    on_bytes: Callable[[int], None] | None,
) -> FragmentVectors:
    """Read a fragment's vectors; StateLost where bytes of a part stay wrong."""
    commit, vectors = manifest.commit, dict[str, "NDArray[np.float32]"]()
    run = commit.run
    for name in sorted({p.name for p in manifest.parts if p.name not in {DELTA, KEYFRAME}}):
        attempts = READ_ATTEMPTS
        while name not in vectors:
            try:
                vectors[name] = await read_part(bus, run, plan, manifest, name, on_bytes=on_bytes)
            except Corrupt as error:
                attempts -= 1
                if not attempts:
                    what = f"its {name!r} cannot be read ({error})"
                    lost = await state_lost(bus, run, commit.fragment, commit.version, what)
                    raise lost from error
    master = vectors.pop(MASTER)
    leaves = {name.removeprefix(OUTER): vector for name, vector in vectors.items()}
    held = await _shared(bus, plan, manifest, on_bytes)
    shared = held.planes if held is not None and held.scheme == scheme else None
    return FragmentVectors(master, outer.restore(master, leaves), shared)


async def _shared(
    bus: Bus, plan: Plan, manifest: Manifest, on_bytes: Callable[[int], None] | None
) -> Held | None:
    """Return the global fragment that learners have; None where the log has lost it.

    They cannot read it either, and the next version makes it whole.
    """
    commit = manifest.commit
    reader = GlobalReader(bus, commit.run, plan)
    for _ in range(READ_ATTEMPTS):
        try:
            await reader.read(manifest, Meters(on_bytes))
        except StateLost as error:
            about = {"fragment": commit.fragment, "version": commit.version}
            log.warning("keyframe_lost", **about, cause=str(error))
            return None
        except WireError:
            continue
        return reader.held[commit.fragment]
    return None


async def _settle(
    bus: Bus, shard: Shard, config: SyncConfig, streams: dict[str, StreamInfo]
) -> None:
    """Note what the newest commits merged and refused: it may be read again.

    What lies above a fragment's floor was sent at most ``max_staleness`` versions ago, since
    nothing older holds a floor down. A ledger holds one commit per fragment and version, and half
    as many other records at the very most.
    """
    run = shard.assembler.run
    if (info := streams.get(Subjects(run).stream("LEDGER"))) is None:
        return
    count = min(MOST_RECENT, 2 * config.fragments * (config.max_staleness + 2))
    commits = _records(bus, Subjects(run).commit(), after=max(0, info.last_seq - count))
    async with aclosing(commits):
        async for record in commits:
            with suppress(WireError):
                commit = decode(Commit, record.payload, run=run)
                if commit.fragment in shard.fragments:
                    shard.fragments[commit.fragment].settle_all(commit)


async def _read_starts(
    bus: Bus, run: str, incarnations: Incarnations, streams: dict[str, StreamInfo]
) -> None:
    """Note where in CONTRIB each learner's incarnations began.

    The ledger knows of the newest ones, also where retention has dropped their ``Start``. A start
    that no learner can have made is left out.
    """
    stream = streams.get(Subjects(run).stream("CONTRIB"))
    for member in (await ledger.members(bus, run)).values():
        if 0 < member.contrib_sequence <= (stream.last_seq if stream else 0):
            incarnations.note(member.learner, member.incarnation, member.contrib_sequence)
    async with aclosing(_records(bus, Subjects(run).start())) as records:
        async for record in records:
            with suppress(WireError):
                incarnations.start(read(Start, record, run=run), record.sequence)


async def _records(bus: Bus, pattern: str, after: int = 0) -> AsyncGenerator[Record]:
    """Yield what lies after a sequence by now."""
    newest = max((record.sequence for record in await bus.last_each(pattern)), default=0)
    if newest <= after:
        return
    follower = bus.follow(pattern, deliver=Deliver.ALL, after=after)
    async with aclosing(follower):
        async for record in follower:
            yield record
            if record.sequence >= newest:
                return
