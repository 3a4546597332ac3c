"""Succession: every shard finds one owner, shares are even, and nothing moves without a reason."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.protocol import succession
from skerry.protocol.succession import (
    Moves,
    Policy,
    SuccessionReason,
    View,
    decide,
    fenced,
    heard,
    next_wake_s,
    unfenced,
)

LEASE_S = 2.0
TICK_S = 0.1
PULSE_S = LEASE_S / succession.PULSES_PER_LEASE


@dataclass
class Syncer:
    """One process: it pulses, hears after ``delay_s``, and takes by compare-and-set."""

    name: str
    instance: str
    policy: Policy
    fences: dict[int, tuple[int, str]]
    began_s: float
    phase: int
    view: View = field(init=False)
    deaf: bool = False
    handed: int = 0

    def __post_init__(self) -> None:
        self.view = View(self.name, self.instance)
        for shard, (token, holder) in self.fences.items():
            self.view = fenced(self.view, self.began_s, shard, token, holder, found=True)

    def decide(self, now: float) -> None:
        held = {s: t for s, t in self.view.holds.items() if self.fences[s][0] == t}
        self.view = replace(self.view, holds=held)
        moves, _ = decide(now, self.view, self.policy)
        for shard in moves.hand_over:
            held.pop(shard)
            self.handed += 1
        for shard in moves.take:
            known = self.view.fences.get(shard)
            token, _ = self.fences.get(shard, (0, ""))
            if (known.token if known else 0) == token:
                newest = max((t for t, _ in self.fences.values()), default=0) + 1
                self.fences[shard] = (newest, self.name)
                held[shard] = newest
        self.view = replace(self.view, holds=held)


@dataclass
class World:
    """Syncers around one log; pulses take ``delay_s`` to everybody."""

    shards: int
    delay_s: float = 0.0
    ticks: int = 0
    fences: dict[int, tuple[int, str]] = field(default_factory=dict)
    living: list[Syncer] = field(default_factory=list)
    sent: list[tuple[float, str, str, dict[int, int]]] = field(default_factory=list)

    @property
    def now(self) -> float:
        return self.ticks * TICK_S

    def start(self, name: str, instance: str = "") -> Syncer:
        policy, phase = Policy(self.shards, LEASE_S), len(self.living)
        syncer = Syncer(name, instance or name, policy, self.fences, self.now, phase)
        self.living.append(syncer)
        return syncer

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.ticks += 1
            self._pulse()
            self._deliver()
            for syncer in self.living:
                syncer.decide(self.now)

    def _pulse(self) -> None:
        every = round(PULSE_S / TICK_S)
        for syncer in self.living:
            if (self.ticks + syncer.phase) % every == 0 and not syncer.deaf:
                claims = dict(syncer.view.holds)
                self.sent.append((self.now, syncer.name, syncer.instance, claims))

    def _deliver(self) -> None:
        due = [pulse for pulse in self.sent if pulse[0] + self.delay_s <= self.now]
        self.sent = [pulse for pulse in self.sent if pulse not in due]
        for syncer in self.living:
            if syncer.deaf:
                continue
            for shard, (token, holder) in self.fences.items():
                syncer.view = fenced(syncer.view, self.now, shard, token, holder)
            for _, name, instance, claims in due:
                syncer.view = heard(syncer.view, self.now, syncer.policy, name, instance, claims)

    def owners(self) -> dict[int, list[str]]:
        owned: dict[int, list[str]] = {shard: [] for shard in range(self.shards)}
        for syncer in self.living:
            for shard, token in syncer.view.holds.items():
                if self.fences[shard][0] == token:
                    owned[shard].append(syncer.instance)
        return owned

    def loads(self) -> list[int]:
        owners = [owner for (owner,) in self.owners().values()]
        return sorted(owners.count(s.instance) for s in self.living)


def test_lone_syncer_of_a_new_run_takes_everything_at_once() -> None:
    view = View("a", "a1")
    assert decide(0.0, view, Policy(3, LEASE_S)) == (Moves(take=(0, 1, 2)), SuccessionReason.FREE)


def test_restarted_process_does_not_wait_for_its_own_old_pulse() -> None:
    view = fenced(View("a", "a2"), 0.0, 0, 7, "a", found=True)
    view = heard(view, 0.0, Policy(1, LEASE_S), "a", "a1", {0: 7})
    assert decide(0.0, view, Policy(1, LEASE_S))[0] == Moves(take=(0,))


@pytest.mark.parametrize(("leaver", "other"), [("a", "b"), ("b", "a")])
def test_farewell_leaves_its_shards_to_the_others_whatever_its_name(
    leaver: str, other: str
) -> None:
    world = World(1)
    leaving = world.start(leaver)
    world.run(5)
    world.start(other)
    world.run(20)
    assert world.owners() == {0: [leaver]}
    world.living.remove(leaving)
    world.sent.append((world.now, leaver, leaver, {}))
    world.run(2 * TICK_S)
    assert world.owners() == {0: [other]}


def test_dead_owner_is_succeeded_after_its_lease_and_not_before() -> None:
    world = World(1)
    owner = world.start("a")
    world.start("b")
    world.run(10)
    world.living.remove(owner)
    world.run(LEASE_S - PULSE_S - TICK_S)
    assert world.owners() == {0: []}
    world.run(PULSE_S + 3 * TICK_S)
    assert world.owners() == {0: ["b"]}


def test_newcomer_does_not_take_what_it_has_not_listened_to_for_a_lease() -> None:
    world = World(1)
    world.fences[0] = (3, "somebody")
    world.start("b")
    world.run(LEASE_S - TICK_S)
    assert world.owners() == {0: []}
    world.run(2 * PULSE_S)
    assert world.owners() == {0: ["b"]}


def test_nobody_takes_a_shard_because_the_pulses_were_lost_for_a_while() -> None:
    world = World(2)
    for name in "abc":
        world.start(name)
    world.run(20)
    before = dict(world.fences)
    for outage_s in (1.0, 3.0, 30.0):
        for syncer in world.living:
            syncer.deaf = True
        world.run(outage_s)
        for syncer in world.living:
            syncer.deaf = False
        world.run(20)
    assert world.fences == before


def test_syncer_that_was_cut_off_takes_nothing_when_it_is_back() -> None:
    world = World(1)
    world.start("a")
    cut = world.start("b")
    world.run(10)
    cut.deaf = True
    world.run(10)
    cut.deaf = False
    world.run(10)
    assert world.fences[0] == (1, "a")


def test_claim_by_an_overtaken_fence_counts_for_nothing() -> None:
    policy = Policy(1, LEASE_S)
    view = fenced(View("b", "b1"), 0.0, 0, 9, "b")
    view = heard(replace(view, holds={0: 9}), 1.0, policy, "a zombie", "z1", {0: 3})
    assert decide(1.0, view, policy) == (Moves(), SuccessionReason.SERVED)


def test_shard_whose_fence_the_log_has_lost_is_begun_again_by_whatever_fence_comes() -> None:
    policy = Policy(1, LEASE_S)
    view = fenced(View("a", "a1"), 0.0, 0, 90, "b")
    view = heard(view, 0.0, policy, "b", "b1", {0: 90})
    assert decide(0.1, view, policy)[0] == Moves()
    assert fenced(view, 0.1, 0, 2, "b") == view, "an older one alone says nothing"
    view = unfenced(view, 0)
    assert decide(0.1, view, policy)[0] == Moves(take=(0,))
    view = fenced(view, 0.2, 0, 2, "b")
    view = heard(view, 0.2, policy, "b", "b1", {0: 2})
    assert decide(0.2, view, policy) == (Moves(), SuccessionReason.SERVED)


def test_newcomer_is_given_its_share_once_it_has_settled() -> None:
    world = World(4)
    first = world.start("a")
    world.run(5)
    world.start("b")
    world.run(LEASE_S)
    assert world.loads() == [0, 4]
    world.run(LEASE_S)
    assert world.loads() == [2, 2]
    assert first.handed == 2


def test_shard_that_its_new_owner_does_not_fetch_goes_to_whoever_is_left() -> None:
    """A syncer may live and yet not be able to serve: its share is not kept free for ever."""
    world = World(1)
    owner = world.start("m")
    unable = world.start("a")
    able = world.start("z")
    world.run(10)
    world.living.remove(owner)
    unable.decide = lambda now: None  # type: ignore[method-assign] # it does nothing
    world.run(LEASE_S * (1 + succession.OVERDUE_LEASES) + 1)
    assert world.owners() == {0: [able.instance]}


def test_twin_of_the_same_name_takes_over_once_and_both_come_to_rest() -> None:
    world = World(1)
    world.start("a", "a1")
    world.run(5)
    world.start("a", "a2")
    world.run(3)
    settled = world.fences[0]
    world.run(30)
    assert world.fences[0] == settled
    assert world.owners() == {0: ["a2"]}


def test_next_wake_is_when_a_silent_owner_counts_as_gone() -> None:
    policy = Policy(1, LEASE_S)
    view = fenced(View("b", "b1"), 0.0, 0, 1, "a")
    view = heard(view, 10.0, policy, "a", "a1", {0: 1})
    assert next_wake_s(10.5, view, policy) == pytest.approx(1.5)


@settings(max_examples=60)
@given(
    shards=st.integers(1, 9),
    syncers=st.integers(1, 5),
    delay_s=st.sampled_from([0.0, 0.1, 0.3]),
    gaps_s=st.lists(st.floats(0, 6), min_size=5, max_size=5),
    kills=st.lists(st.tuples(st.floats(0, 8), st.integers(0, 4)), max_size=3),
)
def test_stable_set_converges_to_one_owner_each_and_even_shares(
    shards: int,
    syncers: int,
    delay_s: float,
    gaps_s: list[float],
    kills: list[tuple[float, int]],
) -> None:
    world = World(shards, delay_s)
    for number in range(syncers):
        world.start(f"s{number}")
        world.run(gaps_s[number])
    for gap_s, victim in kills:
        world.run(gap_s)
        if len(world.living) > 1:
            world.living.pop(victim % len(world.living))
    world.run(8 * LEASE_S)
    assert all(len(owners) == 1 for owners in world.owners().values())
    assert max(world.loads()) - min(world.loads()) <= 1
    before = dict(world.fences)
    world.run(10 * LEASE_S)
    assert world.fences == before


@settings(max_examples=40)
@given(shards=st.integers(1, 6), syncers=st.integers(2, 5), victim=st.integers(0, 4))
def test_shards_of_a_dead_one_are_all_taken_within_a_lease(
    shards: int, syncers: int, victim: int
) -> None:
    world = World(shards)
    for number in range(syncers):
        world.start(f"s{number}")
    world.run(8 * LEASE_S)
    world.living.pop(victim % syncers)
    world.run(LEASE_S + 3 * TICK_S)
    assert all(len(owners) == 1 for owners in world.owners().values())
