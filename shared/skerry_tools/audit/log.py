"""Reading a run's log from its first record to its last, as values."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from skerry.algorithm.fragments import Plan
from skerry.errors import StateLost, WireError
from skerry.log.base import Bus, Record, StreamInfo
from skerry.log.reading import read_now, read_up_to
from skerry.protocol.messages import (
    CheckpointRecord,
    Commit,
    Evaluation,
    MemberRecord,
    Quarantine,
    RunRecord,
)
from skerry.protocol.records import plan_of, read
from skerry.protocol.subjects import ShardSubjects, Subjects
from skerry.settings.loading import run_config_from_json
from skerry.settings.models import RunConfig

OnProgress = Callable[[str, int, int], None]
"""Hears what is being done, how much is done, and of how much (0: unknown)."""
LedgerRecord = RunRecord | MemberRecord | Commit | CheckpointRecord | Evaluation | Quarantine
KINDS: dict[str, type[LedgerRecord]] = {
    "ledger.run": RunRecord,
    "ledger.commit": Commit,
    "ledger.checkpoint": CheckpointRecord,
    "ledger.eval": Evaluation,
    "ledger.quarantine": Quarantine,
    "member": MemberRecord,
}
"""What lies where, by the subject behind the run: the ledger, and the learners' starts."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One record of the ledger, or of a start.

    Where it cannot be read ``value`` is None and ``problem`` why.

    ``kind`` is what a record on its subject has to be; None for a subject that is none of ours.
    """

    raw: Record
    kind: type[LedgerRecord] | None
    value: LedgerRecord | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RunLog:
    """A run's log and what is needed to read it."""

    bus: Bus
    record: RunRecord
    config: RunConfig
    plan: Plan

    @property
    def run(self) -> str:
        return self.record.run

    @property
    def subjects(self) -> Subjects:
        return Subjects(self.record.run)

    @classmethod
    def of(cls, bus: Bus, record: RunRecord) -> RunLog:
        """Return the log of a run; RunMismatch if this release cuts its parameters differently."""
        plan, config = plan_of(record), run_config_from_json(record.config_json)
        return cls(bus, record, config, plan)

    @property
    def shards(self) -> list[ShardSubjects]:
        """The subjects of each of its shards, in order."""
        return [self.subjects.shard(shard) for shard in range(self.plan.shards)]

    def shard_of(self, fragment: int) -> ShardSubjects:
        return self.subjects.of_fragment(fragment, self.plan.shards)

    async def stream(self, name: str) -> StreamInfo:
        """Return one of the run's streams as it is; StateLost where there is none."""
        for info in await self.bus.streams():
            if info.name == name:
                return info
        msg = (
            f"Stream {name} is not in this log, and with it all that run {self.run!r} kept there:"
            " restore the run from a checkpoint with `skerry checkpoints restore`."
        )
        raise StateLost(msg)

    async def members(self) -> list[LedgerEntry]:
        """Return the learners' starts that the log holds, oldest first: the newest few of each."""
        async with aclosing(read_now(self.bus, self.subjects.member())) as records:
            return [self._entry(record) async for record in records]

    async def history(
        self, through: int, members: Sequence[LedgerEntry]
    ) -> AsyncGenerator[LedgerEntry]:
        """Yield the ledger up to a sequence and the learners' starts, by the broker's time."""
        waiting = deque(members)
        async with aclosing(self.ledger(through)) as entries:
            async for entry in entries:
                while waiting and waiting[0].raw.time_ns <= entry.raw.time_ns:
                    yield waiting.popleft()
                yield entry
        for entry in waiting:
            yield entry

    async def ledger(self, through: int, pattern: str | None = None) -> AsyncGenerator[LedgerEntry]:
        """Yield every record of the ledger, or those on a pattern, up to a sequence."""
        records = read_up_to(self.bus, pattern or self.subjects.of_stream("LEDGER")[0], through)
        async with aclosing(records):
            async for record in records:
                yield self._entry(record)

    def _entry(self, record: Record) -> LedgerEntry:
        tokens = record.subject.split(".")[2:4]
        expected = KINDS.get(".".join(tokens if tokens[0] == "ledger" else tokens[:1]))
        if expected is None:
            return LedgerEntry(record, None, None, "nothing of ours goes there")
        try:
            value = read(expected, record, run=self.run, plan_digest=self.plan.digest)
        except WireError as error:
            return LedgerEntry(record, expected, None, str(error))
        return LedgerEntry(record, expected, value)
