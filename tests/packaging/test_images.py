"""Each image's own recipe, followed without a container engine, and a run of what it installs.

A Dockerfile is read line by line: COPY picks the partial tree out of the checkout, the RUN lines
of the build stage run in it as they stand, ENV and ENTRYPOINT of the last stage say how the service
starts. Only the absolute folders are moved below a temporary one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]  it ships no types
import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]  idem
import pytest

from skerry.protocol.roles import Grant, Role
from skerry.service.accounts import services_of
from tests.support.keyed import KeyedBroker
from tests.support.processes import call

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(shutil.which("strip") is None, reason="no strip: apt install binutils"),
]

SERVICES = ("learner", "syncer", "checkpointer", "evaluator", "health_monitor")
LIGHT = ("checkpointer", "health_monitor")
HEAVY = ["jax", "jaxlib", "llvmlite", "numba", "optax", "scipy"]
MOVED = ("/opt/skerry", "/var/lib/skerry", "/tmp/numba")  # noqa: S108 - names inside an image
TOOLS = ("python -m pip", "apt-get")
"""What a build stage installs for itself: here it is there."""
MOST_MB = {
    "checkpointer": 140,
    "health_monitor": 125,
    "syncer": 600,
    "evaluator": 700,
    "learner": 700,
}
"""What an image adds to its base."""
FASTER = {"UV_NO_CACHE", "UV_LINK_MODE"}
"""How files are fetched and stored, not which: left to the machine that tests."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image, unpacked: where its home and its Python are and how its service starts."""

    folder: Path
    python: Path
    env: dict[str, str]
    entrypoint: tuple[str, ...]

    def start(self, *args: str, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        command = [str(self.python), *self.entrypoint[1:], *args]
        with log.open("wb") as out:
            return subprocess.Popen(
                command, cwd=self.folder, env={**self.env, **env}, stdout=out, stderr=out
            )

    def call(self, *args: str) -> subprocess.CompletedProcess[str]:
        return call(self.python, *args, cwd=self.folder, env=self.env)


@dataclass(slots=True)
class Recipe:
    """A Dockerfile in two stages, sorted by what its lines are for."""

    args: dict[str, str] = field(default_factory=dict[str, str])
    env: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    copies: list[list[str]] = field(default_factory=list[list[str]])
    runs: list[str] = field(default_factory=list[str])
    entrypoint: tuple[str, ...] = ()


def read_recipe(path: Path) -> Recipe:
    recipe = Recipe()
    lines = path.read_text().replace("\\\n", " ").splitlines()
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        match word:
            case "FROM":
                recipe.env.append({})
            case "ARG":
                name, _, value = rest.partition("=")
                recipe.args[name] = value
            case "ENV":
                pairs = (pair.partition("=") for pair in rest.split())
                recipe.env[-1].update({name: value for name, _, value in pairs})
            case "COPY" if len(recipe.env) == 1:
                recipe.copies.append(rest.split())
            case "RUN" if len(recipe.env) == 1 and not rest.startswith(TOOLS):
                recipe.runs.append(rest)
            case "ENTRYPOINT":
                recipe.entrypoint = tuple(json.loads(rest))
            case _:
                pass
    return recipe


def moved(value: str, folder: Path) -> str:
    for name in MOVED:
        value = value.replace(name, f"{folder}{name}")
    return value


def copy_context(root: Path, copies: Sequence[Sequence[str]], into: Path) -> None:
    """Do what COPY does: files into the folder named last, a folder's content onto it."""
    for *sources, target in copies:
        for source in sources:
            if (root / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(root / source, into / target, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copy2(root / source, into / target)


def build(root: Path, service: str, folder: Path, uv: str, env: Mapping[str, str]) -> Image:
    recipe = read_recipe(root / "services" / service / "Dockerfile")
    stage, last = recipe.env
    source = folder / "src"
    source.mkdir(parents=True)
    copy_context(root, recipe.copies, source)
    path = f"{Path(uv).parent}{os.pathsep}{env['PATH']}"
    stage = {k: moved(v, folder) for k, v in stage.items() if k not in FASTER}
    during = {**env, **recipe.args, **stage, "PATH": path, "UV_PYTHON": sys.executable}
    for step in recipe.runs:
        done = call("/bin/sh", "-c", step, cwd=source, env=during)
        assert done.returncode == 0, f"{step}\n{done.stderr}"
    shutil.rmtree(source)
    home = folder / "var" / "lib" / "skerry"
    home.mkdir(parents=True)
    python = folder / "opt" / "skerry" / "bin" / "python"
    final = {k: moved(v, folder).replace("$PATH", env["PATH"]) for k, v in last.items()}
    return Image(home, python, {**env, **final, "HOME": str(home)}, recipe.entrypoint)


Build = Callable[[str], Image]


@pytest.fixture(scope="module")
def image(
    root: Path, uv: str, plain_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Build:
    """Build an image at its first use."""
    built: dict[str, Image] = {}

    def get(service: str) -> Image:
        if service not in built:
            folder = tmp_path_factory.mktemp(service)
            built[service] = build(root, service, folder, uv, plain_environ)
        return built[service]

    return get


@pytest.mark.parametrize("service", SERVICES)
def test_the_image_starts_its_service(image: Build, service: str) -> None:
    built = image(service)
    assert built.entrypoint == ("python", "-m", f"skerry_{service}")
    done = built.call(*built.entrypoint[1:], "--help")
    assert done.returncode == 0, done.stderr
    assert "--run" in done.stdout


def test_the_evaluators_image_holds_what_it_imports_late(image: Build) -> None:
    done = image("evaluator").call("-c", "import skerry_evaluator.global_model")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("service", ["learner", "evaluator"])
def test_an_image_that_was_trimmed_reads_parquet(
    image: Build, service: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    program = (
        "import sys; from pathlib import Path; from skerry.data.documents import read_documents;"
        "print([found.text for found in read_documents(Path(sys.argv[1]))])"
    )
    done = image(service).call("-c", program, str(tmp_path / "a.parquet"))
    assert done.stdout == "['one', 'two']\n", done.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_the_image_holds_no_other_service_and_a_light_one_neither_jax_nor_a_compiler(
    image: Build, service: str
) -> None:
    absent = [f"skerry_{other}" for other in SERVICES if other != service]
    absent += HEAVY if service in LIGHT else []
    ask = f"from importlib.util import find_spec as f; print([n for n in {absent} if f(n)])"
    assert image(service).call("-c", ask).stdout == "[]\n"


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_is_small(image: Build, service: str) -> None:
    files = [path.lstat() for path in image(service).python.parents[1].rglob("*")]
    held_mb = sum(facts.st_size for facts in files) / 1e6
    print(service, held_mb)
    assert MOST_MB[service] / 2 < held_mb < MOST_MB[service]


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_holds_the_bytecode_of_what_its_service_imports(
    image: Build, service: str
) -> None:
    program = (
        f"import sys, skerry_{service}.service; from pathlib import Path;"
        "kept = [getattr(module, '__cached__', None) or '' for module in sys.modules.values()];"
        "print([name for name in kept if 'site-packages' in name and not Path(name).exists()])"
    )
    assert image(service).call("-c", program).stdout == "[]\n"


@pytest.mark.parametrize("service", SERVICES)
def test_the_bytecode_of_an_image_is_valid_whatever_a_copy_does_to_times(
    image: Build, service: str
) -> None:
    kept = image(service).python.parents[1].rglob("*.pyc")
    flags = {int.from_bytes(path.read_bytes()[4:8], "little") for path in kept}
    assert flags == {1}, "not unchecked (PEP 552)"


@pytest.mark.parametrize("service", SERVICES)
def test_the_build_context_holds_all_that_the_recipe_copies(root: Path, service: str) -> None:
    """.dockerignore drops everything it does not name again."""
    lines = (root / ".dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    recipe = read_recipe(root / "services" / service / "Dockerfile")
    for *sources, _ in recipe.copies:
        for source in sources:
            assert any(Path(source).match(pattern) for pattern in kept), source


@pytest.mark.nats
@pytest.mark.timeout(600)  # four processes compile at once
def test_a_run_trains_to_its_end_with_each_service_in_its_own_image(
    root: Path, tmp_path: Path, image: Build, compose_broker: Callable[..., KeyedBroker]
) -> None:
    broker = compose_broker(*services_of("images"), Grant(Role.FOUNDER, "learner", "images"))
    (tmp_path / "token").write_text("of-sixteen-letters")
    env = {
        "SKERRY_NATS__URL": broker.server.url,
        "SKERRY_HEALTH__PORT": "0",
        "SKERRY_HEALTH__TOKEN_FILE": str(tmp_path / "token"),
        "SKERRY_LEARNER__SAVE_EVERY_S": "0.01",
    }
    tiny = ("train.steps=12", "sync.h_steps=4", "sync.fragments=2", "model.layers=1")
    config = ["--config", str(root / "infra" / "skerry.toml")]
    options = {"learner": [*config, *(part for value in tiny for part in ("--set", value))]}
    logs = {service: tmp_path / f"{service}.log" for service in SERVICES}
    common = ("--run", "images", "--name")
    running = dict[str, subprocess.Popen[bytes]]()
    for name in SERVICES:
        key = {"SKERRY_NATS__CREDENTIALS": str(broker.keyring.seed(name.replace("_", "-")))}
        words = (*common, name, *options.get(name, []))
        running[name] = image(name).start(*words, env=env | key, log=logs[name])
    try:
        for service in ("learner", "syncer", "checkpointer", "evaluator"):
            code = running[service].wait(timeout=480)
            assert code == 0, logs[service].read_text()
        running["health_monitor"].send_signal(signal.SIGTERM)
        assert running["health_monitor"].wait(timeout=15) == 0, logs["health_monitor"].read_text()
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    written = image("checkpointer").folder / "checkpoints" / "images"
    assert any(written.rglob("*.safetensors"))
    kept = image("learner").folder / "learners"
    assert any((kept / "images").rglob("*"))
    assert any((kept / ".jax").iterdir())
