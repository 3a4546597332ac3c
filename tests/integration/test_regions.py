"""Regions: a broker of their own, whose cache spares the link and is never believed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from skerry.cli import doctor
from skerry.errors import BrokerUnavailable, Denied
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.protocol.roles import Grant, Role
from skerry.protocol.subjects import Subjects
from skerry.service.keyring import Keyring, services_of
from skerry.service.region import begin_region, cache_of, mirrors_of
from skerry.settings.loading import load
from tests.support.keyed import mount_keys
from tests.support.log import all_of, specs
from tests.support.nats_cluster import free_ports
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.nats

RUN = "r"
NAMES = Subjects(RUN)
SHARD = NAMES.shard(0)
INFRA = Path(__file__).parents[2] / "infra" / "nats"
STATE = SHARD.stream("STATE")
DELTA = SHARD.chunk(0, "delta", 0)
MANY = 20


@dataclass(frozen=True, slots=True)
class Region:
    """A hub and the broker of one region, eu, with a learner eu-0."""

    keyring: Keyring
    hub: NatsServer
    leaf: NatsServer

    def bus(self, server: NatsServer, name: str, **given: float) -> NatsBus:
        options = NatsOptions(credentials=self.keyring.seed(name), **given)  # type: ignore[arg-type]
        return NatsBus(server.url, name=name, options=options)

    def learner(self, **given: float) -> NatsBus:
        return self.bus(self.leaf, "eu-0", **given)

    async def make_cache(self) -> None:
        async with self.bus(self.leaf, cache_of("eu")) as bus:
            for mirror in mirrors_of(self.keyring.region_of("eu")):
                await bus.mirror(mirror)


@pytest.fixture
def region(tmp_path: Path) -> Generator[Region]:
    (port,) = free_ports(1)
    keyring = Keyring(tmp_path / "keys")
    keyring.add(*services_of(RUN), Grant(Role.LEARNER, "us-0", RUN))
    hub_url = f"nats-leaf://127.0.0.1:{port}"
    folder = begin_region(keyring, Grant(Role.REGION, "eu", RUN), ["eu-0"], hub_url)
    mount_keys(keyring, tmp_path / "hub")
    alone = (INFRA / "nats.conf").read_text().replace("/data", str(tmp_path / "hub"))
    (tmp_path / "hub" / "alone.conf").write_text(alone.replace(":8222", ":-1"))
    taking = (INFRA / "hub.conf").read_text().replace("nats.conf", "alone.conf")
    taking = taking.replace("0.0.0.0:7422", f"127.0.0.1:{port}")
    hub = NatsServer(tmp_path / "hub", settings=taking, jetstream=False)
    shipped = (folder / "nats.conf").read_text()
    leaf = NatsServer(folder, settings=shipped.replace("/data", str(folder)), jetstream=False)
    hub.start()
    leaf.start()
    try:
        yield Region(keyring, hub, leaf)
    finally:
        leaf.kill()
        hub.kill()


@asynccontextmanager
async def begun(region: Region) -> AsyncGenerator[tuple[NatsBus, NatsBus]]:
    """Yield the admin's bus at the hub, where the run's streams are made, and the learner's."""
    async with region.bus(region.hub, "admin") as admin:
        await admin.declare(specs(RUN))
        async with region.learner() as learner:
            yield admin, learner


async def committed(admin: NatsBus) -> list[int]:
    """Store chunks of a delta and of a snapshot; return the sequences of the delta's."""
    sequences: list[int] = []
    for index in range(MANY):
        for kind in ("delta", "snapshot"):
            subject, chunk = SHARD.chunk(0, kind, 0, index), os.urandom(1000)
            receipt = await admin.publish(subject, chunk, msg_id=f"{kind}{index}")
            if kind == "delta":
                sequences.append(receipt.sequence)
    return sequences


