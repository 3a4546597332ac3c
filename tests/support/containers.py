"""The project's own images and Compose file, run by podman: for a machine without Docker's engine.

Needs root and Debian's packages. Nothing is pulled: the two base images are made of Debian packages
and carry the names that the Dockerfiles and the Compose file ask for. All runs in namespaces of its
own, so that this machine's mounts, addresses and firewall stay as they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.processes import call

BASE = "localhost/base:1"
PYTHON = "docker.io/library/python:3.11-slim-bookworm"
NATS = "docker.io/library/nats:2.14.5-alpine"
CERTIFICATES = Path("/usr/local/share/ca-certificates")
PROGRAMS = [
    "podman",
    "buildah",
    "crun",
    "mmdebstrap",
    "netavark",
    "aardvark-dns",
    "catatonit",
    "iptables",
    "curl",
]
PLACES = ("/usr/lib/podman", "/usr/libexec/podman")
HEALTH_S = 2.0

# A machine in a container may neither raise limits nor set resources: what only that allows is
# dropped from what the runtime is asked for.
RUNTIME = """#!/usr/bin/python3
import json, os, sys
from pathlib import Path

arguments = sys.argv[1:]
for option, value in zip(arguments, arguments[1:]):
    if option in ("--bundle", "-b"):
        path = Path(value, "config.json")
        bundle = json.loads(path.read_text())
        bundle["linux"]["resources"] = {"devices": [{"allow": True, "access": "rwm"}]}
        process = bundle["process"]
    elif option in ("--process", "-p"):
        path = Path(value)
        bundle = process = json.loads(path.read_text())
    else:
        continue
    process.pop("rlimits", None)
    process.pop("oomScoreAdj", None)
    path.write_text(json.dumps(bundle))
