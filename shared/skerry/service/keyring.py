"""The keys of one broker: an NKey for each learner and service, and the accounts that they open.

A folder holds it all, for its owner alone: a secret ``NAME.nk`` for each key, which its machine
names in ``nats.credentials``; ``keys.json``, who they are; and ``broker/accounts.conf``, which the
broker's configuration includes: it holds no secret and may be mounted elsewhere. A broker that
reloads drops clients whose key is gone, and no others. ``regions/NAME`` has what a region's own
broker includes; ``link.conf`` there holds the secret by which it enters the hub.

Where keys expire, ``signer.json`` holds the seeds that sign them, a secret is ``NAME.creds``, and
the broker knows who signs instead of each key.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from skerry.errors import ConfigError
from skerry.log.nats.login import new_key
from skerry.protocol.roles import (
    API,
    HUB_API,
    Grant,
    Role,
    delivers_to,
    services_for_edge,
    through_cache,
)
from skerry.protocol.subjects import checked_token
from skerry.service.private import write_private
from skerry.service.signing import SIGNER, Signer, checked_days

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

ACCOUNTS = "broker/accounts.conf"
LINK = "link.conf"
LINK_CREDENTIALS = "link.creds"
REGISTER = "keys.json"
CORE, EDGE = "CORE", "EDGE"
GRANT = TypeAdapter(Grant)
SEED = re.compile(r"SU[A-Z2-7]{56}")


@dataclass(slots=True)
class Keyring:
    """The keys in ``folder``: what each is granted, by its public name, and who has it, by name.

    They expire where a ``signer`` signs them.
    """

    folder: Path
    grants: dict[str, Grant] = field(default_factory=dict[str, Grant])
    signer: Signer | None = None

    @classmethod
    def begun(cls, folder: Path, days: int | None = None) -> Keyring:
        """Return a folder for the first keys; ConfigError where there are some.

        They live for ``days``; None: for ever.
        """
        try:
            is_taken = (folder / REGISTER).exists()
        except OSError as error:
            raise _unreadable(folder, error) from error
        if is_taken:
            msg = f"{folder} has keys already: `skerry keys add` makes one more."
            raise ConfigError(msg, path="keys")
        signer = None if days is None else Signer(checked_days(days))
        return cls(folder, signer=signer)

    @classmethod
    def opened(cls, folder: Path) -> Keyring:
        """Return the keys of a folder; ConfigError where it holds none that can be read."""
        try:
            rows = json.loads((folder / REGISTER).read_text("utf-8"))
            granted = {str(r["key"]): GRANT.validate_python(r) for r in rows}
            for grant in granted.values():
                checked_token(grant.region or "-", "region")
                checked_token(grant.name, "name")
                checked_token(grant.run, "run")
            signer = Signer.opened(folder / SIGNER)
        except FileNotFoundError as error:
            msg = f"There are no keys in {folder}: name their folder, or `skerry keys init`."
            raise ConfigError(msg, path="keys") from error
        except OSError as error:
            raise _unreadable(folder, error) from error
        except (ValueError, TypeError, LookupError) as error:
            msg = (
                f"The keys in {folder} cannot be read ({REGISTER} or {SIGNER} is damaged): restore"
                " it from a copy, or make the keys again."
            )
            raise ConfigError(msg, path="keys") from error
        return cls(folder, granted, signer)

    def seed(self, name: str) -> Path:
        """Return the file with the secret of a key."""
        kind = "nk" if self.signer is None else "creds"
        return self.folder / f"{checked_token(name, 'name')}.{kind}"

    def region(self, name: str) -> Path:
        """Return the folder with what the broker of a region includes."""
        return self.folder / "regions" / checked_token(name, "region")

    @property
    def account_of_log(self) -> str:
        """The broker's name for the account that has the log, and for its folder."""
        return CORE if self.signer is None else self.signer.public(CORE)

    def add(self, *grants: Grant, days: int | None = None) -> bool:
        """Make a key for each grant, or none, and return whether a broker has to reload.

        Raises ConfigError for a name that has one, or for ``days`` where keys do not expire.
        """
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
        until = self._expiry(days)
        for grant in grants:
            self._make(replace(grant, until=until), *new_key())
        return self._write()

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

    def promote(self, region: str) -> None:
        """Have the hub's own broker take a region's learners, and no broker of that region."""
        self.region_of(region)
        for key, grant in tuple(self.grants.items()):
            if home_of(grant) in {account_of(region), f"{region}/{CORE}"}:
                self._drop(key)
                self.seed(grant.name).unlink(missing_ok=True)
            elif grant.region == region and self.signer is None:
                self.grants[key] = replace(grant, region="")
            elif grant.region == region:  # whose token names the account that is gone
                self._make(replace(self._drop(key), region=""), *new_key())
        self._write()

    def rotate(self, name: str) -> None:
        """Replace a key: its user is dropped, and comes back with the new one."""
        grant = self._drop(self._known(name))
        self._make(replace(grant, until=self._expiry()), *new_key())
        self._write()

    def renew(self, name: str, days: int | None = None) -> None:
        """Have a key expire later; its user reads the new file at the next login.

        Raises ConfigError where keys do not expire, for an earlier end, and where the secret is not
        here any more.
        """
        key, path = self._known(name), self.seed(name)
        if (until := self._expiry(days)) == 0:
            raise _for_ever(self.folder)
        if until < self.grants[key].until:  # what is revoked later must outlive all its tokens
            msg = (
                f"The key of {name} expires later than that, or this machine's clock is behind:"
                f" `skerry keys rotate {name}` replaces it at once."
            )
            raise ConfigError(msg, path="days")
        found = SEED.search(path.read_text("utf-8")) if path.exists() else None
        if found is None:
            msg = f"{path} is not here or holds no seed: `skerry keys rotate {name}` makes another."
            raise ConfigError(msg, path="name")
        self._make(replace(self.grants[key], until=until), found[0], key)
        self._write()

    def revoke(self, name: str) -> None:
        """Make a key worthless, and remove its secret."""
        self._drop(self._known(name))
        self._write()
        self.seed(name).unlink(missing_ok=True)

    def _expiry(self, days: int | None = None) -> int:
        if self.signer is not None:
            return self.signer.expiry(days)
        if days is not None:
            raise _for_ever(self.folder)
        return 0

    def _find(self, name: str) -> str:
        return next((key for key, grant in self.grants.items() if grant.name == name), "")

    def _known(self, name: str) -> str:
        if not (key := self._find(name)):
            msg = f"No key in {self.folder} is named {name!r}: `skerry keys show` lists them."
            raise ConfigError(msg, path="name")
        return key

    def _drop(self, key: str) -> Grant:
        grant = self.grants.pop(key)
        if self.signer is not None:
            self.signer.revoke(home_of(grant), key, grant.until)
        return grant

    def _make(self, grant: Grant, seed: str, public: str) -> None:
        """Write the secret of a key; the grant is its own from now on."""
        secret, link = seed + "\n", f'nkey: "{seed}"\n'
        if self.signer is not None:
            secret = self.signer.credentials(home_of(grant), grant, seed, public)
            link = f'credentials: "{LINK_CREDENTIALS}"\n'
        write_private(self.seed(grant.name), secret)
        if grant.role is Role.REGION:
            folder, account = self.region(grant.name), CORE
            if self.signer is not None:
                write_private(folder / LINK_CREDENTIALS, secret)
                account = self.signer.public(f"{grant.name}/{CORE}")
            write_private(folder / LINK, f'account: "{account}"\n{link}')
        self.grants[public] = grant

    def _write(self) -> bool:
        """Write what brokers and later commands read; return whether a broker's has changed."""
        rows = [asdict(grant) | {"key": key} for key, grant in self.grants.items()]
        written = {self.folder / ACCOUNTS: self._settings("", accounts_of(self.grants))}
        for grant in self.grants.values():
            if grant.role is Role.REGION:
                accounts = accounts_in(grant.name, self.grants)
                path = self.region(grant.name) / ACCOUNTS
                written[path] = self._settings(f"{grant.name}/", accounts)
        if self.signer is not None:
            self.signer.write(self.folder / SIGNER)
        write_private(self.folder / REGISTER, json.dumps(rows, indent=1) + "\n")
        changed = {path: text for path, text in written.items() if not _holds(path, text)}
        for path, text in changed.items():
            write_private(path, text, public=True)
        return bool(changed)

    def _settings(self, place: str, accounts: dict[str, Any]) -> str:
        """Return accounts in the server's own language, which has JSON as a part."""
        settings: dict[str, Any] = {"accounts": accounts}
        if self.signer is not None:
            settings = self.signer.accounts(place, accounts, self.grants)
        return "".join(
            f'"{key}": {json.dumps(value, indent=1)}\n' for key, value in settings.items()
        )


def home_of(grant: Grant) -> str:
    """Return the account that a key belongs to; one of a region's own broker after its name."""
    if grant.role is Role.REGION:
        return account_of(grant.name)
    account = CORE if grant.role is Role.CACHE else grant.role.account
    return f"{grant.region}/{account}" if grant.region else account


def _holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_text("utf-8") == text


def _for_ever(folder: Path) -> ConfigError:
    msg = (
        f"The keys in {folder} do not expire, and have no --days: `skerry keys init --days N` in"
        " another folder makes keys that do."
    )
    return ConfigError(msg, path="days")


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
    return subject.replace(API, HUB_API, 1) if subject.startswith(API) else subject


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
