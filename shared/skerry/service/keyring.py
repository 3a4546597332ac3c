"""The keys of one broker: an NKey for each learner and service, and the accounts that they open.

A folder holds it all, for its owner alone: a seed ``NAME.nk`` for each key, which its machine names
in ``nats.credentials``; ``keys.json``, who they are; and ``broker/accounts.conf``, which the
broker's configuration includes: it holds no secret and may be mounted elsewhere. A broker that
reloads drops clients whose key is gone, and no others.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from skerry.errors import ConfigError
from skerry.log.nats.login import new_key
from skerry.protocol.roles import Grant, Role, services_for_edge
from skerry.protocol.subjects import checked_token
from skerry.service.private import write_private

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

ACCOUNTS = "broker/accounts.conf"
REGISTER = "keys.json"
CORE, EDGE = "CORE", "EDGE"


@dataclass(slots=True)
class Keyring:
    """The keys in ``folder``: what each is granted, by its public name, and who has it, by name."""

    folder: Path
    grants: dict[str, Grant] = field(default_factory=dict[str, Grant])

    @classmethod
    def begun(cls, folder: Path) -> Keyring:
        """Return a folder for the first keys; ConfigError where there are some."""
        try:
            is_taken = (folder / REGISTER).exists()
        except OSError as error:
            raise _unreadable(folder, error) from error
        if is_taken:
            msg = f"{folder} has keys already: `skerry keys add` makes one more."
            raise ConfigError(msg, path="keys")
        return cls(folder)

    @classmethod
    def opened(cls, folder: Path) -> Keyring:
        """Return the keys of a folder; ConfigError where it holds none that can be read."""
        path = folder / REGISTER
        try:
            rows = json.loads(path.read_text("utf-8"))
            granted = {
                str(r["key"]): Grant(Role(r["role"]), r["name"], r["run"], int(r["shards"]))
                for r in rows
            }
            for grant in granted.values():
                checked_token(grant.name, "name")
                checked_token(grant.run, "run")
        except FileNotFoundError as error:
            msg = f"There are no keys in {folder}: name their folder, or `skerry keys init`."
            raise ConfigError(msg, path="keys") from error
        except OSError as error:
            raise _unreadable(folder, error) from error
        except (ValueError, TypeError, LookupError) as error:
            msg = f"{path} cannot be read ({error}): restore it, or make the keys again."
            raise ConfigError(msg, path="keys") from error
        return cls(folder, granted)

    def seed(self, name: str) -> Path:
        """Return the file with the secret of a key."""
        return self.folder / f"{checked_token(name, 'name')}.nk"

    def add(self, *grants: Grant) -> None:
        """Make a key for each grant, or none: ConfigError for a name that has one."""
        names = {grant.name for grant in self.grants.values()}
        for grant in grants:
            checked_token(grant.run, "run")
            if checked_token(grant.name, "name") in names:
                msg = (
                    f"Another key is named {grant.name!r}: take another name, or to replace that"
                    f" key, `skerry keys rotate {grant.name}`."
                )
                raise ConfigError(msg, path="name")
            names.add(grant.name)
        for grant in grants:
            self._make(grant)
        self._write()

    def shards_of(self, run: str) -> int:
        """Return the shards of a run for which there are keys; 1 of one that has none."""
        return next((grant.shards for grant in self.grants.values() if grant.run == run), 1)

    def rotate(self, name: str) -> None:
        """Replace a key: its user is dropped, and comes back with the new one."""
        old = self._known(name)
        self._make(self.grants.pop(old))
        self._write()

    def revoke(self, name: str) -> None:
        """Make a key worthless, and remove its seed."""
        del self.grants[self._known(name)]
        self._write()
        self.seed(name).unlink(missing_ok=True)

    def _find(self, name: str) -> str:
        return next((key for key, grant in self.grants.items() if grant.name == name), "")

    def _known(self, name: str) -> str:
        if not (key := self._find(name)):
            msg = f"No key in {self.folder} is named {name!r}: `skerry keys show` lists them."
            raise ConfigError(msg, path="name")
        return key

    def _make(self, grant: Grant) -> None:
        """Write the seed of a new key; the grant is its own from now on."""
        seed, public = new_key()
        write_private(self.seed(grant.name), seed + "\n")
        self.grants[public] = grant

    def _write(self) -> None:
        rows = [asdict(grant) | {"key": key} for key, grant in self.grants.items()]
        write_private(self.folder / REGISTER, json.dumps(rows, indent=1) + "\n")
        # The server's language has JSON as a part.
        accounts = json.dumps(accounts_of(self.grants), indent=1)
        write_private(self.folder / ACCOUNTS, f'"accounts": {accounts}\n', public=True)


def _unreadable(folder: Path, error: OSError) -> ConfigError:
    msg = (
        f"{folder} cannot be read ({error.strerror or error}): start this command as the user who"
        " made its keys, or name another folder with --keys."
    )
    return ConfigError(msg, path="keys")


def accounts_of(grants: Mapping[str, Grant]) -> dict[str, Any]:
    """Return the broker's accounts for these keys, as its configuration has them."""
    services = services_for_edge(grants.values())
    exports = [{"service": s, "response_type": kind} for s, kind in services.items()]
    imports = [{"service": {"account": CORE, "subject": subject}} for subject in services]
    return {
        CORE: {"jetstream": "enabled", "users": _users(grants, CORE), "exports": exports},
        EDGE: {"users": _users(grants, EDGE), "imports": imports},
    }


def _users(grants: Mapping[str, Grant], account: str) -> list[dict[str, Any]]:
    return [
        {
            "nkey": key,
            "permissions": {
                "publish": {"allow": list(grant.publishes())},
                "subscribe": {"allow": [f"_INBOX.{key}.>"]},
            },
        }
        for key, grant in grants.items()
        if grant.role.account == account
    ]


def services_of(run: str, shards: int = 1) -> Iterable[Grant]:
    """Return what a run needs beside learners, each under its role's name."""
    return (Grant(role, role, run, shards) for role in Role if role.account == CORE)


def reload(pid_file: Path) -> None:
    """Have the broker with this pid file read its configuration again; ConfigError if none runs."""
    import psutil  # not for those who only read keys

    try:
        broker = psutil.Process(int(pid_file.read_text("utf-8")))
        if "nats-server" in broker.name():
            broker.send_signal(signal.SIGHUP)
            return
        why = f"process {broker.pid} is {broker.name()}"
    except ValueError:
        why = "it holds no number"
    except OSError as error:
        why = error.strerror or str(error)
    except psutil.Error as error:
        why = str(error)
    msg = f"{pid_file} names no broker that runs here ({why}): reload it where it does."
    raise ConfigError(msg, path="pid-file")
