"""The lab: equal scenarios give equal results, and what a scenario says does happen."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skerry.data.stream import Stream
from skerry.errors import ConfigError, LabError
from skerry.protocol.messages import Commit, MemberRecord, Refused
from skerry.settings.local import LearnerSettings
from skerry.settings.models import EvalConfig, RunConfig
from skerry_tools.lab.lab import RUN, Lab, LabResult
from skerry_tools.lab.progress import LabEvaluator
from skerry_tools.lab.scenario import Failures, IslandSettings, Judging, LabScenario, LinkSettings
from tests.support.labs import records


def run(scenario: LabScenario, **watchers: Any) -> LabResult:
    return Lab(scenario, **watchers).run()


def members_of(lab: Lab, name: str) -> list[MemberRecord]:
    """Return everything a learner has said of its starts, in order."""
    return [member for member in records(lab, MemberRecord) if member.learner == name]


@pytest.fixture(scope="module")
def eventful(config: RunConfig, judging: Judging) -> LabScenario:
    """Unequal islands on a slow link, of which one fails, one comes late and one leaves."""
    return LabScenario(
        run=config,
        judging=judging,
        islands=(
            IslandSettings(name="steady", jitter=0.1),
            IslandSettings(name="shaky", step_s=0.15, jitter=0.1),
            IslandSettings(name="late", step_s=0.05, jitter=0.2, joins=0.4),
            IslandSettings(name="leaver", leaves=0.6),
        ),
        link=LinkSettings(latency_s=0.02, up_bytes_s=50_000, down_bytes_s=200_000),
        failures=Failures(islands=("shaky",), every_s=2.0, down_s=0.3, save_every_s=0.2),
    )


@pytest.fixture(scope="module")
def lived(eventful: LabScenario) -> tuple[Lab, LabResult]:
    lab = Lab(eventful)
    return lab, lab.run()


def test_equal_scenarios_give_equal_results_and_another_seed_another(
    eventful: LabScenario, lived: tuple[Lab, LabResult]
) -> None:
    assert replace(run(eventful), took_s=lived[1].took_s) == lived[1]
    other = run(eventful.model_copy(update={"seed": 1}))
    assert other.params_digests != lived[1].params_digests
    assert other.digest != lived[1].digest


def test_a_run_trains_to_its_end(lived: tuple[Lab, LabResult], config: RunConfig) -> None:
    result = lived[1]
    assert result.steps >= config.train.steps
    assert result.loss < math.log(256) - 0.5
    assert 0 < result.tokens <= result.trained_tokens
    assert 0 < result.goodput <= 1
    assert result.bits_per_byte == pytest.approx(result.loss / math.log(2))


def test_a_result_names_which_text_it_is_of(
    lived: tuple[Lab, LabResult], config: RunConfig, judging: Judging, tmp_path: Path
) -> None:
    corpus, result = lived[0].work.corpus, lived[1]
    assert result.training_text == corpus.train.digest
    assert result.held_out_text == corpus.held_out.digest
    text = tmp_path / "text.txt"
    text.write_text("pack my box with five dozen liquor jugs. " * 200)
    data = config.data.model_copy(update={"paths": (str(text),)})
    other = run(LabScenario(run=config.model_copy(update={"data": data}), judging=judging))
    assert other.training_text != result.training_text
    assert other.held_out_text != result.held_out_text


def test_the_moving_average_goes_from_the_first_version_to_the_last(
    lived: tuple[Lab, LabResult], config: RunConfig, judging: Judging
) -> None:
    def ended(decay: float, **train: float) -> LabResult:
        update = {
            "eval": EvalConfig(ema=decay),
            "train": config.train.model_copy(update=train),
        }
        return run(LabScenario(run=config.model_copy(update=update), judging=judging))

    follows, stays, untrained = ended(1e-9), ended(1 - 1e-9), ended(0.0, lr=1e-12)
    assert follows.average_loss == pytest.approx(follows.loss, abs=1e-4)
    assert stays.average_loss == pytest.approx(untrained.loss, abs=1e-2)
    assert lived[1].average_loss is untrained.average_loss is None


def test_a_killed_learner_goes_on_from_the_ledger(lived: tuple[Lab, LabResult]) -> None:
    lab, result = lived
    settled = [m for m in members_of(lab, "shaky") if m.inner]
    assert result.kills >= 2
    assert [m.incarnation for m in settled][:2] == [1, 2]
    assert settled[-1].cursor > settled[0].cursor
    assert settled[-1].step > settled[0].step == 0
    assert [m.inner for m in settled][:2] == ["new", "warm"]
    kills = {one.island.name: one.kills for one in lab.islands}
    assert kills == {"steady": 0, "shaky": result.kills, "late": 0, "leaver": 0}


def test_no_sequence_is_counted_twice_or_left_out_while_learners_die_come_and_go(
    lived: tuple[Lab, LabResult],
) -> None:
    lab, corpus = lived[0], lived[0].work.corpus
    said = [
        (commit.fragment, one)
        for commit in records(lab, Commit)
        for one in (*commit.consumed, *commit.refused)
        if one.cursor_to
    ]
    for fragment in range(len(lab.work.plan.fragments)):
        counted = Counter[tuple[int, int, int]]()
        for name in ("steady", "shaky", "late", "leaver"):
            own = [one for part, one in said if (part, one.learner) == (fragment, name)]
            rank, reached, incarnation = members_of(lab, name)[-1].shard, 0, 0
            for one in sorted(own, key=lambda one: (one.incarnation, one.identity)):
                # A death costs what had not been sent yet; nothing else is left out.
                assert one.cursor_from <= reached or one.incarnation > incarnation
                reached, incarnation = max(reached, one.cursor_to), one.incarnation
            for one in own:
                if isinstance(one, Refused):
                    continue
                cursors = range(one.cursor_from, one.cursor_to)
                rows = Stream(corpus, rank).order(one.cursor_from, len(cursors))
                order = rank // corpus.config.streams
                for cursor, row in zip(cursors, rows.tolist(), strict=True):
                    counted[order, cursor // corpus.sequences_per_shard, row] += 1
        assert set(counted.values()) == {1}


def test_a_cold_restart_is_on_record_as_such(eventful: LabScenario) -> None:
    cold = eventful.failures.model_copy(update={"warm": False})
    lab = Lab(eventful.model_copy(update={"failures": cold}))
    assert lab.run().kills >= 1
    kinds = {m.inner for m in members_of(lab, "shaky") if m.incarnation > 1 and m.inner}
    assert kinds == {"cold"}


def test_a_late_island_contributes_from_then_on_and_one_that_left_no_more(
    lived: tuple[Lab, LabResult], config: RunConfig
) -> None:
    lab, _ = lived
    steps = {
        name: [c.step for c in records(lab, Commit) for m in c.consumed if m.learner == name]
        for name in ("late", "leaver", "steady")
    }
    assert min(steps["late"]) >= 0.4 * config.train.steps
    # What it had sent when it left is merged in the rounds that were open then.
    assert max(steps["leaver"]) <= 0.6 * config.train.steps + 2 * config.sync.h_steps
    assert max(steps["steady"]) > max(steps["leaver"])


@pytest.mark.drill
def test_a_link_slower_than_the_overlap_makes_hardly_any_late(
    config: RunConfig, judging: Judging
) -> None:
    """Each message takes two steps and tau is two; without grace all but the first miss a round."""
    sync = config.sync.model_copy(update={"h_steps": 24, "learners": 3})

    def far(grace_gamma: float) -> LabResult:
        graced = sync.model_copy(update={"grace_gamma": grace_gamma})
        train = config.train.model_copy(update={"steps": 240})
        return run(
            LabScenario(
                run=config.model_copy(update={"sync": graced, "train": train}),
                judging=judging,
                islands=tuple(IslandSettings(name=name, step_s=0.1, jitter=0.1) for name in "abc"),
                link=LinkSettings(latency_s=0.2),
            )
        )

    patient, hasty = far(sync.grace_gamma), far(0.0)
    assert hasty.staleness > 0.5
    assert patient.staleness < 0.15
    assert patient.commits == hasty.commits, "no round is held up by another one's grace"


def test_reports_are_as_many_as_asked_for_and_a_watcher_hears_of_every_commit(
    config: RunConfig, judging: Judging
) -> None:
    heard, seen = list[float](), list[int]()
    result = run(
        LabScenario(run=config, judging=judging),
        report=lambda evaluated: heard.append(evaluated.loss),
        watch=lambda lab: seen.append(lab.progress.commits),
    )
    assert seen == list(range(1, result.commits + 1))
    assert len(result.curve) == len(heard) + 1
    assert judging.points - 1 <= len(heard) <= judging.points
    steps = [point["step"] for point in result.curve]
    assert steps == sorted(steps)
    assert result.curve[-1]["loss"] == result.loss


def test_the_global_model_is_evaluated_under_every_adoption(
    config: RunConfig, judging: Judging
) -> None:
    blended = config.sync.model_copy(update={"adoption": "blend", "quorum": 2})
    lab = Lab(LabScenario(run=config.model_copy(update={"sync": blended}), judging=judging))
    result = lab.run()
    again = LabEvaluator(lab.connect(), RUN, lab.work, lab.loss, judging)
    assert asyncio.run(again.last(0.0)).loss == result.loss


def test_a_run_of_so_many_tokens_ends_sooner_with_more_learners(
    config: RunConfig, judging: Judging
) -> None:
    data = config.data
    budget = config.train.steps * data.batch * data.seq_len
    train = config.train.model_copy(update={"tokens": budget})
    asked = config.model_copy(update={"train": train})
    few, many = (
        run(LabScenario(run=asked, judging=judging, islands=names))
        for names in (tuple(IslandSettings(name=f"l{n}") for n in range(count)) for count in (2, 4))
    )
    assert many.steps < few.steps < config.train.steps
    for result in (few, many):
        assert budget <= result.tokens < 1.5 * budget


def test_a_run_that_all_leave_ends_with_a_sentence(config: RunConfig, judging: Judging) -> None:
    gone = tuple(IslandSettings(name=name, leaves=0.3) for name in ("a", "b"))
    with pytest.raises(LabError, match="Every island has left at step"):
        run(LabScenario(run=config, judging=judging, islands=gone))


def test_a_scenario_that_contradicts_itself_is_refused(config: RunConfig) -> None:
    failing = LabScenario(run=config, failures=Failures(islands=("nobody",)))
    with pytest.raises(ConfigError, match=r"failures\.islands has 'nobody'"):
        Lab(failing)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_ends_in_order(config: RunConfig, judging: Judging) -> None:
    import signal

    def interrupt(lab: Lab) -> None:
        if lab.progress.commits == 4:
            signal.raise_signal(signal.SIGINT)

    lab = Lab(LabScenario(run=config, judging=judging), watch=interrupt)
    with pytest.raises(KeyboardInterrupt):
        lab.run()
    assert lab.loop.is_closed()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failing_learner_saves_its_state_as_often_as_a_real_one() -> None:
    assert Failures().save_every_s == LearnerSettings().save_every_s
