"""A broker that hangs or is gone for a while: steps go on, then everything catches up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from skerry.errors import BrokerUnavailable
from skerry.log import ledger, run_records
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.protocol.messages import LearnerPhase, Pulse
from tests.support.cluster import Cluster, Service, until_commit, until_pulse
from tests.support.history import settle
from tests.support.nats_server import NatsServer

pytestmark = [pytest.mark.nats, pytest.mark.fault, pytest.mark.drill, pytest.mark.timeout(240)]

LEARNERS = ("a", "b")
KINDS = {"s": "syncer", "c": "checkpointer", "a": "learner", "b": "learner"}


@dataclass(frozen=True)
class Running:
    """A whole run under way, with the test's own connection to its broker."""

    bus: NatsBus
    run: str
    services: dict[str, Service]

    async def steady(self) -> dict[str, Pulse]:
        """Return a pulse of each learner once both train and every fragment has been merged."""
        await until_commit(self.bus, self.run, lambda c: c.version == 5)
        return {
            name: await until_pulse(self.bus, self.run, lambda p, n=name: _trains(p, n))
            for name in LEARNERS
        }

    async def pulses_after(self, sent_ns: int) -> dict[str, Pulse]:
        """Return the first pulse of each learner that was sent after that moment."""
        found: dict[str, Pulse] = {}
        pulses = run_records.follow(self.bus, self.run, Pulse)
        async with asyncio.timeout(60):
            async for pulse in pulses:
                if pulse.sent_ns > sent_ns:
                    found.setdefault(pulse.learner, pulse)
                if len(found) == len(LEARNERS):
                    break
        await pulses.aclose()
        return found

    async def caught_up(self) -> None:
        """Return once every fragment is three versions on and all learners have adopted that."""
        held = await ledger.last_commits(self.bus, self.run)
        goal = {f: c.version + 3 for f, c in held.items()}
        for fragment, version in goal.items():
            await until_commit(
                self.bus,
                self.run,
                lambda c, f=fragment, v=version: c.fragment == f and c.version == v,
            )
        for name in LEARNERS:
            await until_pulse(
                self.bus,
                self.run,
                lambda p, n=name: (
                    p.learner == n and all(p.versions[f] >= v for f, v in goal.items())
                ),
            )

    def assert_all_live(self) -> None:
        ended = {n: s.said[-2000:] for n, s in self.services.items() if s.process.returncode}
        assert ended == {}


def _trains(pulse: Pulse, name: str) -> bool:
    measured = pulse.phase is LearnerPhase.TRAINING and pulse.step_time_s > 0
    return pulse.learner == name and measured and pulse.contributions > 2


@asynccontextmanager
async def running(
    server: NatsServer, run: str, folder: Path, config: Path, cache: Path
) -> AsyncGenerator[Running]:
    """Start one of each; afterwards everything is dead and the history must be whole."""
    async with NatsBus(server.url, name="test") as bus:
        async with Cluster(server.url, run, folder, config, cache) as cluster:
            services = {name: await cluster.start(kind, name) for name, kind in KINDS.items()}
            monitor = ("--set", "health.port=0")
            services["m"] = await cluster.start("health-monitor", "m", *monitor)
            yield Running(bus, run, services)
        history = await settle(bus, run)
    assert history.violations == ()


async def assert_unanswered(server: NatsServer) -> None:
    """Show that the fault has fired: nobody gets an answer from this broker."""
    with pytest.raises(BrokerUnavailable):
        async with NatsBus(server.url, name="probe", options=NatsOptions(connect_timeout_s=0.5)):
            pass


def assert_stepped(before: dict[str, Pulse], after: dict[str, Pulse], outage_s: float) -> None:
    """Show that learners stepped throughout an outage, from their pulses around it.

    A learner that had waited would have been inside steps for a third of the time between them at
    most. One that was held up inside a step would have taken those only that fit around the outage;
    how long a step takes is not held to be the same, because other work on the machine comes and
    goes.
    """
    for name in LEARNERS:
        first, then = before[name], after[name]
        between_s = (then.sent_ns - first.sent_ns) / 1e9
        assert between_s < 1.5 * outage_s, "the pulses are too far apart to prove anything"
        stepping_s = then.busy_s - first.busy_s
        around = (between_s - outage_s) / first.step_time_s
        assert then.steps - first.steps > 1.5 * around, f"{name} was held up in a step"
        assert stepping_s > 0.5 * between_s, f"{name} stepped for {stepping_s} of {between_s} s"


@pytest.mark.parametrize(
    ("begin", "end", "outage_s"),
    [
        (NatsServer.pause, NatsServer.resume, 8.0),
        (NatsServer.kill9, NatsServer.restart, 12.0),
        pytest.param(NatsServer.pause, NatsServer.resume, 20.0, marks=pytest.mark.soak),
        pytest.param(NatsServer.kill9, NatsServer.restart, 60.0, marks=pytest.mark.soak),
    ],
    ids=["hangs", "is killed", "hangs for long", "is killed for long"],
)
async def test_steps_go_on_without_the_broker_and_all_catch_up_once_it_is_back(
    nats_server: NatsServer,
    run_id: str,
    tmp_path: Path,
    tiny_config: Path,
    jax_cache: Path,
    begin: Callable[[NatsServer], None],
    end: Callable[[NatsServer], None],
    outage_s: float,
) -> None:
    async with running(nats_server, run_id, tmp_path, tiny_config, jax_cache) as under_way:
        before = await under_way.steady()
        begin(nats_server)
        await assert_unanswered(nats_server)
        await asyncio.sleep(outage_s)
        under_way.assert_all_live()
        end(nats_server)
        after = await under_way.pulses_after(time.time_ns())
        assert_stepped(before, after, outage_s)
        await under_way.caught_up()
        under_way.assert_all_live()
