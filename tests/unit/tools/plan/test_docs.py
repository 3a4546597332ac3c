"""What docs/planning.md prints is what the commands answer."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skerry.algorithm.presets import MOMENTUM_FROM_H
from skerry.settings.tree import Tree
from skerry_tools.__main__ import app
from skerry_tools.plan import measured, plan, simulation
from skerry_tools.plan.measured import WIRE_BITS
from skerry_tools.plan.plan import make
from skerry_tools.plan.question import question, read, shipped
from skerry_tools.plan.tables import PlanTable, SimulationTable, SiteTable
from tests.support.plans import PUBLISHED, error_points, goodputs

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "planning.md").read_text("utf-8")
DELTAS = (DOCS / "results" / "deltas.md").read_text("utf-8")
EXAMPLES = re.findall(r"```\n\$ skerry (.*)\n([^`]*)```", PAGE)


def rows(heading: str) -> dict[str, list[str]]:
    """Return the rows of the table whose head begins so, by their first cell."""
    _, _, below = PAGE.partition(f"\n{heading}")
    lines = below.partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return {line[0] + line[1] * (len(line) == 3): line[1:] for line in cells}


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == PAGE.count("$ skerry") == 5


@pytest.mark.parametrize(("command", "printed"), EXAMPLES)
def test_an_example_prints_what_the_page_shows(command: str, printed: str) -> None:
    answer = CliRunner().invoke(app, shlex.split(command)).output
    assert " ".join(answer.split()).startswith(" ".join(printed.split()))


def test_the_file_on_the_page_is_a_question() -> None:
    tree = Tree()
    tree.merge(tomllib.loads(re.findall(r"```toml\n([^`]*)```", PAGE)[0]), "the page")
    assert make(question(tree)).tokens == 240e9


def test_bits_on_the_wire_are_those_that_plans_use() -> None:
    printed = re.search(r"with headers: ([^|]*)\|", PAGE)
    assert printed
    pairs = (pair.split() for pair in printed[1].split(","))
    assert {scheme: float(bits) for scheme, bits in pairs} == dict(WIRE_BITS)


def test_deltas_of_auto_are_planned_as_they_were_measured() -> None:
    lines = [
        line.strip("| ").split(" | ")
        for line in DELTAS.splitlines()
        if "muon |" in line or "adamw |" in line
    ]
    assert len(lines) == 11
    for *_, width, _, rate, h_steps, _, _, found, printed in lines:
        planned = measured.auto_bits(float(rate) * int(h_steps) * int(width) ** 0.5)
        assert planned == pytest.approx(float(printed), abs=0.006)
        assert planned == pytest.approx(float(found), abs=0.3)


def test_the_four_regions_are_as_fast_as_the_page_says() -> None:
    names = ("east", "central", "south", "west")
    lines = rows("| links | deltas")
    assert len(lines) == 4
    for link, (scheme, printed) in zip(("5", "3", "2", "2"), lines.values(), strict=True):
        sets = [f"sites.{name}.up={link} Gbit/s" for name in names]
        tree = read([shipped()["four-regions"]], [*sets, f"sync.delta_scheme={scheme}"])
        found = make(question(tree))
        assert printed == (f"{found.speed_up(1):.2f} x" if found.feasible else "not feasible")


def test_the_published_table_is_the_one_that_is_simulated() -> None:
    found = goodputs(10_000)
    printed = {row: [f"{one:.1f}" for one in cells] for row, cells in found.items()}
    for row, cells in PUBLISHED.items():
        printed[row] = [f"{a} ({b})" for a, b in zip(printed[row], cells, strict=True)]
    assert rows("| | 150k") == printed
    assert f"published cells is {error_points(found):.2f} points" in PAGE
    assert error_points(found) <= 1.5


@pytest.mark.parametrize(("setting", "printed"), rows("| setting | points").items())
def test_another_choice_makes_the_error_that_the_page_says(
    setting: str, printed: list[str]
) -> None:
    error = error_points(goodputs(3000, setting.strip("`")))
    assert error == pytest.approx(float(printed[0]), abs=0.2)


@pytest.mark.parametrize(
    ("sentence", "values"),
    [
        (r"the least H that works, from the default (\d+) on", [plan.CHOICES["h_steps"][0]]),
        (r"then the least P from (\d+) on", [plan.CHOICES["fragments"][0]]),
        (r"has momentum from H = (\d+) on", [MOMENTUM_FROM_H]),
        (r"else (\d+) for each parameter", [plan.TOKENS_PER_PARAMETER]),
        (r"`plan.gradient_bits`, (\d+)\)", [PlanTable().gradient_bits]),
        (r"M below (\d) or above (\d)", [measured.MERGE_CHECKED[0], measured.MERGE_CHECKED[-1]]),
        (
            r"and ([\d.]+) ns \(([\d.]+) with outer momentum\) a parameter and (\d+) ms a round",
            [*(s * 1e9 for s in measured.DEFAULT.beside_s), measured.DEFAULT.round_s * 1e3],
        ),
        (r"95 %, of the means of (\d+) equal parts", [simulation.BATCHES]),
        (r"The first ([\d,]+) rounds", [SimulationTable().rounds]),
        (r"chips of (\d+) GB are taken", [SiteTable.model_fields["memory"].default / 1e9]),
        (
            r"Beyond ([\d.]+) million chips, (\d+) learners and (\d+) failures per pause",
            [simulation.CHECKED_CHIPS / 1e6, simulation.CHECKED_LEARNERS, simulation.CHECKED_LOAD],
        ),
    ],
)
def test_a_number_in_a_sentence_is_the_one_that_is_used(sentence: str, values: list[float]) -> None:
    found = re.search(sentence, " ".join(PAGE.split()))
    assert found
    printed = [text.replace(",", "") for text in found.groups() if text]
    assert list(map(float, printed)) == pytest.approx(values)
