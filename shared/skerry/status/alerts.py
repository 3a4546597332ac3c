"""What an operator must know now, as the page and ``skerry top`` say it: a pure function.

For whoever is not looking there are Prometheus rules, in infra/prometheus/rules.yml, for the same
conditions but ``suspect``, which only explains.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from skerry.algorithm.liveness import Liveness
from skerry.protocol.messages import LearnerPhase
from skerry.status.format import clip, duration
from skerry.status.recent import (
    FIRST_S,
    LEAST_GOODPUT,
    RECENT_S,
    STARTING_S,
    WAITED_S,
    WINDOW_S,
    awaited,
    diverged,
    ending,
    held_out,
    late_after_s,
    missed,
    round_s,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.log.base import Room
    from skerry.status.recent import Recent
    from skerry.status.report import LearnerRow, RunReport

FLAPS = 3
ANSWERING = frozenset({LearnerPhase.TRAINING, LearnerPhase.FINISHED})
"""What learners do that answer rounds."""
ENDING = 2.0
"""Once all have finished, so many timeouts of a round pass before something is wrong: one in which
the syncer waits for whoever fell silent at work, and one for the last round."""
LATE_CHECKPOINTS = 5.0
"""A checkpoint that lacks commits is too old after so many times the time in which one is due,"""
CHECKPOINT_S = 120.0
"""and never before this time."""
NEARLY_FULL = 0.9
MOST_NAMES = 4


class Severity(StrEnum):
    """``info`` explains, ``warning`` costs goodput, ``critical`` stops training or loses work."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """How bad it is: the worse, the higher."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Alert:
    """One sentence that says what is wrong and one that says what to do; ``key`` names it."""

    key: str
    severity: Severity
    text: str
    fix: str


@dataclass(frozen=True, slots=True)
class StreamStore:
    """Where streams are kept: a broker's store, or an account's share of it (no ``broker``)."""

    room: Room
    broker: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """What alerts are made from.

    ``gap_s`` is the interval of the commits of late, None for too few of them; ``broker_away_s``
    for how long whoever watches has had no broker; ``malformed`` counts the messages of the last
    ``RECENT_S`` that were left out; ``evaluating``: old evaluations are still being read.
    """

    now_s: float
    now: RunReport
    lately: Recent
    gap_s: float | None
    checkpoint_every_s: float
    quorum: int
    h_steps: int
    round_timeout_s: float
    stores: Sequence[StreamStore] = ()
    broker_away_s: float | None = None
    malformed: int = 0
    evaluating: bool = False


def alerts(seen: Situation) -> list[Alert]:
    """Return what holds now, the worst first."""
    found = [*_broker(seen)]
    if not seen.now.run.finished:
        found += [*_rounds(seen), *_learners(seen), *_quality(seen), *_checkpoints(seen)]
    found += [*_log(seen)]
    return sorted(found, key=lambda alert: alert.severity.rank, reverse=True)


def _broker(seen: Situation) -> Iterator[Alert]:
    if seen.broker_away_s is not None:
        yield Alert(
            "broker",
            Severity.CRITICAL,
            f"The broker has not answered for {duration(seen.broker_away_s)}: what is shown "
            "here stands still, learners go on training.",
            "Start it again; everybody catches up by themselves.",
        )


def _rounds(seen: Situation) -> Iterator[Alert]:
    run, gap_s, rows = seen.now.run, seen.gap_s, seen.now.learners
    ago_s = run.wall_s if run.last_round_s_ago is None else run.last_round_s_ago
    missed_s = min(ago_s, _there_s(rows))
    limit_s = late_after_s(gap_s, seen.h_steps, rows)
    if ending(rows):
        limit_s = max(limit_s, FIRST_S, ENDING * seen.round_timeout_s)
    if missed_s > limit_s:
        usual = "" if gap_s is None else f", one is expected each {duration(gap_s)}"
        yield Alert(
            "no-commit",
            Severity.CRITICAL,
            f"Nothing has been committed since the run was created {duration(ago_s)} ago."
            if run.last_round_s_ago is None
            else f"No round has been committed for {duration(missed_s)}{usual}.",
            "Start a syncer if none runs, or look at its log; learners keep their progress"
            " meanwhile.",
        )
    elif coming := awaited(rows):
        there = [row for row in rows if row.liveness is not Liveness.GONE]
        missed_s = min(ago_s, max(row.worked_s for row in there))
        if missed_s > max(STARTING_S, ENDING * seen.round_timeout_s):
            yield Alert(
                "no-commit",
                Severity.CRITICAL,
                f"No round has been committed for {duration(missed_s)}: all others have finished,"
                f" and the run waits for {_names(coming)} to start.",
                "Look at its log. Start it again, or stop it: the run then ends without it.",
            )


def _there_s(rows: Sequence[LearnerRow]) -> float:
    """Return for how long a round could have been committed, and a checkpoint been due.

    That is as long as anybody who is there has been at work, or has waited for parameters in vain:
    while a run rests nothing is due, and the first to come back must not look hours late. Once all
    have finished they wait for the last rounds; before, the syncer waits with them.
    """
    worked = (row.worked_s for row in [*(row for row in rows if row.at_work), *ending(rows)])
    waited = (row.waited_s for row in rows if _waits(row))
    return max([*worked, *waited], default=0.0)


def _waits(row: LearnerRow) -> bool:
    """Say whether a learner is there, and has caught up for longer than that ever takes."""
    return row.liveness is not Liveness.GONE and row.waited_s > WAITED_S


