"""A learner's side of the protocol: what it believes, answers, adopts and takes back.

A fragment is in one of two conditions. *Idle*: local values have moved from the anchor since
``origin``. *In flight*: the outer gradient was captured at ``captured`` and the answer, a newer
global version, has not been adopted yet. There is never more than one capture in flight, so a
step is contributed once: a round that opens meanwhile waits until the fragment is idle again.

A round may close without our contribution (it came late). It is then still in the log, is merged
by a later commit under the staleness policy, and is not sent again. Under ``rebase`` the captured
progress is away for a round and comes back with that commit, as a delayed gradient. A learner that
did not contribute at all keeps all its progress and sends it to the next round.

A round that is opened again asks whether what was captured for it still lies in the log. If it has
left the log unmerged (the window dropped it, or it was damaged there), it is given up: the anchor
has not moved since, so the next capture contains all of it and its data is counted once.

Every round and manifest comes through ``LearnerDoor`` first: anybody may have written them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from skerry.algorithm import schedule
from skerry.algorithm.fragments import Fragment, LeafSpec
from skerry.protocol.messages import Commit, Round

MOST_AHEAD = 64
"""Versions by which a round may be ahead of the newest manifest and still be kept."""
MOST_MISSED_STARTS = 64
"""Starts of one learner that a reader may miss between two of them that it sees."""


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """How far a learner is: ``step`` on the global clock, the rest of this incarnation.

    ``cursor`` counts the sequences its stream has given since the run began. Of the ``steps``, and
    of their ``tokens``, ``skipped`` steps changed nothing: their loss or gradient was not finite.
    ``routed`` has, by the name of a leaf of units, the tokens that reached each unit: int32
    (units,) of numpy, JAX or torch, which may overflow, and lie on a device until they are claimed.
    """

    step: int
    steps: int
    tokens: int
    cursor: int
    skipped: int = 0
    routed: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)

    def after_step(
        self, tokens: int, cursor: int, routed: Mapping[str, Any] | None = None
    ) -> TrainingProgress:
        """Count a step, on so many tokens, that has been handed to the device."""
        return replace(
            self,
            step=self.step + 1,
            steps=self.steps + 1,
            tokens=self.tokens + tokens,
            cursor=cursor,
            routed=self.routed if routed is None else routed,
        )


@dataclass(frozen=True, slots=True)
class LearnerPolicy:
    """The settings that a learner decides by; ``room`` bounds the fragments in flight."""

    overlap_steps: int
    adoption: Literal["overwrite", "blend", "rebase"]
    schedule: schedule.Schedule
    room: int

    @classmethod
    def of(cls, sync: Any) -> LearnerPolicy:
        """Return the policy of a run by its settings ``sync``."""
        timetable = schedule.Schedule(sync.fragments, sync.h_steps, sync.overlap_steps)
        room = schedule.learner_room(timetable, sync.shards)
        return cls(sync.overlap_steps, sync.adoption, timetable, room)


class AnswerReason(StrEnum):
    """Why a learner answers an open round at a step boundary, or does not."""

    OPEN = "open"
    """Nothing speaks against it: it answers."""
    ANSWERED = "answered"
    CLOSED = "closed"
    """The version that it makes is there already."""
    BEHIND = "behind"
    """The learner must first adopt the version before it."""
    IN_FLIGHT = "in_flight"
    NO_STEPS = "no_steps"
    NO_ROOM = "no_room"
    """No further fragment may be in flight."""


class AdoptReason(StrEnum):
    """Why a learner adopts a version at a step boundary, or does not."""

    DUE = "due"
    """Nothing speaks against it: it adopts."""
    KNOWN = "known"
    OVERLAP = "overlap"
    """It goes on for tau steps after its capture."""


class DoorReason(StrEnum):
    """Why a round or a manifest is not believed, or not yet."""

    NO_SUCH_FRAGMENT = "no_such_fragment"
    BEYOND_THE_END = "beyond_the_end"
    """It is due at a step that the run does not have."""
    EARLY = "early"
    """The version before the one that it makes is not known yet: no refusal, it is kept."""
    TOO_NEW = "too_new"
    """The version that it makes is far ahead of what is known."""
    NOT_OVER = "not_over"
    """It is final, and neither the manifests nor this learner's own steps are at the end."""
    NEVER_COMMITTED = "never_committed"
    """A manifest of a version far from the newest, that the ledger does not bear out."""
    TOO_MANY_STARTS = "too_many_starts"
    """An incarnation whose number is too far above the newest one known."""


