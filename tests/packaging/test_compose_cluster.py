"""infra/nats/compose.cluster.yml: three brokers out of one, by real Compose and real servers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skerry.log.nats.bus import NatsBus
from skerry.log.nats.connection import NatsOptions
from skerry.log.streams import specs
from skerry.settings import loading
from tests.support.nats_cluster import free_ports
from tests.support.nats_server import NatsServer

NODES = ("nats", "nats-2", "nats-3")
WORD = "12e5_a-B"


@pytest.fixture(scope="module")
def services(root: Path) -> dict[str, Any]:
    """Every service as Compose resolves both files together."""
    files = ("-f", "docker-compose.yml", "-f", "infra/nats/compose.cluster.yml")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "docker-compose"), *files, "config", "--format", "json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
    )
    assert (done.returncode, done.stderr) == (0, "")
    resolved: dict[str, Any] = json.loads(done.stdout)["services"]
    return resolved


def test_each_broker_has_a_name_and_a_volume_of_its_own(services: dict[str, Any]) -> None:
    assert [services[node]["environment"]["NATS_NAME"] for node in NODES] == list(NODES)
    assert len({services[node]["volumes"][0]["source"] for node in NODES}) == 3


def test_only_the_first_broker_publishes_a_port(services: dict[str, Any]) -> None:
    assert [len(services[node].get("ports", ())) for node in NODES] == [1, 0, 0]
    assert services["nats"]["ports"][0]["host_ip"] == "127.0.0.1"


def test_all_brokers_are_locked_down_as_the_one_is(services: dict[str, Any]) -> None:
    for node in NODES:
        assert services[node]["read_only"]
        assert services[node]["cap_drop"] == ["ALL"]
        assert services[node]["image"] == services["nats"]["image"]


def test_services_know_all_brokers_and_ask_for_three_replicas(services: dict[str, Any]) -> None:
    for name in services.keys() - set(NODES):
        found = loading.load(None, (), services[name]["environment"])
        assert found.local.nats.url == ",".join(f"nats://{node}:4222" for node in NODES)
        assert found.run.log.replicas == 3
        assert services[name]["depends_on"].keys() == set(NODES)


def exported(service: dict[str, Any], folder: Path) -> dict[str, str]:
    """Run the container's own shell script with a stand-in for the server; return what it gets."""
    (folder / "secret").write_text(f"{WORD}\n")
    stand_in = folder / "nats-server"
    stand_in.write_text("#!/bin/sh\nenv\n")
    stand_in.chmod(0o755)
    shell, flag, script = service["command"]
    script = script.replace("$$", "$").replace("/run/secrets/nats_password", f"{folder}/secret")
    done = subprocess.run(
        [shell, flag, script],
        env={"PATH": f"{folder}:/usr/bin:/bin", **service["environment"]},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if line[:5] == "NATS_")


@pytest.fixture
def brokers(
    root: Path, services: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[NatsServer]]:
    """Three servers with the shipped config and environment; only folders and ports are moved."""
    ports = dict(zip(NODES, free_ports(3), strict=True))
    started: list[NatsServer] = []
    for node in NODES:
        folder = tmp_path / node
        folder.mkdir()
        alone = (root / "infra" / "nats" / "nats.conf").read_text()
        moved = alone.replace('"/data"', f'"{folder}/data"').replace(":8222", ":-1")
        (folder / "alone.conf").write_text(moved)
        together = (root / "infra" / "nats" / "cluster.conf").read_text()
        together = together.replace('"nats.conf"', '"alone.conf"')
        together = together.replace("0.0.0.0:6222", f"127.0.0.1:{ports[node]}")
        told = exported(services[node], folder)
        for other, port in ports.items():
            address = (f"@{other}:6222", f"@127.0.0.1:{port}")
            told["NATS_ROUTES"] = told["NATS_ROUTES"].replace(*address)
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        server = NatsServer(folder, settings=together, jetstream=False)
        started.append(server)
        server.start()
    yield started
    for server in started:
        server.kill()


@pytest.mark.nats
async def test_the_shipped_brokers_replicate(brokers: list[NatsServer], run_id: str) -> None:
    urls = ",".join(server.url for server in brokers)
    async with NatsBus(
        urls, options=NatsOptions(user="skerry", password=WORD, patience_s=60.0)
    ) as bus:
        assert await bus.declare(specs(run_id, replicas=3, window_bytes=1024**2)) == ()
