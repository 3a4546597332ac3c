"""What a learner's key is good for in hostile hands: each attack is denied, or changes nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client

from skerry.log.nats.bus import NatsBus
from skerry.log.nats.jetstream import IDLE_CONSUMER_NS
from skerry.log.nats.login import NatsOptions, login_of
from skerry.protocol.parts import MASTER
from skerry.protocol.roles import Grant, Role
from skerry.protocol.subjects import STREAM_KINDS, Subjects
from tests.support.keyed import KeyedBroker, keyed_broker
from tests.support.log import specs

pytestmark = [pytest.mark.nats, pytest.mark.asyncio(loop_scope="module")]

ME, OTHER = "a", "b"
RUN, ELSEWHERE = Subjects("r"), Subjects("elsewhere")
RUNS = (RUN, ELSEWHERE)
MANIFEST, LEASE = RUN.shard(0).manifest(0), f"{RUN.root}.pulse.drill.lease"
MINE = (RUN.shard(0).contribution(0, ME), RUN.shard(0).start(ME), RUN.member(ME), RUN.pulse(ME))
API = "$JS.API"


def written(names: Subjects, learner: str) -> tuple[str, ...]:
    """Return a subject of each kind that a run's log takes."""
    chunk, run = names.shard(0).chunk(0, MASTER, 0, 0), names.ledger("run")
    of_services = (
        names.shard(0).manifest(0),
        chunk,
        names.shard(0).fence(),
        names.commit(0),
        names.round(0),
    )
    of_learners = (
        names.shard(0).contribution(0, learner),
        names.shard(0).start(learner),
        names.member(learner),
    )
    records = (run, names.ledger("checkpoint"), names.ledger("eval"))
    return (*of_services, *of_learners, names.pulse(learner), names.syncer("syncer"), *records)


@dataclass(frozen=True, slots=True)
class Attack:
    """One message of a learner, and where it wants the answer; ``denied``: the broker says so."""

    subject: str
    payload: bytes = b"forged"
    reply: str = ""
    headers: Mapping[str, str] | None = None
    denied: bool = True


def asks(request: str, body: object = None, reply: str = "", *, denied: bool = True) -> Attack:
    return Attack(f"{API}.{request}", json.dumps(body or {}).encode(), reply, denied=denied)


def forgeries() -> Generator[Attack]:
    """Write what others write, in this run and in another."""
    for names in RUNS:
        yield from (Attack(subject) for subject in written(names, OTHER))
    yield from (Attack(subject) for subject in written(ELSEWHERE, ME))
    longer = (f"{subject}.x" for subject in MINE)
    odd = (
        LEASE,
        f"{RUN.root}.ledger.member.{ME}",
        f"{RUN.root}.contrib.{ME}",
        f"{RUN.root}.contrib.0.{ME}",
        RUN.root,
        "skerry",
        f"{RUN.root}.>",
        ">",
        "x",
    )
    yield from (Attack(subject) for subject in (*longer, *odd))
    for header in ("Nats-Msg-Id", "Nats-Expected-Last-Sequence", "Nats-Rollup"):
        yield Attack(MANIFEST, headers={header: "1"})


OF_STREAMS = (
    "STREAM.DELETE",
    "STREAM.PURGE",
    "STREAM.UPDATE",
    "STREAM.CREATE",
    "STREAM.MSG.DELETE",
    "STREAM.SNAPSHOT",
    "STREAM.RESTORE",
    "STREAM.LEADER.STEPDOWN",
    "STREAM.PEER.REMOVE",
    "CONSUMER.NAMES",
    "CONSUMER.LIST",
)
OF_CONSUMERS = ("CONSUMER.DURABLE.CREATE", "CONSUMER.INFO", "CONSUMER.PAUSE", "CONSUMER.UNPIN")
OF_ALL = (
    "STREAM.LIST",
    "STREAM.NAMES",
    "STREAM.TEMPLATE.CREATE.x",
    "ACCOUNT.PURGE.CORE",
    "META.LEADER.STEPDOWN",
    "SERVER.REMOVE",
)
READS = ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")


