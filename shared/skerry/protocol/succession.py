"""Which syncer serves which shard: each syncer decides for itself, by what it has heard.

There is no vote and no leader. A syncer says a few times per lease which shards it holds; one that
has not been heard for a lease counts as gone, and what none holds is free. Who takes a free shard
and who gives one away follows from the same rule everywhere: every living syncer has its share,
and shares differ by at most one. Where two have heard different things, both may try, and the
fence lets one of them in: that, a compare-and-set in the log, is what keeps a shard safe. The lease
is a hint about when it is worth trying, in the sense of C. Gray, D. Cheriton, "Leases", SOSP 1989.

A syncer hears itself, too. While it does, it would hear the others; a gap (its process was stopped,
its link was cut, the broker was away) says nothing about them, so it waits for a lease again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

PULSES_PER_LEASE = 4
"""Times per lease that a syncer says what it holds."""
DEAF_LEASES = 0.5
"""A syncer that has not heard itself for this part of a lease may have missed others."""
SETTLED_LEASES = 1.25
"""Leases after which a newcomer may be given shards: it has listened for one by then."""
OVERDUE_LEASES = 2.0
"""A shard that is free for this long may go to any syncer: its designated one does not come."""
LEAST_WAIT_S = 0.001
"""The shortest wait: after a shorter one, left by rounding, the clock might not have moved."""
FORGET_LEASES = 20.0
"""Leases of silence after which a syncer is forgotten altogether."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How many shards there are, and how long a silent syncer keeps its own."""

    shards: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class OtherSyncer:
    """Another syncer's process as heard: since when, last, how often, and the shards it claims.

    ``claims`` maps a shard to the fence token by which the syncer holds it.
    """

    name: str
    instance: str
    first_s: float
    heard_s: float
    pulses: int
    claims: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Fence:
    """The newest fence of a shard, and when it was first seen here.

    ``found``: it was there before this process began to listen.
    """

    token: int
    holder: str
    seen_s: float
    found: bool


@dataclass(frozen=True, slots=True)
class View:
    """All that one syncer has heard; all times by its own clock, in seconds.

    ``holds`` are its own shards with their tokens, ``claimed_s`` says when each shard was last
    claimed by anybody, ``echo_s`` when it last heard itself and ``listening_s`` since when it has
    done so without a gap.
    """

    name: str
    instance: str
    peers: Mapping[str, OtherSyncer] = field(default_factory=dict[str, OtherSyncer])
    fences: Mapping[int, Fence] = field(default_factory=dict[int, Fence])
    holds: Mapping[int, int] = field(default_factory=dict[int, int])
    claimed_s: Mapping[int, float] = field(default_factory=dict[int, float])
    echo_s: float | None = None
    listening_s: float | None = None


class SuccessionReason(StrEnum):
    """Why a syncer takes shards, hands some over, or does neither."""

    FREE = "free"
    """It takes its share of what no living syncer holds, or what has been free for too long."""
    ABOVE_SHARE = "above_share"
    """It hands over what is above its share to syncers that are below theirs."""
    WATCHING = "watching"
    """A shard may be free, but it has not listened for a lease yet."""
    SERVED = "served"
    """Every shard has an owner, and shares differ by at most one."""


class Moves(NamedTuple):
    """Shards to take now, and shards to hand over as soon as their commit in hand is done."""

    take: tuple[int, ...] = ()
    hand_over: tuple[int, ...] = ()


def heard(
    view: View, now: float, policy: Policy, name: str, instance: str, claims: Mapping[int, int]
) -> View:
    """Fold in one pulse of a syncer, this one's own included."""
    claimed = dict.fromkeys(_valid(view, claims), now)
    view = replace(view, claimed_s={**view.claimed_s, **claimed})
    if instance == view.instance:
        deaf = view.echo_s is None or now - view.echo_s > DEAF_LEASES * policy.lease_s
        return replace(view, echo_s=now, listening_s=now if deaf else view.listening_s)
    before = view.peers.get(instance)
    if before is None or now - before.heard_s >= policy.lease_s:
        before = OtherSyncer(name, instance, now, now, 0, {})
    elif before.claims and not claims:
        # It let go of all it had: it leaves, or must settle again before it is dealt anything.
        before = replace(before, first_s=now)
    peer = replace(before, heard_s=now, pulses=before.pulses + 1, claims=dict(claims))
    oldest = now - FORGET_LEASES * policy.lease_s
    kept = {key: known for key, known in view.peers.items() if known.heard_s >= oldest}
    return replace(view, peers={**kept, instance: peer})


def fenced(
    view: View, now: float, shard: int, token: int, holder: str, *, found: bool = False
) -> View:
    """Fold in the newest fence of a shard; one that is known already changes nothing."""
    known = view.fences.get(shard)
    if known is not None and known.token >= token:
        return view
    return replace(view, fences={**view.fences, shard: Fence(token, holder, now, found)})