async def read(learner: NatsBus, sequences: Sequence[int]) -> list[int]:
    return [record.sequence for record in await all_of(learner.get_each(DELTA, sequences))]


async def caught_up(region: Region, messages: int) -> None:
    """Return once the cache holds so many chunks."""
    async with asyncio.timeout(30.0), region.bus(region.leaf, cache_of("eu")) as bus:
        while True:
            held = await bus.mirror_info(STATE)
            if held is not None and held.messages >= messages:
                return
            await asyncio.sleep(0.01)


async def test_a_learner_works_through_its_regions_broker_as_at_the_hub(region: Region) -> None:
    async with begun(region) as (admin, learner):
        mine = SHARD.contribution(0, "eu-0")
        receipts = [await learner.publish(mine, b"%d" % n, msg_id=f"{n}") for n in range(MANY)]
        found = await admin.last(mine)
        assert found is not None
        assert found.sequence == receipts[-1].sequence
        assert await learner.last(mine) == found
        await admin.publish(NAMES.round(0), b"open", msg_id="1")
        assert [r.payload for r in await learner.last_each(NAMES.round())] == [b"open"]
        for subject in (SHARD.contribution(0, "us-0"), SHARD.manifest(0), NAMES.commit(0)):
            with pytest.raises(Denied):
                await learner.publish(subject, b"x", msg_id="x")


async def test_what_learners_all_read_crosses_the_link_once(region: Region) -> None:
    await region.make_cache()
    async with begun(region) as (admin, learner), region.learner() as second:
        sequences = await committed(admin)
        await caught_up(region, MANY)
        async with region.bus(region.leaf, cache_of("eu")) as bus:
            held = await bus.mirror_info(STATE)
        assert held is not None
        assert held.messages == MANY  # and nothing of snapshots
        for reader in (learner, second):
            assert await read(reader, sequences) == sequences
            reads = reader.shared_reads
            assert (reads.region, reads.cached_bytes, reads.hub_bytes) == ("eu", MANY * 1000, 0)
        at_hub = await learner.get(STATE, sequences[0])
        assert at_hub == (await all_of(learner.get_each(DELTA, sequences[:1])))[0]


async def test_what_the_cache_does_not_have_is_read_from_the_hub_at_once(region: Region) -> None:
    async with begun(region) as (admin, learner):
        sequences = await committed(admin)
        for _ in range(2):  # the second time the cache rests
            assert await read(learner, sequences) == sequences
        reads = learner.shared_reads
        assert (reads.cached_bytes, reads.hub_bytes) == (0, MANY * 1000)
        await admin.publish(SHARD.chunk(0, "delta", 0, 0), b"next", msg_id="next")
        assert await read(learner, sequences[:1]) == []  # gone, and not waited for


async def test_a_region_whose_link_is_cut_says_so_and_comes_back(region: Region) -> None:
    await region.make_cache()
    async with begun(region) as (admin, _):
        sequences = await committed(admin)
        await caught_up(region, MANY)
        async with region.learner(request_timeout_s=0.5, patience_s=2.0) as learner:
            region.hub.kill()
            with pytest.raises(BrokerUnavailable, match=r"region eu at .* has not reached the hub"):
                await learner.publish(NAMES.member("eu-0"), b"x", msg_id="1")
            assert await read(learner, sequences) == sequences  # out of the cache
            with pytest.raises(BrokerUnavailable, match="region eu has no link to the hub"):
                async with region.learner(connect_timeout_s=1.0):
                    pass
            region.hub.start()
            async with asyncio.timeout(60.0):
                while True:
                    try:
                        await learner.publish(NAMES.member("eu-0"), b"x", msg_id="2")
                        break
                    except BrokerUnavailable:
                        continue
            assert [r.payload for r in await admin.last_each(NAMES.member())] == [b"x"]


