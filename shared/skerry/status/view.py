"""A run as a reader of its log sees it: one pure fold over pulses and ledger records.

``fold`` takes messages in any order between streams and in order within each, again or not: what
it has seen already changes nothing. ``skerry.status.report`` turns a view into rows and JSON.

A reader that starts on a long history need not fold all of it before it can say how the run is
going: it may ``peek`` at each fragment's newest commit, and at the newest evaluation, first, and
fold the history afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from skerry.algorithm import liveness
from skerry.algorithm.goodput import Spent
from skerry.protocol.messages import (
    CheckpointRecord,
    Commit,
    Evaluation,
    LearnerPhase,
    MemberRecord,
    Pulse,
    RefusalCause,
    Refused,
    RunRecord,
    RunState,
    is_round,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

Message = Pulse | Commit | MemberRecord | CheckpointRecord | Evaluation | RunRecord

ENDED = frozenset({LearnerPhase.FINISHED, LearnerPhase.STOPPED})
MOST_EVALUATIONS = 512
"""Above this many a view keeps every second one: old ones thin out, the curve keeps its shape."""
TEXTS_OF_LATE = 32
"""An evaluator that is not among this many of the newest evaluations has ended."""


@dataclass(frozen=True, slots=True)
class RunShape:
    """What a view needs of a run's settings: P, K, when it ends, and how silence is judged."""

    run: str
    fragments: int
    quorum: int
    steps: int
    duration_s: float | None
    liveness: liveness.LivenessPolicy


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a learner's earlier incarnations."""

    tokens: int = 0
    spent: Spent = field(default_factory=Spent)
    bytes_up: int = 0
    bytes_down: int = 0
    f32_bytes_up: int = 0
    f32_bytes_down: int = 0
    contributions: int = 0

    def and_then(self, last: Pulse) -> Totals:
        """Return the sums with an incarnation that ended with this pulse."""
        return Totals(
            self.tokens + last.tokens,
            self.spent + spent_in(last),
            self.bytes_up + last.bytes_up,
            self.bytes_down + last.bytes_down,
            self.f32_bytes_up + last.f32_bytes_up,
            self.f32_bytes_down + last.f32_bytes_down,
            self.contributions + last.contributions,
        )


def spent_in(pulse: Pulse) -> Spent:
    """Return what an incarnation's time has gone into."""
    return Spent(
        train_s=pulse.busy_s,
        compile_s=pulse.compile_s,
        recover_s=pulse.recover_s,
        wait_s=pulse.wait_s,
        replay_s=pulse.replay_s,
        alive_s=pulse.alive_s,
    )


ON_ITS_WAY_S = 1.0
"""A pulse arrives here so much later, at most, than its sender's connection could end."""


@dataclass(frozen=True, slots=True)
class LearnerView:
    """One learner by name, at its newest incarnation; times in seconds since the epoch.

    ``joined_s`` is when the time allocated to it began: its first start of which the view knows
    what became of it. ``ended_s`` is when it had finished or stopped, ``closed_s`` when it lost its
    connection without a pulse since. ``first_s`` is when the log had the first start of that name,
    None before it was read.
    """

    name: str
    incarnation: int
    joined_s: float
    heartbeat: liveness.Heartbeat
    pulse: Pulse | None = None
    progress: liveness.StepProgress | None = None
    earlier: Totals = Totals()
    ended_s: float | None = None
    closed_s: float | None = None
    first_s: float | None = None


class Text(NamedTuple):
    """What an evaluator read last: the digest, and how many evaluations there were before."""

    digest: int
    before: int


