"""What a real run teaches a simulation, and how well the simulation then predicts that run.

Read are the run's ledger (which learner started when, what arrived when) and the rows of
``metrics.jsonl`` in which the health monitor keeps what each learner's time went into: a row is a
moment, numbers by metric and attributes, ``skerry.learner.time{learner=..,use=..}``. Everything
fitted is a mean, and the number of times it was seen is given with it.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import TypeAlias, cast

from skerry.algorithm.goodput import TRAIN, USES, Cause
from skerry.errors import ConfigError
from skerry.log import ledger
from skerry.protocol.messages import Commit, MemberRecord
from skerry.settings.models import RunConfig
from skerry_tools.plan.failures import Absence, TimeUse
from skerry_tools.plan.figures import Answer, Figure, FigureTable, Json, figures
from skerry_tools.plan.question import question, read
from skerry_tools.plan.sampled_rounds import Stretch
from skerry_tools.plan.simulation import Faults, Outcome, Setup, setup, simulate

Metric: TypeAlias = tuple[str, str, str]
"""A metric's name, its learner, and its use or cause."""
MOST = 1e18
"""No number of a row is larger, nor is it infinite or no number."""
NEVER_S = 1e11
"""Time between failures of a run that has had none: three thousand years, the longest there is."""
USED = {
    TRAIN: "train",
    Cause.COMPILE: "starting",
    Cause.RECOVER: "starting",
    Cause.WAIT: "waiting for other learners",
    Cause.REPLAY: "work lost and done again",
    Cause.IDLE: "between steps",
    Cause.DOWN: "away",
}
SIMULATED = {
    TimeUse.TRAIN: "train",
    TimeUse.UPSCALE: "starting",
    TimeUse.WAIT: "waiting for other learners",
    TimeUse.ROLLBACK: "work lost and done again",
    TimeUse.IDLE: "between steps",
}
"""All else is away: which it was, a real run cannot know."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One process of a learner, by the last row that has it, or else as it joined.

    ``spent_s`` are seconds by use since it started, ``seen_s`` (epoch) its last pulse.
    """

    learner: str
    number: int
    seen_s: float
    spent_s: Mapping[str, float] = field(default_factory=dict[str, float])
    step_s: float = 0.0

    @property
    def started_s(self) -> float:
        return self.seen_s - math.fsum(self.spent_s.values())

    @property
    def first_step_s(self) -> float:
        """How long it took from its start to its first step."""
        return self.spent_s.get(Cause.COMPILE, 0.0) + self.spent_s.get(Cause.RECOVER, 0.0)


@dataclass(frozen=True, slots=True)
class RunHistory:
    """What is known of a run; times in seconds since the epoch.

    ``joined_s`` is when each learner first joined, ``ratios`` each use's share of all its time as
    the monitor counted it at ``ended_s``, ``answers_s`` how long contributions took.
    """

    run: str
    joined_s: Mapping[str, float]
    lives: tuple[Incarnation, ...]
    ratios: Mapping[str, float]
    ended_s: float
    answers_s: tuple[float, ...] = ()

    @property
    def restarts(self) -> list[tuple[Incarnation, Incarnation]]:
        """Each incarnation that came after another one of its learner, with that one first."""
        by_place = {(life.learner, life.number): life for life in self.lives}
        before = ((by_place.get((x.learner, x.number - 1)), x) for x in self.lives)
        return [(one, life) for one, life in before if one is not None]


