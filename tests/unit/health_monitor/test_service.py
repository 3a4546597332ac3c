"""The monitor over a log in memory: what it answers, and that it forgets nothing."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.errors import ConfigError
from skerry.log import ledger, run_records
from skerry.log.base import Room, Storage
from skerry.log.memory import MemoryBroker
from skerry.log.streams import specs
from skerry.protocol.messages import (
    Pulse,
)
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.settings.local import HealthSettings
from skerry.settings.models import RunConfig
from skerry_health_monitor.__main__ import listening_on
from skerry_health_monitor.metrics.broker import Brokers, Server
from skerry_health_monitor.service import Monitor
from skerry_health_monitor.web.server import application, listen
from skerry_health_monitor.web.stream import event
from skerry_tools.virtual import VirtualLoop
from tests.support.builders import background, checkpoint_record, evaluation, pulse, run_record
from tests.support.log import begin_anew
from tests.support.scripted_run import STARTS, ScriptedRun

DEADLINE_S = 20.0
BEGAN_S = 1_700_000_000.0


def beat(step: int, **changes: Any) -> Pulse:
    return pulse(step=step, sent_ns=time.time_ns(), alive_s=step * 0.2, **changes)


async def asked(monitor: Monitor, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(application(monitor.feed, monitor.snapshot))
    async with httpx.AsyncClient(transport=transport, base_url="http://monitor") as client:
        return await client.get(path)


async def answered(monitor: Monitor, holds: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Ask until ``/api/run`` answers something that holds, and return it."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            answer = await asked(monitor, "/api/run")
            if answer.status_code == 200 and holds(found := answer.json()):
                return dict(found)
            await asyncio.sleep(0)


async def seen(monitor: Monitor, holds: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Follow until ``/api/run`` answers something that holds, and return it."""
    async with background(monitor.follow()):
        return await answered(monitor, holds)


async def test_it_answers_before_there_is_a_run() -> None:
    monitor = Monitor(MemoryBroker().connect(), "run", until_finished=False)
    healthy = await asked(monitor, "/healthz")
    whole = await asked(monitor, "/api/run")
    assert (healthy.status_code, healthy.json()["status"]) == (200, "waiting")
    assert (whole.status_code, "no run 'run'" in whole.json()["error"]) == (503, True)


async def test_pulses_commits_checkpoints_and_evaluations_show_in_the_run() -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    await scripted.commit_all(step=4)
    await run_records.publish(scripted.bus, beat(5, incarnation=STARTS))
    checkpoint = checkpoint_record("/there", versions=(1, 1, 1), step=4)
    await ledger.record_checkpoint(scripted.bus, checkpoint)
    for version, loss in ((1, 5.5), (2, 4.25)):
        said = evaluation(version, versions=(version,) * 3, loss=loss, evaluated_ns=version)
        await ledger.record_evaluation(scripted.bus, said)
    monitor = Monitor(scripted.bus, "run", until_finished=False)
    found = await seen(
        monitor, lambda run: run["run"]["checkpoint"] and len(run["evaluations"]) == 2
    )
    run, (learner,) = found["run"], found["learners"]
    assert (run["checkpoint"], run["versions"], run["step"]) == ("/there", [1, 1, 1], 5)
    assert (learner["name"], learner["liveness"], learner["tokens"]) == ("a", "alive", 50)
    assert (run["held_out"]["step"], run["held_out"]["loss"]) == (2, 4.25)
    assert [row["loss"] for row in found["evaluations"]] == [5.5, 4.25]
    assert (await asked(monitor, "/healthz")).json()["status"] == "following"


async def test_while_the_broker_is_away_the_run_is_as_it_was() -> None:
    scripted, later_s = await ScriptedRun.begin(MemoryBroker().connect()), 0.0
    await run_records.publish(scripted.bus, beat(5, incarnation=STARTS))
    monitor = Monitor(
        scripted.bus, "run", until_finished=False, clock_s=lambda: time.time() + later_s
    )
    await seen(monitor, lambda run: run["learners"][0]["heard"])
    monitor.link.away_since_s, later_s = time.time(), 3600.0
    (learner,) = (await asked(monitor, "/api/run")).json()["learners"]
    assert learner["liveness"] == "alive"


