"""What a learner may do with one fragment at a step boundary: pure rules over a small state.

A fragment is in one of two conditions. *Idle*: local values have moved from the anchor since
``origin``. *In flight*: the outer gradient was captured at ``captured`` and the answer, a newer
global version, has not been adopted yet. There is never more than one capture in flight, so a
step is contributed once: a round that opens meanwhile waits until the fragment is idle again.

A round may close without our contribution (it came late). It is then still in the log, is merged
by a later commit under the staleness policy, and is not sent again. Under ``rebase`` the learner
adopts ``global + (local - captured)`` all the same: its captured progress is away for a round and
comes back with the commit that merges it, as a delayed gradient. Keeping it locally instead would
need one more vector for each fragment of a learner that is always late. A learner that did not
contribute at all keeps all its progress (rebase from the anchor) and sends it to the next round.

A round that is opened again asks whether what was captured for it still lies in the log. If it has
left the log unmerged (the window dropped it, or it was damaged there), it is given up: the anchor
has not moved since, so the next capture contains all of it and its data is counted once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from skerry.algorithm import schedule
from skerry.protocol.messages import Round
from skerry.settings.models import SyncConfig


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a learner is: ``step`` on the global clock, the rest of this incarnation.

    ``cursor`` counts the sequences its stream has given since the run began. Of the ``steps``, and
    of their ``tokens``, ``skipped`` steps changed nothing: their loss or gradient was not finite.
    """

    step: int
    steps: int
    tokens: int
    cursor: int
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that the rules need; ``room`` bounds the fragments in flight."""

    overlap_steps: int
    adoption: Literal["overwrite", "blend", "rebase"]
    schedule: schedule.Schedule
    room: int

    @classmethod
    def of(cls, sync: SyncConfig) -> Policy:
        beat = schedule.Schedule(sync.fragments, sync.h_steps, sync.overlap_steps)
        room = schedule.learner_room(beat, sync.shards)
        return cls(sync.overlap_steps, sync.adoption, beat, room)


@dataclass(frozen=True, slots=True)
class FragmentSync:
    """Where one fragment stands on this learner; version 0 is before the first adoption.

    ``commit_step`` is the global clock of the adopted version, ``identity`` that of the newest
    contribution, ``short`` the newest round that could not be answered for lack of room,
    ``attempt`` how often the answered round had been opened before when last heard of.
    """

    fragment: int
    origin: Progress
    version: int = 0
    commit_step: int = 0
    answered: int = 0
    identity: int = 0
    captured: Progress | None = None
    short: int = 0
    attempt: int = 0


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
    """As many fragments are in flight as may be."""


class AdoptReason(StrEnum):
    """Why a learner adopts a version at a step boundary, or does not."""

    DUE = "due"
    """Nothing speaks against it: it adopts."""
    KNOWN = "known"
    OVERLAP = "overlap"
    """It goes on for tau steps after its capture."""


def taken(origin: Progress, now: Progress) -> tuple[int, int]:
    """Return the steps between two moments that were not skipped, and their tokens.

    It is what a contribution may claim: its weight is that of what was learnt, while its data
    counts as used all the same. A step that is found to have been skipped only after a capture has
    claimed it is taken off the next claim, which never goes below nothing.
    """
    steps = now.steps - origin.steps
    if not steps:
        return 0, 0
    counted = max(0, steps - (now.skipped - origin.skipped))
    return counted, (now.tokens - origin.tokens) * counted // steps


def may_answer(
    state: FragmentSync, opened: Round, now: Progress, *, in_flight: int, idle: bool, policy: Policy
) -> tuple[bool, AnswerReason]:
    """Return whether to capture for this round at this boundary, and why.

    ``in_flight`` counts the other fragments in flight; ``idle`` says that training has ended, when
    even a contribution of no steps is an answer.
    """
    obstacles = (
        (opened.version <= state.answered, AnswerReason.ANSWERED),
        (opened.version <= state.version, AnswerReason.CLOSED),
        (opened.version > state.version + 1, AnswerReason.BEHIND),
        (state.captured is not None, AnswerReason.IN_FLIGHT),
        (now.steps == state.origin.steps and not idle, AnswerReason.NO_STEPS),
        (in_flight >= policy.room, AnswerReason.NO_ROOM),
    )
    reason = next((name for holds, name in obstacles if holds), AnswerReason.OPEN)
    return reason is AnswerReason.OPEN, reason


def may_adopt(
    state: FragmentSync, version: int, now: Progress, *, idle: bool, policy: Policy
) -> tuple[bool, AdoptReason]:
    """Return whether to adopt ``version`` at this boundary, and why.

    A learner that contributed goes on for tau steps after its capture (Streaming DiLoCo, arXiv
    2501.18512, on overlapping communication); one that did not adopts at once.
    """
    if version <= state.version:
        return False, AdoptReason.KNOWN
    flying = None if idle else state.captured
    if flying is not None and now.step < flying.step + policy.overlap_steps:
        return False, AdoptReason.OVERLAP
    return True, AdoptReason.DUE


def must_wait(state: FragmentSync, now: Progress, policy: Policy) -> bool:
    """Tell whether a blocking mode (tau = 0) holds the learner until this fragment is merged."""
    if policy.overlap_steps:
        return False
    return schedule.due_step(policy.schedule, state.fragment, state.commit_step) <= now.step


def is_old(state: FragmentSync, opened: Round) -> bool:
    """Tell whether a round was answered, and not opened again since: it asks for nothing."""
    return (opened.version, opened.attempt) <= (state.answered, state.attempt)


def in_doubt(state: FragmentSync, opened: Round) -> bool:
    """Tell whether a round asks again for what was captured for it: is it still in the log?"""
    asked_again = opened.version == state.answered and opened.attempt > state.attempt
    return state.captured is not None and asked_again


def captured(state: FragmentSync, version: int, now: Progress, *, attempt: int = 0) -> FragmentSync:
    """Return the state after a capture for the round towards ``version``."""
    identity = state.identity + 1
    return replace(state, captured=now, answered=version, identity=identity, attempt=attempt)


def given_up(state: FragmentSync) -> FragmentSync:
    """Return the state after a capture that nobody will merge: its round may be answered again.

    ``origin`` is still that of the capture, so the next one contains it.
    """
    return replace(state, captured=None, answered=min(state.answered, state.version))


def never_sent(state: FragmentSync, identity: int) -> FragmentSync:
    """Return the state after a capture that could not leave: its identity is free again.

    Identities count what the log was sent; a gap in them would read as a contribution dropped. One
    that was made since is on its way, and stays.
    """
    if state.identity != identity:
        return state
    return replace(given_up(state), identity=identity - 1)


def adopted(
    state: FragmentSync, version: int, commit_step: int, now: Progress, policy: Policy
) -> FragmentSync:
    """Return the state after an adoption; the next contribution starts at its ``origin``.

    overwrite: what was local is gone, so now. rebase, blend: at the capture, or where it was.
    """
    origin = now if policy.adoption == "overwrite" or not state.version else state.captured
    return replace(
        state,
        version=version,
        commit_step=commit_step,
        origin=origin or state.origin,
        captured=None,
    )


def lapsed(state: FragmentSync, version: int) -> bool:
    """Tell whether adopting ``version`` means that a round went by for lack of room."""
    return state.answered < state.short <= version
