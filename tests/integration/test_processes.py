"""Learners on meshes as real processes: two with four devices each, and one with eight."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.protocol.messages import Commit, RunState
from tests.support.builders import wait_until
from tests.support.cluster import Cluster, Service, until_commit
from tests.support.history import settle
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.processes import call
from tests.support.tiny import tiny

pytestmark = [pytest.mark.nats, pytest.mark.drill, pytest.mark.timeout(500)]

KEPT = ("state", "before")
ALONE = ("--set", "learner.mesh=fsdp=1", "--set", "learner.stopped_code=75")
SYNC = ("fragments = 2", "h_steps = 10", "learners = 2")


def merges(*learners: tuple[str, int]) -> Callable[[Commit], bool]:
    """Return what sees a commit of trained steps from each of these incarnations."""

    def seen(commit: Commit) -> bool:
        found = {(row.learner, row.incarnation) for row in commit.consumed if row.tokens}
        return commit.version > 1 and found >= set(learners)

    return seen


STOPPED_EARLY = """
import os, signal, sys
from skerry.client.jax_processes import Crew
from skerry.client.meeting import Group

with Crew(Group(1, 0, "127.0.0.1", 1), sys.argv[1], None, None).computing():
    os.kill(os.getpid(), signal.SIGTERM)
    signal.alarm(20)
    signal.pause()
"""


def test_a_signal_before_training_begins_ends_a_process_of_several() -> None:
    """Also where JAX knows a scheduler, which it is not to ask."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    ended = call(sys.executable, "-c", STOPPED_EARLY, f"127.0.0.1:{free_port()}", env=environment)
    assert ended.returncode == -signal.SIGTERM
    assert "Kubernetes" not in ended.stderr


STANDS_STILL = """
import threading
from dataclasses import dataclass

import jax.numpy as jnp

CALLS = []


def stand(word):
    print(word, flush=True)
    threading.Event().wait()


@dataclass(frozen=True)
class Model:
    vocab: int = 256

    def init(self, key):
        CALLS.append(key)
        if "WORD" == "builds" and len(CALLS) > 1:  # the first is for its shapes
            stand("builds")
        return {"w": jnp.zeros((64, 64))}

    def loss(self, params, tokens):
        stand("compiles")
"""


