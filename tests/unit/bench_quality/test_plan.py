"""The plan of the quality benchmark: its cells, its scenarios and its budget of tokens."""

from __future__ import annotations

import pytest
from bench.quality.__main__ import RATE, chosen, options
from bench.quality.cells import BATCH, LARGEST, SEQ_LEN, Cell, budget, distinct, wanted
from bench.quality.experiments import all_experiments, modes, partition, speeds
from bench.quality.rhythms import ALONE, muon_fleet

HOURS = 6
COMPILE_S = 5.0
"""Of each run, beside its training."""


def cell(**changes: object) -> Cell:
    given = {"key": "a", "labels": (), "sets": (), "learners": 4, "tokens": 1 << 20, "seeds": (0,)}
    return Cell(**{**given, **changes})  # type: ignore[arg-type] # pyright: ignore[reportArgumentType] - of any field


def test_all_but_the_largest_model_runs_in_less_than_six_hours_on_two_cores() -> None:
    runs = [run for run in wanted(all_experiments()) if run.cell.size is not LARGEST]
    assert budget(runs) / RATE + len(distinct(runs)) * COMPILE_S / 2 < HOURS * 3600


def test_every_cell_has_a_name_of_its_own_and_is_compared_with_another_of_its_seeds() -> None:
    for experiment in all_experiments():
        named = {each.key: each for each in experiment.cells}
        assert len(named) == len(experiment.cells)
        for each in experiment.cells:
            assert each.against != each.key
            assert not each.against or set(each.seeds) <= set(named[each.against].seeds)
            names = [name for name, _ in each.labels]
            assert names == [name for name, _ in experiment.cells[0].labels]
            assert experiment.x in names


@pytest.mark.parametrize("learners", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [1.0, 0.73])
def test_steps_follow_from_tokens(learners: int, share: float) -> None:
    tried = cell(learners=learners, share=share)
    trained = tried.steps * learners * BATCH * SEQ_LEN * share
    assert trained == pytest.approx(tried.tokens, rel=0.01)


def test_seeds_differ_in_parameters_and_in_the_order_of_the_data() -> None:
    first, second = (cell().scenario(seed) for seed in (0, 1))
    assert (first.seed, second.seed) == (0, 1)
    assert (first.run.data.seed, second.run.data.seed) == (0, 1)


def test_surroundings_do_not_change_a_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cell().scenario(0).digest
    monkeypatch.setenv("SKERRY_SYNC__H_STEPS", "48")
    assert cell().scenario(0).digest == before


def test_cells_that_experiments_share_are_run_once() -> None:
    shared = [run.scenario.digest for run in wanted([partition()]) if "interleaved" in run.cell.key]
    known = {run.scenario.digest for run in wanted([modes()])}
    assert shared
    assert known.issuperset(shared)
    both = list(wanted([modes(), partition()]))
    assert len(distinct(both)) == len(both) - len(shared)


def test_seeds_and_cells_can_be_picked() -> None:
    given = options(["speeds", "--cells", "4x-*", "--seeds", "7"])
    experiments = chosen(given.experiments, given.cells)
    runs = list(wanted(experiments, given.seeds))
    assert {run.cell.key for run in runs} == {"4x-K=M", "4x-K=1", "4x-K=1+grace"}
    assert {run.seed for run in runs} == {7}


def test_an_unknown_experiment_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ValueError, match="no experiment speed; there are learning-rate, batch, length"
    ):
        chosen(["speed"], None)


def test_where_the_fastest_learner_tells_the_time_slow_ones_count_for_less() -> None:
    named = {each.key: each for each in speeds().cells}
    assert named["4x-K=M"].share == 1.0
    assert named["4x-K=1"].share == pytest.approx((1 + 4 ** (-1 / 3) + 4 ** (-2 / 3) + 1 / 4) / 4)


@pytest.mark.parametrize("share", ALONE.values())
def test_others_join_when_the_first_has_trained_its_share_of_all_tokens(share: float) -> None:
    named = {each.key: each for each in muon_fleet().cells}
    tried = named[f"alone-{share:g}"]
    joins = {island.joins for island in tried.islands}
    alone = max(joins) * tried.steps * tried.batch * SEQ_LEN
    assert len(joins) == 2
    assert alone == pytest.approx(share * tried.tokens, rel=0.01)