@dataclass(frozen=True, slots=True)
class Fitted:
    """One value that a run teaches, by name, and the setting of a simulation that it becomes."""

    name: str
    value: float
    unit: str
    convention: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a simulation says of a run; ``scenario`` is what the other run taught, with its law."""

    history: RunHistory
    learnt_from: str
    fitted: tuple[Fitted, ...]
    outcome: Outcome
    faults: Faults
    scenario: Setup

    @property
    def off_points(self) -> float:
        """Predicted less measured goodput, in percentage points."""
        return 100.0 * (self.outcome.goodput - self.history.ratios[TRAIN])


def read_rows(path: Path) -> Iterator[str]:
    """Yield the lines of a file of metrics, those that were set aside before it first.

    They are beside it as ``<name>.<number>.gz``, or unpacked, the oldest with the highest number.
    Raises ConfigError where a file cannot be read.
    """
    aside = re.compile(re.escape(path.name) + r"\.(\d+)(\.gz)?")
    found = ((aside.fullmatch(file.name), file) for file in path.parent.glob("*"))
    numbered = {int(match[1]): file for match, file in found if match}
    try:
        for file in (*(numbered[number] for number in sorted(numbered, reverse=True)), path):
            opening = gzip.open if file.suffix == ".gz" else open
            with opening(file, "rt", encoding="utf-8") as lines:
                yield from (line.rstrip("\n") for line in lines)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        msg = f"The metrics {path} cannot be read ({error}): name the health monitor's file."
        raise ConfigError(msg, path="metrics") from error


def history(
    run: str, members: Iterable[MemberRecord], commits: Iterable[Commit], rows: Iterable[str]
) -> RunHistory:
    """Return what the ledger and the monitor's rows (JSON lines) say of a run.

    A line that was cut off, or another run's, is skipped. ConfigError where they say too little: no
    learner that ever trained.
    """
    joined: dict[str, float] = {}
    lives: dict[tuple[str, int], Incarnation] = {}
    for member in members:
        if member.incarnation and member.joined_ns:
            at_s, place = member.joined_ns / 1e9, (member.learner, member.incarnation)
            joined[member.learner] = min(joined.get(member.learner, math.inf), at_s)
            lives.setdefault(place, Incarnation(*place, at_s))
    ratios, ended_s = dict[str, float](), 0.0
    for line in rows:
        row: object = None
        with suppress(ValueError):
            row = json.loads(line)
        named = _numbers(cast("dict[str, object]", row), run) if isinstance(row, dict) else {}
        row_s = named.get(("time_s", "", ""))
        if row_s is not None:
            seen = {TRAIN: named.get(("skerry.goodput.ratio", "", ""), 0.0)}
            seen |= {c.value: named.get(("skerry.badput.ratio", "", c.value), 0.0) for c in Cause}
            if math.fsum(seen.values()) > 0:
                ratios, ended_s = seen, row_s
            lives |= {(life.learner, life.number): life for life in _incarnations(named, row_s)}
    trained = any(life.spent_s.get(TRAIN, 0.0) > 0 for life in lives.values())
    if not (trained and ratios and joined):
        msg = (
            f"Run {run!r} has no row of metrics in which a learner trains: name the file that its "
            "health monitor wrote with --metrics, or let it run longer."
        )
        raise ConfigError(msg, path="metrics")
    ordered = tuple(lives[place] for place in sorted(lives))
    arrived = ((commit.opened_ns, one.arrived_ns) for commit in commits for one in commit.consumed)
    answers = tuple((at_ns - opened_ns) / 1e9 for opened_ns, at_ns in arrived if at_ns > opened_ns)
    return RunHistory(run, joined, ordered, ratios, ended_s, answers)


def _numbers(row: Mapping[str, object], run: str) -> dict[Metric, float]:
    """Return the numbers of a row of this run by metric, learner, and use or cause."""
    found: dict[Metric, float] = {}
    for name, value in row.items():
        if row.get("run") == run and isinstance(value, int | float) and abs(value) < MOST:
            metric, _, keys = name.rstrip("}").partition("{")
            own = dict(pair.split("=", 1) for pair in keys.split(",") if "=" in pair)
            place = (metric, own.get("learner", ""), own.get("use") or own.get("cause", ""))
            found[place] = float(value)
    return found


def _incarnations(named: Mapping[Metric, float], at_s: float) -> Iterator[Incarnation]:
    for learner in {learner for metric, learner, _ in named if metric == "skerry.learner.time"}:
        spent = {use: named.get(("skerry.learner.time", learner, use), 0.0) for use in USES}
        number = int(named.get(("skerry.learner.incarnation", learner, ""), 1))
        silent_s = named.get(("skerry.learner.silence", learner, ""), 0.0)
        step_s = named.get(("skerry.step.time", learner, ""), 0.0)
        yield Incarnation(learner, number, at_s - silent_s, spent, step_s)


def fit(known: RunHistory) -> tuple[Fitted, ...]:
    """Return what a run teaches; where it says nothing of something, that is 0 and seen 0 times."""
    worked = [life for life in known.lives if life.spent_s.get(TRAIN, 0.0) > 0]
    firsts = [life for life in worked if life.number == 1]
    again = [life for _, life in known.restarts if life in worked]
    downs = [max(1e-3, life.started_s - before.seen_s) for before, life in known.restarts]
    sigma = pstdev([math.log(down) for down in downs]) if len(downs) > 1 else 0.0
    spent = {use: math.fsum(life.spent_s.get(use, 0.0) for life in worked) for use in USES}
    before_s = max(0.0, _mean([known.joined_s[x.learner] - x.started_s for x in firsts]))
    starts = [max(0.0, life.first_step_s - before_s) for life in firsts]
    restart_s = _mean([x.first_step_s for x in again or firsts])
    replay_s = _mean([x.spent_s.get(Cause.REPLAY, 0.0) for x in again])
    idle = spent[Cause.IDLE] / (spent[TRAIN] + spent[Cause.IDLE])
    steps: dict[str, list[float]] = defaultdict(list)
    for life in known.lives:
        steps[life.learner] += [life.step_s] if life.step_s > 0 else []
    paces = [median(own) for own in steps.values() if own] or [1.0]
    spread = min(0.99, (max(paces) - min(paces)) / (max(paces) + min(paces)))
    half_s = median(paces) / 2.0  # what a learner needs to its boundary, on average
    uploads = [max(0.0, answer_s - half_s) for answer_s in known.answers_s]
    wall_s = fmean(known.ended_s - joined_s for joined_s in known.joined_s.values())
    seen = f"without a process, {len(downs)} seen"
    process = f"process to training, {len(again)} seen"
    answers = f"boundary to syncer, {len(uploads)} answers"
    mtbi_s = spent[TRAIN] / len(downs) if downs else NEVER_S
    return (
        Fitted("wall", wall_s, "s", "from the first join"),
        Fitted("first_start", _mean(starts), "s", f"joined to training, {len(starts)} seen"),
        Fitted("step", median(paces), "s", f"median of {len(paces)} learners", "timing.step"),
        Fitted("spread", spread, "share", "of slowest and fastest around it", "timing.spread"),
        Fitted("restart", restart_s, "s", process, "pauses.upscale_s"),
        Fitted("replay", replay_s, "s", "done again after each restart", "pauses.replay_s"),
        Fitted("idle", idle, "share", "of a training learner's time", "timing.idle"),
        Fitted("upload", median(uploads or [0.0]), "s", answers, "timing.upload_s"),
        Fitted("down", _mean(downs), "s", seen, "recovery.mean_s"),
        Fitted("down_spread", max(sigma, 1e-3), "1", "sigma of its logarithm", "recovery.spread"),
        Fitted("between_failures", mtbi_s, "s", "training of a learner", "failures.chip_mtbi"),
    )


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def happened(known: RunHistory) -> dict[int, tuple[Absence, ...]]:
    """Return when the run's learners were away."""
    begin_s, order = fmean(known.joined_s.values()), sorted(known.joined_s)
    found: dict[int, tuple[Absence, ...]] = defaultdict(tuple)
    for before, life in known.restarts:
        away = (before.seen_s - begin_s, max(before.seen_s, life.started_s) - begin_s)
        found[order.index(life.learner)] += (Absence(*away),)
    return found


