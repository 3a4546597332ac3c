"""Regions: a broker of their own, whose cache spares the link and is never believed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
from nats.aio.msg import Msg
from typer.testing import CliRunner

from skerry.cli import doctor
from skerry.cli.main import app
from skerry.errors import BrokerUnavailable, ConfigError, Denied, RunMismatch
from skerry.log import ledger, run_records
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.protocol.messages import Pulse, RunState
from skerry.protocol.roles import Grant, Role
from skerry.protocol.subjects import Subjects
from skerry.service.accounts import CORE
from skerry.service.keyring import ACCOUNTS, LINK, LINK_CREDENTIALS, Keyring
from skerry.service.region import cache_of
from skerry.settings.loading import load
from skerry.settings.models import LogConfig, RunConfig
from skerry.store.local import LocalStore
from skerry.tasks import TaskGroup
from skerry_checkpointer.promote import rescue, run_promote
from skerry_checkpointer.restore import restore
from skerry_learner.service import learner
from skerry_learner.work import find_or_create
from skerry_syncer.service import stand_by
from tests.support.certificates import needs_openssl, self_signed
from tests.support.checkpoints import QUICK, assert_log_holds
from tests.support.cluster import until_pulse
from tests.support.log import all_of, specs
from tests.support.nats_server import NatsServer
from tests.support.regions import Region, region_of
from tests.support.scripted_run import ScriptedRun
from tests.support.small_run import config, strict_jax

__all__ = ["config", "strict_jax"]

pytestmark = pytest.mark.nats

RUN = "r"
NAMES = Subjects(RUN)
SHARD = NAMES.shard(0)
STATE = SHARD.stream("STATE")
DELTA = SHARD.chunk(0, "delta", 0)
MANY = 20
KINDS = {"days": None}, {"days": 7}


@pytest.fixture
def region(tmp_path: Path, request: pytest.FixtureRequest) -> Generator[Region]:
    with region_of(tmp_path, RUN, **getattr(request, "param", {"days": 7})) as running:
        yield running


@asynccontextmanager
async def begun(region: Region) -> AsyncGenerator[tuple[NatsBus, NatsBus]]:
    """Yield the admin's bus at the hub, where the run's streams are made, and the learner's."""
    async with region.bus(region.hub, "admin") as admin:
        await admin.declare(specs(RUN))
        async with region.learner() as learner:
            yield admin, learner


async def committed(admin: NatsBus, about: str = "") -> list[int]:
    """Store chunks of a delta and of a snapshot; return the sequences of the delta's."""
    sequences: list[int] = []
    for index in range(MANY):
        for kind in ("delta", "snapshot"):
            subject, chunk = SHARD.chunk(0, kind, 0, index), os.urandom(1000)
            receipt = await admin.publish(subject, chunk, msg_id=f"{about}{kind}{index}")
            if kind == "delta":
                sequences.append(receipt.sequence)
    return sequences


async def read(learner: NatsBus, sequences: Sequence[int]) -> list[int]:
    return [record.sequence for record in await all_of(learner.get_each(DELTA, sequences))]


async def caught_up(region: Region, messages: int) -> None:
    """Return once the cache holds so many chunks."""
    async with asyncio.timeout(30.0), region.bus(region.leaf, cache_of("eu")) as bus:
        while True:
            held = await bus.mirrors.info(STATE)
            if held is not None and held.messages >= messages:
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("region", KINDS, ids=["static", "expiring"], indirect=True)
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


@pytest.mark.parametrize("region", KINDS, ids=["static", "expiring"], indirect=True)
async def test_a_region_goes_on_where_brokers_read_their_keys_again(region: Region) -> None:
    async with begun(region) as (admin, learner):
        await region.make_cache()
        region.keyring.add(Grant(Role.LEARNER, "eu-1", RUN, region="eu"))
        for broker in (region.leaf, region.hub):
            await asyncio.to_thread(broker.reload)
        async with region.bus(region.leaf, "eu-1") as new:
            await new.publish(NAMES.pulse("eu-1"), b"x", msg_id="1")
        mine = SHARD.contribution(0, "eu-0")
        receipt = await learner.publish(mine, b"x", msg_id="1")
        found = await admin.last(mine)
        assert found is not None
        assert found.sequence == receipt.sequence
        await committed(admin)
        await caught_up(region, MANY)


