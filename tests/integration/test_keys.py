"""Keys of one's own broker: learners in an account of their own, keys renewed and revoked."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Generator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from skerry.algorithm.fragments import LeafSpec, Plan, plan
from skerry.cli.main import app
from skerry.client import joining
from skerry.errors import BrokerUnavailable, BrokerUnfit, Denied
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.protocol.messages import RunRecord
from skerry.protocol.roles import Grant, Role
from skerry.protocol.subjects import Subjects
from skerry.service import signing
from skerry.service.accounts import LOGIN_S, services_of
from skerry.service.keyring import Keyring
from skerry.settings.models import RunConfig
from tests.support.keyed import KeyedBroker, keyed_broker
from tests.support.log import all_of, specs, take
from tests.support.regions import asked

pytestmark = pytest.mark.nats

RUN = "r"
NAMES = Subjects(RUN)
MANY = 20
CONFIG = RunConfig.model_validate({"sync": {"fragments": 2}, "log": {"window_bytes": 16 * 1024**2}})


@dataclass(frozen=True)
class Cut:
    """What a learner makes of the run's config."""

    plan: Plan


CUT = Cut(plan([LeafSpec("w", (64, 256))], 2))


@pytest.fixture(params=[None, 7], ids=["static", "expiring"])
def broker(tmp_path: Path, request: pytest.FixtureRequest) -> Generator[KeyedBroker]:
    learners = (Grant(Role.LEARNER, name, RUN) for name in ("a", "b"))
    grants = (*services_of(RUN), *learners, Grant(Role.FOUNDER, "first", RUN))
    with keyed_broker(tmp_path, *grants, days=request.param) as held:
        yield held


async def test_a_learner_works_as_before_from_an_account_of_its_own(broker: KeyedBroker) -> None:
    async with broker.bus("admin") as admin, broker.bus("a") as learner, broker.bus("b") as other:
        await admin.declare(specs(RUN))
        pulse, mine = NAMES.pulse("a"), NAMES.shard(0).contribution(0, "a")
        await learner.publish(pulse, b"pulse", msg_id="p")
        receipts = [await learner.publish(mine, b"%d" % n, msg_id=f"{n}") for n in range(MANY)]
        sequences = [receipt.sequence for receipt in receipts]
        found = await other.last(pulse)
        assert found is not None
        assert found.payload == b"pulse"
        assert [r.payload for r in await other.last_each(NAMES.pulse())] == [b"pulse"]
        read = await all_of(other.get_each(NAMES.shard(0).contribution(), sequences))
        assert [record.sequence for record in read] == sequences
        async with aclosing(other.follow(NAMES.shard(0).contribution())) as coming:
            assert len(await take(coming, MANY)) == MANY


async def test_a_founder_creates_the_run_that_others_join(broker: KeyedBroker) -> None:
    async with broker.bus("first") as founder, broker.bus("syncer") as syncer:
        assert await founder.declare(specs(RUN)) == ()
        await syncer.publish(NAMES.round(0), b"open", msg_id="1")


async def test_a_learner_waits_for_the_run_that_it_may_not_create(broker: KeyedBroker) -> None:
    async def joined(bus: NatsBus, *, waits: bool = True) -> RunRecord:
        record, *_ = await joining.find_or_create(bus, RUN, CONFIG, lambda _: CUT, waits=waits)
        return record

    async with broker.bus("a") as learner, broker.bus("first") as founder:
        with pytest.raises(Denied, match=r"the key in .*/a\.\w+ publish on .*STREAM\.CREATE"):
            await joined(learner, waits=False)
        waiting = asyncio.create_task(joined(learner))
        record = await joined(founder)
        async with asyncio.timeout(20.0):
            assert await waiting == record
        assert await joined(learner) == record  # whose streams are there, and not its to change


async def test_a_learner_names_who_makes_a_stream_again_that_a_restart_forgot(
    broker: KeyedBroker,
) -> None:
    async with broker.bus("first") as founder, broker.bus("a", patience_s=2.0) as learner:
        for bus in (founder, learner):
            assert await bus.declare(specs(RUN)) == ()
        broker.server.restart()
        for bus in (founder, learner):
            assert await bus.now_ns(NAMES.ledger("run"))
        said = ""
        async with asyncio.timeout(20.0):
            while "No NATS server answered" in said or not said:  # lost with the old connection
                with pytest.raises(BrokerUnavailable) as refused:
                    await learner.publish(NAMES.pulse("a"), b"x")
                said = str(refused.value)
        assert re.search(r"forgot stream SKERRY_r_PULSE .*start a sync", said)
        await founder.publish(NAMES.pulse("first"), b"x", msg_id="1")
        await learner.publish(NAMES.pulse("a"), b"x", msg_id="1")


async def publish_until_refused(learner: NatsBus, name: str = "a") -> None:
    async with asyncio.timeout(20.0):
        while True:
            await learner.publish(NAMES.pulse(name), b"x", msg_id="1")


