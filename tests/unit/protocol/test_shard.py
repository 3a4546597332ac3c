"""What waits to be merged: each contribution once, however often its bytes lie in the log."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.log.base import Record
from skerry.protocol import shard as shard_module
from skerry.protocol.contribution import (
    Contribution,
    ContributionId,
    ContributionRules,
    Refusal,
)
from skerry.protocol.messages import (
    ContributionHeader,
    ContributionKind,
    RefusalCause,
    Refused,
)
from skerry.protocol.shard import (
    MOST_NAMED,
    MOST_PENDING,
    MOST_REFUSED,
    MOST_SETTLED,
    PendingFragment,
    Refusals,
    Shard,
    WeightRule,
    judge,
)
from tests.support.builders import header, manifest, progress
from tests.support.learners import contributed

RUN = "t"
PLAN = plan([LeafSpec("w", (64, 256))], 1)
FRAGMENT = PLAN.fragments[0]
VERSION = 3
HOURS_NS = 3600 * 10**9


def offered(identity: int = 1, learner: str = "a", **changes: Any) -> ContributionHeader:
    return header(identity, learner, **({"base_version": VERSION, "steps": 10} | changes))


def shard(most_stale: int = 4) -> Shard:
    """A shard whose one fragment is at VERSION."""
    held = manifest(VERSION, run=RUN, plan_digest=PLAN.digest)
    staleness = WeightRule(most_stale, 0.9)
    return Shard.of(RUN, PLAN, staleness, ContributionRules(), [PendingFragment(FRAGMENT, held)])


async def stored(*headers: ContributionHeader, scheme: str = "int4") -> list[Record]:
    """Send contributions hours apart: the broker has forgotten message ids by the next one."""
    return await contributed(RUN, PLAN, *headers, scheme=scheme, apart_ns=HOURS_NS)


async def test_contribution_sent_again_after_an_outage_waits_once() -> None:
    records = await stored(offered(), offered())
    assert len(records) % 2 == 0
    held = shard()
    got = [held.take(record, 1.0) for record in records]
    assert sum(isinstance(one, Contribution) for one in got) == 1
    assert len(held.fragments[0].pending) == 1
    assert held.floor_of(0) == records[-1].sequence


async def test_different_contributions_of_one_learner_all_wait() -> None:
    held = shard()
    for record in await stored(offered(1), offered(2), offered(1, "b")):
        held.take(record, 1.0)
    assert len(held.fragments[0].pending) == 3


async def test_damaged_chunk_is_refused_and_named_to_the_next_commit() -> None:
    record = (await stored(offered()))[0]
    held = shard()
    damaged = dataclasses.replace(record, payload=record.payload[:-1] + b"?")
    assert isinstance(held.take(damaged, 1.0), Refusal)
    assert held.fragments[0].refused.named == (
        Refused(RefusalCause.CORRUPT, "a", sequence=record.sequence),
    )


async def test_flood_of_bad_bytes_does_not_grow_the_commit_for_ever() -> None:
    held = shard()
    for sequence in range(MOST_REFUSED + 10):
        held.take(Record(f"skerry.{RUN}.contrib.0.0.x", sequence, 0, b"rubbish"), 1.0)
    held.take(Record(f"skerry.{RUN}.contrib.0.999.x", 1, 0, b"rubbish"), 1.0)
    held.take(Record(f"skerry.{RUN}.contrib.one.x", 1, 0, b"rubbish"), 1.0)
    refused = held.fragments[0].refused.close()
    assert len(refused.named) == MOST_REFUSED
    assert (refused.unnamed, refused.beyond) == ({"corrupt": 10}, {}), "no contribution is missed"
    assert held.fragments[0].refused == Refusals()


async def test_flood_of_bad_bytes_hides_no_contribution_that_is_refused() -> None:
    records = await stored(offered(base_version=0))
    held = shard(most_stale=1)
    for sequence in range(MOST_REFUSED + 10):
        held.take(Record(f"skerry.{RUN}.contrib.0.0.x", sequence, 0, b"rubbish"), 1.0)
    for record in records:
        held.take(dataclasses.replace(record, sequence=record.sequence + 2 * MOST_REFUSED), 1.0)
    refused = held.fragments[0].refused.close()
    assert refused.named[0] == Refused(RefusalCause.TOO_STALE, "a", 1, 1, 1000, 0, 10)
    assert len(refused.named) == MOST_REFUSED
    assert refused.unnamed == {"corrupt": 11}


def test_flood_of_refused_contributions_is_counted_and_hides_no_other_learners() -> None:
    refused = Refusals()
    for identity in range(1, MOST_REFUSED + 3):
        refused.add(Refused(RefusalCause.TOO_STALE, "a", 1, identity))
    others = [Refused(RefusalCause.TOO_STALE, "b", 1, 1), Refused(RefusalCause.CORRUPT, "x")]
    for other in others:
        refused.add(other)
    closed = refused.close()
    assert [r.identity for r in closed.named if r.learner == "a"] == [*range(1, MOST_NAMED + 1)]
    assert [r for r in closed.named if r.learner != "a"] == others
    rest = MOST_REFUSED + 2 - MOST_NAMED
    assert (closed.unnamed, closed.beyond) == ({"too_stale": rest}, {"a": rest})
    assert refused == Refusals()


async def test_genesis_that_came_during_the_first_commit_is_not_merged_as_a_gradient() -> None:
    """A second learner's offer waits from before version 1; it must not be averaged in later."""
    late = offered(kind=ContributionKind.GENESIS, base_version=0)
    held = shard()
    state = held.fragments[0]
    *_, got = [held.assembler.feed(record) for record in await stored(late, scheme="f32")]
    assert isinstance(got, Contribution)
    assert judge(got, 0, held.staleness) == 1.0
    assert judge(got, state.version, held.staleness) is RefusalCause.GENESIS


