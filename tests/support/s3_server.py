"""A real S3 server of one's own: SeaweedFS on free ports of this machine, with an empty bucket."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from skerry.errors import SkerryError
from skerry.settings.local import StoreSettings
from tests.support.ports import free_ports

BUCKET = "skerry"
STARTUP_S = 60.0
POLL_S = 0.05
PORTS = ("master", "volume", "filer", "s3")
ACTIONS = {"writer": ["Admin", "Read", "Write", "List"], "reader": ["Read", "List"]}
"""What each user may do; the secret key of ``writer`` is ``writer-secret``."""


@dataclass(slots=True)
class S3Server:
    """One server; ``credentials`` is a file in AWS's format with profiles writer and reader."""

    folder: Path
    ports: list[int] = field(default_factory=list[int])
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports[PORTS.index('s3')]}"

    @property
    def credentials(self) -> Path:
        return self.folder / "credentials"

    def access(self, profile: str = "writer") -> StoreSettings:
        return StoreSettings(
            endpoint=self.endpoint,
            region="us-east-1",
            credentials=self.credentials,
            profile=profile,
        )

    def settings(self, url: str) -> list[str]:
        """Return the settings of a store at this address."""
        return [
            f"store.url={url}",
            f"store.endpoint={self.endpoint}",
            f"store.credentials={self.credentials}",
            "store.profile=writer",
        ]

    def start(self) -> None:
        """Start it and make the bucket; SkerryError if it does not answer in time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        users = [
            {
                "name": name,
                "credentials": [{"accessKey": name, "secretKey": f"{name}-secret"}],
                "actions": actions,
            }
            for name, actions in ACTIONS.items()
        ]
        (self.folder / "identities.json").write_text(json.dumps({"identities": users}))
        lines = [
            f"[{name}]\naws_access_key_id = {name}\naws_secret_access_key = {name}-secret\n"
            for name in ACTIONS
        ]
        self.credentials.write_text("".join(lines))
        self.credentials.chmod(0o600)
        self.ports = _free_ports(2 * len(PORTS))
        names = [f"{name}.port{kind}" for kind in ("", ".grpc") for name in PORTS]
        ports = dict(zip(names, self.ports, strict=True))
        words = [
            *("server", f"-dir={self.folder}", "-filer", "-s3", "-master.telemetry=false"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.lance=0", "-s3.port.iceberg=0"),
            *("-volume.max=20", "-master.volumeSizeLimitMB=256", "-s3.autoCreateBucket=false"),
            f"-s3.config={self.folder / 'identities.json'}",
            *(f"-{name}={port}" for name, port in ports.items()),
        ]
        binary = str(Path(sys.executable).with_name("weed"))
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [binary, *words], stdout=log, stderr=log, cwd=self.folder
            )
        self._wait(f"{self.endpoint}/status", "GET")
        self._wait(f"http://127.0.0.1:{ports['filer.port']}/buckets/{BUCKET}/", "POST")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for left in (left for port in self.ports for left in _sockets(port)):
                left.unlink(missing_ok=True)

    def _wait(self, url: str, method: str) -> None:
        deadline = time.monotonic() + STARTUP_S
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5):  # noqa: S310  our own server
                    return
            except OSError:
                if self.process is not None and self.process.poll() is not None:
                    break
                time.sleep(POLL_S)
        self.kill()
        msg = f"The S3 server for tests did not answer: read {self.folder / 'log'}."
        raise SkerryError(msg)


def _free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on, and that no server has left a socket for.

    SeaweedFS keeps sockets under /tmp by port; one that somebody else's server left when it was
    killed cannot be taken away, and it would wait for it for ever.
    """
    found: set[int] = set()
    while len(found) < count:
        found |= {port for port in free_ports(count - len(found)) if not list(_sockets(port))}
    return list(found)


def _sockets(port: int) -> Iterator[Path]:
    return Path("/tmp").glob(f"seaweedfs-*-{port}.sock")  # noqa: S108 - where SeaweedFS puts them