def requests() -> Generator[Attack]:
    """Ask the broker for what only an admin may have."""
    for names in RUNS:
        for kind in STREAM_KINDS:
            stream = names.streams(kind, 1)[0]
            yield from (asks(f"{r}.{stream}", {"name": stream, "seq": 1}) for r in OF_STREAMS)
            yield from (asks(f"{request}.{stream}.x") for request in OF_CONSUMERS)
    for kind in STREAM_KINDS:
        stream = ELSEWHERE.streams(kind, 1)[0]
        yield from (asks(f"{request}.{stream}", {"seq": 1}) for request in READS)
        yield asks(f"DIRECT.GET.{stream}.{ELSEWHERE.pulse(OTHER)}")
        yield asks(f"CONSUMER.CREATE.{stream}.x", {"stream_name": stream, "config": {"name": "x"}})
        yield asks(f"CONSUMER.MSG.NEXT.{stream}.x")
    yield from (asks(request) for request in OF_ALL)
    yield from (Attack(s) for s in ("$SYS.REQ.SERVER.PING", "$SYS.REQ.ACCOUNT.CORE.INFO"))
    ack = f"$JS.ACK.{RUN.shard(0).stream('CONTRIB')}.x.1.1.1.1.0"
    yield from (Attack(s) for s in (ack, "$JS.FC.x", "$JSC.R.x", "$NRG.V.x", "_R_.x.y"))
    yield Attack(f"_INBOX.{OTHER}.x")


def answers() -> Generator[Attack]:
    """Have the broker answer onto a subject of the log."""
    for target in (MANIFEST, RUN.commit(0), RUN.pulse(OTHER), RUN.ledger("run")):
        for subject in MINE:
            yield Attack(subject, reply=target, denied=False)
        yield asks("INFO", reply=target, denied=False)
        for kind in STREAM_KINDS:
            stream, wanted = (
                RUN.streams(kind, 1)[0],
                {"last_by_subj": RUN.shard(0).contribution(0, ME)},
            )
            for request in READS:
                yield asks(f"{request}.{stream}", wanted, target, denied=False)
            yield asks(f"CONSUMER.MSG.NEXT.{stream}.x", {"batch": 9}, target, denied=False)


def consumers() -> Generator[Attack]:
    """Have a consumer deliver onto a subject of the log, or of another account."""
    for kind in STREAM_KINDS:
        for target in (MANIFEST, RUN.commit(0), RUN.pulse(OTHER), f"_INBOX.{OTHER}.x"):
            stream, config = RUN.streams(kind, 1)[0], {"name": "x", "deliver_subject": target}
            body = {"stream_name": stream, "config": config}
            yield asks(f"CONSUMER.CREATE.{stream}.x", body, denied=False)


def marks() -> Generator[Attack]:
    """Write what is one's own with the broker's own marks."""
    given = {
        "Nats-Rollup": "all",
        "Nats-TTL": "1s",
        "Nats-Incr": "1",
        "Nats-Batch-Id": "x",
        "Nats-Schedule": "@at 2000-01-01T00:00:00Z",
        "Nats-Trace-Dest": MANIFEST,
        "Nats-Expected-Stream": RUN.shard(0).stream("STATE"),
        "Nats-Sequence": "1",
        "Nats-Stream-Source": RUN.shard(0).stream("STATE"),
        "Status": "503",
    }
    for subject in MINE:
        for header, value in given.items():
            yield Attack(subject, headers={header: value}, denied=False)
    target = {"Nats-Schedule-Target": MANIFEST, "Nats-Schedule": "@at 2000-01-01T00:00:00Z"}
    yield Attack(MINE[0], headers=target, denied=False)
    own_trace = {"Nats-Trace-Dest": MANIFEST, "Nats-Trace-Only": "true"}
    yield Attack(f"{API}.INFO", headers=own_trace, denied=False)


KINDS = (forgeries, requests, answers, consumers, marks)
EARS = (
    ">",
    "*",
    "skerry.>",
    MANIFEST,
    RUN.shard(0).contribution(0, OTHER),
    "_INBOX.>",
    "_INBOX.*.*",
    f"_INBOX.{OTHER}.>",
    f"{API}.>",
    "$JS.ACK.>",
    "$JS.EVENT.>",
    "$SYS.>",
    "_R_.>",
)


SERVICES = (Role.CHECKPOINTER, Role.EVALUATOR, Role.HEALTH_MONITOR, Role.AUDIT)
GRANTS = (
    *(Grant(Role.LEARNER, ME, "r"), Grant(Role.LEARNER, OTHER, "r")),
    *(Grant(role, role, "r") for role in SERVICES),
    *(Grant(Role.LEARNER, "c", "elsewhere"), Grant(Role.ADMIN, "admin")),
)


