"""The keys of one broker: an NKey for each learner and service, and the accounts that they open.

A folder holds it all, for its owner alone: a seed ``NAME.nk`` for each key, which its machine names
in ``nats.credentials``; ``keys.json``, who they are; and ``broker/accounts.conf``, which the
broker's configuration includes: it holds no secret and may be mounted elsewhere. A broker that
reloads drops clients whose key is gone, and no others. ``regions/NAME`` has what a region's own
broker includes; ``link.conf`` there holds the secret by which it enters the hub.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from skerry.errors import ConfigError
from skerry.log.nats.login import new_key
from skerry.protocol.roles import (
    API,
    HUB,
    Grant,
    Role,
    delivers_to,
    services_for_edge,
    through_cache,
)
from skerry.protocol.subjects import checked_token
from skerry.service.private import write_private

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

ACCOUNTS = "broker/accounts.conf"
LINK = "link.conf"
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
                str(r["key"]): Grant(
                    Role(r["role"]), r["name"], r["run"], int(r["shards"]), r.get("region", "")
                )
                for r in rows
            }
            for grant in granted.values():
                checked_token(grant.region or "-", "region")
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

    def region(self, name: str) -> Path:
        """Return the folder with what the broker of a region includes."""
        return self.folder / "regions" / checked_token(name, "region")

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

    def region_of(self, name: str) -> Grant:
        """Return what a region's broker may do at the hub; ConfigError for one that has no key."""
        for grant in self.grants.values():
            if grant.role is Role.REGION and grant.name == name:
                return grant
        msg = f"{self.folder} knows no region {name!r}: `skerry region init {name}` makes its keys."
        raise ConfigError(msg, path="region")

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
        if grant.role is Role.REGION:
            write_private(self.region(grant.name) / LINK, f'nkey: "{seed}"\n')
        self.grants[public] = grant

    def _write(self) -> None:
        rows = [asdict(grant) | {"key": key} for key, grant in self.grants.items()]
        write_private(self.folder / REGISTER, json.dumps(rows, indent=1) + "\n")
        self._write_accounts(self.folder / ACCOUNTS, accounts_of(self.grants))
        for grant in self.grants.values():
            if grant.role is Role.REGION:
                folder = self.region(grant.name)
                accounts = accounts_in(grant.name, self.grants)
                self._write_accounts(folder / ACCOUNTS, accounts)

    def _write_accounts(self, path: Path, accounts: Mapping[str, Any]) -> None:
        # The server's language has JSON as a part.
        text = json.dumps(accounts, indent=1)
        write_private(path, f'"accounts": {text}\n', public=True)


def _unreadable(folder: Path, error: OSError) -> ConfigError:
    msg = (
        f"{folder} cannot be read ({error.strerror or error}): start this command as the user who"
        " made its keys, or name another folder with --keys."
    )
    return ConfigError(msg, path="keys")


def accounts_of(grants: Mapping[str, Grant]) -> dict[str, Any]:
    """Return the broker's accounts for these keys, as its configuration has them."""
    services = services_for_edge(grants.values())
    regions = {key: grant for key, grant in grants.items() if grant.role is Role.REGION}
    mirrors = dict.fromkeys(s for grant in regions.values() for s in grant.mirrors())
    exports: list[dict[str, Any]] = [
        {"service": s, "response_type": kind} for s, kind in services.items()
    ]
    exports += [{"service": subject} for subject in mirrors]
    exports += [
        {"stream": f"{delivers_to(grant.name)}.>", "accounts": [account_of(grant.name)]}
        for grant in regions.values()
    ]
    here = {key: grant for key, grant in grants.items() if not grant.region}
    edge = services_for_edge(here.values())
    return {
        CORE: {"jetstream": "enabled", "users": _users(here, CORE), "exports": exports},
        EDGE: {"users": _users(here, EDGE), "imports": [_imported(s) for s in edge]},
        **{
            account_of(grant.name): _of_region(key, grant, grants.values())
            for key, grant in regions.items()
        },
    }


def account_of(region: str) -> str:
    """Return the account at the hub that a region's broker is in."""
    return f"REGION_{region}"


def _of_region(key: str, region: Grant, grants: Iterable[Grant]) -> dict[str, Any]:
    """Return the account of a region's broker: what each of its learners may do, by name."""
    learners = (g for g in grants if g.region == region.name and g.role.account == EDGE)
    said = dict.fromkeys(subject for g in learners for subject in replace(g, region="").publishes())
    delivered = {"stream": {"account": CORE, "subject": f"{delivers_to(region.name)}.>"}}
    services = [_imported(subject) for subject in (*said, *region.mirrors())]
    return {"users": [{"nkey": key}], "imports": [*services, delivered]}


def accounts_in(region: str, grants: Mapping[str, Grant]) -> dict[str, Any]:
    """Return the accounts of a region's own broker: its link is in CORE, its learners in EDGE.

    What learners ask of JetStream's API is asked of the hub's; what the region keeps has an API
    apart.
    """
    here = {key: grant for key, grant in grants.items() if grant.region == region}
    services = services_for_edge(here.values())
    kept = dict.fromkeys(stream for grant in here.values() for stream in grant.kept())
    exports = [{"service": _at_hub(s), "response_type": kind} for s, kind in services.items()]
    exports += [{"service": f"{API}.DIRECT.GET.{stream}"} for stream in kept]
    imports = [_imported(_at_hub(s)) | {"to": s} for s in services]
    imports += [
        _imported(f"{API}.DIRECT.GET.{stream}") | {"to": through_cache(stream)} for stream in kept
    ]
    users = _users(here, Role.CACHE.account)
    return {
        CORE: {"jetstream": "enabled", "users": users, "exports": exports},
        EDGE: {"users": _users(here, EDGE), "imports": imports},
    }


def _at_hub(subject: str) -> str:
    return subject.replace(API, f"$JS.{HUB}.API", 1) if subject.startswith(API) else subject


def _imported(subject: str) -> dict[str, Any]:
    return {"service": {"account": CORE, "subject": subject}}


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
