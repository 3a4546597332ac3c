"""docker-compose.yml and what it mounts, checked by the tools that would read it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import BusError
from skerry.settings import loading
from tests.support.nats_server import NatsServer

BIN = Path(sys.executable).parent
SERVICES = ("learner", "syncer", "checkpointer", "health_monitor")
OURS = {"syncer", "checkpointer", "evaluator", "health-monitor", "learner-1", "learner-2"}


def compose(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "docker-compose"), "--project-directory", str(root), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def services(root: Path) -> dict[str, Any]:
    """Every service as Compose resolves it, the GPU profile included."""
    done = compose(root, "--profile", "gpu", "config", "--format", "json")
    assert done.returncode == 0, done.stderr
    resolved: dict[str, Any] = json.loads(done.stdout)["services"]
    return resolved


def test_compose_accepts_the_file_without_a_warning(root: Path) -> None:
    done = compose(root, "config", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_default_profile_is_a_broker_and_a_whole_run(root: Path) -> None:
    done = compose(root, "config", "--services")
    assert set(done.stdout.split()) == OURS | {"nats"}


def test_the_gpu_profile_adds_a_learner_with_a_device(services: dict[str, Any]) -> None:
    (device,) = services["learner-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert services["learner-gpu"]["build"]["args"] == {"EXTRA": "cuda"}


def test_ports_are_published_on_the_loopback_only(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}


def test_no_container_can_write_its_image_or_gain_rights(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_everybody_waits_for_a_broker_that_answers(services: dict[str, Any]) -> None:
    for name in OURS:
        assert services[name]["depends_on"]["nats"]["condition"] == "service_healthy"
    assert services["nats"]["healthcheck"]["test"][0] == "CMD"


def test_a_container_is_killed_only_after_its_service_gave_up(services: dict[str, Any]) -> None:
    for name in OURS:
        drain_s = float(services[name]["environment"]["SKERRY_SHUTDOWN_S"])
        assert float(services[name]["stop_grace_period"].removesuffix("s")) > drain_s


def test_the_environment_of_each_service_is_one_that_settings_accept(
    services: dict[str, Any],
) -> None:
    for name in OURS:
        found = loading.load(None, (), services[name]["environment"])
        assert found.local.nats.url == "nats://nats:4222"


def test_the_monitor_gets_the_brokers_figures_and_keeps_its_metrics(
    services: dict[str, Any],
) -> None:
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
    root: Path, services: dict[str, Any], recipe: str, variable: str, names: tuple[str, ...]
) -> None:
    """Learners keep inner states and compiled programs, the evaluator compiled programs."""
    text = (root / "services" / recipe / "Dockerfile").read_text()
    folder = re.search(rf"{variable}=(\S+)", text)
    assert folder is not None
    for name in names:
        assert folder[1] in {volume["target"] for volume in services[name]["volumes"]}


def test_the_mounted_config_is_one_that_settings_accept(root: Path) -> None:
    found = loading.load(root / "infra" / "skerry.toml", (), {})
    assert found.run.sync.learners == 2


@pytest.mark.parametrize("service", SERVICES)
def test_hadolint_finds_nothing(root: Path, service: str) -> None:
    recipe = root / "services" / service / "Dockerfile"
    done = subprocess.run(
        [str(BIN / "hadolint"), str(recipe)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


async def connects(url: str, password: str) -> bool:
    from skerry.log.nats.bus import NatsBus
    from skerry.log.nats.connection import NatsOptions

    try:
        async with NatsBus(
            url, options=NatsOptions(user="skerry", password=password, connect_timeout_s=2.0)
        ):
            return True
    except BusError:
        return False


@pytest.mark.nats
@pytest.mark.parametrize("password", ["s3cret-Word_", "12e5", "007"])
def test_the_broker_takes_the_password_of_its_secret_and_no_other(
    compose_broker: Callable[[str], NatsServer], password: str
) -> None:
    server = compose_broker(password)
    assert asyncio.run(connects(server.url, password))
    assert not asyncio.run(connects(server.url, "another"))


@pytest.mark.nats
def test_the_broker_refuses_to_start_without_a_secret(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NATS_PASSWORD", raising=False)
    config = root / "infra" / "nats" / "nats.conf"
    done = subprocess.run(
        [str(BIN / "nats-server"), "-t", "-c", str(config)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "NATS_PASSWORD" in done.stderr


def test_the_broker_command_hands_over_the_quoted_secret(
    services: dict[str, Any], tmp_path: Path
) -> None:
    """Runs the container's own shell script with a stand-in for the server."""
    (tmp_path / "secret").write_text("12e5\n")
    server = tmp_path / "nats-server"
    server.write_text('#!/bin/sh\nprintf %s "$NATS_PASSWORD"\n')
    server.chmod(0o755)
    shell, flag, script = services["nats"]["command"]
    script = script.replace("$$", "$").replace(
        "/run/secrets/nats_password", str(tmp_path / "secret")
    )
    done = subprocess.run(
        [shell, flag, script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "'12e5'")
