"""A simulation put together: islands that fail, rounds over them, and what comes of it.

Every learner draws from a generator of its own, made of the seed and its number, so that one more
learner changes nothing for the others and the same seed gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from skerry.algorithm import schedule
from skerry.protocol import rounds
from skerry_tools.plan import account, merges
from skerry_tools.plan.merges import Merges, Pace, Plan, Track
from skerry_tools.plan.process import Absence, Island, Timeline, Use, walk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry_tools.plan.scenario import Request
    from skerry_tools.plan.scene import Away, Layout, Scene

DAY_S = 86400.0
CHECKED_LOAD = 7.0
"""Failures per pause of an island, up to where the model was held to published figures."""
CHECKED_LEARNERS = 16
CHECKED_CHIPS = 2.4e6
FEW_FAILURES = 100


@dataclass(frozen=True, slots=True)
class Struck:
    """What is known to happen: stretches by learner number, and where nothing can be merged.

    ``cut`` learners train on, but nothing of theirs arrives.
    """

    absences: Mapping[int, tuple[Absence, ...]]
    cut: Mapping[int, tuple[tuple[float, float], ...]]
    stalled: tuple[tuple[float, float], ...] = ()


NOTHING = Struck({}, {})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run. Shares are of the time given to it, by chips, unless said otherwise.

    ``half_width`` is half the 95 % confidence interval of the goodput. ``running`` is the share of
    time a learner trains at all, the mean over learners; ``uptime[k - 1]`` that at least k do.
    ``tokens_s`` is None where no tokens per step are given, ``doubts`` say what goes beyond what
    the model was checked on.
    """

    end_s: float
    learners: int
    chips: tuple[int, ...]
    goodput: float
    half_width: float
    split: dict[Use, float]
    running: float
    uptime: tuple[float, ...]
    failures: int
    merges: Merges
    tokens_s: float | None
    tokens_done: float | None
    time_to_tokens_s: float | None
    doubts: tuple[str, ...]
    timelines: tuple[Timeline, ...]
    paces: tuple[Pace, ...]


def island(scene: Scene, chips: float) -> Island:
    """Return one learner's hardware of so many chips."""
    slices = max(1, round(chips / scene.fleet.slice_chips))
    elastic = scene.fleet.elastic
    return Island(
        slices=slices,
        slice_rate_s=chips / slices / scene.failures.chip_mtbi,
        recovery=scene.recovery.drawn,
        clock=scene.failures.clock,
        elastic=scene.fleet.layout != "data-parallel" if elastic is None else elastic,
        downscale_s=scene.pauses.downscale_s,
        upscale_s=scene.pauses.upscale_s,
        upscale=scene.pauses.upscale,
        batch_s=scene.pauses.batch_s,
        checkpoint_every_s=scene.checkpoints.every,
        checkpoint_s=scene.checkpoints.cost_s,
        rollback=scene.checkpoints.rollback,
        replay_s=scene.pauses.replay_s,
    )


def simulate(request: Request, struck: Struck = NOTHING, end_s: float | None = None) -> Outcome:
    """Return what becomes of a run; ``struck`` happens on top of what the scenario draws."""
    scene = request.scene
    end_s = scene.simulation.days * DAY_S if end_s is None else end_s
    chips = _chips(request)
    timelines = _walk(request, chips, struck, end_s)
    paces = _paces(request, len(chips))
    seen = _merges(request, timelines, paces, struck, end_s)
    goodput, half = account.goodput(timelines, chips)
    split = account.split(timelines, chips)
    kept = (1.0 - seen.waited) * (1.0 - scene.timing.idle)
    split[Use.WAIT] += seen.waited * split[Use.TRAIN]
    split[Use.IDLE] += (1.0 - seen.waited) * scene.timing.idle * split[Use.TRAIN]
    split[Use.TRAIN] *= kept
    at_once = account.running_at_once(timelines)
    tokens_s = _tokens_s(request, timelines, paces, kept)
    tokens = scene.timing.tokens
    return Outcome(
        end_s=end_s,
        learners=len(chips),
        chips=chips,
        goodput=goodput * kept,
        half_width=half * kept,
        split=split,
        running=float(np.mean([account.running_share(t) for t in timelines])),
        uptime=tuple(account.uptime(at_once)),
        failures=sum(t.failures for t in timelines),
        merges=seen,
        tokens_s=tokens_s,
        tokens_done=None if tokens_s is None else tokens_s * end_s,
        time_to_tokens_s=None if not tokens_s or tokens is None else tokens / tokens_s,
        doubts=tuple(_doubts(request, timelines, end_s)),
        timelines=timelines,
        paces=paces,
    )


def with_fleet(
    request: Request, *, chips: float | None = None, layout: Layout | None = None,
    learners: int | None = None,
) -> Request:  # fmt: skip
    """Return the same question about another fleet."""
    given = {
        name: v for name, v in (("chips", chips), ("layout", layout)) if v is not None
    }  # fmt: skip
    fleet = request.scene.fleet.model_copy(update=given)
    scene = request.scene.model_copy(update={"fleet": fleet})
    run = request.run
    if learners is not None:
        quorum = min(run.sync.quorum, learners)
        sync = run.sync.model_copy(update={"learners": learners, "quorum": quorum})
        run = run.model_copy(update={"sync": sync})
    return replace(request, scene=scene, run=run, seats=())