@dataclass(frozen=True, slots=True)
class RunView:
    """The whole run: learners by name, the newest version per fragment, and sums over commits.

    ``counted`` is the version of each fragment up to which its commits are in the sums (rounds,
    merged, staleness, refused, started): behind ``versions`` while a history is being read.
    ``accepted`` counts the tokens that commits have merged from a learner, all its incarnations
    together; ``staleness`` is that of its newest merged contribution. ``evaluations`` are in the
    order of the ledger, thinned out; ``judgements`` counts all that there were. ``evaluated`` says
    how far each evaluator's have been seen, by its name, and ``texts`` which text its newest one
    was on.
    ``last_commit_s`` is when the newest commit was seen to be there, by the reader's clock.
    ``lacking`` says for fragments with commits that the newest checkpoint does not hold since when
    there are such; of what an earlier checkpoint lacked, by its time.
    ``judged`` is that of the newest state, which may be known before those that led to it.
    """

    frame: RunShape
    learners: Mapping[str, LearnerView] = field(default_factory=dict[str, LearnerView])
    accepted: Mapping[str, int] = field(default_factory=dict[str, int])
    staleness: Mapping[str, int] = field(default_factory=dict[str, int])
    versions: Mapping[int, int] = field(default_factory=dict[int, int])
    counted: Mapping[int, int] = field(default_factory=dict[int, int])
    refused: Mapping[RefusalCause, int] = field(default_factory=dict[RefusalCause, int])
    rounds: int = 0
    merged: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    step: int = 0
    started_s: float | None = None
    created_s: float | None = None
    last_commit: Commit | None = None
    last_commit_s: float | None = None
    checkpoint: CheckpointRecord | None = None
    lacking: Mapping[int, float] = field(default_factory=dict[int, float])
    evaluations: tuple[Evaluation, ...] = ()
    evaluated: Mapping[str, int] = field(default_factory=dict[str, int])
    texts: Mapping[str, Text] = field(default_factory=dict[str, "Text"])
    judgements: int = 0
    judged: Evaluation | None = None
    finished: bool = False

    @property
    def counting(self) -> bool:
        """Whether the sums still lack commits that are known to be there."""
        return any(self.counted.get(f, 0) < version for f, version in self.versions.items())

    @property
    def evaluating(self) -> bool:
        """Whether evaluations that are known to be there are still to come."""
        if self.judged is None:
            return False
        return _reached(self.judged) > max(self.evaluated.values(), default=0)


def fold(view: RunView, message: Message, at_s: float) -> RunView:
    """Return the view after ``message``, which arrived at ``at_s`` (seconds since the epoch).

    Silence is judged by arrival alone, so that no two clocks need to agree. Only the first pulse
    of an incarnation may be an old one read back from the stream: it counts from its own date,
    unless that lies in the future.
    """
    match message:
        case Pulse():
            return _with_learner(view, _pulsed(view, message, at_s))
        case MemberRecord():
            return _with_learner(view, _joined(view, message, at_s))
        case Commit():
            return committed(view, message, min(at_s, message.closed_ns / 1e9))
        case CheckpointRecord():
            return _checkpointed(view, message)
        case Evaluation():
            return _evaluated(view, message)
        case RunRecord():
            finished = view.finished or message.state is RunState.FINISHED
            return replace(view, created_s=message.created_ns / 1e9, finished=finished)


def _checkpointed(view: RunView, written: CheckpointRecord) -> RunView:
    if view.checkpoint is not None and written.written_ns <= view.checkpoint.written_ns:
        return view
    behind = {f: s for f, s in view.lacking.items() if view.versions[f] > held_in(written, f)}
    return replace(view, checkpoint=written, lacking=behind)


def held_in(checkpoint: CheckpointRecord | None, fragment: int) -> int:
    """Return a fragment's version in a checkpoint, 0 where there is none."""
    held = () if checkpoint is None else checkpoint.versions
    return held[fragment] if fragment < len(held) else 0


def _lacking(view: RunView, commit: Commit, seen_s: float) -> Mapping[int, float]:
    """Return since when commits are lacking, with this one, known or not."""
    fragment = commit.fragment
    if commit.version <= held_in(view.checkpoint, fragment):
        return view.lacking
    since_s = min(seen_s, view.lacking.get(fragment, seen_s))
    return {**view.lacking, fragment: since_s}


def _with_learner(view: RunView, learner: LearnerView | None) -> RunView:
    if learner is None:
        return view
    return replace(view, learners={**view.learners, learner.name: learner})


