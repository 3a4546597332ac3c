"""What a run's record says of a training loop's model, and what it tells who has to compute it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.client.asked import model_of_leaves, settings_of
from skerry.errors import ConfigError, ModelError
from skerry.models.presets import OWN, arch_of
from skerry.models.tensors import leaf_specs_of
from skerry.protocol.messages import RunRecord, RunState
from skerry.settings.loading import to_json
from skerry.settings.models import ModelConfig, RunConfig
from skerry_evaluator.service import Evaluator

NAMED = ModelConfig(preset="nano", layers=1, vocab=300)
TEXT = arch_of(ModelConfig(preset="nano", d_model=64)).config


def leaves_of(model: ModelConfig) -> tuple[LeafSpec, ...]:
    return leaf_specs_of(arch_of(model))


def test_a_loops_model_is_the_one_described_whose_tensors_it_has_or_its_own() -> None:
    described = ModelConfig(config=TEXT)
    assert model_of_leaves(NAMED, leaves_of(NAMED), TEXT) == NAMED
    assert model_of_leaves(ModelConfig(), leaves_of(described), TEXT) == described
    assert model_of_leaves(ModelConfig(), (LeafSpec("w", (3,)),), TEXT).preset == OWN
    frozen = (*leaves_of(NAMED)[:-1], replace(leaves_of(NAMED)[-1], trainable=False))
    assert model_of_leaves(NAMED, frozen).preset == OWN


def test_who_has_to_compute_a_loops_own_model_says_so() -> None:
    config, cut = RunConfig(model=ModelConfig(preset=OWN)), plan((LeafSpec("w", (300,)),), 1)
    record = RunRecord("r", to_json(config), cut.specs, 1, 1, cut.digest, 1, "0", RunState.OPEN)
    with pytest.raises(ModelError, match="training loops' own"):
        Evaluator.of(None, record, "e")  # type: ignore[arg-type] # it asks no bus


def test_a_loop_names_its_broker_with_a_login_and_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SKERRY_NATS__URL", "nats://elsewhere:4222")
    address = "nats://user:secret@127.0.0.1:4222"
    assert settings_of(address, "r", None).local.nats.url == address
    assert settings_of(None, "r", None).local.nats.url == "nats://elsewhere:4222"


def test_a_loops_config_takes_numbers_of_numpy() -> None:
    found = settings_of("nats://h:1", "r", {"train": {"steps": np.int64(4)}}).run.train
    assert type(found.steps) is int
    assert found.steps == 4


def test_a_config_that_is_no_table_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"config is \[1\], which holds no settings: give a dict"):
        settings_of("nats://h:1", "r", [1])  # type: ignore[arg-type] # as a program may


def test_a_table_whose_name_is_no_text_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"1 \(from config\) is not a setting"):
        settings_of("nats://h:1", "r", {1: {}})  # type: ignore[dict-item] # as a program may
