"""The files of Compose, alone and with brokers or a collector, by the tools that read them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import BusError
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.log.streams import specs
from skerry.protocol.roles import Grant, Role
from skerry.service.accounts import services_of
from skerry.service.keyring import Keyring
from skerry.settings import loading
from tests.support.keyed import KeyedBroker, mount_keys
from tests.support.nats_server import NatsServer
from tests.support.ports import free_ports
from tests.support.processes import call

BIN = Path(sys.executable).parent
IMAGES = ("learner", "syncer", "checkpointer", "health_monitor")
OURS = {"syncer", "checkpointer", "evaluator", "health-monitor", "learner-1", "learner-2"}
NODES = ("nats", "nats-2", "nats-3")
WORD = "12e5_a-B"
HANDED_OVER = {"NATS_NAME", "NATS_ROUTES", "ROUTE_PASSWORD"}
BACKENDS = {"otel-collector", "jaeger", "prometheus"}
CLUSTER, OTEL = "infra/nats/compose.cluster.yml", "infra/otel/compose.otel.yml"
Services = dict[str, Any]


@pytest.fixture(scope="module")
def resolve(root: Path) -> Callable[..., Any]:
    """Return what Compose makes of files, the GPU profile included."""

    def resolved(*more: str, options: tuple[str, ...] = (), given: str | None = None) -> Any:
        files = [part for name in more for part in ("-f", name)]
        command = [BIN / "docker-compose", "--profile", "gpu", *files, "config", *options]
        done = call(*command, "--format", "json", cwd=root, given=given)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return resolved


@pytest.fixture(scope="module")
def services(resolve: Callable[..., Any]) -> Services:
    return dict(resolve("docker-compose.yml")["services"])


@pytest.fixture(scope="module")
def clustered(resolve: Callable[..., Any]) -> Services:
    return dict(resolve("docker-compose.yml", CLUSTER)["services"])


@pytest.fixture(scope="module")
def observed(resolve: Callable[..., Any]) -> Services:
    return dict(resolve("docker-compose.yml", OTEL)["services"])


@pytest.fixture(scope="module")
def collector(root: Path, resolve: Callable[..., Any]) -> dict[str, Any]:
    """The collector's config, read by the one YAML parser that is here: Compose's own."""
    text = textwrap.indent((root / "infra/otel/collector.yml").read_text(), "  ")
    wrapped = f"services: {{none: {{image: none}}}}\nx-config:\n{text}"
    return dict(resolve("-", options=("--no-interpolate",), given=wrapped)["x-config"])


def test_the_default_profile_is_a_broker_and_a_whole_run(root: Path) -> None:
    done = call(BIN / "docker-compose", "config", "--services", cwd=root)
    assert set(done.stdout.split()) == OURS | {"nats"}


def test_the_gpu_profile_adds_a_learner_with_a_device(services: Services) -> None:
    (device,) = services["learner-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert services["learner-gpu"]["build"]["args"] == {"EXTRA": "cuda"}


@pytest.mark.parametrize("more", [(), (CLUSTER,), (OTEL,)])
def test_no_container_can_write_its_image_gain_rights_or_be_reached_from_outside(
    resolve: Callable[..., Any], more: tuple[str, ...]
) -> None:
    for name, service in resolve("docker-compose.yml", *more)["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert {port["host_ip"] for port in service.get("ports", [])} <= {"127.0.0.1"}, name


def test_all_wait_for_a_broker_that_answers(services: Services) -> None:
    for name in OURS:
        assert services[name]["depends_on"]["nats"]["condition"] == "service_healthy"
    assert services["nats"]["healthcheck"]["test"][0] == "CMD"


def test_a_container_is_killed_only_after_its_service_gave_up(services: Services) -> None:
    for name in OURS:
        drain_s = float(services[name]["environment"]["SKERRY_SHUTDOWN_S"])
        assert float(services[name]["stop_grace_period"].removesuffix("s")) > drain_s


def test_settings_accept_the_environments_and_the_mounted_config(
    root: Path, services: Services
) -> None:
    for name in OURS:
        found = loading.load(None, (), services[name]["environment"])
        assert found.local.nats.url == "nats://nats:4222"
    assert loading.load(root / "infra" / "skerry.toml", (), {}).run.sync.learners == 2


def test_the_monitor_gets_the_brokers_figures_and_keeps_its_metrics(services: Services) -> None:
    monitor = services["health-monitor"]
    local = loading.load(None, (), monitor["environment"]).local
    assert local.metrics.broker_urls == ("http://nats:8222",)
    kept = {volume["target"] for volume in monitor["volumes"]}
    assert str(local.telemetry.jsonl and local.telemetry.jsonl.parent) in kept


@pytest.mark.parametrize(
    ("recipe", "variable", "names"),
    [
        ("learner", "SKERRY_LEARNER__PATH", ("learner-1", "learner-2", "learner-gpu")),
        ("evaluator", "JAX_COMPILATION_CACHE_DIR", ("evaluator",)),
    ],
)
def test_what_makes_a_restart_warm_is_kept_in_a_volume(
    root: Path, services: Services, recipe: str, variable: str, names: tuple[str, ...]
) -> None:
    """Learners keep inner states and compiled programs, the evaluator compiled programs."""
    text = (root / "services" / recipe / "Dockerfile").read_text()
    folder = re.search(rf"{variable}=(\S+)", text)
    assert folder is not None
    for name in names:
        assert folder[1] in {volume["target"] for volume in services[name]["volumes"]}


@pytest.mark.parametrize("service", IMAGES)
def test_hadolint_finds_nothing(root: Path, service: str) -> None:
    done = call(BIN / "hadolint", root / "services" / service / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


async def connects(url: str, credentials: Path | None) -> bool:
    options = NatsOptions(credentials=credentials, connect_timeout_s=2.0)
    try:
        async with NatsBus(url, options=options):
            return True
    except BusError:
        return False


def test_each_service_has_a_key_of_its_own_and_the_broker_none(services: Services) -> None:
    for name in {*OURS, "learner-gpu"}:
        targets = {secret["target"]: secret["source"] for secret in services[name]["secrets"]}
        assert targets["key"] == name
        found = loading.load(None, (), services[name]["environment"]).local.nats
        assert found.credentials == Path("/run/secrets/key")
    assert "secrets" not in services["nats"]


def test_make_secrets_makes_a_key_for_each_learner(root: Path, services: Services) -> None:
    done = call("make", "-n", "-B", "-o", ".venv/.runtime", "secrets", cwd=root)
    named = re.findall(r"--(?:founder|learner) (\S+)", done.stdout)
    assert sorted(named) == sorted(name for name in services if name.startswith("learner"))


def test_keys_of_another_run_are_not_taken_for_those_asked_for(root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "Makefile", tmp_path)
    secrets = tmp_path / "infra" / "secrets"
    keyring = Keyring(secrets)
    keyring.add(*services_of("one"))
    for name in ("route_password", "page_token"):
        (secrets / name).write_text("")
    for run, code in (("one", 0), ("on", 2), ("two", 2)):
        done = call("make", "-o", ".venv/.runtime", "secrets", f"SKERRY_RUN={run}", cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert (f"infra/secrets has no keys of run {run}:" in done.stderr) == bool(code)


@pytest.mark.nats
def test_the_broker_takes_keys_of_the_run_and_nothing_else(
    compose_broker: Callable[..., KeyedBroker],
) -> None:
    broker = compose_broker(*services_of("compose"))
    url = broker.server.url
    assert asyncio.run(connects(url, broker.keyring.seed("syncer")))
    assert not asyncio.run(connects(url, None))


@pytest.mark.nats
def test_the_broker_refuses_to_start_without_keys(root: Path, tmp_path: Path) -> None:
    config = shutil.copy(root / "infra" / "nats" / "nats.conf", tmp_path)
    done = call(BIN / "nats-server", "-t", "-c", config)
    assert done.returncode != 0
    assert "accounts.conf" in done.stderr


def exported(service: dict[str, Any], folder: Path) -> dict[str, str]:
    """Run the container's own shell script with a stand-in for the server; return what it gets."""
    (folder / "secret").write_text(f"{WORD}\n")
    stand_in = folder / "nats-server"
    stand_in.write_text("#!/bin/sh\nenv\n")
    stand_in.chmod(0o755)
    shell, flag, script = service["command"]
    script = script.replace("$$", "$").replace("/run/secrets/route_password", f"{folder}/secret")
    env = {"PATH": f"{folder}:/usr/bin:/bin", **service.get("environment", {})}
    done = call(shell, flag, script, env=env)
    assert done.returncode == 0, done.stderr
    given = (line.split("=", 1) for line in done.stdout.splitlines())
    return {name: value for name, value in given if name in HANDED_OVER}