def _chips(request: Request) -> tuple[int, ...]:
    """Return the chips of each learner: as its site has them, or equal, the first ones one more."""
    if request.seats:
        return tuple(seat.chips for seat in request.seats)
    count, chips = request.learners, round(request.scene.fleet.chips)
    return tuple(chips // count + (number < chips % count) for number in range(count))


def _walk(
    request: Request, chips: Sequence[int], struck: Struck, end_s: float
) -> tuple[Timeline, ...]:
    scene = request.scene
    found: list[Timeline] = []
    for number, own in enumerate(chips):
        seeds = np.random.SeedSequence([scene.simulation.seed, number])
        absences = [
            *_absences(request, scene.outages, number, Use.OUTAGE, end_s),
            *_absences(request, scene.preemptions, number, Use.PREEMPTED, end_s),
            *struck.absences.get(number, ()),
        ]
        chance = np.random.Generator(np.random.PCG64(seeds))
        found.append(walk(island(scene, own), end_s, chance, absences))
    return tuple(found)


def _absences(
    request: Request, planned: Sequence[Away], number: int, use: Use, end_s: float
) -> list[Absence]:
    found: list[Absence] = []
    for away in planned:
        if number not in request.struck(away):
            continue
        begin = away.begin or 0.0
        while begin < end_s:
            found.append(Absence(begin, begin + away.lasts, use))
            if away.every is None:
                break
            begin += away.every
    return found


def _paces(request: Request, count: int) -> tuple[Pace, ...]:
    """Return each learner's pace: its site's, or step times spread evenly around the middle one."""
    if request.seats:
        return tuple(Pace(seat.step_s, seat.upload_s) for seat in request.seats)
    timing = request.scene.timing
    places = [2.0 * n / (count - 1) - 1.0 if count > 1 else 0.0 for n in range(count)]
    return tuple(Pace(timing.step * (1 + timing.spread * at), timing.upload_s) for at in places)


def round_plan(request: Request) -> Plan:
    """Return schedule and policy of the run's rounds."""
    sync = request.run.sync
    timetable = schedule.Schedule(sync.fragments, sync.h_steps, sync.overlap_steps)
    policy = rounds.Policy(
        sync.quorum,
        sync.grace_gamma,
        sync.overlap_steps,
        schedule.room_steps(timetable),
        sync.round_timeout_s,
    )
    return Plan(timetable, policy, request.scene.timing.commit_s)


def round_tracks(
    request: Request, timelines: Sequence[Timeline], paces: Sequence[Pace], struck: Struck
) -> list[Track]:
    """Return when each learner runs, and how far into a step it begins."""
    chance = np.random.Generator(np.random.PCG64([request.scene.simulation.seed, len(paces), 1]))
    phases = chance.random(len(paces)).tolist()
    return [
        merges.track(timeline, pace, struck.cut.get(number, ()), phases[number])
        for number, (timeline, pace) in enumerate(zip(timelines, paces, strict=True))
    ]


def _merges(
    request: Request, timelines: Sequence[Timeline], paces: Sequence[Pace], struck: Struck,
    end_s: float,
) -> Merges:  # fmt: skip
    count = request.scene.simulation.rounds
    if request.scene.fleet.layout != "decoupled" or count == 0:
        return Merges()
    tracks = round_tracks(request, timelines, paces, struck)
    return merges.observe(round_plan(request), tracks, end_s, count, struck.stalled)


def _tokens_s(
    request: Request, timelines: Sequence[Timeline], paces: Sequence[Pace], kept: float
) -> float | None:
    """Return the tokens that all learners train on per second, None where no step says how many."""
    per_step = request.scene.timing.tokens_per_step
    own = [seat.tokens_per_step for seat in request.seats]
    if per_step is None and not own:
        return None
    tokens = [per_step] * len(paces) if per_step is not None else own
    shares = [float(account.spent(t)[Use.TRAIN]) / t.end_s for t in timelines]
    rates = (n * s / pace.step_s for n, s, pace in zip(tokens, shares, paces, strict=True))
    return sum(rates) * kept


def _doubts(request: Request, timelines: Sequence[Timeline], end_s: float) -> list[str]:
    """Return what of the question lies beyond what the model was checked on."""
    scene, said = request.scene, list[str]()
    if not request.feasible:
        said.append("the links or the syncer do not carry this: see `skerry plan`")
    own = island(scene, scene.fleet.chips / request.learners)
    pause_s = max(own.recovery.mean_s, own.downscale_s) + own.upscale_s
    load = own.slices * own.slice_rate_s * pause_s
    if load > CHECKED_LOAD:
        said.append(f"an island fails {load:.1f} times per pause; checked up to {CHECKED_LOAD:g}")
    if request.learners > CHECKED_LEARNERS:
        said.append(f"{request.learners} learners; checked up to {CHECKED_LEARNERS}")
    if scene.fleet.chips > CHECKED_CHIPS:
        said.append(f"{scene.fleet.chips:g} chips; checked up to {CHECKED_CHIPS:g}")
    failures = sum(t.failures for t in timelines)
    if 0 < failures < FEW_FAILURES:
        said.append(f"only {failures} failures in {end_s / DAY_S:g} days: the interval is rough")
    return said
