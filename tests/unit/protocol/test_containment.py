"""What of a round's contributions is merged, and how: one of four learners sends something else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.merge import slice_norms
from skerry.algorithm.quantise_numpy import dequantise, quantise
from skerry.protocol.commit import Batch, Closing, Weighed, Writer, commit_record, weigh
from skerry.protocol.containment import (
    MOSTLY,
    OFTEN,
    WINDOW,
    Conduct,
    ContainmentRules,
    FragmentMemory,
    containment_rules,
    digest_of,
    examine,
)
from skerry.protocol.contribution import Contribution, ContributionRules
from skerry.protocol.messages import CloseReason, Pulse, QuarantineReason, RefusalCause, Refused
from skerry.protocol.shard import PendingFragment, Shard, WeightRule, weight_rule
from skerry.settings.models import RunConfig
from tests.support.builders import commit, consumed, header, manifest, pulse
from tests.support.learners import walk

PLAN = plan([LeafSpec("w", (64, 256)), LeafSpec("b", (256,))], 1)
FRAGMENT = PLAN.fragments[0]
VERSION = 3
RULES = ContainmentRules(
    clip=2.0, share=2.0, steps=8.0, repeats=True, opposed=True, quarantine=True
)
WEIGHTS = WeightRule(4, 0.5)
COMMON = 2 * walk(FRAGMENT, "common")
CLOSING = Closing(CloseReason.ALL_ARRIVED, 1, 1, 2)


def sent(learner: str, factor: float = 1.0, identity: int = 1, **changes: Any) -> Contribution:
    """Return what a learner sends that has learnt about the same as the others."""
    x = (COMMON + walk(FRAGMENT, learner, identity)) * np.float32(factor)
    planes = quantise("int4", x)
    norms = slice_norms(FRAGMENT, dequantise("int4", planes))
    claim = {"base_version": VERSION, "norms": norms, "steps": 10, "tokens": 1000} | changes
    place = identity * 100 + "abcd".index(learner)
    return Contribution(header(identity, learner, **claim), "int4", planes, place, place)


def shard(rules: ContainmentRules = RULES, weights: WeightRule = WEIGHTS) -> Shard:
    held = manifest(VERSION, run="t", plan_digest=PLAN.digest)
    made = Shard.of("t", PLAN, weights, ContributionRules(), [PendingFragment(FRAGMENT, held)])
    made.containment = rules
    return made


def merged(
    of: Shard, *contributions: Contribution, moved: Any = None
) -> tuple[dict[str, Weighed], list[tuple[str, RefusalCause]]]:
    """Return what the next version of the fragment is made of, by learner, and what is refused."""
    state = of.fragments[0]
    found = examine(
        contributions, FRAGMENT, state.version + 1, of.containment, scale=None, moved=moved
    )
    weighed = weigh(of, state, Batch(contributions, 0), found)
    refused = state.refused.close()
    record = commit_record(
        state, weighed, refused, CLOSING, Writer("t", PLAN.digest, "s", 1), floor=0, merge_s=0.0
    )
    state.commit(replace(manifest(1), commit=record), [c.id for c in contributions], 0)
    names = [(r.learner, r.cause) for r in refused.named]
    return {w.contribution.header.learner: w for w in weighed}, names


HONEST = [sent(name) for name in "abc"]


def test_honest_learners_are_merged_as_without_rules() -> None:
    bare, _ = merged(shard(ContainmentRules()), *HONEST, sent("d"))
    ruled, refused = merged(shard(), *HONEST, sent("d"))
    assert not refused
    assert {n: (w.weight, w.cut, w.uncounted) for n, w in ruled.items()} == {
        n: (w.weight, 0.0, 0.0) for n, w in bare.items()
    }


@pytest.mark.parametrize(("mode", "most"), [("data-parallel", 2 / 3), ("diloco", 4 / 5)])
def test_bare_gradients_are_averaged_over_the_tokens_of_all(mode: str, most: float) -> None:
    rule = weight_rule(RunConfig.model_validate({"mode": mode}))
    few, many = sent("a", steps=1, tokens=40), sent("b", steps=1, tokens=80)
    found, _ = merged(shard(ContainmentRules(), rule), few, many)
    assert found["b"].weight == pytest.approx(most)


@pytest.mark.parametrize(
    ("steps", "tokens", "share"), [(1, 800, 800 / 1040), (8, 640, 1 / 4)], ids=["large", "claimed"]
)
def test_mode_data_parallel_counts_the_tokens_of_one_step(
    steps: int, tokens: int, share: float
) -> None:
    run = RunConfig.model_validate({"mode": "data-parallel", "sync": {"learners": 4}})
    held = shard(containment_rules(run.contain), weight_rule(run))
    others = [sent(name, steps=1, tokens=80) for name in "bcd"]
    found, _ = merged(held, sent("a", steps=steps, tokens=tokens), *others)
    assert found["a"].weight == pytest.approx(share)


def test_what_is_too_long_is_cut_and_the_commit_says_by_how_much() -> None:
    held = shard()
    found, refused = merged(held, *HONEST, sent("d", 4))
    assert not refused
    assert found["d"].cut == pytest.approx(1 - 2 / 4, rel=0.02)
    assert found["d"].gradient.cut == found["d"].cut
    state = held.fragments[0].manifest
    assert state is not None
    assert {c.learner: c.cut for c in state.commit.consumed} == {
        name: weighed.cut for name, weighed in found.items()
    }


@pytest.mark.parametrize(
    ("factor", "cause"), [(50, RefusalCause.OVERLONG), (-1, RefusalCause.OPPOSED)]
)
def test_what_is_absurdly_long_or_points_against_the_others_is_refused(
    factor: float, cause: RefusalCause
) -> None:
    found, refused = merged(shard(), *HONEST, sent("d", factor))
    assert found.keys() == {*"abc"}
    assert refused == [("d", cause)]


def test_lengths_of_versions_before_count_where_a_round_has_one_contribution() -> None:
    held = shard()
    for number, name in enumerate("abc", start=1):
        merged(held, sent(name, identity=number, base_version=VERSION))
    found, _ = merged(held, sent("d", 4))
    assert 0.4 < found["d"].cut < 0.6


def test_tokens_and_steps_beyond_the_others_do_not_count_and_no_weight_is_above_its_bound() -> None:
    many = sent("d", steps=2**20, tokens=100 * 2**20)
    held = shard()
    found, refused = merged(held, *HONEST, many)
    assert not refused
    assert found["d"].uncounted == pytest.approx(1 - 80 / 2**20)
    tokens = {name: row.tokens for name, row in held.fragments[0].progress.items()}
    assert tokens == {"a": 1000, "b": 1000, "c": 1000, "d": 8000}, "it is nearer to its end"
    assert found["d"].weight == pytest.approx(0.5)
    off, _ = merged(shard(ContainmentRules()), *HONEST, many)
    assert off["d"].weight > 0.999


@pytest.mark.parametrize(("steps", "counts"), [(100, True), (10_000, False)])
def test_steps_that_the_learners_own_pulse_does_not_bear_out_are_refused(
    steps: int, *, counts: bool
) -> None:
    held, own = shard(), pulse("d", 50)
    pulses: dict[str, Pulse] = {"d": own}
    held.pulse_of = pulses.get
    found, refused = merged(held, *HONEST, sent("d", steps=steps))
    assert ("d" in found) is counts
    assert refused == ([] if counts else [("d", RefusalCause.IMPLAUSIBLE)])


def test_a_pulse_of_another_start_of_the_learner_says_nothing_about_its_steps() -> None:
    held, pulses = shard(), {"d": pulse("d", 1, incarnation=2)}
    held.pulse_of = pulses.get
    found, refused = merged(held, *HONEST, sent("d", steps=10_000))
    assert ("d" in found, refused) == (True, [])


def test_norms_that_are_not_those_of_what_was_sent_are_refused() -> None:
    lying = sent("d", norms=(0.001, 0.001))
    assert merged(shard(), *HONEST, lying)[1] == [("d", RefusalCause.IMPLAUSIBLE)]


def test_what_was_merged_before_is_refused_whoever_sends_it() -> None:
    held = shard()
    merged(held, *HONEST, sent("d"))
    again = replace(sent("d"), header=sent("d", identity=2).header)
    copied = replace(HONEST[0], header=sent("d", identity=3, norms=()).header)
    _, refused = merged(held, again, copied)
    assert [cause for _, cause in refused] == [RefusalCause.REPEATED] * 2


def test_a_learner_beside_at_most_one_other_may_learn_the_same_again() -> None:
    held = shard()
    merged(held, *HONEST[:2])
    again = replace(HONEST[0], header=sent("a", identity=2, norms=()).header)
    found, refused = merged(held, again)
    assert (found.keys(), refused) == ({"a"}, [])


def test_of_two_equal_contributions_the_one_that_came_first_is_merged() -> None:
    copied = replace(sent("a"), header=sent("d", norms=()).header, sequence_last=10**6)
    found, refused = merged(shard(), *HONEST, copied)
    assert found.keys() == {*"abc"}
    assert refused == [("d", RefusalCause.REPEATED)]


def test_zeros_are_no_work_where_others_have_learnt() -> None:
    assert merged(shard(), *HONEST, sent("d", 0))[1] == [("d", RefusalCause.FREE_RIDING)]
    nothing, refused = merged(shard(), *[sent(name, 0) for name in "abcd"])
    assert not refused
    assert nothing.keys() == {*"abcd"}
    unused = sent("d", 0, slice_tokens=(0, 0))  # experts to which none of its tokens went
    assert not merged(shard(), *HONEST, unused)[1]
    assert not merged(shard(RULES._replace(repeats=False)), *HONEST, sent("d", 0))[1]


def test_what_a_learner_in_quarantine_sends_is_refused() -> None:
    held = shard()
    held.quarantined = {"d"}
    assert merged(held, *HONEST, sent("d"))[1] == [("d", RefusalCause.QUARANTINED)]


def test_memory_forgets_what_is_too_old() -> None:
    memory = FragmentMemory()
    memory.take(commit(2, consumed=(consumed("a", norm=1.0, digest=7),)))
    memory.take(commit(2 + WINDOW - 1, consumed=(consumed("b", norm=1.0, digest=8),)))
    assert memory.digests.keys() == {7, 8}
    memory.take(commit(2 + WINDOW))
    assert memory.newest.keys() == {"b"}
    assert memory.digests.keys() == {8}


@pytest.mark.parametrize("often", [OFTEN - 1, OFTEN])
def test_what_a_learner_did_before_its_quarantine_is_forgotten(often: int) -> None:
    seen = Conduct()
    bad = (Refused(RefusalCause.OVERLONG, "b", 1, 1),)
    for _ in range(often):
        seen.take(commit(3, refused=bad))
    assert not list(seen.suspects({"b"}))
    seen.take(commit(3, refused=bad))  # it is released, and begins anew
    assert not list(seen.suspects(()))


def conduct(count: int, **bad: Any) -> list[tuple[str, QuarantineReason]]:
    """Return who is suspected when so many contributions of b were bad, after good ones of both."""
    seen = Conduct()
    for number in range(WINDOW + count):
        cause = bad.get("cause") if number >= WINDOW else None
        own = consumed("b", alignment=bad.get("alignment", 0.3) if number >= WINDOW else 0.3)
        kept = [consumed("a", alignment=0.3), *([] if cause else [own])]
        refused = (Refused(cause, "b", 1, 1),) if cause else ()
        seen.take(commit(3, consumed=tuple(kept), refused=refused))
    found = list(seen.suspects(()))
    assert not list(seen.suspects(()))
    return found


@pytest.mark.parametrize(
    ("bad", "often", "reason"),
    [
        ({"cause": RefusalCause.REPEATED}, OFTEN, QuarantineReason.REPEATS),
        ({"cause": RefusalCause.FREE_RIDING}, OFTEN, QuarantineReason.FREE_RIDES),
        ({"cause": RefusalCause.OVERLONG}, OFTEN, QuarantineReason.OVERLONG),
        ({"cause": RefusalCause.OPPOSED}, OFTEN, QuarantineReason.OPPOSED),
        ({"alignment": -0.3}, MOSTLY, QuarantineReason.OPPOSED),
    ],
)
def test_who_offends_often_is_put_into_quarantine_once(
    bad: dict[str, Any], often: int, reason: QuarantineReason
) -> None:
    assert conduct(often, **bad) == [("b", reason)]
    assert conduct(often - 1, **bad) == []


@pytest.mark.parametrize("bad", [{"alignment": -0.01}, {"cause": RefusalCause.CORRUPT}])
def test_small_offences_put_nobody_into_quarantine(bad: dict[str, Any]) -> None:
    assert conduct(WINDOW, **bad) == []


def test_digest_is_of_codes_and_scales() -> None:
    planes = HONEST[0].planes
    other = planes._replace(scales=planes.scales + np.uint16(1))
    assert len({digest_of(planes), digest_of(other), digest_of(HONEST[1].planes)}) == 3