def test_a_brokers_command_hands_over_the_quoted_secret(
    clustered: Services, tmp_path: Path
) -> None:
    assert exported(clustered["nats"], tmp_path)["ROUTE_PASSWORD"] == f"'{WORD}'"


def test_each_broker_has_a_name_and_a_volume_and_only_the_first_a_port(clustered: Services) -> None:
    assert [clustered[node]["environment"]["NATS_NAME"] for node in NODES] == list(NODES)
    stores, keys = zip(*(clustered[node]["volumes"] for node in NODES), strict=True)
    assert len({store["source"] for store in stores}) == 3
    assert {volume["target"] for volume in keys} == {"/etc/nats/keys"}
    assert [len(clustered[node].get("ports", ())) for node in NODES] == [1, 0, 0]
    assert {clustered[node]["image"] for node in NODES} == {clustered["nats"]["image"]}


def test_services_know_all_brokers_and_ask_for_three_replicas(clustered: Services) -> None:
    for name in clustered.keys() - set(NODES):
        found = loading.load(None, (), clustered[name]["environment"])
        assert found.local.nats.url == ",".join(f"nats://{node}:4222" for node in NODES)
        assert found.run.log.replicas == 3
        assert clustered[name]["depends_on"].keys() == set(NODES)


@pytest.fixture
def brokers(
    root: Path, clustered: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[NatsServer]]:
    """Three servers with the shipped config and environment; only folders and ports are moved."""
    ports = dict(zip(NODES, free_ports(3), strict=True))
    keyring = Keyring(tmp_path / "secrets")
    keyring.add(Grant(Role.ADMIN, "admin"))
    started: list[NatsServer] = []
    for node in NODES:
        folder = tmp_path / node
        mount_keys(keyring, folder)
        alone = (root / "infra" / "nats" / "nats.conf").read_text()
        moved = alone.replace('"/data"', f'"{folder}/data"').replace(":8222", ":-1")
        (folder / "alone.conf").write_text(moved)
        together = (root / "infra" / "nats" / "cluster.conf").read_text()
        together = together.replace('"nats.conf"', '"alone.conf"')
        together = together.replace("0.0.0.0:6222", f"127.0.0.1:{ports[node]}")
        given = exported(clustered[node], folder)
        for other, port in ports.items():
            routes = given["NATS_ROUTES"].replace(f"@{other}:6222", f"@127.0.0.1:{port}")
            given["NATS_ROUTES"] = routes
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        server = NatsServer(folder, settings=together, jetstream=False)
        started.append(server)
        server.start()
    yield started
    for server in started:
        server.kill()


