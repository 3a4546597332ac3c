"""From the log to a shard in memory: what a syncer reads before it serves one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import structlog

from skerry.algorithm.fragments import Plan
from skerry.errors import WireError
from skerry.log import ledger, run_records
from skerry.log.base import Bus, StreamInfo
from skerry.log.reading import read_now
from skerry.log.state_writer import StateWriter
from skerry.protocol.containment import WINDOW, containment_rules
from skerry.protocol.contribution import ContributionRules, Incarnations
from skerry.protocol.messages import Commit, Manifest, Round, Start
from skerry.protocol.parts import snapshot_version
from skerry.protocol.records import decode, read
from skerry.protocol.shard import PendingFragment, Shard, weight_rule
from skerry.protocol.subjects import Subjects
from skerry_syncer.restoring import FragmentVectors, Restorer

if TYPE_CHECKING:
    from skerry.settings.models import RunConfig, SyncConfig

log = structlog.get_logger()

MOST_RECENT = 2000
MOST_ATTEMPTS = 10**6
"""No honest round is opened again so often; numbers stay far from what a record can hold."""


class LoadedShard(NamedTuple):
    """A shard as its log says it is, and the vectors of each fragment that has been committed."""

    shard: Shard
    vectors: dict[int, FragmentVectors]


async def load(
    bus: Bus,
    writer: StateWriter,
    plan: Plan,
    config: RunConfig,
    *,
    restorer: Restorer,
    on_bytes: Callable[[int], None] | None = None,
) -> LoadedShard:
    """Rebuild the writer's shard from manifests and slots; append what the ledger lacks first.

    ``restorer`` holds what this process has of the fragments already. Raises StateLost where the
    log lacks what its own records name.
    """
    manifests = await writer.recover()
    streams = {info.name: info for info in await bus.streams()}
    stream = streams.get(Subjects(writer.run).shard(writer.shard).stream("CONTRIB"))
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
        weight_rule(config),
        ContributionRules(data.seq_len, data.batch * data.seq_len, sync.contribution_scheme),
        [
            PendingFragment(f, manifests.get(f.index), floor=floors.get(f.index, 0))
            for f in writer.fragments
        ],
    )
    shard.containment = containment_rules(config.contain)
    ledger_info = streams.get(Subjects(writer.run).stream("LEDGER"))
    commits: dict[int, dict[int, Commit]] = {}
    if ledger_info:
        commits = await commits_since(bus, writer.run, manifests, sync, ledger_info.last_seq)
    restorer = replace(restorer, on_bytes=on_bytes)  # what it holds is the same
    vectors = {
        index: await restorer.take(manifest, commits.get(index, {}))
        for index, manifest in manifests.items()
    }
    for index, settled in commits.items():  # what they merged and refused may be read again
        for _, commit in sorted(settled.items()):
            shard.fragments[index].settle_all(commit)
    await _read_starts(bus, writer, shard.assembler.incarnations, stream)
    shard.again = await _asked_again(bus, shard, stream, restarted=bool(manifests) and not floors)
    return LoadedShard(shard, vectors)


async def _asked_again(
    bus: Bus, shard: Shard, stream: StreamInfo | None, *, restarted: bool
) -> dict[int, int]:
    """Return by fragment the attempt of its next round, where contributions to it may be gone.

    The window has dropped them, somebody has removed them, or the stream restarted (``restarted``),
    before any commit resolved them. Only the sender can tell: it looks when the round that it has
    answered is opened again.
    """
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


async def commits_since(
    bus: Bus, run: str, manifests: Mapping[int, Manifest], config: SyncConfig, last: int
) -> dict[int, dict[int, Commit]]:
    """Return commits by fragment and version: all since the snapshots, and the newest before.

    ``last`` is the ledger's last sequence. What lies above a fragment's floor was sent at most
    ``max_staleness`` versions ago, since nothing older holds a floor down; those of a window say
    what contributions are compared with. A ledger holds one commit per fragment and version, and
    half as many other records in most runs; where there are more, those of a fragment since its
    snapshot are read by themselves.
    """
    since = {i: range(snapshot_version(m) + 1, m.commit.version) for i, m in manifests.items()}
    reach = max([config.max_staleness, WINDOW, *(len(versions) for versions in since.values())]) + 2
    found: dict[int, dict[int, Commit]] = {index: {} for index in manifests}

    async def collect(pattern: str, after: int) -> None:
        records = read_now(bus, pattern, after)
        async with aclosing(records):
            async for record in records:
                with suppress(WireError):
                    commit = decode(Commit, record.payload, run=run)
                    found.get(commit.fragment, {})[commit.version] = commit

    count = min(MOST_RECENT, 2 * config.fragments * reach)
    those = Subjects(run).commit(*(manifests if len(manifests) == 1 else ()))
    await collect(those, max(0, last - count))
    for index, versions in since.items():
        if not found[index].keys() >= set(versions):
            begins = await ledger.commit_of(bus, run, index, versions.start)
            await collect(Subjects(run).commit(index), begins[0] - 1 if begins else 0)
    return found


async def _read_starts(
    bus: Bus, writer: StateWriter, incarnations: Incarnations, stream: StreamInfo | None
) -> None:
    """Note where in a shard's CONTRIB each learner's incarnations began.

    The ledger knows of the newest ones, also where retention has dropped their ``Start``. A start
    that no learner can have made is left out.
    """
    run, shard = writer.run, writer.shard
    for member in (await ledger.members(bus, run)).values():
        began = dict(enumerate(member.contrib_sequences)).get(shard, 0)
        if 0 < began <= (stream.last_seq if stream else 0):
            incarnations.note(member.learner, member.incarnation, began)
    pattern = Subjects(run).shard(shard).start()
    async with aclosing(read_now(bus, pattern)) as records:
        async for record in records:
            with suppress(WireError):
                incarnations.start(read(Start, record, run=run), record.sequence)
