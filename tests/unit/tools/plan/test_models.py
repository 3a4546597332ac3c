"""A plan knows the size of a model."""

from __future__ import annotations

import pytest

from skerry.errors import ConfigError
from skerry.settings.models import ModelConfig, RunConfig, SyncConfig
from skerry_tools.plan.models import size_of
from skerry_tools.plan.sites import PlanTable, Request, Scene


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
