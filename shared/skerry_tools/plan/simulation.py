"""A simulation put together: learners that fail, rounds over them, and what comes of it.

Every learner draws from a generator of its own, made of the seed and its number, so that one more
learner changes nothing for the others and the same seed gives the same bytes. Three quantities are
never mixed: *goodput* is work that lasts over the time given to the run, by chips; *running* the
share of its time in which a learner trains at all, with however many of its slices; *uptime(K)* the
share of time that at least K learners run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.random import PCG64, Generator

from skerry.algorithm import schedule
from skerry.protocol.rounds import RoundPolicy
from skerry_tools.plan.failures import Absence, FailingLearner, LearnerTimeline, TimeUse, walk
from skerry_tools.plan.plan import make
from skerry_tools.plan.question import Question, check_simulation
from skerry_tools.plan.sampled_rounds import RoundRules, SampledRounds, Stretch, Track, sample
from skerry_tools.plan.tables import Layout, ScenarioTables

DAY_S = 86400.0
CHECKED_LOAD = 7.0
"""Failures per pause of a learner, up to where the model was compared with published figures."""
CHECKED_LEARNERS, CHECKED_CHIPS, FEW_FAILURES = 16, 2.4e6, 100
BATCHES, STUDENT_95 = 30, 2.045
"""Equal parts of a run, and the 97.5 % point of Student's law with one degree of freedom less."""


@dataclass(frozen=True, slots=True)
class SimulatedLearner:
    """One learner: its site, chips, seconds of a step and of an answer, and tokens of a step."""

    site: str
    chips: int
    step_s: float
    upload_s: float
    step_tokens: float | None


@dataclass(frozen=True, slots=True)
class Setup:
    """A question with its learners one by one; ``feasible``: the links of its sites carry it."""

    question: Question
    learners: tuple[SimulatedLearner, ...]
    feasible: bool = True


@dataclass(frozen=True, slots=True)
class Faults:
    """What is known to happen: absences by learner number, and when nothing can be merged.

    ``cut`` learners train on, but nothing of theirs arrives.
    """

    absences: Mapping[int, Sequence[Absence]] = field(default_factory=dict[int, Sequence[Absence]])
    cut: Mapping[int, Sequence[Stretch]] = field(default_factory=dict[int, Sequence[Stretch]])
    stalled: tuple[Stretch, ...] = ()


NO_FAULTS = Faults()


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What became of a run. Shares are of the time given to it, by chips, unless said otherwise.

    ``half_width`` is half the 95 % confidence interval of the goodput; ``uptime[k - 1]`` the share
    of time that at least k learners run. ``tokens_s`` is None where no tokens of a step are given.
    """

    setup: Setup
    end_s: float
    goodput: float
    half_width: float
    split: dict[TimeUse, float]
    uptime: tuple[float, ...]
    rounds: SampledRounds
    tokens_s: float | None
    timelines: tuple[LearnerTimeline, ...]

    @property
    def running(self) -> float:
        return float(np.mean([one.running_share for one in self.timelines]))

    @property
    def failures(self) -> int:
        return sum(timeline.failures for timeline in self.timelines)

    @property
    def time_to_tokens_s(self) -> float | None:
        tokens = self.setup.question.tables.timing.tokens
        return None if not self.tokens_s or tokens is None else tokens / self.tokens_s


def setup(asked: Question) -> Setup:
    """Return a question's learners: of its sites, or equal; ConfigError for what cannot be."""
    if asked.tables.sites:
        found = _sited(asked)
        if asked.tables.fleet.layout != "decoupled":
            found = replace(found, learners=_equal(found.question))
    else:
        found = Setup(asked, _equal(asked))
    check_simulation(found.question)
    return found


def _equal(asked: Question) -> tuple[SimulatedLearner, ...]:
    """Share the chips equally, the first learners get one more; steps spread around the middle."""
    timing, count = asked.tables.timing, asked.learners
    least, more = divmod(round(asked.tables.fleet.chips), count)
    places = [2.0 * n / (count - 1) - 1.0 if count > 1 else 0.0 for n in range(count)]
    steps = [timing.step * (1 + timing.spread * place) for place in places]
    return tuple(
        SimulatedLearner("", least + (n < more), step_s, timing.upload_s, timing.tokens_per_step)
        for n, step_s in enumerate(steps)
    )


