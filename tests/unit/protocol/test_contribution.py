"""Contributions: chunked, put together in any order, refused by cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.merge import slice_norms
from skerry.log.base import Record
from skerry.protocol import contribution
from skerry.protocol.chunks import seal, unseal
from skerry.protocol.contribution import (
    MOST_SKIPPED,
    Contribution,
    ContributionAssembler,
    ContributionRules,
    Incarnations,
    Refusal,
)
from skerry.protocol.messages import (
    ContributionHeader,
    ContributionKind,
    RefusalCause,
    Refused,
    Start,
)
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.telemetry import tracing
from tests.support.builders import header
from tests.support.learners import contributed, walk
from tests.support.telemetry import Collected

RUN = "t"
PLAN = plan([LeafSpec("w", (64, 256))], 2)
FRAGMENT = PLAN.fragments[0]


def offered(identity: int = 1, **changes: Any) -> ContributionHeader:
    norms = slice_norms(FRAGMENT, walk(FRAGMENT, identity))
    base: dict[str, Any] = {
        "base_version": 3,
        "steps": 10,
        "cursor_from": 5,
        "cursor_to": 15,
        "norms": norms,
    }
    return header(identity, **(base | changes))


async def sent(*headers: ContributionHeader, run: str = RUN) -> list[Record]:
    return await contributed(run, PLAN, *headers)


@pytest.mark.parametrize("order", [1, -1])
async def test_chunks_make_a_contribution_in_whatever_order(order: int) -> None:
    records = await sent(offered())
    assert len(records) > 2
    assembler = ContributionAssembler(RUN, PLAN)
    results = [assembler.feed(record) for record in records[::order]]
    whole = results[-1]
    assert results[:-1] == [None] * (len(records) - 1)
    assert isinstance(whole, Contribution)
    assert whole.header == offered()
    assert (whole.sequence_first, whole.sequence_last) == (1, len(records))
    want = cpu().quantise("int4", walk(FRAGMENT, 1))
    np.testing.assert_array_equal(whole.planes.codes, want.codes)


async def test_sending_again_stores_nothing_new() -> None:
    once = await sent(offered())
    assert len(await sent(offered(), offered())) == len(once)


async def test_newer_contribution_replaces_an_unfinished_one() -> None:
    records = await sent(offered(1), offered(2))
    half = len(records) // 2
    assembler = ContributionAssembler(RUN, PLAN)
    results = [
        assembler.feed(r) for r in [*records[: half - 1], *records[half:], records[half - 1]]
    ]
    assert isinstance(results[-2], Contribution)
    assert results[-2].header.identity == 2
    assert assembler.incomplete_from(0) is not None


@pytest.mark.parametrize(
    ("run", "changes", "damage", "cause"),
    [
        (RUN, {}, lambda r: replace(r, payload=r.payload[:-1] + b"?"), "corrupt"),
        ("other", {}, lambda r: r, "wrong_run"),
        (RUN, {}, lambda r: replace(r, subject=f"skerry.{RUN}.contrib.0.0.b"), "corrupt"),
        (RUN, {}, lambda r: replace(r, subject=f"skerry.{RUN}.contrib.1.0.a"), "corrupt"),
        (RUN, {}, lambda r: replace(r, subject=f"skerry.{RUN}.contrib.0.0.a b*c"), "corrupt"),
        (RUN, {"cursor_from": 9, "cursor_to": 8}, lambda r: r, "implausible"),
    ],
    ids=[
        "damaged",
        "another run",
        "another's subject",
        "another shard's subject",
        "no learner's name",
        "backwards",
    ],
)
async def test_message_that_is_no_part_of_a_contribution_is_refused(
    run: str, changes: dict[str, int], damage: Callable[[Record], Record], cause: str
) -> None:
    (first, *_) = await sent(offered(**changes), run=run)
    got = ContributionAssembler(RUN, PLAN).feed(damage(first))
    assert isinstance(got, Refusal)
    assert got.cause == cause


async def test_outdated_unfinished_contribution_is_given_up() -> None:
    records = await sent(offered())
    assembler = ContributionAssembler(RUN, PLAN)
    assembler.feed(records[0])
    assert assembler.expire(0, 3) == []
    assert assembler.expire(0, 4) == [Refused(RefusalCause.INCOMPLETE, "a", 1, 1, 1000, 5, 15)]
    assert assembler.incomplete_from(0) is None


async def test_chunks_without_a_header_make_no_contribution() -> None:
    bare: list[Record] = []
    for record in await sent(offered()):
        chunk, packed = unseal(record.payload, run=RUN, plan=PLAN)
        payload = seal(replace(chunk, contribution=None), bytes(packed))
        bare.append(replace(record, payload=payload))
    assembler = ContributionAssembler(RUN, PLAN)
    *_, got = [assembler.feed(record) for record in bare]
    assert isinstance(got, Refusal)
    assert (got.cause, assembler.open) == (RefusalCause.CORRUPT, {})


async def test_no_more_are_open_at_once_than_fit_and_the_oldest_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contribution, "MOST_OPEN", 2)
    assembler = ContributionAssembler(RUN, PLAN)
    for sequence, name in enumerate("abc", start=1):
        first = (await sent(offered(learner=name)))[0]
        assembler.feed(replace(first, sequence=sequence))
    assert {learner for _, learner in assembler.open} == {"b", "c"}
    assert [(f, r.cause, r.learner) for f, r in assembler.replaced] == [(0, "incomplete", "a")]


def started(incarnation: int, sequence: int) -> Record:
    payload = encode(Start(RUN, "a", incarnation, 1))
    return Record(Subjects(RUN).shard(0).start("a"), sequence, 1, payload)


async def test_what_an_older_incarnation_completes_behind_a_start_is_superseded() -> None:
    *chunks, last = await sent(offered())
    assembler = ContributionAssembler(RUN, PLAN)
    assert [assembler.feed(r) for r in [*chunks, started(2, last.sequence)]] == [None] * len(
        [*chunks, last]
    )
    got = assembler.feed(Record(last.subject, last.sequence + 1, 1, last.payload))
    assert isinstance(got, Refusal)
    assert got.refused == Refused(RefusalCause.SUPERSEDED, "a", 1, 1, 1000, 5, 15)


async def test_what_was_whole_before_the_start_still_counts() -> None:
    records = await sent(offered())
    assembler = ContributionAssembler(RUN, PLAN)
    assembler.feed(started(1, 0))  # its own
    assembler.incarnations.note("a", 2, records[-1].sequence + 1)  # known before it is passed
    *_, got = [assembler.feed(record) for record in records]
    assert isinstance(got, Contribution)


async def test_an_earlier_start_counts_although_a_later_one_is_known() -> None:
    records = await sent(offered())
    assembler = ContributionAssembler(RUN, PLAN)
    assembler.incarnations.note("a", 3, 1000)
    assembler.feed(started(2, 0))
    *_, got = [assembler.feed(record) for record in records]
    assert isinstance(got, Refusal)
    assert got.cause == "superseded"


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), max_size=12))
def test_starts_that_tell_nothing_are_not_kept(noted: list[tuple[int, int]]) -> None:
    incarnations = Incarnations()
    for number, sequence in noted:
        incarnations.note("a", number, sequence)
    for number, sequence in product(range(7), range(11)):
        newer = any(n > number and began < sequence for n, began in noted)
        assert incarnations.superseded("a", number, sequence) == newer
    assert len(incarnations.starts.get("a", [])) <= len({number for number, _ in noted})


@pytest.mark.parametrize("rise", [0, 1, -1], ids=["the same", "rising", "falling"])
def test_a_flood_of_starts_is_not_held(rise: int) -> None:
    incarnations = Incarnations()
    incarnations.note("a", 5000, 0)
    for sequence in range(1, 5001):
        start = Start(RUN, "a", 5001 + rise * sequence, 1)
        incarnations.start(start, sequence)
    assert len(incarnations.starts["a"]) <= MOST_SKIPPED


async def test_unfinished_contribution_without_its_first_chunk_is_named_by_identity() -> None:
    _, *rest = await sent(offered(7))
    assembler = ContributionAssembler(RUN, PLAN)
    for record in rest:
        assembler.feed(record)
    assert assembler.expire(0, 4) == [Refused(RefusalCause.INCOMPLETE, "a", 1, 7)]


async def test_only_the_first_chunk_carries_trace_context_and_a_syncer_reads_it_back(
    collected: Collected,
) -> None:
    place = tracing.context(tracing.trace_id(RUN, 0, 2), "publish")
    parent = tracing.trace_parent(place)
    records = await sent(offered(1, trace_parent=parent))
    assert len(records) > 1
    carried = [record.headers.get("traceparent", "") for record in records]
    assert carried == [parent] + [""] * (len(records) - 1)
    assembler = ContributionAssembler(RUN, PLAN)
    got = [assembler.feed(record) for record in records][-1]
    assert isinstance(got, Contribution)
    assert tracing.parse(got.trace_parent) == place


async def test_a_sender_that_only_sets_the_header_is_linked_by_it() -> None:
    parent = f"00-{tracing.trace_id(RUN, 0, 2)}-b7ad6b7169203331-01"
    first, *rest = await sent(offered(1))
    assembler = ContributionAssembler(RUN, PLAN)
    told = replace(first, headers={"TraceParent": parent})
    got = [assembler.feed(record) for record in (told, *rest)][-1]
    assert isinstance(got, Contribution)
    assert got.trace_parent == parent


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"tokens": 2**64 - 1}, RefusalCause.IMPLAUSIBLE),
        ({"tokens": 2**40}, RefusalCause.IMPLAUSIBLE),
        ({"steps": 2**40, "tokens": 100 * 2**40}, RefusalCause.IMPLAUSIBLE),
        ({"cursor_to": 2**60}, RefusalCause.IMPLAUSIBLE),
        ({"step": 2**64 - 1}, RefusalCause.IMPLAUSIBLE),
    ],
)
async def test_claims_that_contradict_data_or_steps_are_refused_without_their_numbers(
    changes: dict[str, int], cause: RefusalCause
) -> None:
    rules = ContributionRules(sequence_tokens=100, step_tokens=100, scheme="int4")
    assembler = ContributionAssembler(RUN, PLAN, rules)
    honest = [assembler.feed(record) for record in await sent(offered())]
    assert isinstance(honest[-1], Contribution)
    got = assembler.feed((await sent(offered(2, **changes)))[0])
    assert isinstance(got, Refusal)
    assert (got.cause, got.refused.tokens, got.refused.cursor_to) == (cause, 0, 0)
    assert not assembler.open


async def test_scheme_that_is_not_the_runs_is_refused_before_memory_is_spent() -> None:
    assembler = ContributionAssembler(RUN, PLAN, ContributionRules(scheme="int8"))
    got = assembler.feed((await sent(offered()))[0])
    assert isinstance(got, Refusal)
    assert (got.cause, assembler.open) == (RefusalCause.WRONG_SCHEME, {})


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [(ContributionKind.GENESIS, "int4"), (ContributionKind.OUTER_GRADIENT, "f32")],
)
async def test_initial_parameters_are_exact_and_nothing_else_is_sent_that_way(
    kind: ContributionKind, scheme: str
) -> None:
    assembler = ContributionAssembler(RUN, PLAN, ContributionRules(scheme="int4"))
    got = assembler.feed((await contributed(RUN, PLAN, offered(kind=kind), scheme=scheme))[0])
    assert isinstance(got, Refusal)
    assert (got.cause, assembler.open) == (RefusalCause.IMPLAUSIBLE, {})


@pytest.mark.parametrize("incarnation", [2**40, 2**64 - 1])
async def test_start_with_a_number_that_no_learner_counts_to_supersedes_nothing(
    incarnation: int,
) -> None:
    assembler = ContributionAssembler(RUN, PLAN)
    refused = assembler.feed(started(incarnation, 1))
    assert isinstance(refused, Refusal)
    assert refused.cause is RefusalCause.IMPLAUSIBLE
    records = [replace(r, sequence=r.sequence + 1) for r in await sent(offered())]
    assert isinstance([assembler.feed(record) for record in records][-1], Contribution)