@pytest.mark.parametrize("region", KINDS, ids=["static", "expiring"], indirect=True)
async def test_a_region_of_an_odd_name_begins_where_the_hub_runs(region: Region) -> None:
    """Its name is a number to nats-server unless it is quoted."""
    (hub,) = re.findall(r"nats-leaf://[^\"]+", (region.leaf.folder / "nats.conf").read_text())
    folder = str(region.keyring.folder)
    words = ["region", "init", "12", "--hub", hub, "--learner", "x-0", "--run", RUN]
    said = CliRunner().invoke(app, [*words, "--keys", folder]).output
    for _ in range(2 if "again, twice" in said else 1):
        await asyncio.to_thread(region.hub.reload)
    there = region.keyring.region("12")
    shipped = (there / "nats.conf").read_text().replace("/data", str(there))
    leaf = NatsServer(there, settings=shipped, jetstream=False)
    try:
        leaf.start()
        async with region.bus(region.hub, "admin") as admin, region.bus(leaf, "x-0") as learner:
            await admin.declare(specs(RUN))
            await learner.publish(SHARD.contribution(0, "x-0"), b"x", msg_id="1")
    finally:
        leaf.kill()


async def test_a_region_hears_of_no_address_but_the_one_it_dials(region: Region) -> None:
    """A broker in a container knows an address that leads nowhere from outside of it."""
    link = (region.leaf.folder / "nats.conf").read_text()
    (port,) = re.findall(r"nats-leaf://127.0.0.1:(\d+)", link)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    said = json.loads((await reader.readline()).removeprefix(b"INFO "))
    writer.close()
    assert said["domain"] == "hub"
    assert not {"connect_urls", "leafnode_urls"} & said.keys()


async def test_what_learners_all_read_crosses_the_link_once(region: Region) -> None:
    await region.make_cache()
    async with begun(region) as (admin, learner), region.learner() as second:
        sequences = await committed(admin)
        await caught_up(region, MANY)
        async with region.bus(region.leaf, cache_of("eu")) as bus:
            held = await bus.mirrors.info(STATE)
        assert held is not None
        assert held.messages == MANY  # and nothing of snapshots
        for reader in (learner, second):
            assert await read(reader, sequences) == sequences
            reads = reader.shared_reads
            assert (reads.region, reads.cached_bytes) == ("eu", MANY * 1000)
        at_hub = await learner.get(STATE, sequences[0])
        assert at_hub == (await all_of(learner.get_each(DELTA, sequences[:1])))[0]


async def test_what_the_cache_does_not_have_is_read_from_the_hub_at_once(region: Region) -> None:
    async with begun(region) as (admin, learner):
        sequences = await committed(admin)
        for _ in range(2):  # the second time the cache rests
            assert await read(learner, sequences) == sequences
        assert learner.shared_reads.cached_bytes == 0
        await admin.publish(SHARD.chunk(0, "delta", 0, 0), b"next", msg_id="next")
        assert await read(learner, sequences[:1]) == []  # gone, and not waited for


@pytest.mark.parametrize("region", KINDS[:1], ids=["static"], indirect=True)
async def test_what_a_cache_answers_that_is_no_message_is_read_from_the_hub(region: Region) -> None:
    accounts = region.keyring.region("eu") / ACCOUNTS
    users = r'("jetstream": "enabled",\s*"users": \[)'
    text = re.sub(users, r'\1{"user": "x", "password": "x"},', accounts.read_text())
    accounts.write_text(text)
    await asyncio.to_thread(region.leaf.reload)
    rubbish = {"Nats-Subject": "x", "Nats-Sequence": "x", "Nats-Time-Stamp": "yesterday"}
    async with begun(region) as (admin, _):
        sequences = await committed(admin)
        client = await nats.connect(region.leaf.url.replace("//", "//x:x@"))
        for headers in (None, rubbish):

            async def lie(asked: Msg, headers: dict[str, str] | None = headers) -> None:
                await client.publish(asked.reply, b"lie", headers=headers)

            lies = await client.subscribe(f"$JS.API.DIRECT.GET.{STATE}", cb=lie)
            async with region.learner() as learner:
                assert await read(learner, sequences) == sequences
                assert learner.shared_reads.cached_bytes == 0
            assert lies.delivered
            await lies.unsubscribe()
        await client.close()