def claimed(origin: TrainingProgress, now: TrainingProgress) -> tuple[int, int]:
    """Return the steps between two moments that were not skipped, and their tokens.

    A contribution may claim these: skipped steps add nothing to its weight, although their data
    counts as used. A step that turns out to have been skipped after a capture has claimed it is
    taken off the next claim, which never goes below 0.
    """
    steps = now.steps - origin.steps
    if not steps:
        return 0, 0
    counted = max(0, steps - (now.skipped - origin.skipped))
    return counted, (now.tokens - origin.tokens) * counted // steps


def claimed_by_slice(
    leaves: Sequence[LeafSpec],
    fragment: Fragment,
    tokens: int,
    origin: Mapping[str, Any],
    now: Mapping[str, Any],
) -> tuple[int, ...]:
    """Return how many of the claimed tokens reached each slice, from two moments' ``routed``.

    Empty if all tokens reached all slices. The counts are copied from the device here.
    """
    found: list[int] = []
    counts: dict[int, Any] = {}
    for piece in fragment.slices:
        leaf = leaves[piece.leaf]
        if leaf.name not in now or not leaf.unit:
            found.append(tokens)
            continue
        if piece.leaf not in counts:
            after, before = np.asarray(now[leaf.name], np.int32), origin.get(leaf.name, 0)
            counts[piece.leaf] = after - np.asarray(before, np.int32)
        found.append(min(tokens, max(0, int(counts[piece.leaf][piece.start // leaf.unit]))))
    return () if all(count == tokens for count in found) else tuple(found)


def supersedes(incarnation: int, newest: int) -> bool:
    """Return True if a start with this number can be one after the ``newest`` that is known."""
    return newest < incarnation <= newest + MOST_MISSED_STARTS


@dataclass(frozen=True, slots=True)
class LearnerFragment:
    """Where one fragment stands on this learner; version 0 is before the first adoption.

    ``commit_step`` is the global clock of the adopted version, ``identity`` that of the newest
    contribution, ``short`` the newest round that could not be answered for lack of room,
    ``attempt`` how often the answered round had been opened before when last heard of.
    """

    fragment: int
    origin: TrainingProgress
    version: int = 0
    commit_step: int = 0
    answered: int = 0
    identity: int = 0
    captured: TrainingProgress | None = None
    short: int = 0
    attempt: int = 0

    def may_answer(
        self,
        opened: Round,
        now: TrainingProgress,
        *,
        in_flight: int,
        idle: bool,
        policy: LearnerPolicy,
    ) -> tuple[bool, AnswerReason]:
        """Return whether to capture for this round at this boundary, and why.

        ``in_flight`` counts the other fragments in flight; ``idle`` says that training has ended,
        when even a contribution of no steps is an answer.
        """
        obstacles = (
            (opened.version <= self.answered, AnswerReason.ANSWERED),
            (opened.version <= self.version, AnswerReason.CLOSED),
            (opened.version > self.version + 1, AnswerReason.BEHIND),
            (self.captured is not None, AnswerReason.IN_FLIGHT),
            (now.steps == self.origin.steps and not idle, AnswerReason.NO_STEPS),
            (in_flight >= policy.room, AnswerReason.NO_ROOM),
        )
        reason = next((name for holds, name in obstacles if holds), AnswerReason.OPEN)
        return reason is AnswerReason.OPEN, reason

    def may_adopt(
        self, version: int, now: TrainingProgress, *, idle: bool, policy: LearnerPolicy
    ) -> tuple[bool, AdoptReason]:
        """Return whether to adopt ``version`` at this boundary, and why.

        A learner that contributed goes on for tau steps after its capture (Streaming DiLoCo, arXiv
        2501.18512, on overlapping communication); one that did not adopts at once.
        """
        if version <= self.version:
            return False, AdoptReason.KNOWN
        flying = None if idle else self.captured
        if flying is not None and now.step < flying.step + policy.overlap_steps:
            return False, AdoptReason.OVERLAP
        return True, AdoptReason.DUE

    def must_wait(self, now: TrainingProgress, policy: LearnerPolicy) -> bool:
        """Return True if a blocking mode (tau = 0) holds the learner until this is merged."""
        if policy.overlap_steps:
            return False
        return schedule.due_step(policy.schedule, self.fragment, self.commit_step) <= now.step

    def has_answered(self, opened: Round) -> bool:
        """Return True if a round was answered, and not opened again since: it asks for nothing."""
        return (opened.version, opened.attempt) <= (self.answered, self.attempt)

    def may_be_missing(self, opened: Round) -> bool:
        """Return True if a round asks again for what was captured: it may have left the log."""
        asked_again = opened.version == self.answered and opened.attempt > self.attempt
        return self.captured is not None and asked_again

    def after_capture(
        self, version: int, now: TrainingProgress, *, attempt: int = 0
    ) -> LearnerFragment:
        """Return the state after a capture for the round towards ``version``."""
        identity = self.identity + 1
        return replace(self, captured=now, answered=version, identity=identity, attempt=attempt)

    def after_giving_up(self) -> LearnerFragment:
        """Return the state after a capture that no commit will merge: its round is open again.

        ``origin`` is still that of the capture, so the next one contains it.
        """
        return replace(self, captured=None, answered=min(self.answered, self.version))

    def after_never_sent(self, identity: int) -> LearnerFragment:
        """Return the state after a capture that could not leave: its identity is free again.

        Identities count what was sent to the log; a gap would look like a dropped contribution.
        A capture that was made since is on its way, and stays.
        """
        if self.identity != identity:
            return self
        return replace(self.after_giving_up(), identity=identity - 1)

    def after_adoption(
        self, version: int, commit_step: int, now: TrainingProgress, policy: LearnerPolicy
    ) -> LearnerFragment:
        """Return the state after an adoption; the next contribution starts at its ``origin``.

        That is now if local progress is gone (overwrite), else the capture, or the old ``origin``.
        """
        origin = now if policy.adoption == "overwrite" or not self.version else self.captured
        return replace(
            self,
            version=version,
            commit_step=commit_step,
            origin=origin or self.origin,
            captured=None,
        )

    def after_reset(self, now: TrainingProgress) -> LearnerFragment:
        """Return the state after local progress was dropped; a capture stays in flight."""
        held = replace(now, step=self.captured.step) if self.captured else None
        return replace(self, origin=now, captured=held)

    def has_lapsed(self, version: int) -> bool:
        """Return True if adopting ``version`` means that a round went by for lack of room."""
        return self.answered < self.short <= version


@dataclass(slots=True)
class LearnerDoor:
    """Decides which rounds and manifests a learner believes, and counts what it refuses.

    A round makes the version after the newest that a manifest has announced. One that is ahead of
    that is kept, since rounds and manifests travel apart, and comes in once a manifest bears it
    out; so does a final one, once the run is at its end. ``steps`` are those of the run.
    """

    fragments: int
    steps: int
    clock: int = 0
    over: bool = False
    versions: dict[int, int] = field(default_factory=dict[int, int])
    refused: Counter[DoorReason] = field(default_factory=Counter[DoorReason])
    _open: dict[int, Round] = field(default_factory=dict[int, "Round"])
    _early: dict[int, Round] = field(default_factory=dict[int, "Round"])

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The newest believable round of every fragment, by fragment."""
        return tuple(self._open[fragment] for fragment in sorted(self._open))

    def take_round(self, opened: Round) -> DoorReason | None:
        """Let a round in, or return why it is not believed, or not yet."""
        reason = self._check_round(opened)
        if reason is None:
            held = self._open.get(opened.fragment)
            if held is None or held.version <= opened.version:
                self._open[opened.fragment] = opened
            return None
        if reason in {DoorReason.EARLY, DoorReason.NOT_OVER}:
            self._early[opened.fragment] = opened
        if reason is not DoorReason.EARLY:
            self.refused[reason] += 1
        return reason

    def take_manifest(self, commit: Commit) -> DoorReason | None:
        """Let a manifest in, with the rounds that it bears out, or return why not."""
        if not 0 <= commit.fragment < self.fragments:
            self.refused[DoorReason.NO_SUCH_FRAGMENT] += 1
            return DoorReason.NO_SUCH_FRAGMENT
        self.versions[commit.fragment] = commit.version
        self.clock = max(self.clock, commit.step)
        self.over = self.over or commit.final or self.clock >= self.steps
        held = self._open.get(commit.fragment)
        if held is not None and held.version > commit.version + 1:
            del self._open[commit.fragment]
        self._look_again()
        return None

    def end(self) -> None:
        """Believe final rounds from now on: this learner has come to the run's end itself."""
        self.over = True
        self._look_again()

    def _look_again(self) -> None:
        for fragment, opened in list(self._early.items()):
            if self._check_round(opened) is None:
                del self._early[fragment]
                self.take_round(opened)

    def _check_round(self, opened: Round) -> DoorReason | None:
        if not 0 <= opened.fragment < self.fragments:
            return DoorReason.NO_SUCH_FRAGMENT
        if opened.due_step > max(self.steps, self.clock):
            return DoorReason.BEYOND_THE_END
        known = self.versions.get(opened.fragment, 0)
        if opened.version > known + 1:
            far = known and opened.version > known + MOST_AHEAD
            return DoorReason.TOO_NEW if far else DoorReason.EARLY
        return DoorReason.NOT_OVER if opened.final and not self.over else None


@dataclass(frozen=True, slots=True)
class MissingCheck:
    """A contribution whose round, towards ``round_version``, was opened again."""

    learner: str
    incarnation: int
    fragment: int
    identity: int
    round_version: int
