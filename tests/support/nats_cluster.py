"""Three real nats-servers that replicate each other's streams, with the ways in which they fail."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.nats_server import NatsServer
from tests.support.ports import free_ports

POLL_S = 0.05
NODE = """
server_name: {name}
http: "127.0.0.1:{monitor}"
jetstream {{
  max_file_store: 8GB
  max_memory_store: 256MB
  sync_interval: "{sync}"
}}
cluster {{
  name: skerry
  listen: "127.0.0.1:{route}"
  routes: [{routes}]
}}
"""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a stream's replicas stand, as the server that leads it sees them."""

    leader: str
    current: frozenset[str]


class NatsCluster:
    """A JetStream cluster on loopback ports; leaving the ``with`` kills what still runs.

    Nodes are called n0, n1 and so on; each keeps its name, ports and store through restarts.
    ``sync`` is JetStream's ``sync_interval``.
    """

    def __init__(self, folder: Path, *, size: int = 3, sync: str = "2m") -> None:
        ports = free_ports(3 * size)
        clients, routes, self._monitors = ports[:size], ports[size : 2 * size], ports[2 * size :]
        listed = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        self.nodes = [
            NatsServer(
                folder / f"n{i}",
                port=clients[i],
                settings=NODE.format(
                    name=f"n{i}",
                    monitor=self._monitors[i],
                    sync=sync,
                    route=routes[i],
                    routes=listed,
                ),
            )
            for i in range(size)
        ]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill9()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill9()

    @property
    def url(self) -> str:
        """The addresses of all nodes, comma separated, as ``nats.url`` takes them."""
        return ",".join(node.url for node in self.nodes)

    def start(self) -> None:
        """Start every node that does not run."""
        for node in self.nodes:
            node.start()

    def kill9(self) -> None:
        """End every process at once, as a power cut of the rack would end the processes."""
        for node in self.nodes:
            if node.running:
                node.signal_kill()
        for node in self.nodes:
            node.kill9()

    async def ready(self, timeout_s: float = 60.0) -> None:
        """Return once every node that runs says that all it should hold is there and current."""
        running = [i for i, node in enumerate(self.nodes) if node.running]
        async with asyncio.timeout(timeout_s):
            while True:
                answers = [await asyncio.to_thread(self._healthy, i) for i in running]
                if all(answers):
                    return
                await asyncio.sleep(POLL_S)

    async def leader(self, stream: str, timeout_s: float = 60.0) -> int:
        """Return the number of the node that leads a stream, once there is one."""
        return int((await self._standing(stream, 1, timeout_s)).leader.removeprefix("n"))

    async def until_current(self, stream: str, timeout_s: float = 60.0) -> None:
        """Return once every node holds all of a stream."""
        await self._standing(stream, len(self.nodes), timeout_s)

    async def _standing(self, stream: str, current: int, timeout_s: float) -> Standing:
        async with asyncio.timeout(timeout_s):
            while True:
                for i, node in enumerate(self.nodes):
                    if not node.running:
                        continue
                    found = await asyncio.to_thread(self._seen_by, i, stream)
                    if found is not None and len(found.current) >= current:
                        return found
                await asyncio.sleep(POLL_S)

    def _healthy(self, node: int) -> bool:
        found = self._ask(node, "healthz")
        return found is not None and found.get("status") == "ok"

    def _seen_by(self, node: int, stream: str) -> Standing | None:
        """Return how a stream stands if this node leads it."""
        found = self._ask(node, "jsz?acc=$G&streams=true") or {}
        for account in found.get("account_details", ()):
            for detail in account.get("stream_detail", ()):
                led = detail.get("cluster", {})
                if detail["name"] == stream and led.get("leader") == f"n{node}":
                    replicas = led.get("replicas", ())
                    current = {r["name"] for r in replicas if r["current"] and not r.get("lag")}
                    return Standing(led["leader"], frozenset(current | {led["leader"]}))
        return None

    def _ask(self, node: int, path: str) -> dict[str, Any] | None:
        """Return what a node's monitoring says, or None when it does not answer well."""
        url = f"http://127.0.0.1:{self._monitors[node]}/{path}"
        try:
            with urllib.request.urlopen(url, timeout=1.0) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, ValueError):
            return None
