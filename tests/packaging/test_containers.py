"""The Compose files in real containers, to the end of their runs. Needs root and podman."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.containers import Compose, Engine, composed, missing
from tests.support.processes import SKERRY, call

pytestmark = [
    pytest.mark.drill,
    pytest.mark.fault,
    pytest.mark.skipif(bool(missing()), reason=f"not here: {missing()}"),
]

CLUSTER = "infra/nats/compose.cluster.yml"
STEPS = 400
DEADLINE_S = 420.0
ENDING = {"syncer", "checkpointer", "evaluator", "learner-1", "learner-2"}
"""What ends with the run; the health monitor and the brokers stay."""


@pytest.fixture(scope="module")
def engine(root: Path) -> Iterator[Engine]:
    """Yield an engine that holds every image of the Compose file, built from its own recipe.

    Its folder has a short name: below a long one podman restarts no container.
    """
    engine = Engine(Path(tempfile.mkdtemp(prefix="skerry-")))
    try:
        engine.make_bases()
        program = Path(sys.executable).with_name("docker-compose")
        services = json.loads(call(program, "config", "--format", "json", cwd=root).stdout)
        recipes = {
            service["image"]: root / service["build"]["dockerfile"]
            for service in services["services"].values()
            if "build" in service
        }
        for tag, recipe in recipes.items():
            engine.build(root, recipe, tag)
        yield engine
    finally:
        engine.close()


@pytest.fixture
def project(root: Path, tmp_path: Path) -> Path:
    """Return what Compose reads of a checkout, with secrets of its own and a short run."""
    for name in ("docker-compose.yml", "Makefile"):
        shutil.copy2(root / name, tmp_path)
    shutil.copytree(root / "infra", tmp_path / "infra", ignore=shutil.ignore_patterns("secrets"))
    config = tmp_path / "infra" / "skerry.toml"
    written = config.read_text()
    config.write_text(written.replace("steps = 2000", f"steps = {STEPS}"))
    assert config.read_text() != written
    ready = ("-o", ".venv/.runtime", f"BIN={Path(sys.executable).parent}")
    done = call("make", *ready, f"PYTHON={sys.executable}", "secrets", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path


def wait_for(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, what()
        time.sleep(1.0)


def kill(compose: Compose, service: str) -> None:
    """End a container as a lack of memory does; the engine's own kill counts as a user's stop."""
    name = compose.engine.containers()[service]["Id"]
    told = compose.engine.call("podman", "inspect", "--format", "{{.State.Pid}}", name)
    os.kill(int(told), signal.SIGKILL)


def restarts(compose: Compose, service: str) -> int:
    name = compose.engine.containers()[service]["Id"]
    return int(compose.engine.call("podman", "inspect", "--format", "{{.RestartCount}}", name))


def train(compose: Compose, struck: str) -> None:
    """Start everything, kill one container in the middle of the run, and wait for the end."""
    compose.call("up", "--detach", "--no-build", "--pull", "never")
    wait_for(
        lambda: "round_adopted" in compose.logs("learner-1"), lambda: compose.logs("learner-1")
    )
    kill(compose, struck)
    wait_for(lambda: restarts(compose, struck) > 0, lambda: compose.logs(struck))

    def ended() -> bool:
        found = compose.engine.containers()
        return all(found[name]["State"] == "exited" for name in ENDING)

    def told() -> str:
        return "\n".join(f"## {name}\n{compose.logs(name)[-2000:]}" for name in ENDING)

    wait_for(ended, told)
    codes = {name: compose.engine.containers()[name]["ExitCode"] for name in ENDING}
    assert codes == dict.fromkeys(ENDING, 0), told()


def starts(compose: Compose) -> dict[str, int]:
    """Return how often each learner started, by a log that proves to be whole."""
    login = {"SKERRY_NATS__CREDENTIALS": str(compose.folder / "infra" / "secrets" / "audit.nk")}
    options = ("--run", "compose", "--nats", "nats://127.0.0.1:4222", "--json")
    command = (*SKERRY, "ledger", "verify", *options)
    told = json.loads(compose.engine.call(*command, cwd=compose.folder, env=login))
    assert told["ok"], told
    assert told["survey"]["step"] == STEPS
    return {entry["learner"]: entry["incarnation"] for entry in told["learners"]}


def answers(compose: Compose, *options: str) -> str:
    url = "http://127.0.0.1:8787/"
    asked = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}")
    return compose.engine.call(*asked, *options, url)


@pytest.mark.timeout(1500)  # five images are built first
def test_the_run_of_compose_ends_though_a_learners_container_is_killed(
    engine: Engine, project: Path
) -> None:
    with composed(engine, project, "docker-compose.yml") as compose:
        train(compose, "learner-1")
        assert starts(compose) == {"learner-1": 2, "learner-2": 1}
        token = (project / "infra" / "secrets" / "page_token").read_text().strip()
        assert answers(compose) == "401"
        assert answers(compose, "--user", f"any:{token}") == "200"
        written = engine.folder / "images" / "volumes" / "skerry_checkpoints" / "_data"
        assert (written / "compose" / f"step-{STEPS:08d}").is_dir()
    assert engine.call("podman", "ps", "-aq") == ""


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_the_run_of_three_brokers_ends_though_the_first_is_killed(
    engine: Engine, project: Path
) -> None:
    with composed(engine, project, "docker-compose.yml", CLUSTER) as compose:
        train(compose, "nats")
        assert starts(compose) == {"learner-1": 1, "learner-2": 1}
