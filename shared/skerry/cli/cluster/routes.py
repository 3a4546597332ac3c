"""A way of its own to the broker for each service of a cluster that allows chaos."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from skerry.cli.cluster import child
from skerry.cli.cluster.place import log_file
from skerry.cli.cluster.services import Reach
from skerry.cli.cluster.wires import must_reach
from skerry.errors import SkerryError
from skerry.service.control import PROXY

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncGenerator, Iterable, Mapping

    from skerry.cli.cluster.place import Place
    from skerry.cli.cluster.wires import Wire

LOOPBACK = "127.0.0.1"
READY_S = 30.0
AGAIN_S = 0.2


def proxied(url: str) -> bool:
    """Say whether the proxy can stand in for a broker: one address, in the clear."""
    return "," not in url and urlsplit(url).scheme == "nats"


@contextlib.asynccontextmanager
async def routes(
    place: Place, url: str, names: Iterable[str], wires: Mapping[str, Wire]
) -> AsyncGenerator[dict[str, Reach]]:
    """Yield how each service reaches its broker instead of ``url``, while the proxy runs.

    A service with a cable is in its namespace. A proxy that ends is started again with the same
    ports. ConfigError if nothing comes through a cable.
    """
    target = urlsplit(url)
    broker = f"{target.hostname}:{target.port or 4222}"
    hosts = {name: wires[name].outer if name in wires else LOOPBACK for name in names}
    process, ports = await _start(place, broker, hosts, dict.fromkeys(hosts, 0))
    user = f"{target.netloc.rpartition('@')[0]}@" if "@" in target.netloc else ""
    keeper = asyncio.create_task(_keep(place, broker, hosts, ports, process), name="proxy")
    try:
        for name, wire in wires.items():
            await must_reach(wire, ports[name])
        yield {
            name: Reach(
                f"nats://{user}{host}:{ports[name]}",
                wires[name].entering if name in wires else (),
            )
            for name, host in hosts.items()
        }
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


async def _keep(
    place: Place,
    broker: str,
    hosts: Mapping[str, str],
    ports: Mapping[str, int],
    process: Process,
) -> None:
    try:
        while True:
            await process.wait()
            await asyncio.sleep(AGAIN_S)
            process, _ = await _start(place, broker, hosts, ports)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _start(
    place: Place, broker: str, hosts: Mapping[str, str], ports: Mapping[str, int]
) -> tuple[Process, dict[str, int]]:
    log = place.logs / "proxy.log"
    wanted = [f"{name}={hosts[name]}:{port}" for name, port in ports.items()]
    with log_file(log) as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", child.__file__, str(os.getpid())),
            *(sys.executable, "-m", "skerry.cli.cluster.proxy", broker),
            *(str((place.folder / PROXY).resolve()), *wanted),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_S):
            return process, json.loads(await process.stdout.readline())
    except (ValueError, TimeoutError) as error:
        msg = f"The proxy between the services and the broker did not start: see {log}."
        raise SkerryError(msg) from error
    finally:
        if process.returncode is None and sys.exc_info()[0] is not None:
            process.kill()
