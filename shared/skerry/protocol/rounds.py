"""When an open round closes: quorum, and an adaptive grace window on top of it.

Source: Decoupled DiLoCo (arXiv 2604.21428), on the syncer's minimum quorum and adaptive grace
window. In its ablation K = 1 alone costs quality and K = M costs goodput; K = 1 with the grace
window costs neither. How long that window may be is ours: see ``grace_s``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from skerry.protocol.messages import CloseReason

OFF_BY = 4.0
"""How many times its deviation a contribution may be late and still be waited for."""


class Decision(StrEnum):
    """What becomes of an open round now."""

    WAIT = "wait"
    CLOSE = "close"
    REOPEN = "reopen"


class OpenReason(StrEnum):
    """Why a round stays open, or is opened again."""

    QUORUM = "quorum"
    """It waits for its K-th contribution."""
    GRACE = "grace"
    """It waits for more than K, in its grace window."""
    FINAL = "final"
    """A final round waits for every learner: training is over, so that is free."""
    NOBODY_CAME = "nobody_came"
    """It was open for a timeout without any contribution."""


@dataclass(frozen=True, slots=True)
class RoundPolicy:
    """K, gamma, tau, for how many steps a round may live, and how long without its quorum.

    ``room_steps``: a round that lives for longer holds up the next (``schedule.room_steps``).
    """

    quorum: int
    grace_gamma: float
    overlap_steps: int
    room_steps: float
    round_timeout_s: float


@dataclass(frozen=True, slots=True)
class Timings:
    """Exponential moving averages in seconds; None until measured.

    ``step_s``: one training step of a learner. ``quorum_s``: from opening a round to its K-th
    contribution. ``sync_s``: from closing a round to its commit being readable. ``behind_s``: from
    the K-th contribution to each later one, in time or late; ``behind_off_s``: by how much that
    is off its average.
    """

    step_s: float | None = None
    quorum_s: float | None = None
    sync_s: float | None = None
    behind_s: float | None = None
    behind_off_s: float | None = None


@dataclass(frozen=True, slots=True)
class RoundView:
    """One open round, as the syncer sees it; all times on one clock, in seconds.

    ``arrived`` maps a learner to the time its contribution was complete, ``expected`` holds the
    learners that are alive and have not refused. ``short_since_s`` is since when fewer than K
    learners have been alive, None while there are enough. A ``final`` round comes after training.
    """

    opened_s: float
    arrived: Mapping[str, float]
    expected: frozenset[str]
    short_since_s: float | None = None
    final: bool = False


def ema(old: float | None, new: float, factor: float) -> float:
    """Return the moving average ``old + factor * (new - old)``; the first value as it is."""
    return new if old is None else old + factor * (new - old)


def measured(timings: Timings, factor: float, **seconds: float | None) -> Timings:
    """Return the timings with what was measured folded in, by the names of their fields."""
    known = {name: new for name, new in seconds.items() if new is not None}
    return replace(timings, **{n: ema(getattr(timings, n), v, factor) for n, v in known.items()})


def measured_behind(
    timings: Timings, factor: float, behind_s: float, policy: RoundPolicy
) -> Timings:
    """Return the timings with one more contribution behind the K-th folded in.

    One that comes too late to be waited for says nothing about how long to wait; it lets the
    timings fade, so that no learner is waited for because it was in time once. The first one is
    taken to be off by half of itself, as a first round trip is in RFC 6298.
    """
    if behind_s > most_grace_s(policy, timings):
        if timings.behind_s is None:
            return timings
        return measured(timings, factor, behind_s=0.0, behind_off_s=0.0)
    if timings.behind_s is None:
        return replace(timings, behind_s=behind_s, behind_off_s=behind_s / 2)
    off_s = abs(behind_s - timings.behind_s)
    return measured(timings, factor, behind_s=behind_s, behind_off_s=off_s)


def measured_arrivals(
    timings: Timings, factor: float, arrivals: Iterable[float], policy: RoundPolicy
) -> Timings:
    """Return the timings with a round's contributions after the K-th folded in, in their order.

    ``arrivals`` are times in seconds; if there are fewer than K, nothing is folded in.
    """
    times = sorted(arrivals)
    for at_s in times[policy.quorum :]:
        timings = measured_behind(timings, factor, at_s - times[policy.quorum - 1], policy)
    return timings


def patience_s(timings: Timings) -> float:
    """Return the seconds after the K-th contribution within which nearly all the others come.

    That is the average plus four deviations, as RFC 6298 waits for an acknowledgement, and at least
    one step, since learners answer at their next step boundary.
    """
    usual_s = (timings.behind_s or 0.0) + OFF_BY * (timings.behind_off_s or 0.0)
    return max(timings.step_s or 0.0, usual_s)


def most_grace_s(policy: RoundPolicy, timings: Timings) -> float:
    """Return the most seconds that a round may wait beyond its quorum.

    ``gamma * (room * step - (quorum + sync))``. Decoupled DiLoCo (arXiv 2604.21428) has tau for the
    room: the steps after which a learner needs the result. Ours never stops for it, so what a round
    costs by living longer begins where it holds up the rounds after it. What comes after it has
    closed is merged H steps later, with the fragment's next round: a slow link, or a busy machine,
    is a reason to wait, not to close (experiment ``lateness``). So one step is waited for even
    where it does hold up others: without it all but the first would miss every round.
    """
    if timings.step_s is None or not policy.overlap_steps or not policy.grace_gamma:
        return 0.0
    spent = (timings.quorum_s or 0.0) + (timings.sync_s or 0.0)
    slack = policy.room_steps * timings.step_s - spent
    return min(max(policy.grace_gamma * slack, timings.step_s), policy.round_timeout_s)


def grace_s(policy: RoundPolicy, timings: Timings) -> float:
    """Return how long a round waits beyond its quorum, in seconds.

    Nearly all contributions come within that time. It is at most ``most_grace_s``: 0 where learners
    stop for a round (tau = 0), where gamma is 0, or before a step is measured; quorum and sync
    times that are not measured yet count as nothing.
    """
    return min(patience_s(timings), most_grace_s(policy, timings))


WITHOUT_QUORUM = frozenset({CloseReason.SHORT_HANDED, CloseReason.TIMEOUT, CloseReason.FINAL_EMPTY})
"""Why a round closed that never had its K-th contribution, and so no time until its quorum."""


def decide(
    now: float, view: RoundView, policy: RoundPolicy, timings: Timings
) -> tuple[Decision, CloseReason | OpenReason]:
    """Return what becomes of a round now, and why: a CloseReason exactly where it closes.

    ============ ================ ==================================================================
    CLOSE        ALL_ARRIVED      at least K contributed, and so did every expected learner
    CLOSE        GRACE_OVER       K contributed, and the grace window after the K-th has passed
    CLOSE        SHORT_HANDED     fewer than K are alive, for a timeout now, and all of them are in;
                                  a final round does not wait for that timeout
    CLOSE        TIMEOUT          open for a timeout with at least one contribution
    CLOSE        FINAL_EMPTY      a final round without any contribution: there is nothing to merge
    REOPEN       NOBODY_CAME      open for a timeout without any contribution
    WAIT         QUORUM, GRACE    before and after the K-th contribution
    WAIT         FINAL            a final round waits for everyone; training is over, so it is free
    ============ ================ ==================================================================

    K is a minimum, but not one that may stop a run for ever: where learners have gone for good,
    the rest would wait for them in every round. The first round pays one timeout, and from then on
    (``short_since_s`` is older than a timeout) a round closes once all living learners are in.
    """
    closes = _close_reason(now, view, policy, timings)
    if closes is not None:
        return Decision.CLOSE, closes
    if not view.final and len(view.arrived) >= policy.quorum:
        return Decision.WAIT, OpenReason.GRACE
    if now < view.opened_s + policy.round_timeout_s:
        return Decision.WAIT, OpenReason.FINAL if view.final else OpenReason.QUORUM
    return Decision.REOPEN, OpenReason.NOBODY_CAME


def _close_reason(
    now: float, view: RoundView, policy: RoundPolicy, timings: Timings
) -> CloseReason | None:
    """Return why a round closes now, None if it does not."""
    count, missing = len(view.arrived), view.expected - view.arrived.keys()
    enough = count >= (1 if view.final else policy.quorum)
    if enough and not missing:
        full = count >= policy.quorum
        return CloseReason.ALL_ARRIVED if full else CloseReason.SHORT_HANDED
    if enough and not view.final:
        over = now >= _grace_end_s(view, policy, timings)
        return CloseReason.GRACE_OVER if over else None
    if count and not missing and now >= _short_end_s(view, policy):
        return CloseReason.SHORT_HANDED
    if now < view.opened_s + policy.round_timeout_s:
        return None
    if count:
        return CloseReason.TIMEOUT
    return CloseReason.FINAL_EMPTY if view.final else None


def next_wake_s(now: float, view: RoundView, policy: RoundPolicy, timings: Timings) -> float:
    """Return after how many seconds time alone changes the decision; 0 unless it is to wait.

    Until then only an event can: a contribution, or a learner that comes or goes.
    """
    decision, reason = decide(now, view, policy, timings)
    if decision is not Decision.WAIT:
        return 0.0
    if reason is OpenReason.GRACE:
        return _grace_end_s(view, policy, timings) - now
    ends = [view.opened_s + policy.round_timeout_s]
    if view.arrived and view.expected <= view.arrived.keys():
        ends.append(_short_end_s(view, policy))
    return min(ends) - now


def short_since_s(
    now: float, before: float | None, alive: int, policy: RoundPolicy
) -> float | None:
    """Return since when fewer than K learners are alive, given what was so before; None: enough.

    With none alive the time does not begin: before a run's learners have compiled none is missed,
    and the first of them to train must not go on at once without the others.
    """
    if alive >= policy.quorum:
        return None
    return before if before is not None or not alive else now


def quorum_at_s(view: RoundView, quorum: int) -> float | None:
    """Return when the K-th contribution arrived, None if it has not."""
    times = sorted(view.arrived.values())
    return times[quorum - 1] if len(times) >= quorum else None


def _grace_end_s(view: RoundView, policy: RoundPolicy, timings: Timings) -> float:
    reached = quorum_at_s(view, policy.quorum)
    return math.inf if reached is None else reached + grace_s(policy, timings)


def _short_end_s(view: RoundView, policy: RoundPolicy) -> float:
    since = view.short_since_s
    return math.inf if since is None else since + policy.round_timeout_s
