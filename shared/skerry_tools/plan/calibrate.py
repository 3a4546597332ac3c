"""What a real run teaches a simulation, and how well the simulation then tells that run again.

Read are the run's ledger (who started when, what arrived when) and its learners' pulses, as the
health monitor has written them down row by row in ``metrics.jsonl``: the stream of pulses itself
keeps only the newest and dies with its broker. Everything fitted is a mean over what was seen, and
the number of times it was seen is said with it.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING, TypeVar

from skerry.algorithm.goodput import TRAIN, Cause
from skerry.errors import ConfigError, WireError
from skerry.log import ledger
from skerry.log.base import Deliver
from skerry.protocol.messages import Commit, MemberRecord
from skerry.protocol.records import decode
from skerry.protocol.subjects import Subjects
from skerry_tools.plan import journal
from skerry_tools.plan.journal import Life
from skerry_tools.plan.process import Absence, Use
from skerry_tools.plan.simulate import Struck

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from skerry.log.base import Bus
    from skerry.protocol.messages import RunRecord

T = TypeVar("T", Commit, MemberRecord)

NEVER_S = 1e11
"""Time between failures of a run that has had none: three thousand years, the longest there is."""
_OF_USE: dict[str, Use] = {
    TRAIN: Use.TRAIN,
    Cause.COMPILE: Use.UPSCALE,
    Cause.RECOVER: Use.UPSCALE,
    Cause.WAIT: Use.WAIT,
    Cause.REPLAY: Use.ROLLBACK,
    Cause.IDLE: Use.IDLE,
    Cause.DOWN: Use.RECOVER,
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a run; times in seconds since the epoch.

    ``joined_s`` is when each learner first joined, ``ratios`` each use's share of all its time, as
    the monitor reckoned at ``ended_s``.
    """

    run: str
    joined_s: Mapping[str, float]
    lives: tuple[Life, ...]
    ratios: Mapping[str, float]
    ended_s: float
    commits: tuple[Commit, ...] = ()

    @property
    def restarts(self) -> tuple[Life, ...]:
        """The lives that came after another one of the same learner."""
        firsts = {life.learner for life in self.lives if life.incarnation == 1}
        return tuple(x for x in self.lives if x.incarnation > 1 and x.learner in firsts)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was fitted; each value is a mean over ``seen`` of its name. Times in seconds."""

    learners: int
    wall_s: float
    step_s: float
    spread: float
    start_s: float
    restart_s: float
    replay_s: float
    idle: float
    upload_s: float
    mtbi_s: float
    down_s: float
    down_sigma: float
    seen: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def sets(self) -> list[str]:
        """Return it as settings of a simulation."""
        values: dict[str, object] = {
            "fleet.layout": "decoupled",
            "fleet.chips": self.learners,
            "fleet.slice_chips": 1,
            "fleet.elastic": False,
            "failures.chip_mtbi": self.mtbi_s,
            "failures.clock": "running",
            "recovery.law": "log-normal",
            "recovery.mean_s": self.down_s,
            "recovery.spread": max(self.down_sigma, 1e-3),
            "pauses.upscale_s": self.restart_s,
            "pauses.replay_s": self.replay_s,
            "timing.step": self.step_s,
            "timing.spread": self.spread,
            "timing.upload_s": self.upload_s,
            "timing.idle": self.idle,
            "simulation.days": self.wall_s / 86400.0,
        }
        return [
            f"{path}={json.dumps(v) if isinstance(v, bool) else v}" for path, v in values.items()
        ]

    @property
    def starting(self) -> Struck:
        """Every learner's first start: compiling, before anything else."""
        start = Absence(0.0, self.start_s, Use.UPSCALE, restart=False)
        return Struck(dict.fromkeys(range(self.learners), (start,)), {})


@dataclass(frozen=True, slots=True)
class Actual:
    """What became of a run: its goodput, and the share of its time by use."""

    goodput: float
    split: dict[Use, float]


async def history(bus: Bus, run: str) -> tuple[RunRecord, list[MemberRecord], list[Commit]]:
    """Return the run, every start of a learner and every commit that the ledger holds by now."""
    record, subjects = await ledger.read_run(bus, run), Subjects(run)
    members = await _all(bus, subjects.members(), MemberRecord, run)
    commits = await _all(bus, subjects.commits(), Commit, run)
    return record, members, commits


async def _all(bus: Bus, pattern: str, kind: type[T], run: str) -> list[T]:
    newest = max((r.sequence for r in await bus.last_each(pattern)), default=0)
    found: list[T] = []
    if not newest:
        return found
    async with aclosing(bus.follow(pattern, deliver=Deliver.ALL)) as records:
        async for record in records:
            with suppress(WireError):
                found.append(decode(kind, record.payload, run=run))
            if record.sequence >= newest:
                break
    return found


def evidence(
    run: str, members: Iterable[MemberRecord], commits: Iterable[Commit], rows: Iterable[str]
) -> Evidence:
    """Return what the ledger and the monitor's rows (JSON lines) say of a run.

    ConfigError where they say too little: no learner that ever trained.
    """
    joined: dict[str, float] = {}
    lives: dict[tuple[str, int], Life] = {}
    for member in members:
        if member.incarnation and member.joined_ns:
            at_s, place = member.joined_ns / 1e9, (member.learner, member.incarnation)
            joined[member.learner] = min(joined.get(member.learner, math.inf), at_s)
            lives.setdefault(place, Life(*place, at_s, {}, 0.0))
    ratios: dict[str, float] = {}
    ended_s = 0.0
    for line in rows:
        row = journal.parsed(line, run)
        if row is None:
            continue
        told = journal.ratios(row)
        if told:
            ratios, ended_s = told, float(row["time_s"])
        lives |= {(life.learner, life.incarnation): life for life in journal.lives(row)}
    trained = any(life.spent_s.get(TRAIN, 0.0) > 0 for life in lives.values())
    if not trained or not ratios or not joined:
        msg = (
            f"Run {run!r} has no row of metrics in which a learner trains: name the file that its "
            "health monitor wrote with --metrics, or let it run longer."
        )
        raise ConfigError(msg, path="metrics")
    found = tuple(lives[place] for place in sorted(lives))
    return Evidence(run, joined, found, ratios, ended_s, tuple(commits))


