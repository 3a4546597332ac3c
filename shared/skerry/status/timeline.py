"""The recent rounds: what the log says of each, and when learners were seen to have adopted it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite

from skerry.protocol.messages import (
    CloseReason,
    Commit,
    Pulse,
    RefusalCause,
    Round,
    counted_tokens,
    is_round,
    refusals,
    why,
)
from skerry.status import recent

MOST_ROUNDS = 160
AHEAD_S, WRITTEN_S = 1.0, 60.0
"""How far a syncer's clock may be ahead of the broker's, and how long, beside its merge, a round
may have closed before the broker has its record."""

Key = tuple[int, int]
"""Fragment and version."""


@dataclass(slots=True)
class CommittedRound:
    """One committed round; times in seconds since the epoch, ``loss`` in nats per token.

    ``stored_s`` is when the broker had its ledger record. ``arrived_s`` are seconds from opening to
    each contribution, where the syncer noted them. ``merged`` is False for initial and restored
    parameters, which no learner was asked for. ``adopted`` counts the learners whose pulses have
    shown this version or a newer one; ``adopted_s`` is when the last of those did that were there
    when the round was stored: a learner that starts later has not kept it waiting. It is None if no
    learner was seen to, as for rounds that were adopted before the monitor started again.
    """

    fragment: int
    version: int
    sequence: int
    step: int
    reason: str
    closed_by: CloseReason | None
    final: bool
    opened_s: float
    quorum_s: float
    grace_s: float
    closed_s: float
    stored_s: float
    learners: tuple[str, ...]
    arrived_s: tuple[float, ...]
    causes: tuple[RefusalCause, ...]
    refused: int
    staleness: int
    tokens: int
    loss: float | None
    trace_id: str
    merged: bool = True
    adopted: int = 0
    adopted_s: float | None = None


def corrected(commit: Commit, stored_ns: int, since_ns: int) -> Commit:
    """Return the commit with times that can be right.

    A syncer's clock may say that a round closed before the run was created (``since_ns``), after
    the broker had its record (``stored_ns``), or longer before that than merging and writing take.
    Such rounds would stretch the curves over decades, or lie an hour back while the clock is off.
    All times of a round are moved by the same amount.
    """
    earliest_ns = stored_ns - int((WRITTEN_S + min(max(commit.merge_s, 0.0), WRITTEN_S)) * 1e9)
    earliest_ns = max(earliest_ns, min(since_ns, stored_ns))
    latest_ns = stored_ns + int(AHEAD_S * 1e9)
    off_ns = min(max(commit.closed_ns, earliest_ns), latest_ns) - commit.closed_ns
    if not off_ns:
        return commit
    return replace(
        commit,
        opened_ns=max(0, commit.opened_ns + off_ns),
        closed_ns=commit.closed_ns + off_ns,
        consumed=tuple(
            replace(c, arrived_ns=max(1, c.arrived_ns + off_ns)) if c.arrived_ns else c
            for c in commit.consumed
        ),
    )


def committed_round(commit: Commit, sequence: int, stored_s: float) -> CommittedRound:
    """Return a commit as a row of the timeline."""
    counted = [(c.loss, counted_tokens(c)) for c in commit.consumed]
    losses = [(loss, tokens) for loss, tokens in counted if isfinite(loss) and tokens]
    weight = sum(tokens for _, tokens in losses)
    return CommittedRound(
        fragment=commit.fragment,
        version=commit.version,
        sequence=sequence,
        step=commit.step,
        reason=why(commit),
        closed_by=commit.reason,
        final=commit.final,
        opened_s=commit.opened_ns / 1e9,
        quorum_s=commit.quorum_s,
        grace_s=commit.grace_s,
        closed_s=commit.closed_ns / 1e9,
        stored_s=stored_s,
        learners=tuple(c.learner for c in commit.consumed),
        arrived_s=arrivals(commit),
        causes=tuple(refused.cause for refused in commit.refused),
        refused=len(refusals(commit)),
        staleness=max((c.staleness for c in commit.consumed), default=0),
        tokens=sum(tokens for _, tokens in counted),
        loss=sum(loss * tokens for loss, tokens in losses) / weight if weight else None,
        trace_id=commit.trace_id,
        merged=is_round(commit),
    )


def arrivals(commit: Commit) -> tuple[float, ...]:
    """Return seconds from the opening to each contribution, in order; those before it count as 0.

    Empty for a commit of a release that did not note them.
    """
    noted = [c.arrived_ns for c in commit.consumed if c.arrived_ns]
    return tuple(sorted(max(0.0, (at_ns - commit.opened_ns) / 1e9) for at_ns in noted))


@dataclass(slots=True)
class Timeline:
    """The newest rounds by fragment and version, and those in the air.

    ``reported`` are the versions that each learner's last pulse named, ``held`` the highest that
    any of its pulses did: one that starts again names 0 first. ``ahead`` is the highest of
    everybody's.
    """

    most: int = MOST_ROUNDS
    rounds: dict[Key, CommittedRound] = field(default_factory=dict[Key, CommittedRound])
    open: dict[int, Round] = field(default_factory=dict[int, "Round"])
    newest: dict[int, CommittedRound] = field(default_factory=dict[int, CommittedRound])
    reported: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    held: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    ahead: dict[int, int] = field(default_factory=dict[int, int])

    def committed(self, row: CommittedRound) -> None:
        """Take in the next commit of a fragment."""
        fragment, version = row.fragment, row.version
        if self.ahead.get(fragment, 0) >= version:  # pulses came before the ledger
            row.adopted = sum(
                fragment < len(held) and held[fragment] >= version for held in self.held.values()
            )
        self.newest[fragment] = self.rounds[fragment, version] = row
        if fragment in self.open and self.open[fragment].version <= version:
            del self.open[fragment]
        while len(self.rounds) > self.most:
            del self.rounds[next(iter(self.rounds))]

    def opened(self, record: Round) -> None:
        """Take in a round that was opened, opened again, or reported again."""
        newest = self.newest.get(record.fragment)
        if newest is None or record.version > newest.version:
            self.open[record.fragment] = record

    def pulsed(self, pulse: Pulse, now_s: float) -> None:
        """Note which versions a learner says it has adopted that it had never held before."""
        if pulse.versions == self.reported.get(pulse.learner):
            return
        self.reported[pulse.learner] = pulse.versions
        highest = self.held.setdefault(pulse.learner, [])
        highest.extend([0] * (len(pulse.versions) - len(highest)))
        began_s = now_s - pulse.alive_s
        for fragment, version in enumerate(pulse.versions):
            held = highest[fragment]
            if version <= held:
                continue
            highest[fragment] = version
            self.ahead[fragment] = max(version, self.ahead.get(fragment, 0))
            # Ten thousand of these a second, of 200 learners and 50 rounds a second: in place.
            for seen in range(max(held, version - self.most) + 1, version + 1):
                row = self.rounds.get((fragment, seen))
                if row is not None:
                    row.adopted += 1
                    if row.stored_s >= began_s:
                        row.adopted_s = now_s

    def interval_s(self) -> float | None:
        """Return the mean seconds between recent commits, None for fewer than three of them.

        By the broker's clock, which is one: those of syncers may differ, or be set meanwhile.
        """
        return recent.interval_s(row.stored_s for row in self.rounds.values() if row.merged)
