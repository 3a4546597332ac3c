"""A plan knows the learner's models without JAX."""

from __future__ import annotations

import pytest

from skerry.errors import ConfigError
from skerry.models.base import specs_of
from skerry.models.factory import PRESETS, sizes_of
from skerry.models.transformer import Transformer
from skerry.settings.models import ModelConfig, RunConfig, SyncConfig
from skerry_tools.plan.models import SIZES, leaves_of, size_of
from skerry_tools.plan.sites import PlanTable, Request, Scene


def test_the_presets_are_those_of_the_learner() -> None:
    assert SIZES.keys() == PRESETS.keys()


@pytest.mark.parametrize("preset", PRESETS)
def test_the_tensors_are_those_that_the_learner_builds(preset: str) -> None:
    config = ModelConfig.model_validate({"preset": preset, "vocab": 512})
    assert leaves_of(config) == specs_of(Transformer(sizes_of(config)))


def test_the_largest_fragment_of_a_bare_count_is_an_even_share_rounded_up() -> None:
    request = Request(RunConfig(), Scene(plan=PlanTable(parameters=1001)))
    assert size_of(request).largest_fragment(10) == 101


def test_more_fragments_than_parameters_are_refused_by_path() -> None:
    run = RunConfig(sync=SyncConfig(fragments=8))
    with pytest.raises(ConfigError, match=r"sync\.fragments is 8"):
        size_of(Request(run, Scene(plan=PlanTable(parameters=4))))


def test_a_model_of_ones_own_needs_its_count() -> None:
    run = RunConfig(model=ModelConfig(factory="mine:model"))
    with pytest.raises(ConfigError, match=r"plan\.parameters is missing"):
        size_of(Request(run, Scene()))