@pytest.fixture(scope="module", params=[None, 1], ids=["static", "expiring"])
def broker(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Generator[KeyedBroker]:
    folder = tmp_path_factory.mktemp("keyed")
    with keyed_broker(folder, *GRANTS, days=request.param) as held:
        yield held


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin(broker: KeyedBroker) -> AsyncGenerator[NatsBus]:
    """An admin who has written two runs."""
    async with broker.bus("admin") as bus:
        for names in RUNS:
            await bus.declare(specs(names.run))
            for subject in written(names, OTHER):
                await bus.publish(subject, b"true", msg_id=subject)
        for subject in MINE:
            await bus.publish(subject, b"mine", msg_id=subject)
        yield bus


@dataclass(slots=True)
class Intruder:
    """A client with a learner's key, and what the broker refuses it."""

    client: Client
    refusals: asyncio.Queue[str]

    async def refused(self, what: str) -> None:
        """Return once the broker has said that it does not allow this."""
        async with asyncio.timeout(20.0):
            while what.lower() not in await self.refusals.get():
                pass


@asynccontextmanager
async def logged_in(broker: KeyedBroker, name: str) -> AsyncGenerator[Intruder]:
    refusals = asyncio.Queue[str]()

    async def note(error: Exception) -> None:
        refusals.put_nowait(str(error))

    login = login_of(NatsOptions(credentials=broker.keyring.seed(name)))
    client = await nats.connect(
        broker.server.url, **login.given, inbox_prefix=f"_INBOX.{login.name}", error_cb=note
    )
    yield Intruder(client, refusals)
    await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def intruder(broker: KeyedBroker) -> AsyncGenerator[Intruder]:
    async with logged_in(broker, ME) as client:
        yield client


async def log_of_others(admin: NatsBus) -> dict[str, Any]:
    """Return all that the log holds but what is the intruder's, and how streams are set."""
    held: dict[str, Any] = {info.name: info.spec for info in await admin.streams()}
    patterns = (p for names in RUNS for spec in specs(names.run) for p in spec.subjects)
    for records in await asyncio.gather(*(admin.last_each(pattern) for pattern in patterns)):
        held |= {record.subject: (record.sequence, record.payload) for record in records}
    return {name: what for name, what in held.items() if name not in MINE}


@pytest.mark.parametrize("attacks", KINDS, ids=lambda attacks: attacks.__name__)
async def test_a_learner_changes_nothing_but_what_is_its_own(
    admin: NatsBus, intruder: Intruder, attacks: Callable[[], Generator[Attack]]
) -> None:
    truth = await log_of_others(admin)
    for attack in attacks():
        headers = dict(attack.headers or {}) or None
        await intruder.client.publish(attack.subject, attack.payload, attack.reply, headers=headers)
        if attack.denied:
            await intruder.refused(f'publish to "{attack.subject}"')
        await intruder.client.request(f"{API}.INFO")  # through the same doors, after it
    assert await log_of_others(admin) == truth


@pytest.mark.parametrize("role", SERVICES)
async def test_what_a_service_reads_is_not_put_into_the_log(
    broker: KeyedBroker, admin: NatsBus, role: Role
) -> None:
    truth = await log_of_others(admin)
    async with logged_in(broker, role) as client:
        for attack in (*answers(), *consumers()):
            await client.client.publish(attack.subject, attack.payload, attack.reply)
        await client.client.request(f"{API}.INFO")
    assert await log_of_others(admin) == truth


async def test_what_a_learner_asks_the_broker_to_keep_for_it_does_not_stay(
    intruder: Intruder,
) -> None:
    """A stream has room for a thousand consumers; durable ones would leave none to others."""
    name = RUN.stream("PULSE")

    async def made(consumer: str, **config: object) -> dict[str, Any]:
        body = {
            "stream_name": name,
            "config": {"name": consumer, "durable_name": consumer} | config,
        }
        request = f"{API}.CONSUMER.CREATE.{name}.{consumer}", json.dumps(body).encode()
        answer: dict[str, Any] = json.loads((await intruder.client.request(*request)).data)
        return answer

    kept = await made("for-ever")
    assert kept["config"]["inactive_threshold"] == IDLE_CONSUMER_NS
    refused = await made("for-long", inactive_threshold=10**18)
    assert "exceeds system limit" in refused["error"]["description"]
    await intruder.client.request(f"{API}.CONSUMER.DELETE.{name}.for-ever")


async def test_a_learner_hears_only_answers_to_itself(intruder: Intruder) -> None:
    for subject in EARS:
        for queue in ("", "q"):
            await intruder.client.subscribe(subject, queue=queue)
            await intruder.refused(f'subscription to "{subject}"')
