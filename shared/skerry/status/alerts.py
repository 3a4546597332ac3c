"""What an operator must know now, as the page and ``skerry top`` say it: a pure function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.algorithm.liveness import Liveness
from skerry.protocol.messages import LearnerPhase
from skerry.status import alert_table as table
from skerry.status.alert_table import (
    CHECKPOINT_S,
    FLAPS,
    LATE_CHECKPOINTS,
    NEARLY_FULL,
    Alert,
    Severity,
)
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

ANSWERING = frozenset({LearnerPhase.TRAINING, LearnerPhase.FINISHED})
"""What learners do that answer rounds."""
ENDING = 2.0
"""Once all have finished, so many timeouts of a round pass before something is wrong: one in which
the syncer waits for learners that fell silent at work, and one for the last round."""
MOST_NAMES = 4


@dataclass(frozen=True, slots=True)
class StreamStore:
    """Where streams are kept: a broker's store, or an account's share of it (no ``broker``)."""

    room: Room
    broker: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """What alerts are made from.

    ``gap_s`` is the interval of recent commits, None for too few of them; ``broker_away_s``
    for how long the watcher has had no broker; ``malformed`` counts the messages of the last
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
        yield table.BROKER.alert(
            f"The broker has not answered for {duration(seen.broker_away_s)}: what is shown "
            "here stands still, learners go on training."
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
        yield table.NO_COMMIT.alert(
            f"Nothing has been committed since the run was created {duration(ago_s)} ago."
            if run.last_round_s_ago is None
            else f"No round has been committed for {duration(missed_s)}{usual}."
        )
    elif coming := awaited(rows):
        there = [row for row in rows if row.liveness is not Liveness.GONE]
        missed_s = min(ago_s, max(row.worked_s for row in there))
        if missed_s > max(STARTING_S, ENDING * seen.round_timeout_s):
            yield table.NO_COMMIT.alert(
                f"No round has been committed for {duration(missed_s)}: all others have finished,"
                f" and the run waits for {_names(coming)} to start.",
                fix="Look at its log. Start it again, or stop it: the run then ends without it.",
            )


def _there_s(rows: Sequence[LearnerRow]) -> float:
    """Return for how long a round could have been committed, and a checkpoint been due.

    That is as long as any learner that is there has been at work, or has waited for parameters in
    vain: while a run rests nothing is due, and the first to come back must not look hours late.
    Once all have finished they wait for the last rounds; before, the syncer waits with them.
    """
    worked = (row.worked_s for row in [*(row for row in rows if row.at_work), *ending(rows)])
    waited = (row.waited_s for row in rows if _waits(row))
    return max([*worked, *waited], default=0.0)


def _waits(row: LearnerRow) -> bool:
    """Return True if a learner is there, and has caught up for longer than that ever takes."""
    return row.liveness is not Liveness.GONE and row.waited_s > WAITED_S


def _learners(seen: Situation) -> Iterator[Alert]:
    rows = seen.now.learners
    gone = missed(rows)
    suspect = [r for r in rows if r.liveness is Liveness.SUSPECT]
    working = sum(r.liveness is Liveness.ALIVE and r.phase in ANSWERING for r in rows)
    if gone:
        short = working < seen.quorum
        yield table.GONE.alert(
            f"{_names(gone)} {'is' if len(gone) == 1 else 'are'} gone"
            + (f": {working} of the {seen.quorum} that a round needs are left." if short else "."),
            severity=Severity.CRITICAL if short else Severity.WARNING,
            fix=""
            if len(gone) > 1
            else "It comes back by itself if its process still runs. If not, start it again under"
            " the same name: it goes on from the log.",
        )
    if suspect:
        yield table.SUSPECT.alert(
            f"{_names(suspect)} {'has' if len(suspect) == 1 else 'have'} been silent or stood "
            "still for longer than usual."
        )
    for name, count in seen.lately.starts(seen.now_s).most_common(MOST_NAMES):
        if count >= FLAPS:
            text = f"{clip(name)} was started {count} times within {duration(RECENT_S)}."
            yield table.FLAPPING.alert(text, of=name)
    if refused := seen.lately.refused(seen.now_s):
        causes = ", ".join(
            f"{n} {clip(cause)}" for cause, n in sorted(refused.most_common(MOST_NAMES))
        )
        yield table.REFUSED.alert(
            f"Contributions were refused within {duration(RECENT_S)}: {causes}."
        )


def _quality(seen: Situation) -> Iterator[Alert]:
    run = seen.now.run
    goodput = seen.lately.goodput(seen.now_s)
    if goodput is not None and goodput < LEAST_GOODPUT:
        yield table.GOODPUT.alert(f"Goodput of the last {duration(WINDOW_S)} is {goodput:.0%}.")
    if run.held_out_texts > 1 and not seen.evaluating:
        yield table.TEXTS.alert(
            f"Evaluators read {run.held_out_texts} different texts: losses cannot be compared."
        )
    if nan := diverged(seen.now.learners):
        yield table.LOSS.alert(f"The loss of {_names(nan)} is not finite.")
    judged = {} if seen.evaluating else held_out(seen.now.evaluations)
    if worse := [found for found in judged.values() if found.worse]:
        yield table.HELD_OUT.alert(
            f"Held-out loss {worse[0].newest:.3f} is well above its best, {worse[0].best:.3f}."
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
        yield table.CHECKPOINT.alert(
            f"There is no checkpoint after {duration(ago_s)}."
            if run.checkpoint is None
            else f"The newest checkpoint is {duration(ago_s)} old, one is due each"
            f" {duration(due_s)}."
        )


def _log(seen: Situation) -> Iterator[Alert]:
    for store in seen.stores:
        used, limit, kind = store.room.used_bytes, store.room.limit_bytes, store.room.storage.value
        if limit > 0 and used > NEARLY_FULL * limit:
            whose = f"of broker {clip(store.broker)}" if store.broker else "of this NATS account"
            yield table.STORE.alert(
                f"The {kind} store {whose} is {used / limit:.0%} full.",
                of=f"{kind}-{store.broker}",
                fix=f"Raise max_{kind}_store, or {table.FULL}" if store.broker else "",
            )
    if seen.malformed:
        yield table.MALFORMED.alert(
            f"{seen.malformed} messages of the last {duration(RECENT_S)} could not be read, or are"
            " of no learner or fragment here, and were left out."
        )


def _names(rows: Sequence[LearnerRow]) -> str:
    shown = ", ".join(clip(row.name) for row in rows[:MOST_NAMES])
    more = len(rows) - MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