@pytest.mark.drill
@pytest.mark.nats
async def test_the_shipped_brokers_replicate(
    brokers: list[NatsServer], tmp_path: Path, run_id: str
) -> None:
    urls = ",".join(server.url for server in brokers)
    options = NatsOptions(credentials=tmp_path / "secrets" / "admin.nk", patience_s=60.0)
    async with NatsBus(urls, options=options) as bus:
        assert await bus.declare(specs(run_id, replicas=3, window_bytes=1024**2)) == ()


def test_every_service_that_reports_rounds_sends_to_the_collector(observed: Services) -> None:
    for name in {*OURS, "learner-gpu"} - {"health-monitor"}:
        found = loading.load(None, (), observed[name]["environment"]).local.telemetry
        assert found.traces_url == "http://otel-collector:4318/v1/traces", name
        assert found.metrics_url == "http://otel-collector:4318/v1/metrics", name


def test_pipelines_name_parts_that_are_there_and_bound_memory_first(
    collector: dict[str, Any],
) -> None:
    pipelines = collector["service"]["pipelines"].values()
    for part in ("receivers", "processors", "exporters"):
        used = {name for pipeline in pipelines for name in pipeline[part]}
        assert used == collector[part].keys(), part
    assert {pipeline["processors"][0] for pipeline in pipelines} == {"memory_limiter"}


def test_the_collector_is_reached_where_compose_says_so_and_hands_on_to_its_backends(
    collector: dict[str, Any], observed: Services
) -> None:
    protocols = collector["receivers"]["otlp"]["protocols"].values()
    endpoints = [protocol["endpoint"] for protocol in protocols]
    assert all(endpoint.startswith("${env:OTLP_HOST:-127.0.0.1}:") for endpoint in endpoints)
    host = observed["otel-collector"]["environment"]["OTLP_HOST"]
    assert host == "0.0.0.0"  # noqa: S104 - inside the container
    handed = [e["endpoint"] for e in collector["exporters"].values() if "endpoint" in e]
    assert {endpoint.split("//")[1].split(":")[0] for endpoint in handed} <= observed.keys()
    assert observed.keys() >= BACKENDS


def test_the_page_and_who_scrapes_it_have_its_token(observed: Services) -> None:
    local = loading.load(None, (), observed["health-monitor"]["environment"]).local
    assert str(local.health.token_file) == "/run/secrets/page_token"
    assert local.health.names == ("health-monitor",)
    for name in ("health-monitor", "prometheus"):
        assert "page_token" in {secret["source"] for secret in observed[name]["secrets"]}, name
