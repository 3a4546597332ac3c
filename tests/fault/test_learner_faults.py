"""Learners that freeze or are killed: the others go on, nothing is lost, nothing counts twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.protocol.messages import CloseReason, Commit, Consumed, ContributionKind, MemberRecord
from skerry.protocol.records import decode
from skerry.protocol.subjects import Subjects
from tests.support.builders import until
from tests.support.cluster import Cluster, Service, until_commit
from tests.support.history import History, Key, settle
from tests.support.nats_server import NatsServer

pytestmark = [pytest.mark.nats, pytest.mark.fault, pytest.mark.drill, pytest.mark.timeout(180)]

FAILING = Path(__file__).parent / "failing_service.py"
FREEZES_AT = 12
KILLS = 3
SEED = 7


def from_a(commit: Commit) -> list[Consumed]:
    return [c for c in commit.consumed if c.learner == "a"]


async def until_frozen(service: Service) -> None:
    """Return once every thread of the process has stopped; fails if it ended instead."""
    options = os.WSTOPPED | os.WEXITED | os.WNOWAIT
    async with asyncio.timeout(60):
        found = await asyncio.to_thread(os.waitid, os.P_PID, service.process.pid, options)
    assert found is not None
    assert found.si_code == os.CLD_STOPPED, service.said[-2000:]


async def until_left_behind(bus: NatsBus, run: str) -> dict[int, int]:
    """Return the versions at which the syncer has stopped to expect ``a``.

    Only a round in which nobody else is expected closes with ``all_arrived`` for ``b`` alone.
    """
    held = {f: c.version for f, c in (await ledger.last_commits(bus, run)).items()}

    def alone(commit: Commit) -> bool:
        names = {c.learner for c in commit.consumed}
        late = commit.version > held[commit.fragment] + 3
        return late and names == {"b"} and commit.reason is CloseReason.ALL_ARRIVED

    await until_commit(bus, run, alone)
    return {f: c.version for f, c in (await ledger.last_commits(bus, run)).items()}


async def until_back(bus: NatsBus, run: str, versions: dict[int, int]) -> None:
    """Return once each fragment has merged what ``a`` learnt from state newer than that."""
    for fragment, version in versions.items():

        def back(commit: Commit, fragment: int = fragment, version: int = version) -> bool:
            newer = any(row.base_version > version for row in from_a(commit))
            return commit.fragment == fragment and newer

        await until_commit(bus, run, back)


async def freeze_then_resume(
    server: NatsServer, run: str, folder: Path, config: Path, cache: Path
) -> tuple[History, list[Key]]:
    """Freeze ``a`` in the middle of sending until it counts as gone; return what it sent late."""
    async with NatsBus(server.url, name="test") as bus:
        async with Cluster(server.url, run, folder, config, cache) as cluster:
            await cluster.start("syncer", "s")
            await cluster.start("learner", "b")
            arguments = (server.url, run, "a", "learner", str(config), "SIGSTOP")
            where = (r"\.contrib\.\d+\.", str(FREEZES_AT), "before")
            frozen = await cluster.start_script("a", FAILING, *arguments, *where)
            await until_frozen(frozen)
            frozen_ns = time.time_ns()
            stream = Subjects(run).shard(0).stream("CONTRIB")
            (before,) = [s.last_seq for s in await bus.streams() if s.name == stream]
            versions = await until_left_behind(bus, run)
            frozen.resume()
            await until_back(bus, run, versions)
        history = await settle(bus, run)
    late = [
        key
        for key, c in history.contributions.items()
        if c.header.learner == "a"
        and c.header.captured_ns < frozen_ns
        and c.sequence_first > before
    ]
    return history, late


def with_staleness(config: Path, bound: int) -> Path:
    """Let contributions be ``bound`` versions behind and still count in full."""
    changed = f"[sync]\nmax_staleness = {bound}\nstaleness_discount = 1.0\n"
    config.write_text(config.read_text().replace("[sync]\n", changed))
    return config


async def test_what_a_frozen_learner_sends_late_is_merged_as_stale(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, tiny_config: Path, jax_cache: Path
) -> None:
    config = with_staleness(tiny_config, 100_000)
    history, late = await freeze_then_resume(shared_nats, run_id, tmp_path, config, jax_cache)
    assert history.violations == ()
    assert late, "the fault did not fire"
    staleness = {
        (commit.fragment, row.learner, row.incarnation, row.identity): row.staleness
        for commit in history.commits
        for row in commit.consumed
    }
    assert min(staleness[key] for key in late) > 0


async def test_what_a_frozen_learner_sends_too_late_is_refused_and_counted(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, tiny_config: Path, jax_cache: Path
) -> None:
    config = with_staleness(tiny_config, 1)
    history, late = await freeze_then_resume(shared_nats, run_id, tmp_path, config, jax_cache)
    assert history.violations == ()
    assert late, "the fault did not fire"
    for fragment in {key[0] for key in late}:
        mine = [c for c in history.commits if c.fragment == fragment]
        refused = [(r.cause, r.learner) for c in mine for r in c.refused]
        assert ("too_stale", "a") in refused


async def settled(bus: NatsBus, run: str, incarnation: int = 0) -> list[MemberRecord]:
    """Return what every start of ``a`` said of where it went on; waits for that incarnation."""
    found: list[MemberRecord] = []
    subject = Subjects(run).member("a")
    newest = await bus.last(subject)
    members = bus.follow(subject)
    async with asyncio.timeout(60), aclosing(members):
        async for record in members:
            member = decode(MemberRecord, record.payload, run=run)
            found += [member] if member.inner else []
            if incarnation and member.inner and member.incarnation >= incarnation:
                break
            if not incarnation and newest and record.sequence >= newest.sequence:
                break
    return found


def assert_exact(history: History, members: list[MemberRecord]) -> None:
    """Show that each incarnation goes on in its data exactly where the log knew those before.

    Within one, what a fragment contributes starts where its contribution before ended.
    """
    headers = [c.header for c in history.contributions.values() if c.header.learner == "a"]
    told = [h for h in headers if h.kind is ContributionKind.OUTER_GRADIENT]
    for member in members:
        earlier = [h.cursor_to for h in told if h.incarnation < member.incarnation]
        assert member.cursor == max(earlier, default=0), f"incarnation {member.incarnation}"
        mine = [h for h in told if h.incarnation == member.incarnation]
        for fragment in {h.fragment for h in mine}:
            parts = sorted((h for h in mine if h.fragment == fragment), key=lambda h: h.identity)
            starts = [member.cursor, *(h.cursor_to for h in parts[:-1])]
            assert [h.cursor_from for h in parts] == starts


def assert_counted_once(history: History) -> None:
    """Show that the log has counted exactly the tokens that it has merged."""
    for fragment in {c.fragment for c in history.commits}:
        mine = [c for c in history.commits if c.fragment == fragment]
        merged = sum(row.tokens for c in mine for row in from_a(c))
        (counted,) = [row.tokens for row in mine[-1].progress if row.learner == "a"]
        assert counted == merged


async def test_learner_killed_at_random_moments_leaves_a_whole_history(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, tiny_config: Path, jax_cache: Path
) -> None:
    rng = random.Random(SEED)
    async with NatsBus(shared_nats.url, name="test") as bus:
        async with Cluster(shared_nats.url, run_id, tmp_path, tiny_config, jax_cache) as cluster:
            await cluster.start("syncer", "s")
            await cluster.start("learner", "b")
            for incarnation in range(1, KILLS + 1):
                victim = await cluster.start("learner", "a")
                await until_merged(bus, run_id, incarnation, rng.randint(2, 8))
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                victim.kill9()
                assert await victim.ended() == -signal.SIGKILL, "the fault did not fire"
            await cluster.start("learner", "a")
            await until_merged(bus, run_id, KILLS + 1, 4)
        history = await settle(bus, run_id)
        members = await settled(bus, run_id)
    assert history.violations == ()
    assert [m.incarnation for m in members] == list(range(1, KILLS + 2))
    assert_exact(history, members)
    assert_counted_once(history)


async def test_restarted_learner_is_warm_only_with_its_own_undamaged_state_of_this_machine(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, tiny_config: Path, jax_cache: Path
) -> None:
    """One run, five starts: what each finds on disk decides how its inner optimizer begins."""
    often = ("--set", "learner.save_every_s=0.05")
    kept = tmp_path / "learners" / run_id / "a" / "inner.state"
    async with NatsBus(shared_nats.url, name="test") as bus:
        async with Cluster(shared_nats.url, run_id, tmp_path, tiny_config, jax_cache) as cluster:

            async def start(incarnation: int, *sets: str) -> tuple[Service, MemberRecord]:
                service = await cluster.start("learner", "a", *often, *sets)
                return service, (await settled(bus, run_id, incarnation))[-1]

            async def kill(service: Service) -> None:
                service.kill9()
                assert await service.ended() == -signal.SIGKILL, "the fault did not fire"

            await cluster.start("syncer", "s")
            first, new = await start(1)
            await until_merged(bus, run_id, 1, 3)
            await until(kept.exists)
            await kill(first)
            second, warm = await start(2)
            await until_merged(bus, run_id, 2, 2)
            await kill(second)
            kept.write_bytes(kept.read_bytes()[:-1] + b"?")
            third, damaged = await start(3)
            assert "inner_state_unreadable" in third.said
            await kill(third)
            fourth, elsewhere = await start(4, "--set", f'learner.path="{tmp_path / "else"}"')
            await kill(fourth)
            kept.unlink()
            fifth, deleted = await start(5)
            await kill(fifth)
        history = await settle(bus, run_id)
        members = await settled(bus, run_id)
    ways = [m.inner for m in (new, warm, damaged, elsewhere, deleted)]
    assert ways == ["new", "warm", "cold", "cold", "cold"]
    assert 0 <= warm.inner_age_steps <= 1000
    assert warm.cursor > 0
    assert history.violations == ()
    assert_exact(history, members)
    assert_counted_once(history)


async def until_merged(bus: NatsBus, run: str, incarnation: int, identity: int) -> None:
    """Return once the log has merged that contribution of ``a``, or a later one."""
    await until_commit(
        bus,
        run,
        lambda c: any((r.incarnation, r.identity) >= (incarnation, identity) for r in from_a(c)),
    )
