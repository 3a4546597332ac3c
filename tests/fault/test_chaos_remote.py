"""A drill over a broker's address: a run whose services nobody keeps, each started by hand."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from skerry.log import ledger
from skerry.log.base import MSG_ID, Record
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.protocol.subjects import Subjects, drill_of
from skerry_tools.chaos.lease import leased
from tests.support.cluster import Cluster, until_commit
from tests.support.nats_server import NatsServer

pytestmark = [pytest.mark.nats, pytest.mark.fault, pytest.mark.drill, pytest.mark.timeout(600)]

RUN = "far"
SERVICES = {"s-1": "syncer", "s-2": "syncer", "a": "learner", "b": "learner"}
USER, PASSWORD = "drill", "of no use elsewhere"
FAULTS = [
    {"at_s": 0.5, "kind": "duplicate", "target": "a", "amount": 1.0},
    {"at_s": 1.0, "kind": "corrupt", "target": "learner:1", "amount": 1.0},
    {"at_s": 1.5, "kind": "reorder", "target": "any", "amount": 1.0},
    {"at_s": 2.0, "kind": "corrupt", "target": "syncer", "amount": 0.5},
]
PLAN = {"format": 1, "seed": 3, "heal_s": 120.0, "faults": FAULTS}
WITH_A_KILL = {
    "format": 1,
    "faults": [
        {"at_s": 0.0, "kind": "corrupt", "target": "learner", "amount": 1.0},
        {"at_s": 9.0, "kind": "kill", "target": "learner", "duration_s": 1.0},
    ],
}


@dataclass(frozen=True, slots=True)
class Said:
    """What ``skerry chaos`` came to."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> dict[str, Any]:
        return dict(json.loads(self.out))

    @property
    def story(self) -> str:
        return f"{self.out}\n{self.err}"


@dataclass(frozen=True, slots=True)
class Site:
    """A broker that asks for a password, a run at work, and a folder that knows of neither."""

    cluster: Cluster
    bus: NatsBus
    elsewhere: Path
    access: tuple[str, ...]

    async def chaos(self, *arguments: str) -> Said:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "skerry.cli.main", "chaos", "--nats", self.cluster.url),
            *("--run", RUN, *self.access, *arguments),
            cwd=self.elsewhere,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        return Said(process.returncode or 0, out.decode(), err.decode())

    async def contributions(self) -> list[Record]:
        stream = Subjects(RUN).shard(0).stream("CONTRIB")
        held = next(info for info in await self.bus.streams() if info.name == stream)
        found = [
            await self.bus.get(stream, sequence)
            for sequence in range(max(held.first_seq, held.last_seq - 200), held.last_seq + 1)
        ]
        return [record for record in found if record is not None]


@asynccontextmanager
async def site(folder: Path, config: Path, cache: Path) -> AsyncGenerator[Site]:
    secret, elsewhere = folder / "password", folder / "elsewhere"
    secret.write_text(f"{PASSWORD}\n")
    elsewhere.mkdir()
    settings = f'authorization {{ user: "{USER}", password: "{PASSWORD}" }}'
    server = NatsServer(folder / "nats", settings=settings)
    server.start()
    access = ("--set", f"nats.user={USER}", "--set", f"nats.password_file={secret}")
    try:
        async with (
            NatsBus(
                server.url, name="test", options=NatsOptions(user=USER, password=PASSWORD)
            ) as bus,
            Cluster(server.url, RUN, folder, config, cache) as cluster,
        ):
            for name, kind in SERVICES.items():
                await cluster.start(kind, name, *access, "--set", "chaos.allow=true")
            await until_commit(bus, RUN, lambda c: c.version > 3)
            yield Site(cluster, bus, elsewhere, access)
    finally:
        server.kill()


async def test_a_run_that_was_started_by_hand_survives_damaged_messages(
    tmp_path: Path, tiny_config: Path, jax_cache: Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(PLAN))
    given = ("--plan", str(plan), "--quiet-s", "2", "--json")
    async with site(tmp_path, tiny_config, jax_cache) as held:
        async with leased(held.bus, RUN, "process 1 on another machine"):
            second = await held.chaos(*given)
        free = await held.bus.last(drill_of(RUN))
        done = await held.chaos(*given)
        given_back = await held.bus.last(drill_of(RUN))
        newest = max(c.version for c in (await ledger.last_commits(held.bus, RUN)).values())
        commits = await until_commit(held.bus, RUN, lambda c: c.version > newest)
        codes = [service.process.returncode for service in held.cluster.services]
    assert (second.code, second.out) == (2, ""), second.story
    assert second.err.startswith("error: A drill of process 1 on "), second.story
    assert len(second.err.splitlines()) == 1
    assert free is not None
    assert given_back is not None
    assert given_back.sequence > free.sequence, "the drill took the lease, too"
    assert done.code == 0, done.story
    told = done.told
    assert [fault["kind"] for fault in told["faults"]] == [fault["kind"] for fault in FAULTS]
    assert [fault["target"] for fault in told["faults"][:2]] == ["a", "b"]
    assert all(fault["fired"] for fault in told["faults"]), done.story
    assert all(check["ok"] for check in told["checks"]), done.story
    assert {check["name"] for check in told["checks"]} == {
        "everything is healed",
        "every kind of fault fired",
        "a contributes",
        "b contributes",
        "s-1 answers",
        "s-2 answers",
        "a syncer that runs commits",
        "a runs",
        "b runs",
        "s-1 runs",
        "s-2 runs",
        "no process ended meanwhile",
        "nothing acknowledged was lost",
        "the ledger verifies",
        "the window replays",
        "goodput",
    }
    assert told["goodput"]["share_quiet"] > 0
    assert told["goodput"]["share_faults"] > 0
    assert any(commit.refused for commit in commits), "what was damaged is refused, and counted"
    assert codes == [None] * 4


async def test_faults_that_need_processes_are_refused_over_a_broker(
    tmp_path: Path, tiny_config: Path, jax_cache: Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(WITH_A_KILL))
    drawn = ("--dry-run", "--seed", "4", "--duration-s", "60")
    async with site(tmp_path, tiny_config, jax_cache) as held:
        kinds = await held.chaos("--kinds", "corrupt,kill")
        planned = await held.chaos("--plan", str(plan))
        other = await held.chaos("--targets", "c")
        heal = await held.chaos("--heal")
        one, same = await held.chaos(*drawn), await held.chaos(*drawn)
        lease = await held.bus.last(drill_of(RUN))
        ids = {MSG_ID in record.headers for record in await held.contributions()}
    for refused in (kinds, planned):
        assert refused.err.startswith("error: A kill cannot be done here: over a broker's address")
        assert "there are only messages (corrupt, duplicate, reorder," in refused.err
    assert other.err == (
        "error: There is no 'c' in this cluster: use any of a, b, learner, s-1, s-2, syncer.\n"
    )
    assert heal.err.startswith("error: There is nothing to heal over a broker's address")
    for refused in (kinds, planned, other, heal):
        assert (refused.code, refused.out) == (2, ""), refused.story
        assert len(refused.err.splitlines()) == 1, refused.story
    assert one.out == same.out
    assert {f["kind"] for f in one.told["faults"]} == {"corrupt", "duplicate", "reorder"}
    assert lease is None
    assert ids == {True}, "a copy without an id was published"
