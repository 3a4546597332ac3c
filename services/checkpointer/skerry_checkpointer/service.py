"""The checkpointer: writes consistent cuts of the global state into a store.

One checkpoint as soon as every fragment has a version, one every ``checkpoint.every_s`` in which
something was committed, one when the run is finished. It holds no state of its own: what has been
written is what the store holds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from skerry.errors import SkerryError, StoreError
from skerry.log import ledger
from skerry.protocol.messages import CheckpointRecord
from skerry.protocol.records import plan_of
from skerry.protocol.subjects import TOKEN
from skerry.service.shell import arrive, outlast, serve
from skerry.service.turns import TurnTrace, take_turns
from skerry.settings.loading import run_config_from_json
from skerry.store.checkpoint import SavedLearner, dump, read_manifest, step_of
from skerry.store.retention import keep
from skerry.store.writer import CheckpointWriter
from skerry.tasks import in_thread
from skerry.telemetry import instruments, metrics, spans
from skerry_checkpointer.cut import read_cut, take_cut

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus
    from skerry.protocol.messages import Commit, RunRecord
    from skerry.settings.models import CheckpointConfig
    from skerry.store.base import Store
    from skerry.store.checkpoint import Checkpoint
    from skerry.store.writer import Snapshot, Written
    from skerry_checkpointer.cut import ConsistentCut, Vector

log = structlog.get_logger()

LOGGED = ("run", "path", "step", "tokens", "versions", "ledger_sequence", "size_bytes")


@dataclass(slots=True)
class Checkpointer:
    """One session with the log: writes checkpoints of one run into one store.

    ``is_recorded``: the ledger has the newest checkpoint, as far as could be seen at the start.
    """

    bus: Bus
    record: RunRecord
    config: CheckpointConfig
    plan: Plan
    store: Store
    known: dict[str, Checkpoint] = field(default_factory=dict[str, "Checkpoint"])
    is_recorded: bool = False

    @classmethod
    def of(cls, bus: Bus, record: RunRecord, store: Store) -> Checkpointer:
        """Take config and plan from the record.

        Raises RunMismatch if this release cuts its leaves otherwise, ConfigError if it cannot read
        its config.
        """
        plan = plan_of(record)
        config = run_config_from_json(record.config_json, record.skerry_version).checkpoint
        return cls(bus, record, config, plan, store)

    async def run(self) -> None:
        """Write checkpoints until the run is finished and its last state is saved.

        A checkpoint that fails is logged and tried again at the next turn; at the end of the run
        its error is raised. So is the error of a store that cannot be used while the run has no
        checkpoint: its settings are wrong. Later such a store is only away.
        """
        recorded = await ledger.last_checkpoint(self.bus, self.record.run)
        try:
            await self._look()
        except StoreError as error:
            if recorded is None:
                raise
            log.error("checkpoint_failed", run=self.record.run, error=str(error))  # noqa: TRY400  the sentence says it all
        await take_turns(
            self.bus,
            self.record,
            self.plan,
            self.save,
            lambda: self.config.every_s,
            "checkpoint_failed",
        )

    async def save(self) -> Written | None:
        """Write one checkpoint, record it in the ledger and thin out; None if nothing is new."""
        turn = TurnTrace(self.record, spans.CHECKPOINT, spans.WRITE)
        with turn.working():
            await self._look()  # before the cut: a higher index is never of an older one
            cut = await take_cut(self.bus, self.record.run, self.plan)
            if cut is None:
                return None
            commits = [cut.manifests[f.index].commit for f in self.plan.fragments]
            content = tuple((commit.version, commit.params_digest) for commit in commits)
            if content in {checkpoint.content for checkpoint in self.known.values()}:
                return None
            started = time.monotonic()
            written = await self.write(cut, turn.has_read)
            self.known[written.name] = written.checkpoint
            await self._announce(written, time.monotonic() - started, turn)
            await in_thread(self._thin_out)
            return written

    async def write(
        self, cut: ConsistentCut, on_read: Callable[[], None] = lambda: None
    ) -> Written:
        """Write a checkpoint of a cut; ``on_read`` is called when all of it has been read."""
        run = self.record.run
        step = step_of([manifest.commit for manifest in cut.manifests.values()])
        writer = await in_thread(CheckpointWriter, self.store, self.record, self.plan, step)

        async def add(commit: Commit, vector: Vector, snapshot: Snapshot) -> None:
            await in_thread(writer.add, commit, vector, snapshot)

        try:
            whole = await read_cut(self.bus, run, self.plan, cut, add)
            on_read()
            members = await ledger.members(self.bus, run)
            learners = [
                SavedLearner(member.learner, member.shard)
                for member in members.values()
                if TOKEN.fullmatch(member.learner)
            ]
            return await in_thread(
                writer.finish,
                index=1 + max((c.index for c in self.known.values()), default=-1),
                learners=sorted(learners, key=lambda learner: learner.shard),
                ledger_sequence=whole.sequence,
                now_ns=time.time_ns(),
            )
        finally:
            await in_thread(writer.discard)

    async def _announce(self, written: Written, took_s: float, turn: TurnTrace) -> None:
        """Log, record and trace a checkpoint that has just been written."""
        checkpoint = written.checkpoint
        record = self._record_of(written.name, checkpoint)
        facts = {key: getattr(record, key) for key in LOGGED}
        log.info("checkpoint_written", took_s=round(took_s, 3), **facts)
        instruments.record(metrics.CHECKPOINT_DURATION, took_s, {metrics.RUN: record.run})
        await self._publish(record)
        turn.over(
            [saved.commit for saved in checkpoint.state],
            {
                spans.CHECKPOINT_PATH: written.name,
                spans.CHECKPOINT_SIZE: checkpoint.size_bytes,
                spans.LEDGER_SEQUENCE: checkpoint.ledger_sequence,
                spans.STEP: checkpoint.step,
                spans.VERSIONS: checkpoint.versions,
            },
        )

    def _record_of(self, name: str, checkpoint: Checkpoint) -> CheckpointRecord:
        data, digest = dump(checkpoint)
        return CheckpointRecord(
            run=checkpoint.run,
            path=self.store.where(name),
            digest=digest,
            versions=checkpoint.versions,
            step=checkpoint.step,
            tokens=checkpoint.tokens,
            written_ns=checkpoint.created_ns,
            size_bytes=checkpoint.size_bytes + len(data),
            ledger_sequence=checkpoint.ledger_sequence,
        )

    async def _publish(self, record: CheckpointRecord) -> None:
        await ledger.record_checkpoint(self.bus, record)
        instruments.record(metrics.CHECKPOINT_SIZE, record.size_bytes, {metrics.RUN: record.run})

    async def _look(self) -> None:
        """Read what the store holds; record the newest if its writer could not do so any more."""
        await in_thread(self.read_store)
        if self.is_recorded:
            return
        recorded = await ledger.last_checkpoint(self.bus, self.record.run)
        self.is_recorded = True
        name, newest = max(self.known.items(), key=lambda item: item[1].age, default=("", None))
        if newest and (not recorded or recorded.ledger_sequence < newest.ledger_sequence):
            await self._publish(self._record_of(name, newest))

    def read_store(self) -> None:
        """Delete what dead writers left and read the manifests that are new to us."""
        for name in self.store.sweep():
            log.info("leftover_removed", name=name)
        names = self.store.names()
        self.known = {name: held for name, held in self.known.items() if name in names}
        for name in names:
            if name in self.known:
                continue
            try:
                found = read_manifest(self.store, name)
            except StoreError as error:
                log.warning("checkpoint_unreadable", error=str(error))
                continue
            if (found.run, found.run_created_ns) == (self.record.run, self.record.created_ns):
                self.known[name] = found

    def _thin_out(self) -> None:
        """Delete what retention does not keep; what cannot be read or is not ours stays."""
        indices = {name: checkpoint.index for name, checkpoint in self.known.items()}
        config = self.config
        kept = keep(indices, config.keep_newest, config.keep_every, thin=config.thin)
        for name in sorted(indices.keys() - kept):
            try:
                self.store.delete(name)
            except StoreError as error:  # the others must go all the same
                log.warning("checkpoint_not_deleted", name=name, error=str(error))
                continue
            del self.known[name]
            log.info("checkpoint_deleted", name=name)


async def checkpointer(
    bus: Bus, run: str, store: Store, shutdown_s: float, *, stays: bool = False
) -> None:
    """Serve one run until it is finished, across broker restarts and full broker disks.

    A signal has it save the newest state before it ends.
    """
    current: Checkpointer | None = None

    async def session() -> None:
        nonlocal current
        current = Checkpointer.of(bus, await arrive(bus, run), store)
        await current.run()

    async def leave() -> None:
        if current is not None:
            try:
                await current.save()
            except SkerryError as error:
                log.warning("checkpoint_failed", run=run, error=str(error))

    async with bus:
        loops = {"checkpointer": lambda: outlast(session)}
        await serve(loops, drain=leave, shutdown_s=shutdown_s, stays=stays)