async def test_a_region_whose_link_is_cut_says_so_and_comes_back(
    region: Region, tmp_path: Path
) -> None:
    await region.make_cache()
    async with begun(region) as (admin, _):
        sequences = await committed(admin)
        await caught_up(region, MANY)
        async with region.learner(NatsOptions(request_timeout_s=0.5, patience_s=2.0)) as learner:
            region.hub.kill()
            with pytest.raises(BrokerUnavailable, match=r"region eu at .* has not reached the hub"):
                await learner.publish(NAMES.member("eu-0"), b"x", msg_id="1")
            assert await read(learner, sequences) == sequences  # out of the cache
            with pytest.raises(ConfigError, match="Region eu is no standby of run 'r'"):
                await rescue(region.bus(region.leaf, cache_of("eu")), RUN, LocalStore(tmp_path))
            with pytest.raises(BrokerUnavailable, match=r"region eu at .* has not reached the hub"):
                async with region.learner(NatsOptions(connect_timeout_s=3.0)):
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


@pytest.mark.drill
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


@pytest.mark.parametrize("region", KINDS, ids=["static", "expiring"], indirect=True)
async def test_the_key_that_makes_a_regions_cache_writes_and_hears_nothing(region: Region) -> None:
    """It says what goes into its stream, and where the broker publishes that once more."""
    mine, info, kept = SHARD.contribution(0, "eu-0"), "$JS.API.INFO", {"storage": "memory"}
    async with begun(region) as (admin, learner), region.bus(region.leaf, cache_of("eu")) as bus:
        forges = {"subjects": [info], "no_ack": True, "republish": {"src": info, "dest": mine}}
        await bus.mirrors.make({"name": STATE} | forges | kept)
        session = await bus._connection.ready(None)
        await session.client.publish(info, b"forged")
        async with asyncio.timeout(30.0):
            while True:
                held = await bus.mirrors.info(STATE)
                if held is not None and held.messages:
                    break
                await asyncio.sleep(0.01)
        hears = {"subjects": ["skerry.>", "$JS.hub.>"], "no_ack": True}
        for taken in ({"subjects": ["skerry.>"]}, hears):
            await bus.mirrors.make({"name": STATE} | taken | kept)
            receipt = await learner.publish(mine, b"mine", msg_id=f"{taken}")
            found = await admin.last(mine)
            assert found is not None
            assert (found.payload, found.sequence) == (b"mine", receipt.sequence)
            assert await learner.last(mine) == found
            held = await bus.mirrors.info(STATE)
            assert held is not None
            assert held.messages == 0
        assert found.sequence == 2  # and nothing of the forger's


async def test_doctor_says_how_a_regions_cache_goes_on(region: Region) -> None:
    async def asked(name: str = cache_of("eu")) -> doctor.Found:
        sets = [f"nats.url={region.leaf.url}", f"nats.credentials={region.keyring.seed(name)}"]
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
    level, found, _ = await asked("eu-0")  # the only key on its learner's machine
    assert (level, "this key may not ask what is stored" in found) == (doctor.OK, True)


async def test_doctor_fails_a_cache_whose_disk_is_full(region: Region) -> None:
    settings = region.leaf._settings
    assert settings is not None
    region.leaf._settings = settings.replace("domain:", "max_file_store: 4KB\n  domain:")
    region.leaf.restart()
    await region.make_cache()
    key = region.keyring.seed(cache_of("eu"))
    sets = [f"nats.url={region.leaf.url}", f"nats.credentials={key}"]
    async with begun(region) as (admin, _), asyncio.timeout(30.0):
        await committed(admin)
        while True:
            asked = load(None, sets, {})
            level, found, _ = await asyncio.to_thread(doctor.broker, asked, required=True)
            if "stands still" in found:
                break
    assert level == doctor.FAIL