def predict(
    learnt: RunHistory,
    about: RunHistory,
    config: RunConfig,
    sets: Sequence[str] = (),
    faults: Faults | None = None,
) -> Prediction:
    """Simulate the run ``about`` with what ``learnt`` teaches; they may be one.

    How long its learners took to their first step is its own: that is no failure, and depends on
    what else the machine does. Its failures are those of ``faults``, whose first kill is laid upon
    the first restart that there was, or else those that the run has had. No others are drawn.
    """
    taught, own = fit(learnt), {one.name: one.value for one in fit(about)}
    absences = happened(about)
    given = Faults(absences)
    if faults is not None:
        kills = [a.begin_s for found in faults.absences.values() for a in found if a.restart]
        real = [a.begin_s for found in absences.values() for a in found]
        by_s = min(real) - min(kills) if kills and real else own["first_start"]
        given = later(faults, by_s)
    start = (Absence(0.0, own["first_start"], TimeUse.UPSCALE, restart=False),)
    learners = len(about.joined_s)
    starting = {n: (*start, *given.absences.get(n, ())) for n in range(learners)}
    given = replace(given, absences=starting)
    exact = [f"failures.chip_mtbi={NEVER_S}", f"simulation.days={own['wall'] / 86400.0}"]
    asked = _setup(taught, config, learners, [*exact, *sets], f"run {about.run}")
    scenario = _setup(taught, config, len(learnt.joined_s), sets, learnt.run)
    return Prediction(about, learnt.run, taught, simulate(asked, given), given, scenario)


def later(faults: Faults, by_s: float) -> Faults:
    """Return the same faults that much later."""

    def moved(stretches: Sequence[Stretch]) -> tuple[Stretch, ...]:
        return tuple((begin + by_s, end + by_s) for begin, end in stretches)

    absences = {
        number: [replace(a, begin_s=a.begin_s + by_s, end_s=a.end_s + by_s) for a in found]
        for number, found in faults.absences.items()
    }
    cut = {number: moved(found) for number, found in faults.cut.items()}
    return Faults(absences, cut, moved(faults.stalled))


