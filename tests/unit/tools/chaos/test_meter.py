"""Goodput under faults: what counts as time, and what as useful."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import pytest

from skerry.cli.cluster.processes import ProcessEntry, since_boot_s
from skerry.protocol.messages import Commit, Pulse
from skerry_tools.chaos.meter import GoodputMeter, Phase
from tests.support.builders import commit, progress, pulse


def beat(busy_s: float, **changes: Any) -> Pulse:
    return pulse(step=1, busy_s=busy_s, **changes)


def merged(fragment: int = 0, **tokens: int) -> Commit:
    rows = tuple(progress(name, tokens=count) for name, count in tokens.items())
    return commit(fragment=fragment, progress=rows)


def entry(name: str = "a", kind: str = "learner", *, alive: bool = True) -> ProcessEntry:
    pid = os.getpid()
    return ProcessEntry(name, kind, pid, since_boot_s(pid) if alive else -1.0)


def test_faults_that_cost_nothing_but_learners_leave_goodput_at_one() -> None:
    meter = GoodputMeter()
    meter.observe(beat(5.0))
    meter.enter(Phase.QUIET)
    meter.sample([entry("a"), entry("b")], 10.0)
    meter.observe(beat(13.0))
    meter.observe(replace(beat(8.0), learner="b"))
    meter.enter(Phase.FAULTS)
    meter.sample([entry("a"), entry("b", alive=False)], 10.0)
    meter.observe(beat(21.0))
    now = meter.result()
    assert (now.share_quiet, now.share_faults) == pytest.approx((0.8, 0.8))
    assert now.goodput == pytest.approx(1.0)
    assert now.up_s == 10.0


def test_steps_that_replay_what_a_kill_took_are_no_useful_time_a_second_time() -> None:
    meter = GoodputMeter(phase=Phase.FAULTS)
    meter.sample([entry()], 10.0)
    meter.observe(replace(beat(2.0), replay_s=3.0))
    meter.observe(replace(beat(4.0), replay_s=4.0))
    now = meter.result()
    assert now.share_faults == pytest.approx(0.4)
    assert now.replay_s == pytest.approx(4.0)


def test_tokens_are_those_that_commits_have_counted_over_all_fragments() -> None:
    meter = GoodputMeter()
    meter.merged(merged(0, a=1000, b=500), 2)
    meter.merged(merged(1, a=900), 2)
    meter.enter(Phase.QUIET)
    meter.sample([entry("a"), entry("b")], 10.0)
    meter.merged(merged(0, a=1400, b=900), 2)
    meter.merged(merged(1, a=1300, b=400), 2)
    meter.enter(Phase.FAULTS)
    meter.sample([entry("a")], 10.0)
    meter.merged(merged(0, a=1800, b=900), 2)
    meter.merged(merged(1, a=1700, b=400), 2)
    now = meter.result()
    assert (now.rate_quiet, now.rate_faults) == pytest.approx((40.0, 40.0))
    assert now.rate_ratio == pytest.approx(1.0)


def test_what_was_merged_before_it_looked_is_not_counted() -> None:
    meter = GoodputMeter(phase=Phase.QUIET)
    meter.merged(merged(0, a=1000), 1)
    assert meter.totals[Phase.QUIET].tokens == 0


def test_the_time_that_a_restart_takes_is_time_that_the_learner_had() -> None:
    meter = GoodputMeter()
    meter.enter(Phase.QUIET)
    meter.sample([entry()], 10.0)
    meter.observe(beat(10.0))
    meter.enter(Phase.FAULTS)
    meter.sample([entry()], 10.0)
    meter.observe(beat(5.0, incarnation=2))
    assert meter.result().goodput == pytest.approx(0.5)


class Stopped(ProcessEntry):
    """A process that was stopped by a signal."""

    @property
    def paused(self) -> bool:
        return True


def test_only_learners_that_run_have_time() -> None:
    meter, held = GoodputMeter(phase=Phase.FAULTS), entry()
    stopped = Stopped(held.name, held.kind, held.pid, held.since_boot_s)
    meter.sample([entry("s", "syncer"), entry("broker", "broker"), stopped], 10.0)
    assert meter.result().up_s == 0.0


def test_the_first_pulse_of_an_incarnation_counts_whole_and_a_repeated_one_not() -> None:
    meter = GoodputMeter(phase=Phase.FAULTS)
    meter.observe(beat(3.0))
    meter.observe(beat(3.0))
    meter.observe(beat(1.0, incarnation=2))
    assert meter.totals[Phase.FAULTS].busy_s == pytest.approx(4.0)


def test_losses_are_those_before_the_faults_and_at_the_end() -> None:
    meter = GoodputMeter()
    meter.observe(beat(1.0, loss=4.0))
    meter.enter(Phase.FAULTS)
    meter.observe(beat(2.0, loss=1.0))
    meter.observe(beat(2.0, incarnation=2, loss=math.nan))
    now = meter.result()
    assert (now.loss_first, now.loss_last) == (4.0, 1.0)


def test_nothing_measured_is_zero_and_no_error() -> None:
    assert GoodputMeter().result().goodput == 0.0
