"""The messages between services, as plain values.

All classes and enums are generated from proto/skerry/protocol/v1, which says what each field means;
this module adds what follows from them alone. ``skerry.protocol.records`` turns messages into bytes
and back.
"""

from __future__ import annotations

from skerry.algorithm.liveness import Activity
from skerry.errors import WireError
from skerry.protocol.v1.messages import *  # noqa: F403 - the one public name of all of them
from skerry.protocol.v1.messages import (
    Commit,
    CommitOrigin,
    Consumed,
    LearnerPhase,
    RefusalCause,
    SyncerPulse,
)

MOST_LEARNERS = 4096
"""Learners whose contributions a fragment takes: a commit has one row of progress for each."""
MOST_SAMPLE_BYTES = 512
"""Bytes of UTF-8 that ``Evaluation.sample`` may have."""


def activity(phase: LearnerPhase) -> Activity:
    """Return the activity by which a learner in this phase is judged to be alive or not."""
    if phase in {LearnerPhase.STARTING, LearnerPhase.CATCHING_UP}:
        return Activity.WAITING
    return Activity(phase.value)


def is_leaving(pulse: SyncerPulse) -> bool:
    """Return True if this is the last pulse of a syncer that ends in order."""
    return not pulse.host


def is_from_checkpoint(commit: Commit) -> bool:
    """Return True if this commit wrote a checkpoint back: no learner contributed to it."""
    return commit.origin in {CommitOrigin.RESTORED, CommitOrigin.REPLACED}


def begins_history(commit: Commit) -> bool:
    """Return True if a fragment's history in this log begins with this commit, at any version."""
    return commit.origin is CommitOrigin.RESTORED


def is_round(commit: Commit) -> bool:
    """Return True if a round made this commit: initial and restored parameters are no round."""
    return commit.origin is CommitOrigin.ROUND


def counted_tokens(item: Consumed) -> int:
    """Return the tokens of a merged contribution that count: those that its weight is made of."""
    return round(item.tokens * (1.0 - item.uncounted))


def refusals(commit: Commit) -> list[RefusalCause]:
    """Return why contributions were refused; a second offer of initial parameters is no trouble."""
    return [one.cause for one in commit.refused if one.cause is not RefusalCause.GENESIS]


def why(commit: Commit) -> str:
    """Return what made a commit, for people: one word, or where it was restored from."""
    if is_from_checkpoint(commit):
        at = f" at version {commit.source_version}" if commit.source_version else ""
        return f"restored from {commit.source}{at}"
    return (commit.reason or commit.origin).value


def cause_of(error: WireError) -> RefusalCause:
    """Return the cause under which a message that raised ``error`` is refused and counted."""
    return RefusalCause(error.cause)
