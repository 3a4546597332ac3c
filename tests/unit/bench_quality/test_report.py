"""The report says what has been run, what has not, and no more than the intervals allow."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from bench.quality.batches import batch
from bench.quality.cells import Cell, Experiment
from bench.quality.experiments import all_experiments, modes, outer, quantisation
from bench.quality.fleets import failures, scavenging
from bench.quality.lengths import length
from bench.quality.optimizers import growth
from bench.quality.report import stamp_defaults, write_report
from bench.quality.rhythms import muon_fleet
from bench.quality.samples import Estimate
from bench.quality.store import Found
from bench.quality.tables import Findings, effective_step, gather, table, time_to_target
from bench.quality.verdicts import _rate, judged, verdicts


def found(
    cell: Cell, seed: int, loss: float, seconds: float = 100.0, steps: int | None = None
) -> Found:
    """Pretend a run whose loss falls along a straight line from 3 to ``loss``."""
    shares = [n / 10 for n in range(1, 11)]
    result = {
        "loss": loss,
        "curve": [
            {"at_s": seconds * s, "tokens": 1e6 * s, "step": 0, "loss": 3 + (loss - 3) * s}
            for s in (*shares, 1.0)
        ],
        "rho": 0.5,
        **dict.fromkeys(("commits", "staleness", "refused", "kills", "virtual_s"), 8),
        "steps": cell.steps if steps is None else steps,
        **dict.fromkeys(("tokens", "trained_tokens"), 1e6),
        "parameters": 117_000,
        "took_s": 40.0,
        "seed": seed,
        "machine": {"python": "3.13.1", "device": "cpu"},
    }
    return Found(cell.scenario(seed), result)


def every(experiment: Experiment, losses: dict[str, float]) -> dict[str, Found]:
    """Pretend all seeds of the cells with these losses, a little apart from each other."""
    runs = [
        found(cell, seed, losses[cell.key] + 0.01 * seed)
        for cell in experiment.cells
        if cell.key in losses
        for seed in cell.seeds
    ]
    return {run.scenario.digest: run for run in runs}


def test_a_table_has_differences_of_pairs_and_says_what_has_not_been_run() -> None:
    experiment = quantisation()
    losses = {"lr3e-4-f32-f32": 2.0, "lr3e-4-int4-f32": 2.02}
    findings = gather(experiment, every(experiment, losses))
    lines = table(findings).splitlines()
    assert len(lines) == 2 + len(experiment.cells)
    assert sum("not run" in line for line in lines) == len(experiment.cells) - 2
    line = next(line for line in lines if line.startswith("| 3e-4 | int4 | f32"))
    assert "| 6 of 6 |" in line
    assert "+0.99 ± 0.01 |" in line


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        (Estimate(-0.5, 0.2, 3), "reached"),
        (Estimate(0.9, 0.2, 3), "missed"),
        (Estimate(0.4, 0.2, 3), "reached in the mean, the interval leaves it open"),
        (Estimate(0.6, 0.2, 3), "missed in the mean, the interval leaves it open"),
        (Estimate(0.1, None, 1), "one seed only, no verdict"),
    ],
)
def test_a_goal_is_reached_only_if_the_whole_interval_says_so(
    difference: Estimate, said: str
) -> None:
    assert judged(difference, 0.5).endswith(f": {said}")


def test_a_format_that_seems_better_than_f32_is_as_far_off_as_one_that_seems_worse() -> None:
    experiment = quantisation()
    losses = {"lr3e-4-f32-f32": 2.0, "lr3e-4-int4-f32": 1.98, "lr3e-4-e3m0-f32": 2.0001}
    said = verdicts(gather(experiment, every(experiment, losses)))
    assert [line.rpartition(": ")[2] for line in said] == ["missed.", "reached."]


def test_modes_are_judged_by_their_goals() -> None:
    experiment = modes()
    losses = {
        "small-single-M1": 2.0,
        **{f"small-data-parallel-M{m}": 2.1 for m in (2, 4, 8)},
        **{f"small-decoupled-M{m}": loss for m, loss in ((2, 2.05), (4, 2.15), (8, 2.105))},
    }
    said = verdicts(gather(experiment, every(experiment, losses)))
    judged_ms = [line for line in said if line.startswith("Decoupled against data-parallel")]
    assert [line.rpartition(": ")[2] for line in judged_ms] == ["reached.", "missed.", "reached."]


def test_the_slope_over_sizes_is_of_each_sizes_best_line() -> None:
    experiment = growth()
    four = [cell for cell in reversed(experiment.cells) if "M4-" in cell.key]
    before, *others = (
        {cell.size.name: cell.key for cell in four if mode in cell.key}
        for mode in ("data-parallel", "direct")
    )
    more = {"small": 1.06, "large": 1.04, "largest": 1.0}
    losses = dict.fromkeys(before.values(), 2.0)
    losses |= {key: 2.0 * more[name] for name, key in others[0].items()}
    losses |= {cell.key: 2.5 for cell in experiment.cells if cell.key not in losses}
    have = every(experiment, losses)
    for cell in experiment.cells:
        for seed in cell.seeds:
            size = 2 ** {"small": 17, "large": 18, "largest": 20}[cell.size.name]
            have[cell.scenario(seed).digest].result["parameters"] = size
    of_two, said, of_eight = verdicts(gather(experiment, have))
    assert (of_two[:7], of_eight[:7]) == ("M = 2: ", "M = 8: ")
    assert "M = 4: each doubling of the parameters changes the gap by -1.99 ± 0.02 points" in said
    pairs = sum(len(cell.seeds) for cell in four if cell.key in others[0].values())
    assert f"({pairs} pairs of runs): it does not grow." in said


def test_a_rate_is_also_chosen_by_the_last_evaluation_on_the_way() -> None:
    experiment = batch()
    tried = [c for c in experiment.cells if c.labels[:2] == (("batch", "4"), ("mode", "H = 1"))]
    have = every(experiment, {cell.key: 2.0 + 0.1 * n for n, cell in enumerate(tried)})
    assert gather(experiment, have).choices() == [0.0]
    for seed in tried[1].seeds:
        have[tried[1].scenario(seed).digest].result["curve"][-2]["loss"] = 1.9
    assert gather(experiment, have).choices() == [pytest.approx(5.0)]


def test_no_goal_is_about_fleets_that_are_there_for_others_to_stand_beside() -> None:
    experiment = muon_fleet()
    losses = {cell.key: 2.0 + cell.steps / 1e5 for cell in experiment.cells}
    said = verdicts(gather(experiment, every(experiment, losses)))
    assert any("speeds 2x, learners" in line for line in said)
    assert not any("batches of" in line for line in said)


def test_the_effective_step_is_that_of_the_formula() -> None:
    cell = next(c for c in outer().cells if c.key == "H24-M4-nesterov-0.7-0.9-average")
    step = effective_step(found(cell, 0, 2.0))
    assert step == pytest.approx(0.7 * (1 + 0.9 / (1 - 0.9 * 0.5)))


def test_the_target_is_the_loss_without_helpers_at_three_quarters() -> None:
    experiment = scavenging()
    plain, helped = experiment.cells[0], experiment.cells[3]
    runs = [found(plain, 0, 2.0), found(helped, 0, 1.5)]
    findings = gather(experiment, {run.scenario.digest: run for run in runs})
    times = time_to_target(findings, helped, 0)
    assert times is not None
    ours, theirs = times  # from 3 down to 2.25: after half of the way to 1.5
    assert (ours, theirs) == (pytest.approx(50.0), pytest.approx(75.0))
    assert time_to_target(findings, helped, 1) is None


def page_of(
    folder: Path, experiments: Sequence[Experiment], have: dict[str, Found], *more: Path
) -> str:
    """Write the report and return its page."""
    page = folder / "quality.md"
    write_report(page, experiments, have, *more)
    return page.read_text(encoding="utf-8")


def row_of(findings: Findings, cell: Cell) -> dict[str, str]:
    """Return a line of the table by the names of its columns."""
    header, _, *lines = [line.strip("| ").split(" | ") for line in table(findings).splitlines()]
    return dict(zip(header, lines[findings.experiment.cells.index(cell)], strict=True))


def test_columns_say_of_how_many_runs_they_are_where_some_do_not_enter() -> None:
    experiment = scavenging()
    plain, helped = experiment.cells[0], experiment.cells[3]
    runs = [
        found(plain, 0, 2.0),
        found(plain, 1, 2.0),
        found(helped, 0, 1.5),
        found(helped, 1, 2.9),
    ]
    have = {run.scenario.digest: run for run in runs}
    row = row_of(gather(experiment, have), helped)
    assert row["time to target"] == "50.0 s (1 of 2), never in 1 of 2"
    assert row["speed-up"] == "1.50 (1 of 2)"
    assert " of " not in row["difference, %"]
    del have[plain.scenario(1).digest]
    row = row_of(gather(experiment, have), helped)
    assert row["time to target"] == "50.0 s (1 of 2)", "of the other one nothing is known"
    assert row["difference, %"] == "-25.00 (1 of 2)"
    row = row_of(
        gather(experiment, {**have, runs[2].scenario.digest: found(helped, 0, 2.9)}), helped
    )
    assert row["time to target"] == "never in 1 of 2"
    assert row["speed-up"] == "-"


def test_comparisons_with_a_ladder_say_of_how_many_runs_they_are() -> None:
    experiment, failing = failures(), failures().cells[3]
    rungs = {"none": 2.0, "none-M3": 1.9, "none-M2": 1.8}
    have = every(experiment, {**rungs, failing.key: 1.96})
    del have[experiment.cells[1].scenario(2).digest]
    row = row_of(gather(experiment, have), failing)
    assert row["at equal steps, %"].endswith(" (2 of 3)")
    experiment = length()
    half = next(c for c in experiment.cells if c.key == "decoupled-1024")
    losses = {key: 3.0 - 0.1 * n for n, key in enumerate(experiment.ladder)}
    have = every(experiment, {**losses, half.key: losses["data-parallel-1024"] + 0.01})
    column = "steps of data-parallel to this loss, share"
    assert "of" not in row_of(gather(experiment, have), half)[column]
    have[half.scenario(1).digest].result["loss"] = 3.5
    assert row_of(gather(experiment, have), half)[column].endswith(" (1 of 2)")


def test_nothing_run_gives_a_page_that_says_so(tmp_path: Path) -> None:
    text = page_of(tmp_path, all_experiments(), {})
    assert "Not run yet" in text
    assert "![" not in text
    assert json.loads((tmp_path / "quality" / "results.json").read_text(encoding="utf-8")) == []


def test_a_page_has_a_plot_for_what_was_run_the_same_each_time(tmp_path: Path) -> None:
    experiment = quantisation()
    have = every(
        experiment, {"lr3e-4-f32-f32": 2.0, "lr3e-4-int4-f32": 2.001, "lr3e-4-f32-bf16": 2.0}
    )
    text, drawn = page_of(tmp_path, [experiment], have), tmp_path / "quality" / "quantisation.svg"
    assert "![Quantisation](quality/quantisation.svg)" in text
    first = drawn.read_bytes()
    page_of(tmp_path, [experiment], have)
    assert drawn.read_bytes() == first
    rows = json.loads((tmp_path / "quality" / "results.json").read_text(encoding="utf-8"))
    assert len(rows) == len(have)
    assert {row["cell"] for row in rows} == {"lr3e-4-f32-f32", "lr3e-4-int4-f32", "lr3e-4-f32-bf16"}


def with_steps(losses: dict[str, float]) -> Findings:
    """Findings on failing fleets with these losses of one seed."""
    experiment = failures()
    runs = [found(cell, 0, losses[cell.key]) for cell in experiment.cells if cell.key in losses]
    return gather(experiment, {run.scenario.digest: run for run in runs})


def test_what_takes_more_steps_is_compared_with_fleets_of_as_many() -> None:
    """Half of the fleet failing trains as many tokens in 1 / share as many steps."""
    rungs = {"none": 2.0, "none-M3": 1.9, "none-M2": 1.8}
    failing = next(c for c in failures().cells if c.key == "27-percent-down-warm")
    between = math.log2(failing.steps / 768) / math.log2(1536 / 768)
    assert 0 < between < 1
    equal = with_steps({**rungs, failing.key: 1.9}).excess_at_equal_steps(failing)
    assert equal is not None
    assert 1.85 < 1.9 / (1 + equal.mean / 100) < 1.95
    for missing in rungs:
        left = {key: loss for key, loss in rungs.items() if key != missing}
        assert with_steps({**left, failing.key: 1.9}).excess_at_equal_steps(failing) is None


def test_the_best_of_equal_cells_is_rarely_more_than_chance() -> None:
    """By its own interval it would be sure three times as often as one of 95 % is allowed to."""
    keys = ["baseline", *(f"cell-{n}" for n in range(10))]
    cells = [
        Cell(key, (("cell", key),), (), 1, 1 << 16, (0, 1, 2), "" if key == keys[0] else keys[0])
        for key in keys
    ]
    experiment = Experiment("equal", "Equal cells", "", tuple(cells), x="cell")
    scenario = cells[0].scenario(0)
    draw, sure, alone, times = np.random.default_rng(0), 0, 0, 1000
    for _ in range(times):
        losses = 2.0 + 0.02 * draw.standard_normal((len(keys), 3))
        runs = {
            key: {seed: Found(scenario, {"loss": loss}) for seed, loss in enumerate(of_cell)}
            for key, of_cell in zip(keys, losses, strict=True)
        }
        findings = Findings(experiment, runs)
        (said,) = verdicts(findings)
        assert " of the 10 lines compared" in said
        sure += said.startswith("Best") and "chance" not in said
        found = [more for cell in cells if (more := findings.excess(cell))]
        alone += min(found, key=lambda more: more.mean).high < 0
    assert alone > 0.05 * times
    assert sure < 0.025 * times


def test_where_cells_differ_in_steps_the_best_is_at_equal_steps() -> None:
    """At equal tokens 27 % down would be best, for its 1,052 steps: the ladder there is lower."""
    rungs = {"none": 2.0, "none-M3": 1.9, "none-M2": 1.8}
    half, all_down = (
        next(c for c in failures().cells if c.key == f"{key}-warm")
        for key in ("half-of-them", "27-percent-down")
    )
    findings = with_steps({**rungs, half.key: 1.96, all_down.key: 1.94})
    equal = [findings.excess_at_equal_steps(cell) for cell in (half, all_down)]
    assert equal[0] is not None
    assert equal[1] is not None
    assert equal[0].mean < 0 < equal[1].mean
    (best,) = [line for line in verdicts(findings) if line.startswith("Best")]
    assert "`half of them, warm`" in best
    assert "equal fleets of as many steps" in best


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({3e-3: 2.0, 6e-3: 1.9, 1e-2: 2.1}, "(at 0.006)"),
        ({3e-3: 1.8, 6e-3: 1.9, 1e-2: 2.1}, "(at 0.003, the lowest)"),
        ({6e-3: 1.9, 1e-2: 1.8}, "(at 0.01, the highest)"),
        ({6e-3: 1.9}, "(at 0.006, the only one)"),
    ],
)
def test_a_best_rate_at_the_edge_of_what_was_tried_says_so(
    rates: dict[float, float], said: str
) -> None:
    assert _rate(rates) == said


def test_runs_that_end_with_the_same_parameters_are_one_run(tmp_path: Path) -> None:
    experiment = modes()
    losses = {"small-data-parallel-M4": 2.0, "small-streaming-M4": 2.1, "small-decoupled-M4": 2.1}
    have = every(experiment, losses)
    named = {cell.key: cell for cell in experiment.cells}

    def text_of(*ends: int) -> str:
        for key, end in zip(losses, ends, strict=True):
            for seed in (0, 1, 2):
                run = have[named[key].scenario(seed).digest]
                run.result["params_digests"] = [end + seed, 7]
        return page_of(tmp_path, [experiment], have)

    text = text_of(100, 200, 200)
    assert "`small, streaming, 4` and `small, decoupled, 4` are the same runs" in text
    assert "that 1 lines of several seeds" in text
    text = text_of(100, 200, 300)
    assert "are the same runs" not in text
    assert "that 2 lines of several seeds" in text


def test_figures_typed_by_hand_are_told_to_be_older_until_they_are_stamped_with_their_runs(
    tmp_path: Path,
) -> None:
    defaults, experiment = tmp_path / "defaults.md", quantisation()
    defaults.write_text("## What follows for the defaults\n\nint4 costs nothing.\n")
    have = every(experiment, {cell.key: 2.0 for cell in experiment.cells})

    def older() -> bool:
        text = page_of(tmp_path, [experiment], have, defaults)
        assert "int4 costs nothing." in text
        return "was written from other runs" in text

    assert older()
    stamp_defaults([experiment], have, defaults)
    assert not older()
    first = defaults.read_text()
    stamp_defaults([experiment], have, defaults)
    assert defaults.read_text() == first, "a new stamp replaces the old one"
    one = next(iter(have.values()))
    one.result["loss"] += 1e-6
    assert older()
    stamp_defaults([experiment], have, defaults)
    assert not older()
    del have[one.scenario.digest]
    assert older()


TEXTS = {"training_text": "01", "held_out_text": "02"}


@pytest.mark.parametrize("name", list(TEXTS))
def test_pairs_of_different_text_are_left_out_and_told(tmp_path: Path, name: str) -> None:
    experiment = quantisation()
    have = every(experiment, {"lr3e-4-f32-f32": 2.0, "lr3e-4-int4-f32": 2.02})

    def text_of(seed: int, cell: int, told: dict[str, str]) -> str:
        have[experiment.cells[cell].scenario(seed).digest].result.update(told)
        return page_of(tmp_path, [experiment], have)

    assert "of different text" not in text_of(0, 0, TEXTS), "the other one does not say"
    assert "of different text" not in text_of(0, 1, TEXTS)
    text = text_of(0, 1, {**TEXTS, name: "03"})
    assert "**1 pairs of runs are of different text**" in text
    (difference,) = [c for c in experiment.cells if c.key == "lr3e-4-int4-f32"]
    found = gather(experiment, have).excess(difference)
    assert found is not None
    assert found.n == len(difference.seeds) - 1


def test_a_ladder_of_other_text_is_no_ladder() -> None:
    losses = {"none": 2.0, "none-M3": 1.9, "none-M2": 1.8, "27-percent-down-warm": 1.9}
    findings = with_steps(losses)
    failing = next(c for c in failures().cells if c.key == "27-percent-down-warm")
    findings.of(failing)[0].result.update(TEXTS)
    assert findings.excess_at_equal_steps(failing) is not None
    findings.runs["none-M3"][0].result.update(TEXTS, held_out_text="03")
    assert findings.excess_at_equal_steps(failing) is None
    assert len(findings.unlike()) == 1


def test_the_best_of_all_rates_is_told_where_all_runs_are_of_one_text() -> None:
    experiment = batch()
    have = every(experiment, {cell.key: 2.0 for cell in experiment.cells})
    assert verdicts(gather(experiment, have))
    first, second, *_ = have.values()
    first.result.update(TEXTS)
    second.result.update(TEXTS, training_text="03")
    assert not verdicts(gather(experiment, have))


def test_findings_without_runs_say_nothing() -> None:
    for experiment in all_experiments():
        assert verdicts(Findings(experiment, {})) == []