def _sited(asked: Question) -> Setup:
    """Return the learners of the sites, and the question with what their plan says and chooses.

    Where learners stop for rounds, a commit is readable once the slowest site has it.
    """
    plan, timing, failures = make(asked), asked.tables.timing, asked.tables.failures
    at, fleet, commit_s = plan.at, asked.tables.fleet, plan.at.hub_round.syncer_s
    learners: list[SimulatedLearner] = []
    for name, site in at.sites.items():
        one = at.site_rounds[name]
        if not at.load.sync.overlap_steps:
            commit_s = max(commit_s, one.round_s - one.upload_s)
        tokens = timing.tokens_per_step or site.step_tokens
        learner = SimulatedLearner(name, site.table.chips, site.step_s, one.upload_s, tokens)
        learners += [learner] * site.learners
    known = {"commit_s": commit_s, "tokens": at.plan.tokens}
    known = {key: value for key, value in known.items() if key not in timing.model_fields_set}
    steps, chips = sorted(one.step_s for one in learners), sum(one.chips for one in learners)
    timing = timing.model_copy(update={**known, "step": steps[len(steps) // 2]})
    if at.plan.chip_mtbi is not None and "chip_mtbi" not in failures.model_fields_set:
        failures = failures.model_copy(update={"chip_mtbi": at.plan.chip_mtbi})
    fleet = fleet.model_copy(update={"chips": float(chips)})
    chosen = {path.removeprefix("sync."): count for path, count in plan.chosen.items()}
    sync = asked.run.sync.model_copy(update=chosen)
    asked = with_tables(asked, timing=timing, failures=failures, fleet=fleet)
    asked = replace(asked, run=asked.run.model_copy(update={"sync": sync}))
    return Setup(asked, tuple(learners), plan.feasible)


def with_tables(asked: Question, **tables: Any) -> Question:
    """Return the question with these tables replaced."""
    return replace(asked, tables=asked.tables.model_copy(update=tables))


def simulate(asked: Setup, faults: Faults = NO_FAULTS, end_s: float | None = None) -> SimulatedRun:
    """Return what becomes of a run; ``faults`` happen on top of what the scenario draws."""
    tables = asked.question.tables
    end_s = tables.simulation.days * DAY_S if end_s is None else end_s
    timelines = tuple(_timelines(asked, faults, end_s))
    seen = SampledRounds()
    if tables.fleet.layout == "decoupled" and tables.simulation.rounds:
        rules, tracks = round_rules(asked.question, faults), round_tracks(asked, timelines, faults)
        seen = sample(rules, tracks, end_s, tables.simulation.rounds)
    chips = np.array([one.chips for one in asked.learners], dtype=np.float64)
    sums = chips @ np.array([one.spent() for one in timelines])
    sums[TimeUse.PREEMPTED] = 0.0
    shares = sums / sums.sum() if sums.sum() > 0 else sums
    split = {use: float(shares[use]) for use in TimeUse}
    split[TimeUse.WAIT] += seen.waited * split[TimeUse.TRAIN]
    kept = 1.0 - seen.waited
    split[TimeUse.TRAIN] *= kept
    trained = [one.spent()[TimeUse.TRAIN] / one.end_s * kept for one in timelines]
    paces = [(one.step_tokens, one.step_s) for one in asked.learners]
    speeds = [n / s * share for (n, s), share in zip(paces, trained, strict=True) if n is not None]
    return SimulatedRun(
        setup=asked,
        end_s=end_s,
        goodput=split[TimeUse.TRAIN],
        half_width=_half_width(timelines, chips) * kept,
        split=split,
        uptime=tuple(uptime_of(timelines)),
        rounds=seen,
        tokens_s=float(sum(speeds)) if len(speeds) == len(paces) else None,
        timelines=timelines,
    )


def _timelines(asked: Setup, faults: Faults, end_s: float) -> Iterator[LearnerTimeline]:
    tables = asked.question.tables
    planned = [(away, TimeUse.OUTAGE) for away in tables.outages]
    planned += [(away, TimeUse.PREEMPTED) for away in tables.preemptions]
    for number, one in enumerate(asked.learners):
        absences = list(faults.absences.get(number, ()))
        for away, use in planned:
            hit = number in away.learners if away.learners else away.site in {"", one.site}
            begin = (away.begin or 0.0) if hit else math.inf
            while begin < end_s:
                absences.append(Absence(begin, begin + away.lasts, use))
                begin = math.inf if away.every is None else begin + away.every
        seeds = np.random.SeedSequence([tables.simulation.seed, number])
        yield walk(hardware(tables, one.chips), end_s, Generator(PCG64(seeds)), absences)


def hardware(tables: ScenarioTables, chips: float) -> FailingLearner:
    """Return one learner's hardware of so many chips."""
    slices, elastic = max(1, round(chips / tables.fleet.slice_chips)), tables.fleet.elastic
    return FailingLearner(
        slices=slices,
        slice_rate_s=chips / slices / tables.failures.chip_mtbi,
        elastic=tables.fleet.layout != "data-parallel" if elastic is None else elastic,
        clock=tables.failures.clock,
        recovery=tables.recovery,
        pauses=tables.pauses,
        saving=tables.checkpoints,
    )


def round_rules(asked: Question, faults: Faults = NO_FAULTS) -> RoundRules:
    """Return schedule and policy of the run's rounds."""
    sync = asked.run.sync
    timetable = schedule.Schedule(sync.fragments, sync.h_steps, sync.overlap_steps)
    grace, room = (sync.grace_gamma, sync.overlap_steps), schedule.room_steps(timetable)
    policy = RoundPolicy(sync.quorum, *grace, room, sync.round_timeout_s)
    return RoundRules(timetable, policy, asked.tables.timing.commit_s, faults.stalled)


def round_tracks(asked: Setup, timelines: Sequence[LearnerTimeline], faults: Faults) -> list[Track]:
    """Return when each learner runs, and how far into a step it begins."""
    seeds = [asked.question.tables.simulation.seed, len(timelines), 1]
    phases = Generator(PCG64(seeds)).random(len(timelines)).tolist()
    return [
        Track(timeline, one.step_s, one.upload_s, faults.cut.get(number, ()), phases[number])
        for number, (timeline, one) in enumerate(zip(timelines, asked.learners, strict=True))
    ]


def _half_width(timelines: Sequence[LearnerTimeline], chips: np.ndarray[Any, Any]) -> float:
    """Return half the width of the goodput's 95 % confidence interval.

    By the means of BATCHES equal parts of the run, which are as good as independent once they are
    much longer than a recovery.
    """
    edges = np.linspace(0.0, timelines[0].end_s, BATCHES + 1)
    useful, given = np.zeros(BATCHES), np.zeros(BATCHES)
    for count, one in zip(chips, timelines, strict=True):
        ends, lengths = np.append(one.times, one.end_s), one.lengths
        lost = np.append(0.0, np.cumsum(one.undone))  # work counts until it is lost
        undone = lost[np.searchsorted(one.undone_at, edges, side="right")]
        done = np.interp(edges, ends, np.append(0.0, np.cumsum(lengths * one.shares))) - undone
        lent = np.where(one.uses == TimeUse.PREEMPTED, 0.0, lengths)
        useful += count * np.diff(done)
        given += count * np.diff(np.interp(edges, ends, np.append(0.0, np.cumsum(lent))))
    means = useful[given > 0] / given[given > 0]
    return STUDENT_95 * float(means.std(ddof=1)) / math.sqrt(means.size) if means.size > 1 else 0.0


def uptime_of(timelines: Sequence[LearnerTimeline]) -> list[float]:
    """Return the share of time that at least K learners run, for K from 1 to M."""
    times = np.concatenate([one.times for one in timelines])
    steps = [np.diff((one.shares > 0).astype(np.int64), prepend=0) for one in timelines]
    order, end_s = np.argsort(times, kind="stable"), timelines[0].end_s
    lasting = np.diff(np.append(times[order], end_s))
    count = np.cumsum(np.concatenate(steps)[order])
    shares = np.bincount(count, weights=lasting, minlength=len(timelines) + 1) / end_s
    return [min(1.0, float(share)) for share in np.cumsum(shares[::-1])[::-1][1:]]


def binomial_uptime(quorum: int, learners: int, running: float) -> float:
    """Return uptime(K) of learners that each run independently for the share ``running``."""
    return math.fsum(
        math.comb(learners, k) * running**k * (1.0 - running) ** (learners - k)
        for k in range(max(quorum, 0), learners + 1)
    )


def caveats(found: SimulatedRun) -> Iterator[str]:
    """Yield what of the question lies beyond what the model was checked on."""
    tables, learners = found.setup.question.tables, len(found.timelines)
    if not found.setup.feasible:
        yield "the links or the syncer do not carry this: see `skerry plan`"
    own = hardware(tables, tables.fleet.chips / learners)
    pause_s = max(tables.recovery.mean_s, tables.pauses.downscale_s) + tables.pauses.upscale_s
    load = own.slices * own.slice_rate_s * pause_s
    if load > CHECKED_LOAD:
        yield f"a learner fails {load:.1f} times per pause; checked up to {CHECKED_LOAD:g}"
    if learners > CHECKED_LEARNERS:
        yield f"{learners} learners; checked up to {CHECKED_LEARNERS}"
    if tables.fleet.chips > CHECKED_CHIPS:
        yield f"{tables.fleet.chips:g} chips; checked up to {CHECKED_CHIPS:g}"
    if 0 < found.failures < FEW_FAILURES:
        days = found.end_s / DAY_S
        yield f"only {found.failures} failures in {days:g} days: the interval is rough"


@dataclass(frozen=True, slots=True)
class SweepCell:
    """One goodput of a table; shares."""

    row: str
    chips: float
    goodput: float
    published: float | None = None


def sweep(asked: Setup) -> list[SweepCell]:
    """Return the goodput of every row at every number of chips of the scenario's sweep.

    Each cell ends after so many failures, if that is sooner, and has no rounds.
    """
    table, days = asked.question.tables.sweep, asked.question.tables.simulation.days
    rows: list[tuple[str, Layout, int]] = [
        ("data-parallel", "data-parallel", 1), ("elastic", "elastic", 1),
        *((f"M = {learners}", "decoupled", learners) for learners in table.learners),
    ]  # fmt: skip
    cells: list[SweepCell] = []
    for name, layout, learners in rows:
        known = table.published.get(name, (None,) * len(table.chips))
        for chips, percent in zip(table.chips, known, strict=True):
            one = with_fleet(asked, chips=chips, layout=layout, learners=learners)
            end_s = table.failures * one.question.tables.failures.chip_mtbi / chips
            found = simulate(one, end_s=min(days * DAY_S, end_s))
            share = None if percent is None else percent / 100.0
            cells.append(SweepCell(name, chips, found.goodput, share))
    return cells


def error_points(cells: Sequence[SweepCell]) -> float | None:
    """Return the root-mean-square error to what is published, in percentage points."""
    off = [100.0 * (c.goodput - c.published) for c in cells if c.published is not None]
    return math.sqrt(math.fsum(d * d for d in off) / len(off)) if off else None


def with_fleet(asked: Setup, *, chips: float, layout: Layout, learners: int) -> Setup:
    """Return the same question about equal learners of another fleet, without rounds."""
    tables, sync = asked.question.tables, asked.question.run.sync
    fleet = tables.fleet.model_copy(update={"chips": chips, "layout": layout})
    quiet = tables.simulation.model_copy(update={"rounds": 0})
    update = {"learners": learners, "quorum": min(sync.quorum, learners)}
    run = asked.question.run.model_copy(update={"sync": sync.model_copy(update=update)})
    question = with_tables(
        replace(asked.question, run=run), fleet=fleet, simulation=quiet, sites={}
    )
    return Setup(question, _equal(question))
