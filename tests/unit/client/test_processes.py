"""The processes of one learner: how they meet, what they say, and that none outlives another."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from skerry.algorithm.backend import cpu
from skerry.client import meeting, processes
from skerry.client.inner_file import Origin
from skerry.client.meeting import GONE_S, Group, come, gather, meet, own
from skerry.client.peer import Deed
from skerry.client.processes import Assignment, FollowingProcess, LeadProcess
from skerry.errors import BrokerUnavailable, ConfigError, Overtaken, RunMismatch, SkerryError
from skerry.log.memory import MemoryBroker
from skerry.protocol.codec import Shares, pack
from skerry.settings import loading
from skerry.settings.local import LearnerSettings
from skerry.settings.models import RunConfig
from skerry_learner import following
from tests.support.ports import free_port


def group(process: int, port: int, knows: str = "") -> Group:
    return Group(2, process, "127.0.0.1", port, knows)


@contextmanager
def joined() -> Generator[tuple[LeadProcess, FollowingProcess, socket.socket, SimpleQueue[str]]]:
    """Yield two processes, the second one's connection, and what either says of a loss."""
    port, lost = free_port(), SimpleQueue[str]()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(gather, group(0, port), "run", "a")
        second = pool.submit(come, group(1, port), "run", "a")
        connection, address = second.result(10)
        connections, told = first.result(10)
    assert address == told
    lead = LeadProcess(connections, lost.put)
    yield lead, FollowingProcess(connection, lost.put), connection, lost
    lead.close()


@pytest.mark.parametrize(("host", "ours"), [("127.0.0.1", True), ("192.0.2.1", False)])
def test_an_address_of_another_machine_is_not_our_own(host: str, ours: bool) -> None:
    """The second stands for an address behind which this machine is, and which it does not have."""
    assert own(f"{host}:7077") is ours


def test_processes_are_awaited_at_the_coordinators_address_alone() -> None:
    port, elsewhere = free_port(), "127.0.0.2"
    with ThreadPoolExecutor() as pool:
        first = pool.submit(gather, group(0, port), "run", "a")
        second = pool.submit(come, group(1, port), "run", "a")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((elsewhere, port), timeout=5)
        for connection in (second.result(10)[0], *first.result(10)[0].values()):
            connection.close()


def test_settings_that_make_no_group_are_refused() -> None:
    assert Group.of(LearnerSettings()) is None
    at = {"processes": 2, "coordinator": "host:7077"}
    assert Group.of(LearnerSettings.model_validate(at)) == Group(2, 0, "host", 7077)
    for wrong in ({"coordinator": "host"}, {"coordinator": ""}, {"process": 2}):
        with pytest.raises(ConfigError, match=r"learner\."):
            Group.of(LearnerSettings.model_validate(at | wrong))


def test_orders_come_in_order_and_the_end_is_no_loss() -> None:
    with joined() as (lead, follower, _, lost):
        for step in range(3):
            lead.post(Deed.STEP, step, 0.5)
        lead.close()
        heard = [follower.orders.get(timeout=10) for _ in range(4)]
    assert heard == [*((Deed.STEP, [n, 0.5]) for n in range(3)), (Deed.END, [])]
    assert lost.empty()


def test_one_that_compiles_ends_at_once_and_in_order() -> None:
    with joined() as (lead, _, _connection, lost):
        lead.abandon()
        assert not lost.get(timeout=10), "nothing is wrong"


def test_a_request_that_comes_early_waits_and_its_failure_is_told() -> None:
    async def main() -> None:
        with joined() as (lead, follower, _, _lost):
            reading = asyncio.create_task(lead.others.read(3, 7))
            await asyncio.sleep(0.05)
            gone, failed = Overtaken("gone"), OSError("no")
            answers: list[Any] = [{"value": 100}, {"error": gone}, {"error": failed}]

            def take(deed: Deed, words: list[Any]) -> None:
                assert (deed, words[1:]) == (Deed.READ, [3, 7])
                follower.answer(words[0], **answers.pop(0))

            follower.take_requests(take)
            assert await reading == 100
            with pytest.raises(Overtaken):
                await lead.others.read(3, 7)
            with pytest.raises(BrokerUnavailable, match="no"):
                await lead.others.read(3, 7)

    asyncio.run(main())


