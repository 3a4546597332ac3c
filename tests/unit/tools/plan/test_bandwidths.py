"""Streaming DiLoCo's table of bandwidths comes out again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from skerry.errors import ConfigError
from skerry.settings.tree import Tree
from skerry_tools.plan import bandwidths
from skerry_tools.plan.command_plan import scenario_path, scenarios
from skerry_tools.plan.report import bandwidth_page
from skerry_tools.plan.sites import read


@pytest.fixture
def tree() -> Tree:
    return read(scenario_path("streaming-diloco"))


def test_all_published_bandwidths_are_within_one_step_of_the_papers_grid(tree: Tree) -> None:
    found = bandwidths.cells(tree)
    assert len(found) == 75
    assert max(abs(cell.steps) for cell in found) == 1
    assert sum(cell.steps == 0 for cell in found) == 67


def test_without_the_fit_74_of_75_are(tree: Tree) -> None:
    tree.values["bandwidths"]["bits_per_parameter"] = 16.0
    assert sum(abs(cell.steps) <= 1 for cell in bandwidths.cells(tree)) == 74


def test_the_table_says_how_well_it_is_met(tree: Tree) -> None:
    found = bandwidths.cells(tree)
    assert bandwidths.lines(found)[0].startswith("75 of 75")
    json.dumps(bandwidths.as_json(tree, found), allow_nan=False)
    assert bandwidths.verdict([replace(found[0], published=1.0)]).startswith("0 of 1")


def test_an_unknown_method_is_refused_by_path(tree: Tree) -> None:
    tree.values["bandwidths"]["models"]["1B"]["published"]["gossip"] = [1, 1, 1, 1, 1]
    with pytest.raises(ConfigError, match=r"bandwidths\.models\.1B\.published\.gossip"):
        bandwidths.cells(tree)


def test_every_scenario_says_its_source_and_what_is_assumed() -> None:
    for name in scenarios():
        values = read(scenario_path(name)).values
        assert "arXiv" in values["source"]
        words = {text.partition(":")[0] for text in values["status"].values()}
        assert words <= {"published", "fitted", "assumed", "derived"}


def test_a_report_has_a_picture_for_each_model_and_a_row_for_each_cell(tree: Tree) -> None:
    found = bandwidth_page.report(tree)
    assert [name for part in found.parts for name, _ in part.pictures] == [
        "utilisation-1B",
        "utilisation-10B",
        "utilisation-100B",
    ]
    assert len(found.parts[1].tables[0].rows) == 75