def actual(known: Evidence) -> Actual:
    """Return what became of the run, as its own monitor reckoned."""
    split = dict.fromkeys(Use, 0.0)
    for use, share in known.ratios.items():
        split[_OF_USE[use]] += share
    return Actual(known.ratios[TRAIN], split)


def fit(known: Evidence) -> Calibration:
    """Return what a run teaches; where it says nothing of something, that is 0 and seen 0 times."""
    worked = [life for life in known.lives if life.spent_s.get(TRAIN, 0.0) > 0]
    firsts = [life for life in worked if life.incarnation == 1]
    again = [life for life in worked if life in known.restarts]
    wall_s = fmean(known.ended_s - known.joined_s[x] for x in known.joined_s)
    early = [known.joined_s[x.learner] - x.started_s for x in firsts if x.learner in known.joined_s]
    before_s = max(0.0, fmean(early)) if early else 0.0
    trained = math.fsum(life.spent_s[TRAIN] for life in worked)
    idle = math.fsum(life.spent_s.get(Cause.IDLE, 0.0) for life in worked)
    paces = _paces(known.lives)
    downs = _downs(known)
    starts = [max(0.0, life.start_s - before_s) for life in firsts]
    uploads = _uploads(known.commits, median(paces))
    return Calibration(
        learners=len(known.joined_s),
        wall_s=wall_s,
        step_s=median(paces),
        spread=min(0.99, (max(paces) - min(paces)) / (max(paces) + min(paces))),
        start_s=_mean(starts),
        restart_s=_mean([x.start_s for x in again]) or _mean([x.start_s for x in firsts]),
        replay_s=_mean([x.spent_s.get(Cause.REPLAY, 0.0) for x in again]),
        idle=idle / (trained + idle),
        upload_s=median(uploads) if uploads else 0.0,
        mtbi_s=trained / len(known.restarts) if known.restarts else NEVER_S,
        down_s=_mean(downs),
        down_sigma=pstdev([math.log(d) for d in downs]) if len(downs) > 1 else 0.0,
        seen={
            "step_s": len(paces),
            "start_s": len(starts),
            "restart_s": len(again),
            "down_s": len(downs),
            "upload_s": len(uploads),
        },
    )


def tape(known: Evidence) -> Struck:
    """Return when the run's learners were away, as it was: the failures it has really had."""
    begin_s = fmean(known.joined_s.values())
    order = sorted(known.joined_s)
    absences: dict[int, list[Absence]] = defaultdict(list)
    by_place = {(life.learner, life.incarnation): life for life in known.lives}
    for life in known.restarts:
        before = by_place.get((life.learner, life.incarnation - 1))
        if before is not None:
            away = Absence(before.seen_s - begin_s, max(before.seen_s, life.started_s) - begin_s)
            absences[order.index(life.learner)].append(away)
    return Struck({number: tuple(found) for number, found in absences.items()}, {})


def together(*parts: Struck) -> Struck:
    """Return all that happens in any of the parts."""
    absences: dict[int, tuple[Absence, ...]] = {}
    cut: dict[int, tuple[tuple[float, float], ...]] = {}
    for part in parts:
        for number, found in part.absences.items():
            absences[number] = (*absences.get(number, ()), *found)
        for number, stretches in part.cut.items():
            cut[number] = tuple(sorted((*cut.get(number, ()), *stretches)))
    stalled = tuple(sorted(stretch for part in parts for stretch in part.stalled))
    return Struck(absences, cut, stalled)


def shifted(struck: Struck, by_s: float) -> Struck:
    """Return the same that much later."""

    def later(stretches: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
        return tuple((begin + by_s, end + by_s) for begin, end in stretches)

    return Struck(
        {
            number: tuple(replace(a, begin_s=a.begin_s + by_s, end_s=a.end_s + by_s) for a in found)
            for number, found in struck.absences.items()
        },
        {number: later(found) for number, found in struck.cut.items()},
        later(struck.stalled),
    )


def _paces(lives: Sequence[Life]) -> list[float]:
    """Return each learner's step time: the median of its lives'."""
    by_learner: dict[str, list[float]] = defaultdict(list)
    for life in lives:
        if life.step_s > 0:
            by_learner[life.learner].append(life.step_s)
    return [median(found) for found in by_learner.values()] or [1.0]


def _downs(known: Evidence) -> list[float]:
    """Return how long each learner that came back had been away, in seconds."""
    by_place = {(life.learner, life.incarnation): life for life in known.lives}
    found: list[float] = []
    for life in known.restarts:
        before = by_place.get((life.learner, life.incarnation - 1))
        if before is not None:
            found.append(max(1e-3, life.started_s - before.seen_s))
    return found


def _uploads(commits: Iterable[Commit], step_s: float) -> list[float]:
    """Return how long answers took beyond the half step that a learner needs to its boundary."""
    return [
        max(0.0, (one.arrived_ns - commit.opened_ns) / 1e9 - step_s / 2.0)
        for commit in commits
        for one in commit.consumed
        if one.arrived_ns > commit.opened_ns
    ]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