def _joined(view: RunView, member: MemberRecord, at_s: float) -> LearnerView | None:
    if member.incarnation == 0:
        return None  # a place that a restored run keeps for a name: none has come yet
    held = view.learners.get(member.learner)
    since_s = min(at_s, member.joined_ns / 1e9)
    first_s = at_s if held is None or held.first_s is None else min(at_s, held.first_s)
    if held is None or member.incarnation > held.incarnation:
        held = _started(view, held, member.learner, member.incarnation, since_s)
        return replace(held, first_s=first_s)
    return replace(held, first_s=first_s) if first_s != held.first_s else None


def _started(
    view: RunView, held: LearnerView | None, name: str, incarnation: int, since_s: float
) -> LearnerView:
    """Return a learner at a new incarnation, with what its earlier ones did added up."""
    heartbeat = liveness.first_heartbeat(since_s, view.frame.liveness)
    if held is None or held.pulse is None:
        first_s = None if held is None else held.first_s
        return LearnerView(name, incarnation, since_s, heartbeat, first_s=first_s)
    return replace(
        held,
        incarnation=incarnation,
        heartbeat=heartbeat,
        pulse=None,
        progress=None,
        ended_s=None,
        closed_s=None,
        earlier=held.earlier.and_then(held.pulse),
    )


def _no_newer(pulse: Pulse, held: Pulse) -> bool:
    """Say whether a pulse has been seen; its sender's wall clock may have been set back since."""
    if pulse.alive_s != held.alive_s:
        return pulse.alive_s < held.alive_s
    return pulse.sent_ns == held.sent_ns


def _pulsed(view: RunView, pulse: Pulse, at_s: float) -> LearnerView | None:
    held = view.learners.get(pulse.learner)
    sent_s = min(at_s, pulse.sent_ns / 1e9)
    if held is None or pulse.incarnation > held.incarnation:
        since_s = max(0.0, sent_s - pulse.alive_s)
        held = _started(view, held, pulse.learner, pulse.incarnation, since_s)
    if pulse.incarnation < held.incarnation:
        return None
    if held.pulse is not None and _no_newer(pulse, held.pulse):
        return None
    seen_s = sent_s if held.pulse is None else at_s
    return replace(
        held,
        pulse=pulse,
        heartbeat=(
            liveness.first_heartbeat(seen_s, view.frame.liveness)
            if held.pulse is None
            else liveness.observe(held.heartbeat, seen_s)
        ),
        progress=(
            liveness.StepProgress(pulse.step, seen_s, pulse.step_time_s)
            if held.progress is None
            else liveness.advance(held.progress, pulse.step, seen_s, pulse.step_time_s)
        ),
        ended_s=(held.ended_s or seen_s) if pulse.phase in ENDED else None,
        closed_s=None,
    )


def disconnected(view: RunView, closed_s: Mapping[str, float]) -> RunView:
    """Return the view that knows when connections of learners, by name, were closed.

    One that has pulsed after that has another connection; a pulse takes a moment to arrive.
    """
    closed = {
        name: replace(held, closed_s=at_s)
        for name, at_s in closed_s.items()
        if (held := view.learners.get(name)) is not None
        and at_s >= held.heartbeat.last_s - ON_ITS_WAY_S
    }
    return replace(view, learners={**view.learners, **closed}) if closed else view


def seen_s(now_s: float, stored_ns: int, sequence: int, known_to: int) -> float:
    """Return when a record was there, by the reader's clock, which is at ``now_s``.

    What comes while we watch, beyond ``known_to``, is as old as its arrival: the broker's clock may
    be behind ours, and nothing would ever look new. Of history only the broker can say how old.
    """
    return now_s if sequence > known_to else min(now_s, stored_ns / 1e9)