def _learners(seen: Situation) -> Iterator[Alert]:
    rows = seen.now.learners
    gone = missed(rows)
    suspect = [r for r in rows if r.liveness is Liveness.SUSPECT]
    working = sum(r.liveness is Liveness.ALIVE and r.phase in ANSWERING for r in rows)
    if gone:
        short = working < seen.quorum
        yield Alert(
            "gone",
            Severity.CRITICAL if short else Severity.WARNING,
            f"{_names(gone)} {'is' if len(gone) == 1 else 'are'} gone"
            + (f": {working} of the {seen.quorum} that a round needs are left." if short else "."),
            "It comes back by itself if its process still runs. If not, start it again under the "
            "same name: it goes on from the log."
            if len(gone) == 1
            else "They come back by themselves if their processes still run. If not, start them "
            "again under the same names: they go on from the log.",
        )
    if suspect:
        yield Alert(
            "suspect",
            Severity.INFO,
            f"{_names(suspect)} {'has' if len(suspect) == 1 else 'have'} been silent or stood "
            "still for longer than usual.",
            "Nothing yet: rounds do not wait for them.",
        )
    for name, count in seen.lately.starts(seen.now_s).most_common(MOST_NAMES):
        if count >= FLAPS:
            yield Alert(
                f"flapping-{name}",
                Severity.WARNING,
                f"{clip(name)} was started {count} times within {duration(RECENT_S)}.",
                "Read the end of its log: it dies of the same thing each time.",
            )
    if refused := seen.lately.refused(seen.now_s):
        causes = ", ".join(
            f"{n} {clip(cause)}" for cause, n in sorted(refused.most_common(MOST_NAMES))
        )
        yield Alert(
            "refused",
            Severity.WARNING,
            f"Contributions were refused within {duration(RECENT_S)}: {causes}.",
            "too_stale: the learner is slower than sync.max_staleness allows; others: see the "
            "syncer's log.",
        )


def _quality(seen: Situation) -> Iterator[Alert]:
    run = seen.now.run
    goodput = seen.lately.goodput(seen.now_s)
    if goodput is not None and goodput < LEAST_GOODPUT:
        yield Alert(
            "goodput",
            Severity.WARNING,
            f"Goodput of the last {duration(WINDOW_S)} is {goodput:.0%}.",
            "The split of the learners' time says where the rest went.",
        )
    if run.held_out_texts > 1 and not seen.evaluating:
        yield Alert(
            "texts",
            Severity.WARNING,
            f"Evaluators read {run.held_out_texts} different texts: losses cannot be compared.",
            "Give all of them the same text.",
        )
    if nan := diverged(seen.now.learners):
        yield Alert(
            "loss",
            Severity.CRITICAL,
            f"The loss of {_names(nan)} is not finite.",
            "Such steps are skipped and weigh nothing. If it is alone, look at its data and its"
            " hardware; lower train.lr if all diverge.",
        )
    judged = {} if seen.evaluating else held_out(seen.now.evaluations)
    if worse := [found for found in judged.values() if found.worse]:
        yield Alert(
            "held-out",
            Severity.WARNING,
            f"Held-out loss {worse[0].newest:.3f} is well above its best, {worse[0].best:.3f}.",
            "Go back to a checkpoint from before: skerry up --from.",
        )


def _checkpoints(seen: Situation) -> Iterator[Alert]:
    run = seen.now.run
    ago_s = run.wall_s if run.checkpoint_s_ago is None else run.checkpoint_s_ago
    # Between two rounds there is nothing new to write, however often one may be written.
    due_s = max(seen.checkpoint_every_s, round_s(seen.gap_s, seen.h_steps, seen.now.learners))
    limit_s = max(CHECKPOINT_S, LATE_CHECKPOINTS * due_s)
    # Not by its age alone: after an outage the first commit is one that a checkpoint just lacks.
    late_s = min(ago_s, run.checkpoint_lacks_s, _there_s(seen.now.learners))
    if run.checkpoint_lacks and late_s > limit_s:
        what = "There is no checkpoint" if run.checkpoint is None else "The newest checkpoint is"
        yield Alert(
            "checkpoint",
            Severity.WARNING,
            f"{what} after {duration(ago_s)}."
            if run.checkpoint is None
            else f"{what} {duration(ago_s)} old, one is due each {duration(due_s)}.",
            "Look at the checkpointer's log and at the room where it writes.",
        )


def _log(seen: Situation) -> Iterator[Alert]:
    for store in seen.stores:
        used, limit, kind = store.room.used_bytes, store.room.limit_bytes, store.room.storage.value
        if limit > 0 and used > NEARLY_FULL * limit:
            whose = f"of broker {clip(store.broker)}" if store.broker else "of this NATS account"
            setting = f"max_{kind}_store" if store.broker else "the account's limit"
            yield Alert(
                f"store-{kind}-{store.broker}",
                Severity.CRITICAL,
                f"The {kind} store {whose} is {used / limit:.0%} full.",
                f"Raise {setting}, or remove the streams of runs that are over: a full store takes"
                " no more commits.",
            )
    if seen.malformed:
        yield Alert(
            "malformed",
            Severity.WARNING,
            f"{seen.malformed} messages of the last {duration(RECENT_S)} could not be read, or are"
            " of no learner or fragment here, and were left out.",
            "Run `skerry ledger verify`; somebody may run another version of Skerry.",
        )


def _names(rows: Sequence[LearnerRow]) -> str:
    shown = ", ".join(clip(row.name) for row in rows[:MOST_NAMES])
    more = len(rows) - MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
