"""Simulate learners that fail, and what that leaves of their time.

Every learner draws from a generator of its own, made of the seed and its number, so that one more
learner changes nothing for the others and the same seed gives the same bytes. docs/planning.md says
what goodput, running and uptime(K) are.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from skerry.algorithm.schedule import Schedule, offset
from skerry.settings.models import SyncConfig
from skerry_tools.plan.failures import Absence, LearnerTimeline, TimeUse, walk
from skerry_tools.plan.goodput import PARTS, hardware
from skerry_tools.plan.plan import make
from skerry_tools.plan.question import Question, check_simulation
from skerry_tools.plan.tables import DAY_S

CHECKED_LOAD = 7.0
"""Failures per pause of a learner up to which the model was compared with published figures."""
CHECKED_LEARNERS, CHECKED_CHIPS, FEW_FAILURES = 16, 2.4e6, 100
BATCHES, STUDENT_95 = 30, 2.045
"""Equal parts of a run, and the 97.5 % point of Student's law with one degree of freedom less."""
MOST_WAITS = 10_000_000
"""Most rounds times learners that are followed where learners stop: a second or two."""


class SimulatedLearner(NamedTuple):
    """One learner: its site, chips, seconds of a step and of an answer, and tokens of a step."""

    site: str
    chips: int
    step_s: float
    upload_s: float
    step_tokens: float | None


class Setup(NamedTuple):
    """A question with its learners one by one; ``feasible``: the links of its sites carry it."""

    question: Question
    learners: tuple[SimulatedLearner, ...]
    feasible: bool = True

    @property
    def stops(self) -> bool:
        decoupled = self.question.tables.fleet.layout == "decoupled"
        return decoupled and not self.question.run.sync.overlap_steps


class SimulatedRun(NamedTuple):
    """What became of a run. Shares are of its time, by chips, unless said otherwise.

    ``half_width`` is half the 95 % confidence interval of the goodput; ``uptime[k - 1]`` the share
    of time that at least k learners run, each alone. ``tokens_s`` is None where no tokens of a step
    are given, ``time_to_tokens_s`` also without a number to train on.
    """

    setup: Setup
    end_s: float
    half_width: float
    split: dict[TimeUse, float]
    running: float
    uptime: tuple[float, ...]
    tokens_s: float | None
    time_to_tokens_s: float | None
    timelines: tuple[LearnerTimeline, ...]

    @property
    def goodput(self) -> float:
        return self.split[TimeUse.TRAIN]

    @property
    def failures(self) -> int:
        return sum(timeline.failures for timeline in self.timelines)

    @property
    def between_s(self) -> float:
        """Mean time between two failures of a learner while all of it trains."""
        chips = sum(one.chips for one in self.setup.learners)
        return self.setup.question.tables.failures.chip_mtbi * len(self.timelines) / chips

    @property
    def participants(self) -> float:
        """Mean contributions of a merge: those of all that run, thanks to grace, and K at least."""
        sync = self.setup.question.run.sync
        return sync.quorum + sum(self.uptime[sync.quorum :]) * (sync.grace_gamma > 0)


def setup(asked: Question) -> Setup:
    """Return a question's learners: of its sites, or equal; ConfigError for what cannot be."""
    found = _sited(asked) if asked.tables.sites else Setup(asked, equal_learners(asked))
    if asked.tables.fleet.layout != "decoupled":
        found = found._replace(learners=equal_learners(found.question))
    check_simulation(found.question)
    return found