def _setup(
    taught: Sequence[Fitted], config: RunConfig, learners: int, sets: Sequence[str], name: str
) -> Setup:
    """Return a simulation of a real run's config with so many learners, and what was fitted."""
    values = {one.path: one.value for one in taught if one.path}
    days = next(one.value for one in taught if one.name == "wall") / 86400.0
    values |= {"fleet.chips": learners, "fleet.slice_chips": 1, "simulation.days": days}
    texts = [f"{path}={value}" for path, value in values.items()]
    texts += ["fleet.elastic=false", *sets, f"sync.learners={learners}"]
    tree = read((), texts)
    tree.put(("source",), f"Calibrated on run {name}", name)
    tree.put(("status",), dict.fromkeys(values, f"fitted: to run {name}"), name)
    asked = question(tree, name)
    sync = {"learners": learners, "quorum": min(config.sync.quorum, learners)}
    run = config.model_copy(update={"sync": config.sync.model_copy(update=sync)})
    return setup(replace(asked, run=run))


def answer(found: Prediction) -> Answer:
    """Return how far off a prediction is, as text and JSON."""
    from skerry_tools.plan import simulation_answer

    said = (
        f"Run {found.history.run}, from what {found.learnt_from} taught: goodput predicted"
        f" {100 * found.outcome.goodput:.1f} %, measured {100 * found.history.ratios[TRAIN]:.1f} %:"
        f" {found.off_points:+.1f} points."
    )
    rows = (
        (x.name, None if x.value == NEVER_S else x.value, x.unit, x.convention)
        for x in found.fitted
    )
    fitted = FigureTable("calibration", "Fitted", figures(rows))
    tables = [fitted, FigureTable("compared", "What the time went into", _compared(found))]
    values: dict[str, Json] = {
        "answer": said,
        "off_points": found.off_points,
        "figures": {table.name: table.json() for table in tables},
    }
    text = [said, *(line for table in tables for line in ("", *table.lines()))]
    charts = simulation_answer.answer(found.outcome, found.faults).charts
    return Answer(f"Prediction of run {found.history.run}", text, values, tables, charts)


def _compared(found: Prediction) -> dict[str, dict[str, Figure]]:
    measured, predicted = defaultdict[str, float](float), defaultdict[str, float](float)
    for use, share in found.history.ratios.items():
        measured[USED[use]] += share
    for what, share in found.outcome.split.items():
        predicted[SIMULATED.get(what, "away")] += share
    rows: dict[str, dict[str, Figure]] = {}
    for name in dict.fromkeys([*measured, *predicted]):
        if measured[name] or predicted[name]:
            off = 100.0 * (predicted[name] - measured[name])
            rows[name] = figures((
                ("predicted", predicted[name], "share", "by the simulation"),
                ("measured", measured[name], "share", "by the run's health monitor"),
                ("points", off, "1", "predicted less measured"),
            ))  # fmt: skip
    return rows


def predict_run(
    run: str,
    against: str | None,
    faults: Path | None,
    sets: Sequence[str],
    nats: str | None,
    metrics: Path | None,
) -> Prediction:
    """Learn from a run, and predict it or another one; ConfigError where they say too little.

    The log is that of a cluster that runs here, or has left it in this folder, or at ``nats``.
    """
    from skerry_tools.chaos.plan import load
    from skerry_tools.plan.fault_plans import faults_of, services

    learnt, config = asyncio.run(_read(run, nats, metrics))
    about = learnt
    if against is not None:
        about, config = asyncio.run(_read(against, nats, None))
    team = services(len(about.joined_s))
    given = None if faults is None else faults_of(load(faults), team)
    return predict(learnt, about, config, sets, given)


async def _read(run: str, nats: str | None, metrics: Path | None) -> tuple[RunHistory, RunConfig]:
    from skerry.cli.cluster.folder import RunFolder
    from skerry.cli.status import log_of
    from skerry.service.connect import bus_from
    from skerry.settings.loading import load, run_config_from_json

    given = load(None, [f"nats.url={nats}"] if nats else [])
    async with (
        log_of(given, run, named=nats is not None) as log,
        bus_from(log.nats, "simulate") as bus,
    ):
        record = await ledger.read_run(bus, run)
        members = [member for _, member in await ledger.starts(bus, run)]
        commits = [commit async for _, commit in ledger.stored_commits(bus, run)]
    known = history(run, members, commits, read_rows(metrics or RunFolder(run).metrics))
    return known, run_config_from_json(record.config_json)