def peek(view: RunView, commit: Commit, seen_s: float) -> RunView:
    """Return the view that knows of a commit, but counts it only once it is folded in its place.

    ``seen_s`` is when it was there (seconds since the epoch). What came before it may be unknown
    still: a reader fills it in by folding the history.
    """
    newest = view.last_commit_s is None or seen_s >= view.last_commit_s
    view = replace(view, lacking=_lacking(view, commit, seen_s))
    return _known(view, commit, seen_s, newest=newest)


def peek_evaluation(view: RunView, evaluation: Evaluation) -> RunView:
    """Return the view that knows of the newest state's evaluation ahead of those before it."""
    return _judged(view, evaluation)


def _judged(view: RunView, evaluation: Evaluation) -> RunView:
    """Keep the evaluation of the newest state: a slow evaluator may speak after a quick one."""
    if view.judged is not None and _reached(evaluation) <= _reached(view.judged):
        return view
    return replace(view, judged=evaluation)


def _reached(evaluation: Evaluation) -> int:
    """Return how new a state is: versions only grow, so that no clock is needed to tell."""
    return sum(evaluation.versions)


def _known(view: RunView, commit: Commit, seen_s: float, *, newest: bool) -> RunView:
    if commit.version <= view.versions.get(commit.fragment, 0):
        return view
    return replace(
        view,
        accepted=_accepted(view.accepted, commit),
        versions={**view.versions, commit.fragment: commit.version},
        step=max(view.step, commit.step),
        last_commit=commit if newest else view.last_commit,
        last_commit_s=seen_s if newest else view.last_commit_s,
    )


def committed(view: RunView, commit: Commit, seen_s: float) -> RunView:
    """Return the view with a commit in it, which was there at ``seen_s`` (seconds since the epoch).

    The ledger has one order: what is folded in is the newest, whatever its syncer's clock says,
    unless it belongs to a history whose end was seen before.
    """
    if commit.version <= view.counted.get(commit.fragment, 0):
        return view
    newest = not view.counting or view.last_commit_s is None or seen_s >= view.last_commit_s
    began, closed_s = not is_round(commit), commit.closed_ns / 1e9
    ages = [] if began else [c.staleness for c in commit.consumed]
    started = [s for s in (view.started_s, closed_s if began else None) if s is not None]
    return replace(
        _known(view, commit, seen_s, newest=newest),
        counted={**view.counted, commit.fragment: commit.version},
        lacking=_lacking(view, commit, seen_s),
        staleness={**view.staleness, **{c.learner: c.staleness for c in commit.consumed}},
        refused=_counted(view.refused, commit.refused),
        rounds=view.rounds + (not began),
        merged=view.merged + len(ages),
        staleness_sum=view.staleness_sum + sum(ages),
        staleness_max=max([view.staleness_max, *ages]),
        started_s=min(started, default=None),
    )


def _evaluated(view: RunView, evaluation: Evaluation) -> RunView:
    """Return the view with an evaluation in it, once: an evaluator judges no state twice."""
    who, reached = evaluation.evaluator, _reached(evaluation)
    if reached <= view.evaluated.get(who, 0):
        return view
    held = view.evaluations
    if len(held) >= MOST_EVALUATIONS:
        held = held[::2]
    return replace(
        _judged(view, evaluation),
        evaluations=(*held, evaluation),
        evaluated={**view.evaluated, who: reached},
        texts={**view.texts, who: Text(evaluation.text_digest, view.judgements)},
        judgements=view.judgements + 1,
    )


def _accepted(accepted: Mapping[str, int], commit: Commit) -> Mapping[str, int]:
    """Take the largest count over fragments: each counts the same tokens, some a round behind."""
    held = accepted.get
    more = {row.learner: row.tokens for row in commit.progress if row.tokens > held(row.learner, 0)}
    new = {row.learner: 0 for row in commit.progress if row.learner not in accepted}
    return {**accepted, **new, **more} if more or new else accepted


def _counted(
    counts: Mapping[RefusalCause, int], refused: tuple[Refused, ...]
) -> Mapping[RefusalCause, int]:
    """Count refusals by cause."""
    added = dict(counts)
    for entry in refused:
        added[entry.cause] = added.get(entry.cause, 0) + 1
    return added