def unfenced(view: View, shard: int) -> View:
    """Forget the fence of a shard that the log does not hold any more, and the claims by it.

    Its state was purged or replaced: what the log holds now has another fence, with any token, or
    none, and a claim by the lost one says nothing.
    """
    peers = {
        key: replace(peer, claims={s: t for s, t in peer.claims.items() if s != shard})
        for key, peer in view.peers.items()
    }
    return replace(
        view,
        peers=peers,
        fences={s: fence for s, fence in view.fences.items() if s != shard},
        holds={s: token for s, token in view.holds.items() if s != shard},
        claimed_s={s: at_s for s, at_s in view.claimed_s.items() if s != shard},
    )


def decide(now: float, view: View, policy: Policy) -> tuple[Moves, SuccessionReason]:
    """Return which shards this syncer should take and which it should hand over, and why."""
    living, mine = _living(now, view, policy), sorted(_valid(view, view.holds))
    claims = {peer.instance: _valid(view, peer.claims) for peer in living}
    loads = {(view.name, view.instance): len(mine)}
    for peer in living:
        if claims[peer.instance] or now - peer.first_s >= SETTLED_LEASES * policy.lease_s:
            loads[peer.name, peer.instance] = len(claims[peer.instance])
    # Syncers that hold the most keep one more, if shards do not divide evenly.
    least, more = divmod(policy.shards, len(loads))
    order = sorted(loads, key=lambda key: (-loads[key], key))
    shares = {key: least + (rank < more) for rank, key in enumerate(order)}
    unclaimed = sorted({*range(policy.shards)}.difference(mine, *claims.values()))
    free = [s for s in unclaimed if _free(now, view, policy, s)]
    take = _assigned(view.instance, free, loads, shares)
    take += [s for s in free if s not in take and _overdue(now, view, policy, s)]
    if take:
        return Moves(take=tuple(sorted(take))), SuccessionReason.FREE
    above = len(mine) - shares[view.name, view.instance]
    if above > 0:
        return Moves(hand_over=tuple(mine[-above:])), SuccessionReason.ABOVE_SHARE
    return Moves(), SuccessionReason.WATCHING if unclaimed else SuccessionReason.SERVED


def next_wake_s(now: float, view: View, policy: Policy) -> float:
    """Return after how many seconds time alone could change the decision; at most a lease."""
    lease = policy.lease_s
    times = [now + lease]
    for peer in view.peers.values():
        times += [peer.heard_s + lease, peer.first_s + SETTLED_LEASES * lease]
    starts = [fence.seen_s for fence in view.fences.values()]
    starts += [*view.claimed_s.values(), view.listening_s or 0.0]
    times += [start + leases * lease for start in starts for leases in (1.0, OVERDUE_LEASES)]
    return max(LEAST_WAIT_S, min(t - now for t in times if t > now))


def _valid(view: View, claims: Mapping[int, int]) -> list[int]:
    """Return the shards whose claims rest on the newest fence; an overtaken syncer's do not."""
    return [s for s, t in claims.items() if s not in view.fences or t >= view.fences[s].token]


def _living(now: float, view: View, policy: Policy) -> list[OtherSyncer]:
    """Return the others that were heard within a lease.

    The newest pulse of an earlier process of this name lies in the log when this one begins; only
    one that goes on pulsing lives beside it.
    """
    return [
        peer
        for peer in view.peers.values()
        if now - peer.heard_s < policy.lease_s and (peer.name != view.name or peer.pulses > 1)
    ]


def _assigned(
    instance: str,
    free: Sequence[int],
    loads: Mapping[tuple[str, str], int],
    shares: Mapping[tuple[str, str], int],
) -> list[int]:
    """Return the free shards that are this syncer's, as every other one would deal them out."""
    left, mine = list(free), list[int]()
    for key in shares:
        room = max(0, shares[key] - loads[key])
        dealt, left = left[:room], left[room:]
        mine += dealt if key[1] == instance else []
    return mine


def _free(now: float, view: View, policy: Policy, shard: int) -> bool:
    """Return True if a shard that no living syncer claims may be taken."""
    fence = view.fences.get(shard)
    if fence is None or (fence.found and fence.holder == view.name):
        return True
    since = _listening_s(now, view, policy)
    return since is not None and now - max(since, fence.seen_s) >= policy.lease_s


def _overdue(now: float, view: View, policy: Policy, shard: int) -> bool:
    fence, since = view.fences.get(shard), _listening_s(now, view, policy)
    if fence is None or since is None:
        return False
    since = max(since, fence.seen_s, view.claimed_s.get(shard, since))
    return now - since >= OVERDUE_LEASES * policy.lease_s


def _listening_s(now: float, view: View, policy: Policy) -> float | None:
    """Return since when this syncer hears all that is said; None while it does not."""
    if view.echo_s is None or now - view.echo_s > DEAF_LEASES * policy.lease_s:
        return None
    return view.listening_s