def equal_learners(asked: Question) -> tuple[SimulatedLearner, ...]:
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
    plan, timing = make(asked), asked.tables.timing
    at, learners, hub = plan.at, list[SimulatedLearner](), plan.at.hub_round
    commit_s = hub.syncer_s - hub.spared_s
    for name, site in at.sites.items():
        one = at.site_rounds[name]
        if not at.load.sync.overlap_steps:
            commit_s = max(commit_s, one.round_s - one.upload_s - hub.spared_s)
        tokens = timing.tokens_per_step or site.step_tokens
        learner = SimulatedLearner(name, site.table.chips, site.step_s, one.upload_s, tokens)
        learners += [learner] * site.table.learners
    known = {"commit_s": commit_s, "tokens": at.tables.plan.tokens}
    known |= timing.model_dump(exclude_unset=True)
    steps, chips = sorted(one.step_s for one in learners), sum(one.chips for one in learners)
    timing = timing.model_copy(update={**known, "step": steps[len(steps) // 2]})
    fleet = asked.tables.fleet.model_copy(update={"chips": float(chips)})
    asked = asked.changed(plan.chosen, timing=timing, fleet=fleet)
    return Setup(asked, tuple(learners), plan.feasible)


def simulate(asked: Setup) -> SimulatedRun:
    end_s = asked.question.tables.simulation.days * DAY_S
    timelines = tuple(_timelines(asked, end_s))
    spent, kept = np.array([one.spent() for one in timelines]), np.ones(len(timelines))
    if asked.stops:
        kept = _kept(asked, timelines)
        spent[:, np.arange(len(TimeUse)) != TimeUse.OUTAGE] *= kept[:, np.newaxis]
        spent[:, TimeUse.WAIT] = np.maximum(0.0, end_s - spent.sum(axis=1))
    chips = np.array([one.chips for one in asked.learners], dtype=np.float64)
    shares = chips @ spent / (chips.sum() * end_s)
    paces = np.array([(one.step_tokens or math.nan) / one.step_s for one in asked.learners])
    tokens_s = float(paces @ spent[:, TimeUse.TRAIN]) / end_s
    return SimulatedRun(
        setup=asked,
        end_s=end_s,
        half_width=_half_width(timelines, chips * kept) * float(chips @ kept / chips.sum()),
        split={use: float(shares[use]) for use in TimeUse},
        running=float(np.mean([one.running_share for one in timelines] * kept)),
        uptime=tuple(uptime_of(timelines)),
        tokens_s=None if math.isnan(tokens_s) else tokens_s,
        time_to_tokens_s=None if math.isnan(tokens_s) else _reached(asked, timelines, paces * kept),
        timelines=timelines,
    )


def _timelines(asked: Setup, end_s: float) -> Iterator[LearnerTimeline]:
    tables = asked.question.tables
    for number, one in enumerate(asked.learners):
        absences: list[Absence] = []
        for away in tables.outages:
            hit = number in away.learners if away.learners else away.site in {"", one.site}
            hit = hit or asked.stops  # then none goes on without the others
            begin = (away.begin or 0.0) if hit else math.inf
            while begin < end_s:
                absences.append((begin, begin + away.lasts))
                begin += math.inf if away.every is None else away.every
        seeds = np.random.SeedSequence([tables.simulation.seed, number])
        elastic = tables.fleet.layout != "data-parallel"
        own = hardware(tables, one.chips, elastic=elastic)
        yield walk(own, end_s, Generator(PCG64(seeds)), absences)


def _kept(asked: Setup, timelines: Sequence[LearnerTimeline]) -> NDArray[np.float64]:
    """Return what learners that stop for rounds keep of their time: shape [learners].

    A round lasts until all have come to its step and sent, and its commit can be read. While a
    learner waits its clock stands still: nothing fails and nothing comes back. So it takes as long
    for a round as it does alone, and all as long as the slowest. Outages, alike for all, are left
    out.
    """
    sync, tables, learners = asked.question.run.sync, asked.question.tables, asked.learners
    awake = [one.lengths * (one.uses != TimeUse.OUTAGE) for one in timelines]
    clocks = [np.append(0.0, np.cumsum(own)) for own in awake]
    ran = [
        np.append(0.0, np.cumsum(own * (one.shares > 0)))
        for own, one in zip(awake, timelines, strict=True)
    ]
    reached = min(own[-1] / one.step_s for own, one in zip(ran, learners, strict=True))
    most = min(tables.simulation.rounds, MOST_WAITS // len(timelines))
    ends = _due_steps(sync, int(min(reached, most * sync.h_steps)))[:most]
    if not len(ends):  # not one round in all that time
        slowest_s = max(one.step_s for one in learners)
        return np.array([one.step_s / slowest_s for one in learners])
    each = zip(learners, ran, clocks, strict=True)
    done = np.array([np.interp(ends * one.step_s, own, clock) for one, own, clock in each])
    uploads_s = np.array([[one.upload_s] for one in learners])
    took_s = (np.diff(done, prepend=0.0) + uploads_s).max(axis=0)
    return np.asarray(done[:, -1] / (took_s + tables.timing.commit_s).sum(), dtype=np.float64)


def _due_steps(sync: SyncConfig, until: int) -> NDArray[np.int64]:
    """Return the steps up to ``until`` at which fragments are due, in order."""
    schedule = Schedule(sync.fragments, sync.h_steps, 0)
    turns = sorted({offset(schedule, part) for part in range(sync.fragments)})
    steps = np.add.outer(np.arange(until // sync.h_steps + 1) * sync.h_steps, turns).ravel()
    return steps[(steps > 0) & (steps <= until)]


def _reached(
    asked: Setup, timelines: Sequence[LearnerTimeline], paces: NDArray[np.float64]
) -> float | None:
    """Return when all tokens are trained on; beyond what was simulated, by its mean speed."""
    tokens, end_s = asked.question.tables.timing.tokens, timelines[0].end_s

    def trained(moment_s: float) -> float:
        return float(paces @ [one.done_by(np.array([moment_s]))[0] for one in timelines])

    whole = trained(end_s)
    if tokens is None or not whole:
        return None
    if tokens >= whole:
        return tokens / whole * end_s
    parts = bisect_left(range(PARTS), tokens, key=lambda n: trained(end_s * n / PARTS))
    return end_s * parts / PARTS


def _half_width(timelines: Sequence[LearnerTimeline], chips: NDArray[np.float64]) -> float:
    """Return half the width of the goodput's 95 % confidence interval.

    By the means of BATCHES equal parts of the run, which are as good as independent once they are
    much longer than a recovery.
    """
    end_s, useful = timelines[0].end_s, np.zeros(BATCHES)
    edges = np.linspace(0.0, end_s, BATCHES + 1)
    for count, one in zip(chips, timelines, strict=True):
        useful += count * np.diff(one.done_by(edges))
    means = useful / (chips.sum() * end_s / BATCHES)
    return STUDENT_95 * float(means.std(ddof=1)) / math.sqrt(BATCHES)


def uptime_of(timelines: Sequence[LearnerTimeline]) -> list[float]:
    """Return the share of time that at least K learners run, for K from 1 to M."""
    times = np.concatenate([one.times for one in timelines])
    steps = [np.diff((one.shares > 0).astype(np.int64), prepend=0) for one in timelines]
    order, end_s = np.argsort(times, kind="stable"), timelines[0].end_s
    lasting = np.diff(np.append(times[order], end_s))
    count = np.cumsum(np.concatenate(steps)[order])
    shares = np.bincount(count, weights=lasting, minlength=len(timelines) + 1) / end_s
    return [min(1.0, float(share)) for share in np.cumsum(shares[::-1])[::-1][1:]]


def caveats(found: SimulatedRun) -> Iterator[str]:
    """Yield what of the question lies beyond what the model was checked on."""
    tables, learners = found.setup.question.tables, len(found.timelines)
    if not found.setup.feasible:
        yield "the links or the syncer do not carry this: see `skerry plan`"
    pause_s = max(tables.recovery.mean_s, tables.pauses.downscale_s) + tables.pauses.upscale_s
    load = hardware(tables, tables.fleet.chips / learners).rate_s * pause_s
    if load > CHECKED_LOAD:
        yield f"a learner fails {load:.1f} times per pause; checked up to {CHECKED_LOAD:g}"
    if learners > CHECKED_LEARNERS:
        yield f"{learners} learners; checked up to {CHECKED_LEARNERS}"
    if tables.fleet.chips > CHECKED_CHIPS:
        yield f"{tables.fleet.chips:g} chips; checked up to {CHECKED_CHIPS:g}"
    if 0 < found.failures < FEW_FAILURES:
        days = found.end_s / DAY_S
        yield f"only {found.failures} failures in {days:g} days: the interval is rough"
