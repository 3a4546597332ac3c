"""Modes: what each fills in, what each refuses, and that a stored run says it all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import ConfigError
from skerry.settings.checks import check_run, remark_on_rate
from skerry.settings.loading import (
    decided,
    differences,
    load,
    run_config_from_json,
    to_json,
    to_toml,
)
from skerry.settings.models import ModelConfig, OuterConfig, RunConfig, SyncConfig, TrainConfig
from skerry.settings.modes import Mode, clauses

MODES: tuple[Mode, ...] = get_args(Mode)


def resolve(*sets: str, **environ: str) -> RunConfig:
    return load(None, sets, environ).run


def refusal(*sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(*sets)
    assert caught.value.path == str(caught.value).partition(" ")[0]
    return str(caught.value)


def value_of(run: RunConfig, path: str) -> Any:
    table, _, name = path.partition(".")
    return getattr(getattr(run, table), name)


def test_the_default_mode_fills_in_nothing() -> None:
    assert resolve() == RunConfig()
    assert resolve().mode == "decoupled"
    assert differences(resolve("mode=decoupled"), RunConfig()) == ()


PAPERS = ("adamw", "nesterov")
F32 = {"merge": "average", "contribution_scheme": "f32", "global_scheme": "f32"}
MET = {"quorum": 4, "fragments": 1, "overlap_steps": 0}


@pytest.mark.parametrize(
    ("mode", "filled", "inner", "outer"),
    [
        (
            "streaming",
            {
                "quorum": 4,
                "overlap_steps": 2,
                "grace_gamma": 0.0,
                "fragments": 8,
                "h_steps": 96,
                "contribution_scheme": "e3m0",
                "adoption": "blend",
                "blend_alpha": 0.5,
                "merge": "average",
            },
            *PAPERS,
        ),
        (
            "diloco",
            {**MET, "h_steps": 500, "merge": "average", "contribution_scheme": "f32"},
            *PAPERS,
        ),
        (
            "data-parallel",
            {**MET, "h_steps": 1, "shards": 1, "max_staleness": 0, "adoption": "overwrite", **F32},
            "gradient",
            "adamw",
        ),
        ("single", {"learners": 1, "quorum": 1, **F32}, "muon", "direct"),
    ],
)
def test_a_mode_fills_in_what_is_open(
    mode: str, filled: dict[str, object], inner: str, outer: str
) -> None:
    learners = [] if mode == "single" else ["sync.learners=4"]
    run = resolve(f"mode={mode}", *learners)
    sync = run.sync.model_dump()
    assert {name: sync[name] for name in filled} == filled
    assert (run.train.inner, run.outer.preset) == (inner, outer)


@pytest.mark.parametrize(
    ("sets", "inner", "lr"),
    [
        ((), "muon", 1.2e-2),
        (("model.preset=micro", "model.layers=2"), "muon", 6e-3),
        (("train.lr=1e-3",), "adamw", 1e-3),
        (("train.inner=adamw",), "adamw", 3e-3),
        (("mode=diloco",), "adamw", 3e-3),
        (("model.preset=small",), "adamw", 3e-3),
        (("model.path=folder",), "adamw", 3e-3),
        (("model.factory=a:b",), "adamw", 3e-3),
        (("model.lora_rank=4",), "adamw", 3e-3),
    ],
)
def test_small_models_from_scratch_are_trained_with_muon(
    sets: tuple[str, ...], inner: str, lr: float
) -> None:
    train = resolve(*sets).train
    assert (train.inner, train.lr) == (inner, lr)


@pytest.mark.parametrize(
    ("sets", "remarked"),
    [
        ((), False),
        (("train.inner=muon", "train.lr=4.8e-2"), False),
        (("train.inner=muon", "train.lr=1e-3"), True),
        (("train.lr=1",), True),
        (("train.lr=1e-4", "model.path=folder"), False),
        (("train.inner=a:b", "train.lr=1"), False),
    ],
)
def test_a_rate_outside_what_was_measured_is_remarked_on(
    sets: tuple[str, ...], remarked: bool
) -> None:
    said = remark_on_rate(resolve(*sets))
    assert said.startswith("train.lr is") is remarked
    assert ("docs/quality.md" in said) is remarked


def test_a_config_for_another_model_has_that_models_defaults() -> None:
    own = ModelConfig(preset="own")
    assert resolve("train.steps=7").for_model(own).train == TrainConfig(steps=7)
    chosen = resolve("train.lr=1e-3", "mode=diloco", "sync.learners=3")
    assert chosen.for_model(own) == chosen.model_copy(update={"model": own})


def test_what_the_user_has_set_stays() -> None:
    run = resolve("mode=streaming", "sync.overlap_steps=5", "sync.grace_gamma=0.5")
    assert (run.sync.overlap_steps, run.sync.grace_gamma) == (5, 0.5)
    single = resolve("mode=single", "sync.contribution_scheme=int4")
    assert single.sync.contribution_scheme == "int4"


def test_every_source_may_name_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('mode = "diloco"\n[sync]\nlearners = 3\n')
    assert load(path, (), {}).run.sync.quorum == 3
    assert resolve(SKERRY_MODE="single").sync.learners == 1
    assert load(path, ["mode=streaming"], {"SKERRY_MODE": "single"}).run.mode == "streaming"


def test_a_mode_that_does_not_exist_is_refused_with_those_that_do() -> None:
    sentence = refusal("mode=ddp")
    assert 'mode (from --set) is "ddp", but it must be one of' in sentence
    assert all(f"'{mode}'" in sentence for mode in MODES)


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (
            ["mode=streaming", "sync.quorum=1"],
            'is 1 but mode is "streaming", in which every round waits for all learners: leave it',
        ),
        (["mode=streaming", "sync.fragments=7"], "one divides the other"),
        (["mode=diloco", "sync.fragments=8"], "leave it out or set sync.fragments=1."),
        (["mode=data-parallel", "outer.lr=0.1"], "from train.lr: leave it out."),
        (["mode=data-parallel", "train.duration_s=60"], "counts steps and no time: leave it out."),
        (["sync.overlap_steps=0"], "sync.quorum is 1 but sync.overlap_steps is 0 and sync."),
        (["train.inner=gradient"], 'train.inner is "gradient" but mode is "decoupled"'),
        (["outer.preset=adamw"], 'outer.preset is "adamw" but mode is "decoupled"'),
    ],
)
def test_contradictions_are_refused_with_the_reason(sets: list[str], sentence: str) -> None:
    said = refusal(*sets)
    assert sentence in said
    assert said.count("\n") == 0


OTHER: dict[str, str] = {
    "sync.adoption": "rebase",
    "sync.merge": "rda",
    "sync.global_scheme": "bf16",
    "sync.contribution_scheme": "int4",
    "train.inner": "adamw",
    "outer.preset": "direct",
    "outer.lr": "0.5",
    "outer.momentum": "0.5",
}
"""Values that a mode does not insist on; of a number, one more."""


@pytest.mark.parametrize("mode", MODES)
def test_everything_a_mode_insists_on_is_refused_otherwise(mode: Mode) -> None:
    for clause in clauses(mode, 2):
        if clause.because:
            value = clause.value if isinstance(clause.value, int) else 8
            other = OTHER.get(clause.path, value + 1 if clause.least is None else 0)
            assert refusal(f"mode={mode}", f"{clause.path}={other}").startswith(clause.path)


@given(mode=st.sampled_from(MODES), learners=st.integers(1, 64))
def test_what_a_mode_fills_in_holds_together_and_is_stored_whole(mode: Mode, learners: int) -> None:
    learners = 1 if mode == "single" else learners
    run = RunConfig(mode=mode, sync=SyncConfig(learners=learners))
    check_run(run)
    assert all(value_of(run, c.path) == c.value for c in clauses(mode, learners))
    stored = json.loads(to_json(run))
    assert stored["mode"] == mode
    assert all(name in stored["sync"] for name in SyncConfig.model_fields)
    assert run_config_from_json(to_json(decided(run))) == decided(run)
    assert RunConfig.model_validate_json(to_json(run)) == run


@pytest.mark.parametrize("mode", MODES)
def test_a_written_file_loads_to_the_same_run(mode: Mode, tmp_path: Path) -> None:
    settings = load(None, [f"mode={mode}"], {})
    (tmp_path / "run.toml").write_text(to_toml(settings), encoding="utf-8")
    assert load(tmp_path / "run.toml", (), {}) == settings


def test_a_stored_run_that_contradicts_its_mode_is_refused() -> None:
    stored = json.loads(to_json(RunConfig(mode="diloco")))
    stored["sync"]["quorum"] = 1
    with pytest.raises(ConfigError, match=r"sync\.quorum is 1 but mode is"):
        run_config_from_json(json.dumps(stored))


def test_one_default_is_not_another_runs() -> None:
    RunConfig(mode="diloco")
    assert RunConfig().sync == SyncConfig()
    assert RunConfig().outer == OuterConfig()
