"""Which processes a local cluster consists of, and what each is started with."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.cli.cluster.place import Place
    from skerry.cli.cluster.supervise import Command

SERVICES = {
    "learner": ("skerry_learner",),
    "syncer": ("skerry_syncer",),
    "checkpointer": ("skerry_checkpointer",),
    "evaluator": ("skerry_evaluator",),
    "health-monitor": ("skerry_health_monitor",),
    "lab": ("skerry_tools.lab",),
    "tools": ("skerry_tools",),
}
"""Command name of each service, and of the lab: its module, and words before its options."""

NEEDS = {
    "learner": ("jax", "optax", "numba", "safetensors"),
    "syncer": ("jax", "optax", "numba"),
    "checkpointer": ("safetensors",),
    "health-monitor": ("prometheus_client", "starlette", "uvicorn"),
    "evaluator": ("jax", "optax", "numba", "safetensors"),
    "lab": ("jax", "optax", "numba", "safetensors"),
    "tools": (),
}
"""What each extra installs; a service's extra has the name of its module."""

COMPILING = frozenset({"learner", "evaluator", "syncer", "lab"})
"""Services that compile what they compute with."""
CACHES = ("JAX_COMPILATION_CACHE_DIR", "NUMBA_CACHE_DIR")
HELP = frozenset({"-h", "--help"})
SIDELINES = frozenset({"evaluator", "health-monitor"})
"""Services that only look on: a run goes on without them."""


def require(service: str) -> None:
    """Raise ConfigError with the command to run when a service's packages are not installed."""
    missing = [
        n for n in (SERVICES[service][0], *NEEDS[service]) if not importlib.util.find_spec(n)
    ]
    if missing:
        msg = (
            f"The {service} needs {', '.join(missing)}, which is not installed: "
            f"run `pip install 'skerry[{service}]'`."
        )
        raise ConfigError(msg, path=service)


def argv(service: str, *rest: str) -> tuple[str, ...]:
    """Return the command line that starts a service."""
    return (sys.executable, "-m", *SERVICES[service], *rest)


@dataclass(frozen=True, slots=True)
class Team:
    """How many of each service a cluster has; ``chaos``: faults may be injected into it.

    ``clocks``: its services' clocks can be moved; ``netns``: they have networks of their own.
    """

    learners: int
    syncers: int = 1
    checkpointers: int = 1
    evaluators: int = 1
    chaos: bool = False
    clocks: bool = False
    netns: bool = False

    def names(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each service's processes, in the order in which they are stopped."""
        return {
            "learner": tuple(f"learner-{n}" for n in range(1, self.learners + 1)),
            "syncer": _numbered("syncer", self.syncers),
            "checkpointer": _numbered("checkpointer", self.checkpointers),
            "evaluator": _numbered("evaluator", self.evaluators) if self.evaluators else (),
            "health-monitor": ("health-monitor",),
        }

    def kinds(self) -> dict[str, str]:
        """Return the service of every process, by name."""
        return {name: service for service, names in self.names().items() for name in names}


@dataclass(frozen=True, slots=True)
class Reach:
    """How a service reaches its broker: the address, and what enters the network it is in."""

    url: str
    entering: tuple[str, ...] = ()


def stages(
    place: Place, team: Team, url: str, reach: Mapping[str, Reach]
) -> tuple[tuple[Command, ...], ...]:
    """Return the cluster's processes in the order in which they are stopped.

    Each reaches its broker as ``reach`` says, or else at ``url``.
    """
    plain = Reach(url)
    return tuple(
        tuple(_command(place, reach.get(name, plain), service, name, team) for name in names)
        for service, names in team.names().items()
    )


def _numbered(service: str, count: int) -> tuple[str, ...]:
    return tuple(f"{service}-{n}" for n in range(1, count + 1)) if count > 1 else (service,)


def _command(place: Place, reach: Reach, service: str, name: str, team: Team) -> Command:
    from skerry.cli.cluster import clock
    from skerry.cli.cluster.supervise import Command

    given = ("--nats", reach.url, "--run", place.run, "--name", name)
    config = ("--config", str(place.settings))
    end = _for_monitor(place, team) if service == "health-monitor" else ()
    moved: Mapping[str, str] = clock.environment(place.folder, name) if team.clocks else {}
    return Command(
        name=name,
        argv=(*reach.entering, *argv(service, *given, *config, *end)),
        log=place.logs / f"{name}.log",
        env={**environment(place), **moved},
        essential=service not in SIDELINES,
    )


def _for_monitor(place: Place, team: Team) -> tuple[str, ...]:
    """Return what the health monitor is told besides; with chaos, how its page may strike."""
    if not team.chaos:
        return ("--until-finished",)
    where = {"cluster": place.folder, "token_file": place.token}
    told = (f"health.{name}={json.dumps(str(path.resolve()))}" for name, path in where.items())
    return ("--until-finished", *(word for text in told for word in ("--set", text)))


def environment(place: Place) -> dict[str, str]:
    """Return the environment of a service; what the user has set in ours wins."""
    from skerry.settings.loading import child_environment

    return child_environment(
        {**computing(place.cache), "PYTHONUNBUFFERED": "1", "PYTHON_COLORS": "0"}
    )


def computing(cache: Path) -> dict[str, str]:
    """Return what makes a process compute fast from the start.

    Huge pages make a CPU training step 1.3 times faster; the caches let a restarted process begin
    without compiling.
    """
    cache = cache.resolve()
    return {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "NUMBA_CACHE_DIR": str(cache / "numba"),
    }


def become(service: str, rest: list[str]) -> None:
    """Turn this process into a service, or into the lab, which computes here and now.

    Where this folder can be written, what is compiled is kept in it: started again, a learner
    begins seconds sooner.
    """
    require(service)
    command = argv(service, *rest)
    if service in COMPILING and not HELP & {*rest}:
        from skerry.cli.cluster.place import CACHE, ROOT

        kept = computing(ROOT / CACHE)
        with suppress(OSError):
            for name in CACHES:
                Path(kept[name]).mkdir(parents=True, exist_ok=True)
            for name, value in kept.items():
                os.environ.setdefault(name, value)
    os.execv(command[0], command)  # noqa: S606 - becoming the command is the point