@needs_openssl
@pytest.mark.parametrize("is_known", [True, False])
async def test_a_region_reaches_a_hub_over_tls_whose_authority_it_knows(
    tmp_path: Path, is_known: bool
) -> None:
    hubs, other = self_signed(tmp_path / "certs"), self_signed(tmp_path / "other")
    trusted = hubs if is_known else other
    with region_of(tmp_path, RUN, certificate=hubs, trusted=trusted) as region:
        async with region.bus(region.hub, "admin", NatsOptions(ca_file=hubs)) as admin:
            await admin.declare(specs(RUN))
        if is_known:
            async with region.learner() as learner:
                await learner.publish(NAMES.pulse("eu-0"), b"x", msg_id="1")
            return
        unreached = pytest.raises(
            BrokerUnavailable, match=r"region eu at .* has not reached the hub"
        )
        with unreached:
            async with region.learner(NatsOptions(connect_timeout_s=2.0)):
                pass
        assert "certificate signed by unknown authority" in region.leaf.log.read_text()


async def stands_by(region: Region, admin: NatsBus) -> None:
    """Return once the region's broker has all of the run's state, ledger and members."""
    kept = {*Grant(Role.REGION, run=RUN).mirrored()}
    whole = {i.name: i.last_seq for i in await admin.streams() if i.name in kept}
    async with asyncio.timeout(30.0), region.bus(region.leaf, cache_of("eu")) as bus:
        while True:
            if {info.name: info.last_seq for info in await bus.streams()} == whole:
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("region", KINDS, ids=["static", "expiring"], indirect=True)
async def test_a_run_whose_hub_is_gone_goes_on_at_a_region_that_stands_by(
    region: Region, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, sets = region.keyring.folder, [f"store.path={tmp_path}"]
    promote = (run_promote, "eu", region.leaf.url, sets, keys)
    async with region.bus(region.hub, "admin") as admin:
        run = await ScriptedRun.begin(admin, RUN, config=RunConfig.model_validate(QUICK))
        await run.commit_all(step=3, tokens=70)
        await region.make_cache(standby=True)
        await run.commit(0, step=4)
        await stands_by(region, admin)
        with pytest.raises(RunMismatch, match="is not gone, it answers region eu"):
            await asyncio.to_thread(*promote)
    region.hub.kill()
    shutil.rmtree(region.hub.folder / "jetstream")
    await asyncio.to_thread(*promote)
    where = str(tmp_path / RUN / "step-00000004")
    assert f"{where} has what region eu had of run r: version 1-2." in capsys.readouterr().out
    region.leaf.kill()
    region.hub.start()
    keyring = Keyring.opened(keys)
    assert {grant.region for grant in keyring.grants.values()} == {""}
    assert not {Role.REGION, Role.CACHE} & {grant.role for grant in keyring.grants.values()}
    async with region.bus(region.hub, "admin") as admin, region.bus(region.hub, "eu-0") as learner:
        await restore(admin, where, RUN, sets=["log.replicas=1"])
        await assert_log_holds(learner, RUN, LocalStore(tmp_path / RUN), "step-00000004")
        assert (await ledger.join(learner, RUN, "eu-0", "host", 1)).shard == 1


@pytest.mark.parametrize("region", KINDS[:1], ids=["static"], indirect=True)
async def test_a_deployment_goes_over_from_static_keys_to_keys_that_expire(
    region: Region, tmp_path: Path
) -> None:
    """As docs/how-to/keys.md has it; the log stays, and clients need no new start."""
    held, folder = region.keyring, tmp_path / "new"
    async with begun(region) as (admin, learner):
        mine = SHARD.contribution(0, "eu-0")
        before = await learner.publish(mine, b"x", msg_id="1")
        words = ("init", "--like", str(held.folder), "--days", "7", "--keys", str(folder))
        done = CliRunner().invoke(app, ["keys", *words])
        assert done.exit_code == 0, done.output
        new = Keyring.opened(folder)
        account = done.output.rpartition("The log is in the account ")[2].strip().rstrip(".")
        for server in (region.leaf, region.hub):
            server.stop()
        for name in (ACCOUNTS, *(f"regions/eu/{n}" for n in (ACCOUNTS, LINK, LINK_CREDENTIALS))):
            shutil.copy(folder / name, held.folder / name)
        store = region.hub.folder / "jetstream"
        (store / CORE).rename(store / account)
        shutil.rmtree(region.leaf.folder / "jetstream")
        for server in (region.hub, region.leaf):
            server.start()
        for name in ("admin", "eu-0", cache_of("eu")):
            shutil.copy(new.seed(name), held.seed(name))
        async with asyncio.timeout(30.0):
            after = await learner.publish(mine, b"y", msg_id="2")
        assert after.sequence == before.sequence + 1
        await region.make_cache()
        sequences = await committed(admin)
        await caught_up(region, MANY)
        assert await read(learner, sequences) == sequences
        assert learner.shared_reads.cached_bytes == MANY * 1000


@pytest.mark.drill
async def test_any_broker_of_a_hub_of_three_may_die_under_a_region(tmp_path: Path) -> None:
    """The one that the region's link is with first; then the others."""
    with region_of(tmp_path, RUN, days=7, brokers=3) as region:
        await region.until_whole()
        async with region.bus(region.hub, "admin") as admin, region.learner() as learner:
            await admin.declare(specs(RUN, replicas=3))
            await region.make_cache()
            mine, acknowledged = SHARD.contribution(0, "eu-0"), list[int]()
            sequences = await committed(admin)
            await caught_up(region, MANY)
            assert await read(learner, sequences) == sequences
            assert learner.shared_reads.cached_bytes == MANY * 1000
            linked = region.linked()
            for number, hub in enumerate((linked, *(h for h in region.hubs if h is not linked))):
                hub.kill()
                sequences = await committed(admin, f"{number}")
                for n in range(MANY):
                    receipt = await learner.publish(mine, b"%d" % n, msg_id=f"{number}/{n}")
                    acknowledged.append(receipt.sequence)
                assert await read(learner, sequences) == sequences
                await region.until_whole()
            kept = [r.sequence for r in await all_of(admin.get_each(mine, acknowledged))]
            assert kept == acknowledged == sorted(set(acknowledged))


@pytest.mark.drill
@pytest.mark.timeout(600)
@pytest.mark.parametrize("region", [{"brokers": 1}, {"brokers": 3}], indirect=True)
async def test_a_learner_trains_to_its_runs_end_through_its_regions_broker(
    region: Region, config: RunConfig
) -> None:
    """A real learner and a real syncer; the region's broker dies, or that of three it is with."""
    await region.until_whole()
    log = LogConfig(window_bytes=16 * 1024**2, replicas=len(region.hubs))
    train = config.train.model_copy(update={"steps": 12_000})  # longer than the cache may rest
    given = config.model_copy(update={"log": log, "train": train})
    async with region.bus(region.hub, "admin") as admin:
        await find_or_create(admin, RUN, given)
        await region.make_cache()
        learning = learner(
            region.learner(), RUN, "eu-0", given, shutdown_s=20.0, started_s=time.monotonic()
        )
        async with (
            region.bus(region.hub, "syncer") as syncing,
            asyncio.timeout(500),
            TaskGroup() as group,
        ):
            group.create_task(stand_by(syncing, RUN, "syncer"))
            trains = group.create_task(learning)
            await until_pulse(admin, RUN, lambda pulse: pulse.cached_bytes > 0)
            if len(region.hubs) == 1:
                await asyncio.to_thread(region.leaf.restart)
            else:
                region.linked().kill()
            assert not trains.done()
            await trains
        record = await ledger.read_run(admin, RUN)
        (said,) = await run_records.newest_each(admin, RUN, Pulse)
    assert record.state is RunState.FINISHED
    assert (said.step, said.region) == (train.steps, "eu")
    assert 0 < said.cached_bytes <= said.bytes_down
