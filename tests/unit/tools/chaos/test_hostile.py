"""Hostile messages: each is stored as an attacker would send it, and under no other name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from skerry.algorithm.fragments import LeafSpec, Plan, plan
from skerry.algorithm.merge import slice_norms
from skerry.cli.cluster.processes import ProcessEntry
from skerry.errors import ConfigError
from skerry.log import ledger, run_records
from skerry.log.base import MSG_ID, Record
from skerry.log.contributions import Sender
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.streams import specs
from skerry.protocol import wire
from skerry.protocol.contribution import Contribution, ContributionAssembler, Refusal
from skerry.protocol.messages import FrameKind, Pulse, RefusalCause
from skerry.protocol.subjects import Subjects
from skerry_tools.chaos import messages
from skerry_tools.chaos.drilled import Injection, NotFired
from skerry_tools.chaos.local import LocalRun
from skerry_tools.chaos.messages import FAR_STEP, INTRUDER, MESSAGES, TINY_S
from skerry_tools.chaos.plan import HOSTILE, Fault, FaultPlan, Kind, check, choose
from tests.support.builders import header, pulse, run_record
from tests.support.learners import encode_vector, walk

RUN = "r"
NAMES = Subjects(RUN)
SMALL = plan([LeafSpec("w", (16, 16))], 1)
WIDE = plan([LeafSpec("w", (64, 256))], 1)


class OneLearner(LocalRun):
    """A run whose one service is a learner ``a``."""

    def entries(self) -> dict[str, ProcessEntry]:
        return {"a": _Alive("a", "learner", 1, 1)}


class _Alive(ProcessEntry):
    @property
    def status(self) -> str:
        return "running"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PAUSE_S", 0.0)
    monkeypatch.setattr(messages, "FLOOD", 20)


async def at_work(cut: Plan = SMALL) -> MemoryBus:
    """Return the log of a run in which learner ``a`` has trained and sent one contribution."""
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    await ledger.create_run(bus, run_record(RUN, cut))
    await ledger.join(bus, RUN, "a", "host", 1)
    await run_records.publish(bus, pulse("a", run=RUN, contributions=1))
    fragment = cut.fragments[0]
    norms = slice_norms(fragment, walk(fragment, 1))
    chunks = encode_vector("int4", np.ones(fragment.padded_size, np.float32), 2048)
    await Sender(bus, RUN, cut).send(header(1, norms=norms), chunks)
    return bus


async def struck(bus: MemoryBus, kind: Kind, stream: str) -> list[Record]:
    """Inject the fault; return what it stored in a stream."""
    held = {info.name: info.last_seq for info in await bus.streams()}
    last = held[f"SKERRY_{RUN}_{stream}"]
    fault = Injection.of(Fault(0.0, kind, "a"), "a", "seed")
    async with OneLearner(RUN, Path(), bus).inject(fault) as proof:
        assert " stored, from sequence " in await proof()
    held = {info.name: info.last_seq for info in await bus.streams()}
    found = [
        await bus.get(f"SKERRY_{RUN}_{stream}", sequence)
        for sequence in range(last + 1, held[f"SKERRY_{RUN}_{stream}"] + 1)
    ]
    return [record for record in found if record is not None]


@pytest.mark.parametrize(
    ("kind", "step", "step_time_s"),
    [(Kind.PULSE_TINY_STEP_TIME, 8, TINY_S), (Kind.PULSE_FAR_STEP, FAR_STEP, 0.1)],
)
async def test_a_pulse_that_cannot_be_goes_out_between_the_learners_own(
    kind: Kind, step: int, step_time_s: float
) -> None:
    bus = await at_work()
    *_, newest = await struck(bus, kind, "PULSE")
    sent = wire.decode(Pulse, wire.read(FrameKind.PULSE, newest.payload).header)
    assert sent == pulse("a", run=RUN, contributions=1, step=step, steps=8, step_time_s=step_time_s)


async def test_whole_contributions_come_from_a_learner_that_has_joined() -> None:
    bus, assembler = await at_work(), ContributionAssembler(RUN, SMALL)
    await bus.publish(NAMES.shard(0).contribution(0, "a"), b"")  # as other faults do in its name
    found = [
        assembler.feed(record) for record in await struck(bus, Kind.CONTRIB_FLOOD, "CONTRIB_0")
    ]
    whole = [got.header for got in found if isinstance(got, Contribution)]
    assert [(h.learner, h.identity, h.tokens) for h in whole] == [
        (INTRUDER, identity, 1000) for identity in range(1, 21)
    ]
    assert all(h.cursor_from == 10 * (h.identity - 1) for h in whole)
    assert (await ledger.members(bus, RUN))[INTRUDER].incarnation == 1


async def test_contributions_of_impossibly_many_tokens_are_refused_by_every_reader() -> None:
    bus, assembler = await at_work(), ContributionAssembler(RUN, SMALL)
    found = [assembler.feed(record) for record in await struck(bus, Kind.TOKENS_2_64, "CONTRIB_0")]
    refused = [got for got in found if isinstance(got, Refusal)]
    assert [got.cause for got in refused] == [RefusalCause.IMPLAUSIBLE] * 2


async def test_a_contribution_of_several_chunks_is_not_forged() -> None:
    with pytest.raises(NotFired, match="more chunks than one"):
        await struck(await at_work(WIDE), Kind.CONTRIB_FLOOD, "CONTRIB_0")


async def test_empty_messages_look_like_the_brokers_statuses() -> None:
    records = await struck(await at_work(), Kind.STATUS_HEADER, "CONTRIB_0")
    assert [(r.subject, r.payload, r.headers) for r in records] == [
        (NAMES.shard(0).contribution(0, "a"), b"", {"Status": status}) for status in ("100", "404")
    ]


async def test_ids_of_the_next_contributions_are_used_up() -> None:
    records = await struck(await at_work(), Kind.DEDUP_IDS, "CONTRIB_0")
    assert [r.headers[MSG_ID] for r in records][:2] == ["a/1/0/2/0", "a/1/0/3/0"]
    assert {r.payload for r in records} == {b""}


async def test_junk_goes_where_a_member_would_be() -> None:
    (record,) = await struck(await at_work(), Kind.JUNK_MEMBER, "MEMBERS")
    assert record.subject == NAMES.member(INTRUDER)


def test_every_hostile_message_has_its_fault() -> None:
    assert MESSAGES.keys() >= HOSTILE


def test_only_learners_send_hostile_messages() -> None:
    services = {"a": "learner", "s": "syncer", "broker": "broker"}
    anyone = FaultPlan(1, (Fault(0.0, Kind.JUNK_MEMBER, "any"),))
    assert choose(anyone, 0, services) == "a"
    with pytest.raises(ConfigError, match="There is no 's' for the junk_member"):
        check(FaultPlan(1, (Fault(0.0, Kind.JUNK_MEMBER, "s"),)), services)