class Island:
    """Learner ``a`` in two processes, at a port of its own for each start."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    async def start(self, *arguments: str) -> tuple[Service, Service]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            at = f"127.0.0.1:{free.getsockname()[1]}"
        common = ("--set", "learner.processes=2", "--set", f"learner.coordinator={at}")
        common += ("--set", "learner.save_every_s=0.5", *arguments)
        second = await self.cluster.start("learner", "a", *common, "--set", "learner.process=1")
        first = await self.cluster.start("learner", "a", *common, "--set", "learner.process=0")
        return first, second


@pytest.mark.parametrize(
    ("word", "signalled", "codes"),
    [("compiles", (0, 1), (75, 0)), ("builds", (0,), (-15, 0)), ("builds", (1,), (-15, 0))],
)
async def test_a_signal_ends_two_processes_of_which_neither_waits_for_a_compiler(
    nats_server: NatsServer,
    run_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    word: str,
    signalled: tuple[int, ...],
    codes: tuple[int, int],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "forever.py").write_text(STANDS_STILL.replace("WORD", word))
    text, config = tmp_path / "text.txt", tmp_path / "run.toml"
    text.write_bytes(random.Random(7).randbytes(20_000).hex().encode())
    _, *rest = tiny(text, 100, "fragments = 1", "learners = 1").partition("[data]")
    config.write_text(
        'allow_code = ["forever"]\n[model]\nfactory = "forever:Model"\n' + "".join(rest)
    )
    async with Cluster(nats_server.url, run_id, tmp_path, config, tmp_path / "jax") as cluster:
        both = await Island(cluster).start("--set", "learner.stopped_code=75")
        for process in both:
            stands = partial(lambda log: word in log.read_text(), process.log)
            await asyncio.to_thread(wait_until, stands, within_s=150)
        for number in signalled:
            both[number].terminate()
        ended = await both[0].ended(15), await both[1].ended(15)
    assert ended == codes, both[0].said + both[1].said
    assert "error:" not in both[0].said + both[1].said


async def test_an_island_of_two_processes_trains_dies_and_returns(
    nats_server: NatsServer, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    text, config = tmp_path / "text.txt", tmp_path / "run.toml"
    text.write_bytes(random.Random(7).randbytes(200_000).hex().encode())
    old = "[train]\ninner_max_age_steps = 100_000"  # this island is slow, and the other one is not
    config.write_text(tiny(text, 100_000, *SYNC).replace("[train]", old))
    async with NatsBus(nats_server.url, name="test") as bus:
        async with Cluster(nats_server.url, run_id, tmp_path, config, tmp_path / "jax") as cluster:
            await cluster.start("syncer", "s")
            alone = await cluster.start("learner", "b", *ALONE)
            island, folder = Island(cluster), tmp_path / "learners" / run_id / "a"
            first, second = await island.start()
            await until_commit(bus, run_id, merges(("a", 1), ("b", 1)), timeout_s=150)
            saves = [folder / f"inner-{n}-of-2.{each}" for n in (0, 1) for each in KEPT]
            await asyncio.to_thread(wait_until, lambda: all(save.exists() for save in saves))

            second.kill9()
            assert await first.ended(20) == 1, first.said
            assert "error: Process 1 of this learner is lost" in first.said
            assert "Traceback" not in first.said
            first, second = await island.start()
            await until_commit(bus, run_id, merges(("a", 2), ("b", 1)), timeout_s=150)
            member = (await ledger.members(bus, run_id))["a"]
            assert (member.incarnation, member.inner) == (2, "warm"), first.said

            first.kill9()
            assert await second.ended(20) == 1, second.said
            for save in saves[:2]:
                save.unlink()
            assert "error: Process 0 of this learner is lost" in second.said
            assert "Traceback" not in second.said
            first, second = await island.start()
            await until_commit(bus, run_id, merges(("a", 3), ("b", 1)), timeout_s=150)
            assert (await ledger.members(bus, run_id))["a"].inner == "cold", "one lacks its part"
            assert "its processes have saved no boundary that all of them have" in first.said

            assert alone.process.returncode is None, alone.said
            for process in (second, first):  # as a terminal or a scheduler does
                process.terminate()
            assert await first.ended(60) == 0, first.said
            assert await second.ended(60) == 0, second.said
            assert '"event": "stopped"' in first.said, "one signal each is no second one"
            alone.terminate()
            assert await alone.ended(60) == 75, "its run is not over"
        history = await settle(bus, run_id)
        assert history.violations == ()
        assert (await ledger.read_run(bus, run_id)).fragments == 2


async def test_a_learner_on_eight_devices_is_killed_and_goes_on_with_its_moments(
    nats_server: NatsServer, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    text, config = tmp_path / "text.txt", tmp_path / "run.toml"
    text.write_bytes(random.Random(7).randbytes(200_000).hex().encode())
    config.write_text(tiny(text, 100_000, "fragments = 2", "h_steps = 10", "learners = 1"))
    saved = tmp_path / "learners" / run_id / "a" / "inner.state"
    often = ("--set", "learner.save_every_s=0.5", "--set", "learner.mesh=data=2,fsdp=4")
    async with NatsBus(nats_server.url, name="test") as bus:
        async with Cluster(nats_server.url, run_id, tmp_path, config, tmp_path / "jax") as cluster:
            await cluster.start("syncer", "s")
            learner = await cluster.start("learner", "a", *often)
            await until_commit(bus, run_id, merges(("a", 1)), timeout_s=150)
            await asyncio.to_thread(wait_until, saved.exists)
            learner.kill9()
            await learner.process.wait()
            learner = await cluster.start("learner", "a", *often)
            await until_commit(bus, run_id, merges(("a", 2)), timeout_s=150)
            learner.terminate()
            assert await learner.ended(60) == 0, learner.said
        history = await settle(bus, run_id)
        assert history.violations == ()
        member = (await ledger.members(bus, run_id))["a"]
        assert (member.incarnation, member.inner) == (2, "warm")


@pytest.mark.parametrize(
    ("mode", "model", "sync"),
    [
        ("diloco", "lora_rank = 2", ("h_steps = 5", "learners = 1")),
        ("decoupled", "", ("h_steps = 4", "learners = 1", 'contribution_scheme = "int2"')),
        ("data-parallel", "", ("learners = 1",)),
    ],
)
async def test_modes_adapters_and_error_feedback_come_to_the_end_in_two_processes(
    nats_server: NatsServer,
    run_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    model: str,
    sync: tuple[str, ...],
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    text, config = tmp_path / "text.txt", tmp_path / "run.toml"
    text.write_bytes(random.Random(7).randbytes(50_000).hex().encode())
    config.write_text(tiny(text, 12, *sync, mode=mode).replace("[model]", f"[model]\n{model}"))
    async with NatsBus(nats_server.url, name="test") as bus:
        async with Cluster(nats_server.url, run_id, tmp_path, config, tmp_path / "jax") as cluster:
            await cluster.start("syncer", "s")
            for process in await Island(cluster).start():
                assert await process.ended(200) == 0, process.said
        history = await settle(bus, run_id)
        assert history.violations == ()
        assert (await ledger.read_run(bus, run_id)).state is RunState.FINISHED
