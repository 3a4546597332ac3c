"""What a broker refuses is said at once, in one sentence, and a renewed key is taken."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import BrokerUnavailable, BrokerUnfit, BusError, Denied
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions, new_key
from skerry.protocol.subjects import Subjects
from tests.support.log import all_of, specs, take
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.nats

RUN = "r"
NAMES = Subjects(RUN)
WORD = "w"
ADMIN = {"user": "admin", "password": WORD}


@contextmanager
def serving(folder: Path, *users: dict[str, Any], **more: Any) -> Generator[NatsServer]:
    """Run a server that knows these users and an admin."""
    settings = json.dumps({"authorization": {"users": [ADMIN, *users]}, **more}, indent=1)
    server = NatsServer(folder / "nats", settings=settings)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def bus(server: NatsServer, **given: Any) -> NatsBus:
    return NatsBus(server.url, options=NatsOptions(**given))


async def declare(server: NatsServer) -> None:
    async with bus(server, **ADMIN) as admin:
        await admin.declare(specs(RUN))
        await admin.publish(NAMES.pulse("b"), b"theirs")


def user(name: str, *publish: str, inbox: str = "") -> dict[str, Any]:
    listen = f"{inbox or '_INBOX.' + name}.>"
    permissions = {"publish": {"allow": ["$JS.API.INFO", *publish]}, "subscribe": listen}
    return {"user": name, "password": WORD, "permissions": permissions}


async def test_answers_come_below_an_inbox_of_the_login(tmp_path: Path) -> None:
    with serving(tmp_path, user("a", NAMES.pulse("a"), "$JS.API.DIRECT.GET.>")) as server:
        await declare(server)
        async with bus(server, user="a", password=WORD) as learner:
            await learner.publish(NAMES.pulse("a"), b"mine")
            found = await learner.last(NAMES.pulse("a"))
        assert found is not None
        assert found.payload == b"mine"


async def test_a_single_broker_that_dials_out_as_a_leaf_node_is_no_cluster(tmp_path: Path) -> None:
    """It greets as one, and then its leader would be asked for what it can say itself."""
    allowed = ("$JS.API.DIRECT.GET.>", "$JS.API.STREAM.INFO.>")
    remote = {"remotes": [{"url": "nats-leaf://127.0.0.1:9"}]}
    with serving(tmp_path, user("a", *allowed), leafnodes=remote, server_name="eu") as server:
        await declare(server)
        async with bus(server, user="a", password=WORD) as learner:
            assert learner._connection.clustered
            found = await learner.last(NAMES.pulse("b"))
            assert found is not None
            assert await learner.last_each(NAMES.pulse()) == [found]
            assert await learner.get(NAMES.stream("PULSE"), found.sequence) == found


async def test_an_inbox_may_be_named(tmp_path: Path) -> None:
    with serving(tmp_path, user("a", NAMES.pulse("a"), inbox="here.a")) as server:
        await declare(server)
        async with bus(server, user="a", password=WORD, inbox_prefix="here.a") as learner:
            await learner.publish(NAMES.pulse("a"), b"mine")


async def test_a_login_that_may_hear_no_answer_is_told_so_at_once(tmp_path: Path) -> None:
    denied = pytest.raises(Denied, match=r"login 'a' listen for answers.*nats\.inbox_prefix")
    with serving(tmp_path, user("a", inbox="elsewhere")) as server, denied:
        async with asyncio.timeout(4.0), bus(server, user="a", password=WORD):
            pass


async def test_a_denied_publish_ends_at_once_with_its_subject(tmp_path: Path) -> None:
    with serving(tmp_path, user("a", NAMES.pulse("a"))) as server:
        await declare(server)
        async with asyncio.timeout(4.0), bus(server, user="a", password=WORD) as learner:
            with pytest.raises(Denied, match="login 'a' publish on") as caught:
                await learner.publish(NAMES.pulse("b"), b"forged", msg_id="1")
            assert caught.value.subject == NAMES.pulse("b")
            await learner.publish(NAMES.pulse("a"), b"mine")  # the connection stays


@pytest.mark.parametrize("allowed", [(), ("$JS.API.STREAM.INFO.>", "$JS.API.CONSUMER.CREATE.>")])
async def test_a_denied_read_ends_a_follower(tmp_path: Path, allowed: tuple[str, ...]) -> None:
    with serving(tmp_path, user("a", *allowed)) as server:
        await declare(server)
        async with asyncio.timeout(4.0), bus(server, user="a", password=WORD) as learner:
            with pytest.raises(Denied, match="publish on"):
                await take(learner.follow(NAMES.pulse()), 1)


async def test_a_denied_batch_read_ends_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, user("a")) as server:
        await declare(server)
        async with asyncio.timeout(4.0), bus(server, user="a", password=WORD) as learner:
            with pytest.raises(Denied, match="publish on"):
                await learner.last_each(NAMES.pulse())
            with pytest.raises(Denied, match="publish on"):
                await all_of(learner.get_each(NAMES.pulse(), [1]))


async def test_an_nkey_logs_in_and_names_the_inbox(tmp_path: Path) -> None:
    secret, public = new_key()
    file = tmp_path / "a.nk"
    file.write_text(secret)
    permissions = {"publish": [">"], "subscribe": [f"_INBOX.{public}.>"]}
    with serving(tmp_path, {"nkey": public, "permissions": permissions}) as server:
        async with bus(server, credentials=file) as learner:
            await learner.declare(specs(RUN))


async def test_a_broker_that_asks_for_no_key_is_not_what_a_key_is_for(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    file = tmp_path / "a.nk"
    file.write_text(new_key()[0])
    with pytest.raises(BrokerUnfit, match=r"asks for no key.*include accounts\.conf"):
        async with bus(nats_server, credentials=file):
            pass


async def test_a_renewed_key_is_taken_without_a_restart(tmp_path: Path) -> None:
    (old, old_name), (new, new_name) = new_key(), new_key()
    file = tmp_path / "a.nk"
    file.write_text(old)
    with serving(tmp_path, {"nkey": old_name}) as server:
        config = server.folder / "nats.conf"
        async with bus(server, credentials=file) as learner:
            await learner.declare(specs(RUN))
            config.write_text(config.read_text().replace(old_name, new_name))
            pid = server.pid
            assert pid is not None
            os.kill(pid, signal.SIGHUP)
            task = asyncio.create_task(learner.publish(NAMES.pulse("a"), b"x", msg_id="1"))
            await asyncio.sleep(0)
            file.write_text(new)
            async with asyncio.timeout(20.0):
                await task


async def publish_for_ever(learner: NatsBus, *passes: type[BusError]) -> None:
    async with asyncio.timeout(20.0):
        while True:
            with suppress(*passes):
                await learner.publish(NAMES.pulse("a"), b"x", msg_id="1")


@pytest.mark.parametrize(
    ("patience", "error", "passes"),
    [
        ({"login_patience_s": 1.0}, BrokerUnfit, ()),
        ({"patience_s": 1.0}, BrokerUnavailable, ()),
        # Calls that end sooner, and are made again, do not begin it again.
        ({"login_patience_s": 1.0, "patience_s": 0.2}, BrokerUnfit, (BrokerUnavailable,)),
    ],
)
async def test_a_key_that_stays_revoked_is_named_by_what_ends_and_by_what_is_tried_again(
    tmp_path: Path,
    patience: dict[str, float],
    error: type[BusError],
    passes: tuple[type[BusError], ...],
) -> None:
    (old, old_name), (_, new_name) = new_key(), new_key()
    file = tmp_path / "a.nk"
    file.write_text(old)
    with serving(tmp_path, {"nkey": old_name}) as server:
        config = server.folder / "nats.conf"
        async with bus(server, credentials=file, **patience) as learner:
            await learner.declare(specs(RUN))
            config.write_text(config.read_text().replace(old_name, new_name))
            pid = server.pid
            assert pid is not None
            os.kill(pid, signal.SIGHUP)
            with pytest.raises(error, match=r"refused the login.*nats\.credentials"):
                await publish_for_ever(learner, *passes)