async def test_a_store_of_the_broker_that_fills_up_is_an_alert() -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    await run_records.publish(scripted.bus, beat(5))
    brokers = Brokers(["http://n1"])
    brokers.known["http://n1"] = Server("n1", up=True, rooms=(Room(Storage.FILE, 95, 100),))
    monitor = Monitor(scripted.bus, "run", until_finished=False, brokers=brokers)
    await seen(
        monitor, lambda _: "store-file-n1" in monitor.alert_log.active and monitor.rooms != ()
    )
    assert {room.storage for room in monitor.rooms} == {Storage.FILE, Storage.MEMORY}


async def test_streams_of_a_run_whose_id_begins_with_ours_are_not_ours() -> None:
    broker = MemoryBroker()
    for run in ("run", "run_2"):
        await ScriptedRun.begin(broker.connect(), run)
    monitor = Monitor(broker.connect(), "run", until_finished=False)
    await seen(monitor, lambda _: monitor.rooms != ())
    ours = {spec.name for spec in specs("run")}
    assert {stream.name for stream in monitor.streams} == ours


async def test_records_that_cannot_be_end_neither_it_nor_its_answers() -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    manifest = await scripted.commit(0, step=4)
    odd = replace(manifest.commit, version=2, merge_s=math.nan, quorum_s=math.inf)
    await scripted.bus.publish(Subjects("run").commit(0), encode(odd))
    for name, step_time_s in (("b", math.inf), ("c", 1e-5)):
        sick = beat(5, learner=name, step_time_s=step_time_s)
        await run_records.publish(scripted.bus, sick)
    await scripted.commit(1)
    await scripted.bus.publish(Subjects("run").commit(1), b"no commit")
    monitor = Monitor(scripted.bus, "run", until_finished=False)
    told = await seen(monitor, lambda _: monitor.feed.counts.malformed == {"commit": 2, "pulse": 1})
    assert [row["name"] for row in told["learners"] if row["heard"]] == ["c"]
    assert told["run"]["versions"] == [1, 1, 0]
    assert event("whole", monitor.frame().sections)


async def test_a_monitor_that_is_started_again_knows_the_same() -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    for step in range(3):
        await scripted.commit_all(step=step)
    await run_records.publish(scripted.bus, beat(5))

    def whole(answer: dict[str, Any]) -> bool:
        return answer["run"]["versions"] == [3, 3, 3] and bool(answer["learners"])

    first, second = [
        await seen(Monitor(scripted.bus, "run", until_finished=False), whole) for _ in range(2)
    ]
    for changing in ("wall_s", "eta_s", "goodput", "last_round_s_ago", "checkpoint_lacks_s"):
        del first["run"][changing], second["run"][changing]
    assert first["run"] == second["run"]


async def test_a_log_that_begins_anew_under_the_same_name_is_followed_from_its_beginning() -> None:
    broker = MemoryBroker()
    first = await ScriptedRun.begin(broker.connect())
    for step in range(3):
        await first.commit_all(step=step)
    await run_records.publish(first.bus, beat(90, incarnation=7))
    await first.finish()
    monitor = Monitor(broker.connect(), "run", until_finished=False)
    async with background(monitor.follow()):
        await answered(monitor, lambda answer: bool(answer["run"]["finished"]))
        before = monitor.frame().epoch
        begin_anew(broker)
        second = await ScriptedRun.begin(broker.connect())
        await second.commit_all(step=5)
        await run_records.publish(second.bus, beat(6, incarnation=STARTS))
        told = await answered(
            monitor,
            lambda answer: (
                answer["run"]["rounds"] == 3 and [r["step"] for r in answer["learners"]] == [6]
            ),
        )
    assert (told["run"]["finished"], told["run"]["step"]) == (False, 6)
    assert [row["incarnation"] for row in told["learners"]] == [STARTS]
    assert monitor.frame().epoch is not before


