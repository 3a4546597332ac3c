"""A fault plan is plain values, the same everywhere, and refused before it touches anything."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skerry.errors import ConfigError
from skerry_tools.chaos import plan as plans
from skerry_tools.chaos.plan import DRAWN, Fault, FaultPlan, Kind

SERVICES = {
    "broker": "broker",
    "learner-0": "learner",
    "learner-1": "learner",
    "learner-10": "learner",
    "syncer": "syncer",
}
TARGETS = ("broker", "learner", "syncer", "any")
PINNED = [
    (1.945, Kind.WINDOW_DROP, "broker", 0.476, 0.213),
    (3.409, Kind.PAUSE, "learner", 0.053, 0.0),
    (3.473, Kind.PAUSE, "learner", 0.452, 0.0),
    (4.168, Kind.CORRUPT, "any", 0.054, 0.76),
    (5.359, Kind.BROKER_PAUSE, "broker", 1.801, 0.0),
]


def test_a_seed_gives_the_same_plan_on_every_machine() -> None:
    drawn = plans.random_plan(7, 2.0, 8.0, DRAWN, TARGETS)
    assert [(f.at_s, f.kind, f.target, f.duration_s, f.amount) for f in drawn.faults] == PINNED


def test_other_seeds_give_other_plans() -> None:
    drawn = {plans.random_plan(s, 1.0, 20.0, DRAWN, TARGETS).faults for s in range(50)}
    assert len(drawn) == 50


@given(seed=st.integers(0, 10_000), every_s=st.floats(0.1, 5.0))
def test_a_random_plan_passes_its_own_check(seed: int, every_s: float) -> None:
    drawn = plans.random_plan(seed, every_s, 30.0, DRAWN, TARGETS)
    plans.check(drawn, SERVICES)
    assert all(f.at_s < 30.0 for f in drawn.faults)


@pytest.mark.parametrize(
    ("every_s", "duration_s", "path"),
    [
        (math.inf, 60.0, "every_s"),
        (math.nan, 60.0, "every_s"),
        (0.0, 60.0, "every_s"),
        (5.0, math.inf, "duration_s"),
        (5.0, math.nan, "duration_s"),
        (5.0, 0.0, "duration_s"),
        (5.0, -1.0, "duration_s"),
        (5.0, 2 * plans.MOST_S, "duration_s"),
        (5.0, plans.MOST_S, "duration_s"),
        (1e-300, 1.0, "duration_s"),
    ],
)
def test_times_that_mean_nothing_or_draw_without_end_are_refused(
    every_s: float, duration_s: float, path: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        plans.random_plan(1, every_s, duration_s, DRAWN, TARGETS)
    assert refused.value.path == path


def test_kinds_that_no_target_can_suffer_are_left_out() -> None:
    drawn = plans.random_plan(1, 0.5, 30.0, (Kind.KILL, Kind.BROKER_KILL), ("learner",))
    assert {f.kind for f in drawn.faults} == {Kind.KILL}


@given(seed=st.integers(0, 10_000))
def test_a_plan_survives_its_json(seed: int) -> None:
    drawn = plans.random_plan(seed, 1.0, 20.0, DRAWN, TARGETS)
    assert plans.loads(plans.dumps(drawn)) == drawn


@pytest.mark.parametrize(
    ("text", "path", "nearest"),
    [
        ("{", "faults", ""),
        ("[]", "faults", ""),
        ('{"format": 2, "faults": []}', "format", ""),
        ('{"format": 1}', "faults", ""),
        ('{"format": 1, "fualts": []}', "fualts", "faults"),
        ('{"format": 1, "faults": [{"at_s": 1, "kind": "kil"}]}', "kind", "kill"),
        ('{"format": 1, "faults": [{"at": 1, "kind": "kill"}]}', "at", "at_s"),
        ('{"format": 1, "faults": [{"at_s": true, "kind": "kill"}]}', "at_s", ""),
        ('{"format": 1, "faults": [{"at_s": -1, "kind": "kill"}]}', "at_s", ""),
        ('{"format": 1, "faults": [{"at_s": NaN, "kind": "kill"}]}', "at_s", ""),
        ('{"format": 1, "faults": [{"at_s": 1e999, "kind": "kill"}]}', "at_s", ""),
        ('{"format": 1, "faults": [{"at_s": 1, "kind": []}]}', "kind", ""),
        ('{"format": 1, "faults": [{"at_s": 1, "kind": {}}]}', "kind", ""),
        ('{"format": 1, "faults": [{"at_s": 1, "kind": null}]}', "kind", ""),
        ('{"format": 1, "faults": [], "seed": Infinity}', "seed", ""),
        ('{"format": 1, "faults": [], "seed": NaN}', "seed", ""),
        ('{"format": 1, "faults": [], "seed": 1.5}', "seed", ""),
        ('{"format": 1, "faults": [], "seed": true}', "seed", ""),
        ('{"format": 1, "faults": [], "heal_s": 1' + "0" * 400 + "}", "heal_s", ""),
        ("[" * 100_000, "faults", ""),
        (
            '{"format": 1, "faults": [{"at_s": 0, "kind": "corrupt", "amount": 1.5}]}',
            "amount",
            "",
        ),
        (
            '{"format": 1, "faults": [{"at_s": 2, "kind": "kill"}, {"at_s": 1, "kind": "kill"}]}',
            "faults",
            "",
        ),
        (
            '{"format": 1, "faults": [{"at_s": 0, "kind": "kill", "target": "broker"}]}',
            "target",
            "",
        ),
    ],
)
def test_a_file_that_means_nothing_is_refused_by_name(text: str, path: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plans.loads(text)
    assert (refused.value.path, refused.value.nearest) == (path, nearest)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(["at_s", "kind", "target", "duration_s", "amount", "at"])
NEARLY = (
    st.sampled_from([*Kind, *SERVICES, "learner:1", "learner:" + "9" * 5000, "", 0, -1, 1e300])
    | ANYTHING
)
FAULTS = st.lists(
    st.dictionaries(KEYS, NEARLY).map(lambda fault: {"at_s": 1.0, "kind": "kill"} | fault)
    | ANYTHING,
    max_size=3,
)
NEARLY_PLANS = st.fixed_dictionaries(
    {"format": st.just(1), "faults": FAULTS | ANYTHING},
    optional={"seed": ANYTHING, "heal_s": ANYTHING, "fualts": ANYTHING},
)


LONG = json.dumps(
    {"format": 1, "faults": [{"at_s": 1, "kind": "kill", "target": "learner:" + "9" * 5000}]}
)


DEEP = {"a" * 30: {f"{n}" * 30: {f"{n}" * 30: None for n in range(4)} for n in range(4)}}


@given(text=st.text() | (ANYTHING | NEARLY_PLANS).map(json.dumps))
@example(text=LONG)
@example(text=json.dumps({"format": 1, "faults": [{"at_s": 1, "kind": "kill", "target": DEEP}]}))
def test_whatever_a_file_holds_it_is_a_plan_or_refused_in_one_sentence(text: str) -> None:
    said = ""
    try:
        plans.check(plans.loads(text), SERVICES)
    except ConfigError as refused:
        said = str(refused)
    assert "\n" not in said
    assert len(said) < 400


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        plans.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("any", ("learner-0", "learner-1", "learner-10", "syncer")),
        ("learner", ("learner-0", "learner-1", "learner-10")),
        ("learner:2", ("learner-10",)),
        ("learner:3", ()),
        ("learner:x", ()),
        ("syncer", ("syncer",)),
        ("learner-1", ("learner-1",)),
        ("broker", ("broker",)),
        ("nobody", ()),
    ],
)
def test_a_target_means_services_by_name_kind_or_number(
    target: str, meant: tuple[str, ...]
) -> None:
    assert plans.candidates(target, SERVICES) == meant


def test_an_unknown_target_is_refused_with_the_nearest_one() -> None:
    plan = FaultPlan(1, (Fault(0.0, Kind.KILL, "lerner"),))
    with pytest.raises(ConfigError, match="'learner'") as refused:
        plans.check(plan, SERVICES)
    assert refused.value.nearest == "learner"


def test_the_seed_says_which_of_several_is_struck() -> None:
    chosen = {
        plans.choose(FaultPlan(s, (Fault(0.0, Kind.KILL, "learner"),)), 0, SERVICES)
        for s in range(40)
    }
    assert chosen == {"learner-0", "learner-1", "learner-10"}
