"""A run as a reader of its log sees it: one fold over pulses and ledger records.

A view takes messages in any order between streams and in order within each, again or not: what it
has seen already changes nothing. ``skerry.status.report`` turns a view into rows.

A reader that starts on a long history need not fold all of it before it can say how the run is
going: it may ``peek`` at each fragment's newest commit, and at the newest evaluation, first, and
fold the history afterwards.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING

from skerry.algorithm import liveness
from skerry.algorithm.goodput import Spent
from skerry.protocol.messages import (
    CheckpointRecord,
    Commit,
    Evaluation,
    LearnerPhase,
    MemberRecord,
    Pulse,
    Quarantine,
    QuarantineReason,
    RefusalCause,
    RunRecord,
    RunState,
    is_round,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.settings.models import RunConfig

Message = Pulse | Commit | MemberRecord | CheckpointRecord | Evaluation | RunRecord | Quarantine

ENDED = frozenset({LearnerPhase.FINISHED, LearnerPhase.STOPPED})
MOST_EVALUATIONS = 512
"""Above this many a view keeps every second one: old ones thin out, the curve keeps its shape."""
MOST_QUARANTINED = 1000
"""Most learners kept in quarantine, since names come from the log."""
RECENT_EVALUATIONS = 32
"""The newest ones stay: an evaluator that is not among these has ended."""
ON_ITS_WAY_S = 1.0
"""A pulse may arrive this long after its sender's connection has ended."""
SUMMED = (
    *("tokens", "steps", "contributions"),
    *("bytes_up", "bytes_down", "f32_bytes_up", "f32_bytes_down", "cached_bytes"),
)
"""What a pulse counts of its incarnation, and a view of all of them."""


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


@dataclass(slots=True)
class LearnerView:
    """One learner by name, at its newest incarnation; times in seconds since the epoch.

    ``joined_s`` is when the time allocated to it began: its first start of which the view knows
    what became of it. ``ended_s`` is when it had finished or stopped, ``closed_s`` when it lost its
    connection without a pulse since. ``first_s`` is when the log had the first start of that name,
    None before it was read. ``member`` is the newest record of its start.
    ``earlier`` are the SUMMED of earlier incarnations, ``earlier_spent``
    their time.
    """

    name: str
    incarnation: int
    joined_s: float
    heartbeat: liveness.Heartbeat
    first_s: float | None = None
    earlier: Counter[str] = field(default_factory=Counter[str])
    earlier_spent: Spent = field(default_factory=Spent)
    pulse: Pulse | None = None
    progress: liveness.StepProgress | None = None
    ended_s: float | None = None
    closed_s: float | None = None
    member: MemberRecord | None = None

    @property
    def counts(self) -> Counter[str]:
        """The SUMMED of all incarnations."""
        pulse = self.pulse
        if pulse is None:
            return self.earlier
        return self.earlier + Counter({name: getattr(pulse, name) for name in SUMMED})

    @property
    def spent(self) -> Spent:
        """What the time of all incarnations has gone into."""
        return self.earlier_spent + (Spent() if self.pulse is None else spent_in(self.pulse))


@dataclass(slots=True)
class Evaluations:
    """Evaluations ``kept`` in the order of the ledger, thinned out; the best ones stay.

    ``reached`` says how far each evaluator's have been seen. ``newest`` is that of the newest
    state, which may be known before those that led to it.
    """

    kept: list[Evaluation] = field(default_factory=list[Evaluation])
    reached: dict[str, int] = field(default_factory=dict[str, int])
    newest: Evaluation | None = None

    @property
    def incomplete(self) -> bool:
        """Whether some that are known to be there are still to come."""
        if self.newest is None:
            return False
        return _reached(self.newest) > max(self.reached.values(), default=0)

    def peek(self, evaluation: Evaluation) -> None:
        """Note the newest state's evaluation: a slow evaluator may report after a quick one."""
        if self.newest is None or _reached(evaluation) > _reached(self.newest):
            self.newest = evaluation

    def add(self, evaluation: Evaluation) -> None:
        """Keep an evaluation, once: an evaluator judges no state twice."""
        reached = _reached(evaluation)
        if reached <= self.reached.get(evaluation.evaluator, 0):
            return
        self.peek(evaluation)
        self.reached[evaluation.evaluator] = reached
        if len(self.kept) >= MOST_EVALUATIONS:
            best = self._best()
            old, recent = self.kept[:-RECENT_EVALUATIONS], self.kept[-RECENT_EVALUATIONS:]
            kept = (one for n, one in enumerate(old) if n % 2 == 0 or one in best)
            self.kept = [*kept, *recent]
        self.kept.append(evaluation)

    def _best(self) -> list[Evaluation]:
        """Return the evaluation with the least loss on each text that was read recently."""
        best = dict[int, Evaluation]()
        texts = {one.text_digest for one in self.kept[-RECENT_EVALUATIONS:]}
        for one in self.kept:
            held, counts = best.get(one.text_digest), one.text_digest in texts
            if counts and isfinite(one.loss) and (held is None or one.loss < held.loss):
                best[one.text_digest] = one
        return list(best.values())