@pytest.mark.parametrize("is_away", [False, True])
def test_no_learner_is_gone_where_the_monitor_paused_or_the_broker_was_away(is_away: bool) -> None:
    """For thirty pulses, ten times, each at another moment between two of them."""
    pulse_s, paused_s, loop = 0.1, 0.0, VirtualLoop()
    heard = asyncio.Event()
    heard.set()
    config = RunConfig.model_validate({"liveness": {"pulse_s": pulse_s}})

    def now_s() -> float:
        return BEGAN_S + loop.time() + paused_s

    async def pulses(run: ScriptedRun) -> None:
        for step in count():
            await heard.wait()
            alive = replace(beat(step), incarnation=STARTS, alive_s=now_s() - BEGAN_S)
            await run_records.publish(run.bus, alive)
            await asyncio.sleep(pulse_s)

    async def watch() -> list[str]:
        nonlocal paused_s
        bus = MemoryBroker(clock_ns=lambda: round(now_s() * 1e9)).connect()
        scripted = await ScriptedRun.begin(bus, config=config)
        monitor = Monitor(bus, "run", until_finished=False, clock_s=now_s)
        async with background(pulses(scripted), monitor.follow()):
            await asyncio.sleep(30 * pulse_s)  # before its first pulse the learner was gone
            with capture_logs() as logs:
                for _ in range(10):
                    if is_away:
                        heard.clear()
                        monitor.link.away_since_s = now_s()
                        await asyncio.sleep(30 * pulse_s)
                        monitor.link.away_since_s = None
                        loop.call_later(0.9 * pulse_s, heard.set)
                    else:
                        paused_s += 30 * pulse_s
                    await asyncio.sleep(5.1 * pulse_s)
        return [line["event"] for line in logs if "learner" in line]

    watching = loop.create_task(watch())
    assert loop.run_until(watching, 60.0)
    loop.settle()
    loop.close()
    assert watching.result() == []


@pytest.mark.parametrize("until_finished", [True, False])
async def test_it_ends_with_the_run_only_where_asked(until_finished: bool) -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    await scripted.commit_all()
    await scripted.finish()
    monitor = Monitor(scripted.bus, "run", until_finished=until_finished)
    if until_finished:
        await asyncio.wait_for(monitor.follow(), DEADLINE_S)
    else:
        await seen(monitor, lambda answer: bool(answer["run"]["finished"]))


async def test_a_config_of_another_release_is_one_sentence() -> None:
    bus = MemoryBroker().connect()
    await bus.declare(specs("run"))
    cut = plan([LeafSpec("w", (20, 64))], 1)
    await ledger.create_run(bus, run_record("run", cut, '{"sync": {"telepathy": true}}'))
    following = Monitor(bus, "run", until_finished=True).follow()
    with pytest.raises(ConfigError, match=r"sync\.telepathy .* use that release"):
        await asyncio.wait_for(following, DEADLINE_S)


def test_a_port_in_use_is_one_sentence_with_the_fix() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match=r"health\.port"):
        listen("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7", "2001:db8::7"])
def test_an_address_that_is_not_of_this_machine_names_the_setting(host: str) -> None:
    with pytest.raises(ConfigError, match="an address of this machine") as raised:
        listen(host, 0)
    assert raised.value.path == "health.host"
    assert str(raised.value).count(host) == 1


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="a kernel without IPv6")
def test_it_listens_on_ipv6_too() -> None:
    with listen("::1", 0) as listening:
        assert listening.family is socket.AF_INET6


def test_the_page_takes_a_free_port_where_its_own_is_taken() -> None:
    with listen("127.0.0.1", 0) as taken, capture_logs() as logs:
        port = taken.getsockname()[1]
        with listening_on(HealthSettings(port=port)) as other:
            assert other.getsockname()[1] != port
    assert [line["event"] for line in logs] == ["page_port_taken"]