def test_an_answer_that_comes_after_the_end_of_who_asked_is_no_loss() -> None:
    """A contribution may still be on its way when the run is over."""
    with joined() as (lead, follower, _, lost):
        asked = SimpleQueue[int]()
        follower.take_requests(lambda _deed, words: asked.put(words[0]))

        async def ask() -> int:
            asking = asyncio.create_task(lead.others.read(3, 7))
            number = await asyncio.to_thread(asked.get)
            asking.cancel()
            return number

        follower.answer(asyncio.run(ask()))
        follower.tell(Deed.FOUND, (1, 2))
        assert lead.all_found(10) == [{(1, 2)}]
    assert lost.empty()


def test_a_process_that_was_asked_to_end_asks_the_first_one() -> None:
    asked = SimpleQueue[None]()
    with joined() as (lead, follower, _, _lost):
        lead.on_stop = lambda: asked.put(None)
        follower.ask_stop()
        asked.get(timeout=10)


async def test_a_signal_before_the_first_process_has_its_place_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(following, "SAME_S", 0.0)
    with joined() as (lead, follower, _, _lost):
        loop, asked = asyncio.get_running_loop(), asyncio.Event()
        lead.on_stop = partial(loop.call_soon_threadsafe, asked.set)
        bus = MemoryBroker().connect()
        follows = following.follow(bus, follower, RunConfig(), LearnerSettings())
        task = loop.create_task(follows)
        await asyncio.sleep(0)  # it has begun to wait
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            await asked.wait()
        lead.close()
        await task


async def test_a_process_whose_mesh_is_another_one_says_so() -> None:
    with joined() as (lead, follower, _, _lost):
        origin, config = Origin("run", 1, 2, 3, "a", 0, 2), loading.to_json(RunConfig())
        place = Assignment(origin, 1, 0, config, mesh="data=2")
        lead.post(Deed.HOLD, *asdict(place).values())
        bus = MemoryBroker().connect()
        with pytest.raises(RunMismatch, match="as '', and the first one as 'data=2'"):
            await following.follow(bus, follower, RunConfig(), LearnerSettings())


@pytest.mark.skipif(sys.platform != "linux", reason="others name these options differently")
def test_a_process_that_waits_finds_that_the_first_ones_machine_is_gone() -> None:
    """Nothing is said until all have come, which may be days."""
    with joined() as (_, _follower, connection, _lost):
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == GONE_S


def test_a_process_that_is_gone_is_found_at_once() -> None:
    with joined() as (_, _follower, connection, lost):
        connection.shutdown(socket.SHUT_RDWR)
        sentences = {lost.get(timeout=5), lost.get(timeout=5)}
    assert {text.split(" (")[0] for text in sentences} == {
        "Process 0 of this learner is lost",
        "Process 1 of this learner is lost",
    }
    assert all("Start each again" in text for text in sentences)


def test_a_process_that_answers_what_was_never_asked_is_lost() -> None:
    """What ends the listener without a word would leave a later death unseen."""
    with joined() as (_, follower, _connection, lost):
        follower.answer(99)
        sentences = {lost.get(timeout=5), lost.get(timeout=5)}
    assert any("Process 1 of this learner is lost (its connection" in text for text in sentences)


def test_a_stranger_is_turned_away_and_another_learners_process_is_told_why() -> None:
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(gather, group(0, port), "run", "a")
        with pytest.raises(ConfigError, match="give all of them the same run"):
            come(group(1, port), "run", "b")
        for junk in (b"\x00" * 10_000, b"GET / HTTP/1.1\r\n", json.dumps({"process": 1}).encode()):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(junk + b"\n")
        connection, _ = come(group(1, port), "run", "a")
        connections = first.result(10)[0]
        assert list(connections) == [1]
        connections[1].close()
        connection.close()