async def test_refusal_is_counted_once_however_often_its_chunks_are_read() -> None:
    stale = offered(base_version=0)
    records = await stored(stale, stale)
    held = shard(most_stale=1)
    for record in records:
        held.take(record, 1.0)
    assert held.fragments[0].refused.named == (
        Refused(RefusalCause.TOO_STALE, "a", 1, 1, 1000, 0, 10),
    )


async def test_refusal_names_the_round_that_it_was_made_for_where_its_bytes_say_so() -> None:
    stale = offered(base_version=0, round_version=1)
    *_, last = records = await stored(stale)
    held = shard(most_stale=1)
    *_, late = [held.take(record, 1.0) for record in records]
    damaged = held.take(dataclasses.replace(last, payload=last.payload[:-1] + b"?"), 1.0)
    assert isinstance(late, Refusal)
    assert isinstance(damaged, Refusal)
    assert (late.cause, late.round_version) == ("too_stale", 1)
    assert (damaged.cause, damaged.round_version) == ("corrupt", 0)


async def test_late_chunk_of_a_contribution_that_waits_is_no_refusal() -> None:
    first, second = await stored(offered(1)), await stored(offered(2))
    held = shard()
    for record in [*first, second[0], first[0]]:
        held.take(record, 1.0)
    assert [c.header.identity for c in held.fragments[0].pending.values()] == [1]
    assert held.fragments[0].refused.named == ()


async def test_unfinished_contribution_that_a_newer_one_replaces_is_refused() -> None:
    first, second = await stored(offered(1)), await stored(offered(2))
    held = shard()
    for record in [*first[:-1], *second]:
        held.take(record, 1.0)
    assert held.fragments[0].refused.named == (
        Refused(RefusalCause.INCOMPLETE, "a", 1, 1, 1000, 0, 10),
    )
    assert [c.header.identity for c in held.fragments[0].pending.values()] == [2]


async def test_contribution_to_another_shard_is_left_to_its_owner() -> None:
    held = shard()
    held.fragments = {}
    assert {held.take(record, 1.0) for record in await stored(offered())} == {None}


async def test_what_a_commit_has_settled_is_neither_merged_nor_refused_again() -> None:
    records = await stored(offered(base_version=0))
    held = shard(most_stale=1)
    manifest = held.fragments[0].manifest
    assert manifest is not None
    told = dataclasses.replace(
        manifest.commit, refused=(Refused(RefusalCause.TOO_STALE, "a", 1, 1),)
    )
    held.fragments[0].settle_all(told)
    assert {held.take(record, 1.0) for record in records} == {None}
    assert held.fragments[0].refused.named == ()


async def test_memory_of_what_was_settled_is_bounded() -> None:
    state = shard().fragments[0]
    for identity in range(1, MOST_SETTLED + 10):
        state.settle(ContributionId("a", 1, identity))
    assert len(state.settled) == MOST_SETTLED


async def test_one_learner_fills_no_shard_with_valid_contributions() -> None:
    held, most = shard(), MOST_PENDING
    for record in await stored(*(offered(identity) for identity in range(1, most + 4))):
        held.take(record, 1.0)
    assert len(held.fragments[0].pending) == most
    causes = {r.cause for r in held.fragments[0].refused.named}
    assert causes == {RefusalCause.TOO_MANY}
    for record in await stored(offered(1, "b")):
        held.take(record, 1.0)
    assert {c.header.learner for c in held.fragments[0].pending.values()} == {"a", "b"}


async def test_promise_of_a_base_that_does_not_exist_costs_no_memory() -> None:
    held = shard()
    for record in (await stored(offered(base_version=VERSION + 1)))[:1]:
        assert isinstance(held.take(record, 1.0), Refusal)
    assert not held.assembler.open
    assert [r.cause for r in held.fragments[0].refused.named] == [RefusalCause.BASE_IN_FUTURE]


async def test_what_a_learner_in_quarantine_begins_to_send_costs_no_memory() -> None:
    held = shard()
    held.quarantined = {"a"}
    for record in (await stored(offered()))[:1]:
        held.take(record, 1.0)
    assert not held.assembler.open
    assert [r.cause for r in held.fragments[0].refused.named] == [RefusalCause.QUARANTINED]


async def test_a_fragment_that_has_as_many_learners_as_it_can_takes_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_module, "MOST_LEARNERS", 1)
    held = shard()
    held.fragments[0].manifest = manifest(VERSION, progress=(progress("b", 0),))
    for record in await stored(offered(learner="a"), offered(learner="b")):
        held.take(record, 1.0)
    assert {known.learner for known in held.fragments[0].pending} == {"b"}
    assert {r.cause for r in held.fragments[0].refused.named} == {RefusalCause.TOO_MANY}


def test_a_flood_under_many_names_does_not_grow_the_commit_for_ever() -> None:
    refused = Refusals()
    for number in range(2 * MOST_REFUSED + 5):
        refused.add(Refused(RefusalCause.TOO_STALE, f"x{number}", 1, 1))
    closed = refused.close()
    assert (len(closed.named), len(closed.beyond)) == (MOST_REFUSED, MOST_REFUSED)
    assert closed.unnamed == {"too_stale": MOST_REFUSED + 5}


async def test_name_that_no_learner_can_have_is_counted_and_not_named() -> None:
    held = shard()
    held.take(Record(f"skerry.{RUN}.contrib.0.0.{'x' * 3000}", 1, 0, b"rubbish"), 1.0)
    closed = held.fragments[0].refused.close()
    assert (closed.named, closed.unnamed) == ((), {RefusalCause.CORRUPT: 1})