@dataclass(slots=True)
class RunView:
    """The whole run: learners by name, the newest version per fragment, and sums over commits.

    ``counted`` is the version of each fragment up to which its commits are in the sums (rounds,
    merged, staleness, refused, started): behind ``versions`` while a history is being read.
    ``skipped``: commits between those in the sums were left out; ``rounds`` alone counts them.
    ``accepted`` counts the tokens that commits have merged from a learner, all its incarnations
    together; ``staleness`` is that of its newest merged contribution. ``last_commit_s`` is when the
    newest commit was seen to be there, by the reader's clock. ``lacking`` says, for each fragment
    that the newest checkpoint does not hold whole, since when it lacks commits. A newer checkpoint
    that still lacks some does not move that time. ``quarantined`` are learners of whom nothing is
    merged, and why.
    """

    run: str
    fragments: int
    config: RunConfig
    learners: dict[str, LearnerView] = field(default_factory=dict[str, LearnerView])
    accepted: dict[str, int] = field(default_factory=dict[str, int])
    staleness: dict[str, int] = field(default_factory=dict[str, int])
    versions: dict[int, int] = field(default_factory=dict[int, int])
    counted: dict[int, int] = field(default_factory=dict[int, int])
    skipped: bool = False
    refused: Counter[RefusalCause] = field(default_factory=Counter[RefusalCause])
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
    lacking: dict[int, float] = field(default_factory=dict[int, float])
    quarantined: dict[str, QuarantineReason] = field(default_factory=dict[str, QuarantineReason])
    evaluations: Evaluations = field(default_factory=Evaluations)
    finished: bool = False
    liveness: liveness.LivenessPolicy = field(init=False)

    def __post_init__(self) -> None:
        self.liveness = liveness.LivenessPolicy(
            **self.config.liveness.model_dump(), blocking=not self.config.sync.overlap_steps
        )

    @property
    def counting(self) -> bool:
        """Whether the sums still lack commits that are known to be there."""
        return any(self.counted.get(f, 0) < version for f, version in self.versions.items())

    def steps_by_learner(self) -> dict[str, int]:
        """Return the steps that each learner's pulses have reported."""
        return {name: held.counts["steps"] for name, held in self.learners.items()}

    def take(self, message: Message, at_s: float) -> None:
        """Fold in a message, which was there at ``at_s`` (seconds since the epoch).

        Silence is judged by that alone, never by a sender's clock.
        """
        match message:
            case Pulse():
                self._pulsed(message, at_s)
            case MemberRecord():
                self._joined(message, at_s)
            case Commit():
                self._committed(message, at_s)
            case CheckpointRecord():
                self._checkpointed(message)
            case Evaluation():
                self.evaluations.add(message)
            case Quarantine():
                self.quarantined.pop(message.learner, None)
                if not message.released and len(self.quarantined) < MOST_QUARANTINED:
                    self.quarantined[message.learner] = message.reason
            case RunRecord():
                self.created_s = message.created_ns / 1e9
                self.finished |= message.state is RunState.FINISHED

    def peek(self, message: Commit | Evaluation, seen_s: float) -> None:
        """Take note of the newest of its kind, and count it only once it is folded in its place.

        ``seen_s`` is when it was there (seconds since the epoch). What came before it may be
        unknown still: a reader fills it in by folding the history.
        """
        if isinstance(message, Evaluation):
            self.evaluations.peek(message)
        else:
            newest = self.last_commit_s is None or seen_s >= self.last_commit_s
            self._know(message, seen_s, newest=newest)

    def disconnected(self, closed_s: Mapping[str, float]) -> None:
        """Take note of when connections of learners, by name, were closed.

        One that has pulsed after that has another connection; a pulse takes a moment to arrive.
        """
        for name, at_s in closed_s.items():
            held = self.learners.get(name)
            if held is not None and at_s >= held.heartbeat.last_s - ON_ITS_WAY_S:
                held.closed_s = at_s

    def _joined(self, member: MemberRecord, at_s: float) -> None:
        if member.incarnation == 0:
            return  # a place that a restored run keeps for a name: none has come yet
        held = self.learners.get(member.learner)
        if held is None or member.incarnation > held.incarnation:
            held = self._start(member.learner, member.incarnation, at_s)
        if member.incarnation == held.incarnation:
            held.member = member
        held.first_s = at_s if held.first_s is None else min(at_s, held.first_s)

    def _start(self, name: str, incarnation: int, since_s: float) -> LearnerView:
        """Return a learner at a new incarnation, with what its earlier ones did added up."""
        heartbeat = liveness.joined_heartbeat(since_s, self.liveness)
        held = self.learners.get(name)
        first_s = None if held is None else held.first_s
        if held is None or held.pulse is None:
            new = LearnerView(name, incarnation, since_s, heartbeat, first_s)
        else:
            sums = held.counts, held.spent
            new = LearnerView(name, incarnation, held.joined_s, heartbeat, first_s, *sums)
        self.learners[name] = new
        return new

    def _pulsed(self, pulse: Pulse, at_s: float) -> None:
        held = self.learners.get(pulse.learner)
        if held is None or pulse.incarnation > held.incarnation:
            since_s = max(0.0, at_s - pulse.alive_s)
            held = self._start(pulse.learner, pulse.incarnation, since_s)
        elif pulse.incarnation < held.incarnation or _is_known(pulse, held.pulse):
            return
        if held.pulse is None or held.progress is None:
            held.heartbeat = liveness.first_heartbeat(at_s, self.liveness)
            held.progress = liveness.StepProgress(pulse.step, at_s, pulse.step_time_s)
        else:
            held.heartbeat = liveness.observe(held.heartbeat, at_s)
            held.progress = liveness.advance(held.progress, pulse.step, at_s, pulse.step_time_s)
        held.pulse, held.closed_s = pulse, None
        held.ended_s = (held.ended_s or at_s) if pulse.phase in ENDED else None

    def _checkpointed(self, written: CheckpointRecord) -> None:
        """Keep the checkpoint with the most commits: clocks jump, and a slow writer comes late."""
        held = self.checkpoint
        if held is None or written.ledger_sequence >= held.ledger_sequence:
            self.checkpoint = written
            for fragment in [f for f in self.lacking if self.versions[f] <= held_in(written, f)]:
                del self.lacking[fragment]

    def _committed(self, commit: Commit, seen_s: float) -> None:
        """Fold in a commit that was there at ``seen_s``.

        The ledger has one order: what is folded in is the newest, whatever its syncer's clock says,
        unless it belongs to a history whose end was seen before.
        """
        counted = self.counted.get(commit.fragment)
        if counted is not None and commit.version <= counted:
            return
        newest = not self.counting or self.last_commit_s is None or seen_s >= self.last_commit_s
        self._know(commit, seen_s, newest=newest)
        self.counted[commit.fragment] = commit.version
        self.refused.update(entry.cause for entry in commit.refused)
        self.staleness.update((c.learner, c.staleness) for c in commit.consumed)
        if not is_round(commit):
            began_s = commit.closed_ns / 1e9
            self.started_s = began_s if self.started_s is None else min(self.started_s, began_s)
            return
        ages = [c.staleness for c in commit.consumed]
        passed = 1 if counted is None else commit.version - counted
        self.rounds += passed
        self.skipped |= passed > 1
        self.merged += len(ages)
        self.staleness_sum += sum(ages)
        self.staleness_max = max([self.staleness_max, *ages])

    def _know(self, commit: Commit, seen_s: float, *, newest: bool) -> None:
        """Note a commit's version, and its progress table, which counts all tokens up to it."""
        fragment = commit.fragment
        if commit.version > held_in(self.checkpoint, fragment):
            self.lacking[fragment] = min(seen_s, self.lacking.get(fragment, seen_s))
        if commit.version <= self.versions.get(fragment, 0):
            return
        for row in commit.progress:  # some fragments are a round behind
            self.accepted[row.learner] = max(row.tokens, self.accepted.get(row.learner, 0))
        self.versions[fragment] = commit.version
        self.step = max(self.step, commit.step)
        if newest:
            self.last_commit, self.last_commit_s = commit, seen_s


def _is_known(pulse: Pulse, held: Pulse | None) -> bool:
    """Return True if a pulse was seen; its sender's wall clock may have been set back since."""
    if held is None:
        return False
    if pulse.alive_s != held.alive_s:
        return pulse.alive_s < held.alive_s
    return pulse.sent_ns == held.sent_ns


def _reached(evaluation: Evaluation) -> int:
    """Return how new a state is: versions only grow, so that no clock is needed to tell."""
    return sum(evaluation.versions)


def held_in(checkpoint: CheckpointRecord | None, fragment: int) -> int:
    """Return a fragment's version in a checkpoint, 0 where there is none."""
    held = () if checkpoint is None else checkpoint.versions
    return held[fragment] if fragment < len(held) else 0