def test_a_process_without_the_secret_is_refused_and_believes_no_impostor() -> None:
    port = free_port()
    ours = [group(n, port, "ours") for n in (0, 1)]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(gather, ours[0], "run", "a")
        with pytest.raises(ConfigError, match=r"give all of them the same learner\.secret_file"):
            come(group(1, port, "theirs"), "run", "a")
        connection, _ = come(ours[1], "run", "a")
        first.result(10)[0][1].close()
        connection.close()
        with socket.create_server(("127.0.0.1", port)) as impostor:
            second = pool.submit(come, ours[1], "run", "a")
            pretended, _ = impostor.accept()
            pretended.sendall(b'{"nonce": "1"}\n{"address": "192.0.2.1:1", "proof": "1"}\n')
            assert pretended.recv(1 << 16)
            pretended.close()
        last = pool.submit(gather, ours[0], "run", "a")
        second.result(10)[0].close()
        last.result(10)[0][1].close()


def test_a_process_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may compile another step, and the devices of all would wait for each other for ever."""
    port = free_port()
    here, there = "skerry 1.0, jax 0.9", "skerry 1.0, jax 0.8"
    found = iter([there, here, here, here])  # the second process asks first each time
    monkeypatch.setattr(meeting, "_release", lambda: next(found))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(gather, group(0, port), "run", "a")
        with pytest.raises(ConfigError, match=f"runs {there}, and the first one {here}: install"):
            come(group(1, port), "run", "a")
        connection, _ = come(group(1, port), "run", "a")
        first.result(10)[0][1].close()
        connection.close()


def test_the_secret_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret\n")
    at = {"processes": 2, "coordinator": "host:7077", "secret_file": tmp_path / "secret"}
    found = Group.of(LearnerSettings.model_validate(at))
    assert found == Group(2, 0, "host", 7077, "s3cret")
    assert "s3cret" not in repr(found)
    with pytest.raises(ConfigError, match=r"learner\.secret_file is .*cannot be read"):
        Group.of(LearnerSettings.model_validate(at | {"secret_file": tmp_path / "none"}))


def test_processes_that_share_a_text_meet_by_it() -> None:
    shared: SimpleQueue[str] = SimpleQueue()

    def share(text: str) -> str:
        if text:
            shared.put(text)
        return text or shared.get(timeout=10)

    with ThreadPoolExecutor() as pool:
        made = [
            pool.submit(meet, share, "127.0.0.1", (n, 2), "run", name)
            for n, name in enumerate(("a", ""))
        ]
        lead, follower = (one.result(10) for one in made)
    assert isinstance(lead, LeadProcess)
    assert isinstance(follower, FollowingProcess)
    assert (lead.processes, follower.number) == (2, 1)
    lead.post(Deed.STEP, 1)
    assert follower.orders.get(timeout=10) == (Deed.STEP, [1])
    follower.close()
    lead.close()


def test_a_process_that_breaks_off_is_a_loss_for_the_first_one_alone() -> None:
    with joined() as (_, follower, _, lost):
        follower.break_off()
        assert lost.get(timeout=5).startswith("Process 1 of this learner is lost")
        assert lost.empty()


def test_the_failure_of_the_first_process_is_raised_where_orders_are_taken() -> None:
    with joined() as (lead, follower, _, lost):
        lead.post(Deed.STEP, 1)
        lead.post(Deed.FAIL, "no broker answers.")
        assert follower.next_order() == (Deed.STEP, [1])
        with pytest.raises(SkerryError, match=r"has failed: no broker answers\.$"):
            follower.next_order()
    assert lost.empty()


def test_a_process_that_takes_no_orders_ends_once_the_first_one_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "HEED_S", 0.01)
    with joined() as (lead, _, _, lost):
        lead.post(Deed.FAIL, "no broker answers.")
        assert lost.get(timeout=5).endswith("has failed: no broker answers.")


def test_the_chunks_of_all_shares_are_those_of_one_vector() -> None:
    planes = cpu().quantise("int8", np.arange(12 * 256, dtype=np.float32))
    ranges = ((range(3), range(8, 9)), (range(3, 8), range(9, 12)), ())
    made = [chunk for mine in range(3) for chunk in pack("int8", planes, 600, Shares(ranges, mine))]
    assert [chunk.index for chunk in made] == list(range(made[0].count))
    covered = [n for c in made for n in range(c.first_block, c.first_block + c.blocks)]
    assert sorted(covered) == list(range(12))