async def test_a_regions_broker_may_die_at_any_instant(region: Region) -> None:
    await region.make_cache()
    async with begun(region) as (admin, learner):
        sequences = await committed(admin)
        await caught_up(region, MANY)
        await learner.publish(NAMES.pulse("eu-0"), b"before", msg_id="1")
        region.leaf.restart()
        async with asyncio.timeout(60.0):
            await learner.publish(NAMES.pulse("eu-0"), b"after", msg_id="2")
            assert await read(learner, sequences) == sequences
        found = await admin.last(NAMES.pulse("eu-0"))
        assert found is not None
        assert found.payload == b"after"


async def test_the_root_of_a_region_writes_nothing_that_is_not_its_learners(
    region: Region,
) -> None:
    """With the region's own secret, at the hub itself: any request, any subject for its answer."""
    async with begun(region) as (admin, _), region.bus(region.hub, "eu") as root:
        await committed(admin)
        for subject in (SHARD.contribution(0, "us-0"), NAMES.commit(0), NAMES.pulse("us-0")):
            await admin.publish(subject, b"honest", msg_id=subject)
        before = [(i.name, i.messages, i.last_seq) for i in await admin.streams()]
        session = await root._connection.ready(None)
        client = session.client
        targets = (
            *(SHARD.contribution(0, "us-0"), SHARD.start("us-0"), NAMES.member("us-0")),
            *(NAMES.pulse("us-0"), SHARD.manifest(0), SHARD.fence(), NAMES.commit(0)),
            *(NAMES.ledger("run"), NAMES.quarantine("eu-0"), NAMES.round(0), NAMES.syncer("s")),
            *(SHARD.chunk(0, "delta", 0, 0), Subjects("other").commit(0)),
        )
        asked = json.dumps({"seq": 1}).encode()
        pushes = {"config": {"deliver_policy": "all", "ack_policy": "none"}}
        for subject in targets:
            await client.publish(subject, b"forged")
            await client.publish(f"$JS.API.DIRECT.GET.{STATE}", asked, reply=subject)
            await client.publish("$JS.API.INFO", b"", reply=subject)
            await client.publish(SHARD.contribution(0, "eu-0"), b"mine", reply=subject)
            pushes["config"] |= {"deliver_subject": subject}
            body = json.dumps({"stream_name": STATE} | pushes).encode()
            await client.publish(f"$JS.API.CONSUMER.CREATE.{STATE}", body, reply="_INBOX.x")
        for request in ("DELETE", "PURGE", "UPDATE", "SNAPSHOT", "MSG.DELETE"):
            await client.publish(f"$JS.API.STREAM.{request}.{STATE}", b"{}", reply="_INBOX.x")
        # What is answered behind all of them, by each part of the broker that they went through.
        await root.publish(SHARD.contribution(0, "eu-0"), b"mine", msg_id="last")
        await root.publish(NAMES.pulse("eu-0"), b"mine", msg_id="last")
        await root.last(SHARD.manifest(0))
        grown = {SHARD.stream("CONTRIB"): len(targets) + 1, NAMES.stream("PULSE"): 1}
        after = [
            (i.name, i.messages - grown.get(i.name, 0), i.last_seq - grown.get(i.name, 0))
            for i in await admin.streams()
        ]
        assert after == before


async def test_doctor_says_how_a_regions_cache_goes_on(region: Region) -> None:
    seed = region.keyring.seed(cache_of("eu"))
    sets = [f"nats.url={region.leaf.url}", f"nats.credentials={seed}"]

    async def asked() -> doctor.Found:
        return await asyncio.to_thread(doctor.broker, load(None, sets, {}), required=True)

    level, found, _ = await asked()
    assert (level, "`skerry region cache eu` makes it" in found) == (doctor.FAIL, True)
    await region.make_cache()
    async with begun(region) as (admin, _):
        await committed(admin)
        await caught_up(region, MANY)
        level, found, _ = await asked()
    assert level == doctor.OK
    assert "region eu keeps 0.0 MB, and is 0 messages behind the hub" in found