os.execvp("crun", ["crun", *arguments])
"""

# Podman wants the unified tree of control groups, and folders of its own below /run.
NAMESPACES = """set -e
umount -R /sys/fs/cgroup 2>/dev/null || umount -l /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /run/netns /run/containers
mount -t tmpfs none /run/netns
mount -t tmpfs none /run/containers
ip link set lo up
echo ready
exec sleep infinity
"""

PYTHON_RECIPE = f"""FROM {BASE}
COPY certificates/ {CERTIFICATES}/
RUN update-ca-certificates && rm -f /usr/lib/python3*/EXTERNALLY-MANAGED && ln -s python3 /usr/bin/python
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt PIP_CERT=/etc/ssl/certs/ca-certificates.crt
"""  # noqa: E501 - a recipe's line

NATS_RECIPE = f"""FROM {BASE}
COPY nats-server /usr/local/bin/nats-server
CMD ["nats-server"]
"""


def missing() -> str:
    """Return what this machine lacks for containers; empty if nothing."""
    if os.geteuid() != 0:
        return "root"
    places = os.pathsep.join([os.environ.get("PATH", ""), *PLACES])
    absent = [name for name in PROGRAMS if shutil.which(name, path=places) is None]
    if (
        not absent
        and call("unshare", "-m", "-n", "mount", "-t", "cgroup2", "none", "/mnt").returncode
    ):
        return "namespaces"
    return " ".join(absent)


@dataclass(slots=True)
class Engine:
    """Podman in a mount and a network namespace; ``folder`` holds images, containers and logs."""

    folder: Path
    env: dict[str, str] = field(init=False)
    _holder: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        runtime = self.folder / "crun"
        runtime.write_text(RUNTIME)
        runtime.chmod(0o755)
        self._write("containers.conf", _settings(self.folder, runtime))
        stored = f'graphroot = "{self.folder}/images"\nrunroot = "{self.folder}/run"\n'
        self._write("storage.conf", f'[storage]\ndriver = "overlay"\n{stored}')
        self.env = {
            **os.environ,
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "BUILDAH_ISOLATION": "chroot",
            "TMPDIR": str(self.folder),
        }
        command = ["unshare", "-m", "-n", "--propagation", "private", "sh", "-c", NAMESPACES]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n", "no namespaces on this machine"

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def inside(self, *command: str | Path, online: bool = False) -> list[str]:
        """Return a command that runs another one in here; ``online``: on this machine's network."""
        spaces = ["-m"] if online else ["-m", "-n"]
        return ["nsenter", "-t", str(self._holder.pid), *spaces, *map(str, command)]

    def call(
        self,
        *command: str | Path,
        online: bool = False,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Run a program to its good end and return what it prints."""
        wd = ["env", "-C", cwd] if cwd else []
        told = {**self.env, **(env or {})}
        done = call(*self.inside(*wd, *command, online=online), env=told)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def build(self, context: Path, recipe: Path, tag: str) -> None:
        options = ("--isolation", "chroot", "--pull-never", "--quiet", "--format", "docker")
        self.call("buildah", "bud", *options, "-f", recipe, "-t", tag, context, online=True)

    def make_bases(self) -> None:
        """Make what stands for the images that a registry has."""
        archive = self.folder / "base.tar"
        held = "ca-certificates,python3,python3-venv,python3-pip,wget"
        bootstrap = ("mmdebstrap", "--variant=minbase", f"--include={held}", "bookworm")
        self.call(*bootstrap, archive, online=True)
        self.call("podman", "import", archive, BASE)
        archive.unlink()
        place = self.folder / "bases"
        (place / "certificates").mkdir(parents=True)
        for path in CERTIFICATES.glob("*.crt"):
            shutil.copy2(path, place / "certificates")
        shutil.copy2(Path(sys.executable).with_name("nats-server"), place)
        for recipe, tag in ((PYTHON_RECIPE, PYTHON), (NATS_RECIPE, NATS)):
            (place / "Containerfile").write_text(recipe)
            self.build(place, place / "Containerfile", tag)

    def containers(self) -> dict[str, Any]:
        """Return what podman says of each container of Compose, by its service."""
        listed = json.loads(self.call("podman", "ps", "-a", "--format", "json"))
        return {entry["Labels"]["com.docker.compose.service"]: entry for entry in listed}

    def close(self) -> None:
        """Remove the namespaces and all images."""
        with self._holder:
            self._holder.kill()
        shutil.rmtree(self.folder)


def _settings(folder: Path, runtime: Path) -> str:
    return f"""[containers]
netns = "host"
cgroups = "disabled"
cgroupns = "host"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "{folder}/run/libpod"
runtime = "crun"
runtime_supports_nocgroups = ["crun"]
[engine.runtimes]
crun = ["{runtime}"]
"""


@dataclass(slots=True)
class Compose:
    """Docker Compose on a project's files, over podman's Docker API."""

    engine: Engine
    folder: Path
    files: Sequence[str]
    socket: Path

    def call(self, *arguments: str) -> str:
        files = [part for name in self.files for part in ("-f", name)]
        program = Path(sys.executable).with_name("docker-compose")
        told = {"DOCKER_HOST": f"unix://{self.socket}"}
        return self.engine.call(program, *files, *arguments, cwd=self.folder, env=told)

    def logs(self, service: str) -> str:
        return self.call("logs", "--no-color", "--no-log-prefix", service)


@contextlib.contextmanager
def composed(engine: Engine, folder: Path, *files: str) -> Generator[Compose]:
    """Serve the API and time the health checks, as an engine would; remove all at the end."""
    socket, over = engine.folder / "podman.sock", threading.Event()
    serve = engine.inside("podman", "system", "service", "--time=0", f"unix://{socket}")
    with (engine.folder / "api.log").open("wb") as log:
        api = subprocess.Popen(serve, env=engine.env, stdout=log, stderr=log)
    compose = Compose(engine, folder, files, socket)
    health = threading.Thread(target=_check_health, args=(engine, over), daemon=True)
    try:
        while not socket.exists():
            assert api.poll() is None, (engine.folder / "api.log").read_text()
            time.sleep(0.05)
        health.start()
        yield compose
    finally:
        compose.call("down", "--volumes", "--timeout", "10")
        over.set()
        health.join()
        api.terminate()
        api.wait()


def _check_health(engine: Engine, over: threading.Event) -> None:
    """Run each container's check every two seconds: podman leaves that to systemd."""
    while not over.wait(HEALTH_S):
        names = call(*engine.inside("podman", "ps", "-q"), env=engine.env).stdout.split()
        for name in names:
            call(*engine.inside("podman", "healthcheck", "run", name), env=engine.env)
