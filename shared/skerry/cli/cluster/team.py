"""Which processes a local cluster consists of, and what each is started with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.cli.cluster import clock
from skerry.cli.cluster.supervisor import Command, Need
from skerry.cli.programs import SERVICES, argv, computing
from skerry.settings.loading import child_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.cli.cluster.folder import RunFolder

NEEDS = {"evaluator": Need.NEVER, "health-monitor": Need.NEVER, "checkpointer": Need.SETTINGS}
"""Services that a run goes on without."""


@dataclass(frozen=True, slots=True)
class Team:
    """How many of each service a cluster has; ``learners`` 0: as many as its run's config says.

    ``chaos``: faults may be injected into it.
    ``clocks``: its services' clocks can be moved.
    """

    learners: int = 0
    syncers: int = 1
    checkpointers: int = 1
    evaluators: int = 1
    chaos: bool = False
    clocks: bool = False

    def names(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each service's processes, in the order in which they are stopped."""
        counts = (self.learners, self.syncers, self.checkpointers, self.evaluators, 1)
        return {
            service: _numbered(service, count) if count > 1 or service == "learner" else (service,)
            for service, count in zip(SERVICES, counts, strict=True)
            if count
        }

    def kinds(self) -> dict[str, str]:
        """Return the service of every process, by name."""
        return {name: service for service, names in self.names().items() for name in names}


def stages(
    folder: RunFolder,
    team: Team,
    urls: Mapping[str, str],
    sets: Mapping[str, tuple[str, ...]],
) -> list[list[Command]]:
    """Return the cluster's processes in the order in which they are stopped.

    ``urls`` are brokers' addresses other than that of the settings file; ``sets`` are further
    settings of a service.
    """

    def command(service: str, name: str) -> Command:
        given = ["--run", folder.run, "--name", name, "--config", str(folder.settings)]
        given += [word for text in sets.get(service, ()) for word in ("--set", text)]
        given += ["--until-finished"] if service == "health-monitor" else []
        env = environment(folder.cache)
        if team.clocks:
            env |= clock.environment(folder.path, name)
        if name in urls:
            env["SKERRY_NATS__URL"] = urls[name]  # it may hold a password, and anybody reads argv
        return Command(
            name=name,
            kind=service,
            argv=argv(service, *given),
            log=folder.logs / f"{name}.log",
            env=env,
            need=NEEDS.get(service, Need.ALWAYS),
        )

    return [[command(service, name) for name in names] for service, names in team.names().items()]


def page_sets(folder: RunFolder, team: Team) -> tuple[str, ...]:
    """Return the settings by which the page of a run that allows faults injects them."""
    if not team.chaos:
        return ()
    where = {"cluster": folder.path, "token_file": folder.token}
    return tuple(f"health.{key}={json.dumps(str(path.resolve()))}" for key, path in where.items())


def environment(cache: Path) -> dict[str, str]:
    """Return the environment of a service; what the user has set in ours wins."""
    plain = {"PYTHONUNBUFFERED": "1", "PYTHON_COLORS": "0"}
    return child_environment({**computing(cache), **plain})


def _numbered(service: str, count: int) -> tuple[str, ...]:
    return tuple(f"{service}-{n}" for n in range(1, count + 1))