async def test_a_revoked_key_is_worthless_at_once_and_nobody_else_notices(
    broker: KeyedBroker,
) -> None:
    seen: list[str] = []
    others = broker.bus("b", on_event=lambda event, _: seen.append(event))
    async with broker.bus("admin") as admin, others as other:
        await admin.declare(specs(RUN))
        async with broker.bus("a", login_patience_s=0.0) as learner:
            await learner.publish(NAMES.pulse("a"), b"x", msg_id="1")
            secret = broker.keyring.seed("a")
            kept = secret.read_text()
            broker.keyring.revoke("a")
            assert not secret.exists()
            secret.write_text(kept)  # it still has its copy
            broker.reload()
            with pytest.raises(BrokerUnfit, match="refused the login"):
                await publish_until_refused(learner)
        await other.publish(NAMES.pulse("b"), b"y", msg_id="1")
        assert seen == []


async def test_a_key_that_is_rotated_costs_a_dial(broker: KeyedBroker) -> None:
    async with broker.bus("admin") as admin, broker.bus("a") as learner:
        await admin.declare(specs(RUN))
        await learner.publish(NAMES.pulse("a"), b"x", msg_id="1")
        broker.keyring.rotate("a")
        broker.reload()
        async with asyncio.timeout(20.0):
            await learner.publish(NAMES.pulse("a"), b"y", msg_id="2")


@pytest.mark.parametrize("broker", [7], ids=["expiring"], indirect=True)
async def test_a_key_more_or_one_renewed_costs_the_broker_nothing(broker: KeyedBroker) -> None:
    async with broker.bus("admin") as admin:
        await admin.declare(specs(RUN))
        assert not broker.keyring.add(Grant(Role.LEARNER, "c", RUN), days=1)
        for renewed in (False, True):
            if renewed:
                broker.keyring.renew("c")
            async with broker.bus("c") as learner:
                await learner.publish(NAMES.pulse("c"), b"x", msg_id=f"{renewed}")
        broker.keyring.revoke("c")
        other = Keyring.begun(broker.keyring.folder / "elsewhere", 1)
        other.add(Grant(Role.LEARNER, "a", RUN))
        wrong = NatsOptions(credentials=other.seed("a"))
        with pytest.raises(
            BrokerUnfit, match=r"a\.creds, was revoked or .* for another broker, or"
        ):
            async with NatsBus(broker.server.url, options=wrong):
                pass


def test_a_client_on_a_busy_machine_has_time_to_log_in(broker: KeyedBroker) -> None:
    assert asked(broker.server, "varz")["auth_timeout"] == LOGIN_S


@pytest.mark.parametrize("broker", [7], ids=["expiring"], indirect=True)
async def test_a_key_is_renewed_before_it_expires_or_ends_with_one_sentence(
    broker: KeyedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, dialled = broker.keyring, asyncio.Event()

    def note(event: str, _: object) -> None:
        if event == "reconnected":
            dialled.set()

    async with broker.bus("admin") as admin:
        await admin.declare(specs(RUN))
        with monkeypatch.context() as soon:
            soon.setattr(signing, "DAY_S", 1)
            held.add(*(Grant(Role.LEARNER, name, RUN) for name in ("c", "d")), days=2)
        async with (
            broker.bus("c", on_event=note) as learner,
            broker.bus("d", login_patience_s=0.0) as late,
        ):
            held.renew("c")
            with pytest.raises(BrokerUnfit, match=r"d\.creds, expired at .* `skerry keys renew d`"):
                await publish_until_refused(late, "d")
            async with asyncio.timeout(20.0):
                await learner.publish(NAMES.pulse("c"), b"y", msg_id="1")
                await dialled.wait()


def test_the_command_makes_keys_and_has_a_running_broker_take_them(
    tmp_path: Path, broker: KeyedBroker
) -> None:
    folder, pid_file = str(broker.keyring.folder), tmp_path / "pid"
    pid_file.write_text(f"{broker.server.pid}\n")

    def keys(*words: str) -> str:
        done = CliRunner().invoke(app, ["keys", *words, "--keys", folder])
        assert done.exit_code == 0, done.output
        return done.stdout

    async def enters(name: str) -> None:
        async with broker.bus(name) as bus:
            await bus.rooms()

    async def logs_in_soon(name: str) -> None:
        async with asyncio.timeout(20.0):
            while True:
                try:
                    return await enters(name)
                except BrokerUnfit:  # the broker reads its keys in its own time
                    await asyncio.sleep(0.01)

    keys("add", "laptop", "--run", RUN, "--pid-file", str(pid_file))
    asyncio.run(logs_in_soon("laptop"))
    rows = json.loads(keys("show", "--json"))
    assert NAMES.pulse("laptop") in next(r for r in rows if r["name"] == "laptop")["publishes"]
    secret = broker.keyring.seed("laptop").read_text().strip()
    assert secret not in keys("show")
    keys("revoke", "laptop")
    assert "laptop" not in keys("show")


def test_no_process_but_a_broker_is_told_to_reload(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    made = Keyring(tmp_path / "keys")
    made.add(Grant(Role.ADMIN, "admin", RUN))
    for text in (str(psutil.Process().pid), "x", "999999999"):
        pid_file.write_text(text)
        words = ["keys", "add", f"n{len(text)}", "--pid-file", str(pid_file)]
        done = CliRunner().invoke(app, [*words, "--keys", str(made.folder)])
        assert done.exit_code == 2
        assert "names no broker" in done.stderr
