"""What an operator must know now, as the page and ``skerry top`` say it: a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from skerry.algorithm.liveness import Liveness, LivenessReason
from skerry.protocol.messages import LearnerPhase
from skerry.status import alert_table as table
from skerry.status.alert_table import Alert, Severity
from skerry.status.format import clip, duration
from skerry.status.recent import RECENT_S, WINDOW_S, Recent
from skerry.status.report import EvaluationRow, LearnerRow, RunReport, recent_texts

if TYPE_CHECKING:
    from skerry.log.base import Room
    from skerry.settings.models import RunConfig

LEAST_GOODPUT = 0.5
"""Goodput below this is low."""
LATE_ROUNDS = 10.0
"""A commit is late after this many expected rounds, but not before LATE_S."""
LATE_S = 20.0
"""Least time without a commit that is too long."""
FIRST_S = 120.0
"""The same before the first rounds, while everybody compiles."""
WAITED_S = 300.0
"""A learner that catches up for so long waits for parameters that no syncer commits."""
STARTING_S = 1800.0
"""A learner that starts when all others have finished may take this long: none compiles longer."""
ENDING = 2.0
"""Round timeouts that may pass once all have finished: one in which the syncer waits for learners
that fell silent at work, and one for the last round."""
LATE_CHECKPOINTS, CHECKPOINT_S = 5.0, 120.0
"""A checkpoint that lacks commits is too old after LATE_CHECKPOINTS times the interval in which one
is due, but not before CHECKPOINT_S."""
FLAPS = 3
NEARLY_FULL = 0.9
WORSE, JUDGED = 0.1, 3
"""Held-out loss goes the wrong way if JUDGED values in a row are this share above its best."""
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
    config: RunConfig
    stores: Sequence[StreamStore] = ()
    broker_away_s: float | None = None
    malformed: int = 0
    evaluating: bool = False


def alerts(seen: Situation) -> list[Alert]:
    """Return what holds now, the worst first."""
    found: list[Alert] = []
    if seen.broker_away_s is not None:
        text = (
            f"The broker has not answered for {duration(seen.broker_away_s)}: what is shown "
            "here stands still, learners go on training."
        )
        found.append(table.BROKER.alert(text))
    if not seen.now.run.finished:
        found += [*_rounds(seen), *_learners(seen), *_quality(seen), *_checkpoints(seen)]
    found += _log(seen)
    return sorted(found, key=lambda alert: alert.severity.rank, reverse=True)


def round_s(gap_s: float | None, h_steps: int, rows: Iterable[LearnerRow]) -> float:
    """Return the expected seconds between two commits.

    That is the interval of recent commits, ``gap_s``; before there is one, H of the longest steps.
    """
    if gap_s is not None:
        return gap_s
    return h_steps * max((row.step_time_s for row in rows), default=0.0)


def late_after_s(gap_s: float | None, h_steps: int, rows: Iterable[LearnerRow]) -> float:
    """Return after how long without a commit something is wrong; see ``round_s``."""
    least_s = FIRST_S if gap_s is None else LATE_S
    return max(least_s, LATE_ROUNDS * round_s(gap_s, h_steps, rows))


def checkpoint_due_s(gap_s: float | None, config: RunConfig, rows: Iterable[LearnerRow]) -> float:
    """Return how often a checkpoint is due: between two rounds there is nothing new to write."""
    return max(config.checkpoint.every_s, round_s(gap_s, config.sync.h_steps, rows))


def _rounds(seen: Situation) -> Iterator[Alert]:
    run, gap_s, rows = seen.now.run, seen.gap_s, seen.now.learners
    timeout_s = seen.config.sync.round_timeout_s
    missed_s = min(run.commit_age_s, _there_s(rows))
    limit_s = late_after_s(gap_s, seen.config.sync.h_steps, rows)
    there = [row for row in rows if row.liveness is not Liveness.GONE]
    if all(row.phase is LearnerPhase.FINISHED for row in there):  # they wait for the run's end
        limit_s = max(limit_s, FIRST_S, ENDING * timeout_s)
    if missed_s > limit_s:
        usual = "" if gap_s is None else f", one is expected each {duration(gap_s)}"
        yield table.NO_COMMIT.alert(
            f"Nothing has been committed since the run was created {duration(run.wall_s)} ago."
            if run.last_round_s_ago is None
            else f"No round has been committed for {duration(missed_s)}{usual}."
        )
    elif coming := _awaited(there):
        missed_s = min(run.commit_age_s, max(row.worked_s for row in there))
        if missed_s > max(STARTING_S, ENDING * timeout_s):
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
    there = [row for row in rows if row.liveness is not Liveness.GONE]
    ending = all(row.phase is LearnerPhase.FINISHED for row in there)
    worked = [row.worked_s for row in there if ending or row.at_work]
    waited = [row.waited_s for row in there if row.waited_s > WAITED_S]
    return max([*worked, *waited], default=0.0)


def _awaited(there: Sequence[LearnerRow]) -> list[LearnerRow]:
    """Return who is starting while all others have finished, so that the run's end waits for them.

    A learner that catches up is reported by how long it has waited.
    """
    coming = [row for row in there if row.phase is not LearnerPhase.FINISHED]
    starting = all(row.phase is LearnerPhase.STARTING for row in coming)
    return coming if starting and len(coming) < len(there) else []


def _learners(seen: Situation) -> Iterator[Alert]:
    rows, quorum = seen.now.learners, seen.config.sync.quorum
    answering = {LearnerPhase.TRAINING, LearnerPhase.FINISHED}
    working = sum(r.liveness is Liveness.ALIVE and r.phase in answering for r in rows)
    if gone := missed(rows):
        short = f": {working} of the {quorum} that a round needs are left" * (working < quorum)
        yield table.GONE.alert(
            f"{_names(gone)} {'is' if len(gone) == 1 else 'are'} gone{short}.",
            severity=Severity.CRITICAL if short else None,
            fix=""
            if len(gone) > 1
            else "It comes back by itself if its process still runs. If not, start it again under"
            " the same name: it goes on from the log.",
        )
    if suspect := [r for r in rows if r.liveness is Liveness.SUSPECT]:
        yield table.SUSPECT.alert(
            f"{_names(suspect)} {'has' if len(suspect) == 1 else 'have'} been silent or stood "
            "still for longer than usual.",
            fix=f"A round needs {quorum}, and waits for them." if working < quorum else "",
        )
    if held := [row for row in rows if row.quarantine]:
        why = ", ".join(
            sorted({row.quarantine.value.replace("_", " ") for row in held if row.quarantine})
        )
        yield table.QUARANTINED.alert(
            f"Nothing of {_names(held)} is merged: in quarantine ({why})."
        )
    for name, count in seen.lately.starts(seen.now_s).most_common(MOST_NAMES):
        if count >= FLAPS:
            text = f"{clip(name)} was started {count} times within {duration(RECENT_S)}."
            yield table.FLAPPING.alert(text, of=name)
    if refused := seen.lately.refused(seen.now_s):
        common = sorted(refused.most_common(MOST_NAMES))
        causes = ", ".join(f"{n} {clip(cause)}" for cause, n in common)
        yield table.REFUSED.alert(
            f"Contributions were refused within {duration(RECENT_S)}: {causes}."
        )


def missed(rows: Sequence[LearnerRow]) -> list[LearnerRow]:
    """Return who is gone without a goodbye, and whose place no other has taken since.

    A view keeps every name: one that was replaced under another would be missed for ever. So each
    name that first joined after another fell silent stands in for one, whatever became of it; one
    that joined before is no stand-in, however many are left.
    """

    def silent_s(row: LearnerRow) -> float:  # never before it came, whatever its own clock says
        return min(row.seen_s_ago, row.seen_s_ago if row.joined_s_ago is None else row.joined_s_ago)

    gone = [
        row
        for row in rows
        if row.liveness is Liveness.GONE and row.reason is not LivenessReason.STOPPED
    ]
    gone.sort(key=silent_s, reverse=True)
    came = [row.joined_s_ago for row in rows if row.joined_s_ago is not None]
    for joined_s_ago in sorted(came, reverse=True):
        replaced = next((row for row in gone if silent_s(row) > joined_s_ago), None)
        if replaced is not None:
            gone.remove(replaced)
    return [row for row in rows if row in gone]


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
    mismatched = seen.lately.mismatched(seen.now_s)
    if differing := [row for row in seen.now.learners if row.name in mismatched]:
        yield table.MISMATCH.alert(
            f"Within {duration(RECENT_S)} global fragments of {_names(differing)} were not what was"
            " committed."
        )
    judged = {} if seen.evaluating else held_out(seen.now.evaluations)
    if worse := [found for found in judged.values() if found.recent > found.best * (1 + WORSE)]:
        yield table.HELD_OUT.alert(
            f"Held-out loss {worse[0].newest:.3f} is well above its best, {worse[0].best:.3f}."
        )


class HeldOut(NamedTuple):
    """Losses on one text so far: the newest, the least of all, and the least of the newest three.

    In nats per token. One evaluation alone proves nothing.
    """

    newest: float
    best: float
    recent: float


def held_out(evaluations: Sequence[EvaluationRow]) -> dict[str, HeldOut]:
    """Return what recent evaluators found on the text that each read last, by their names.

    Losses on one text are those of one model: an evaluator that took another's
    place goes on from its best, one that was given another text starts again.
    """
    found: dict[str, HeldOut] = {}
    for evaluator, text in recent_texts(evaluations).items():
        losses = [e.loss for e in evaluations if e.text == text and e.loss is not None]
        if losses:
            found[evaluator] = HeldOut(losses[-1], min(losses), min(losses[-JUDGED:]))
    return found


def diverged(rows: Iterable[LearnerRow]) -> list[LearnerRow]:
    """Return who trains with a loss that is no finite number."""
    return [row for row in rows if row.heard and row.loss is None and row.takes_steps]


def _checkpoints(seen: Situation) -> Iterator[Alert]:
    run, config, rows = seen.now.run, seen.config, seen.now.learners
    due_s = checkpoint_due_s(seen.gap_s, config, rows)
    # Not by its age alone: after an outage the first commit is one that a checkpoint just lacks.
    late_s = min(run.checkpoint_age_s, run.checkpoint_lacks_s, _there_s(rows))
    if run.checkpoint_lacks and late_s > max(CHECKPOINT_S, LATE_CHECKPOINTS * due_s):
        yield table.CHECKPOINT.alert(
            f"There is no checkpoint after {duration(run.wall_s)}."
            if run.checkpoint is None
            else f"The newest checkpoint is {duration(run.checkpoint_age_s)} old, one is due each"
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
