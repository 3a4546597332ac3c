"""The keys of one broker: an NKey for each learner and service, and the accounts that they open.

A folder holds it all, for its owner alone: a secret ``NAME.nk`` for each key, which its machine
names in ``nats.credentials``; ``keys.json``, what each may do; and ``broker/accounts.conf``, which
the broker's configuration includes: it holds no secret and may be mounted elsewhere. A broker that
reloads drops clients whose key is gone, and no others. ``regions/NAME`` has what a region's own
broker includes; ``link.conf`` there holds the secret with which it logs in to the hub.

Where keys expire, ``signer.json`` holds the seeds that sign them, a secret is ``NAME.creds``, and
the broker knows who signs instead of each key.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from skerry.errors import ConfigError
from skerry.folders import mode_of
from skerry.log.nats.login import new_key
from skerry.protocol.roles import Grant, Role
from skerry.protocol.subjects import checked_token
from skerry.service.accounts import CACHE, CORE, account_of, home_of, included
from skerry.service.private import write_private
from skerry.service.signing import SIGNER, Signer, checked_days

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

ACCOUNTS = "broker/accounts.conf"
LINK = "link.conf"
LINK_CREDENTIALS = "link.creds"
REGISTER = "keys.json"
GRANT = TypeAdapter(Grant)
SEED = re.compile(r"SU[A-Z2-7]{56}")


@contextmanager
def changing(folder: Path) -> Generator[Keyring]:
    """Yield the keys of a folder; another command that changes them waits until this one is done.

    Both would read them, and the second to write would undo what the first did. Raises as
    ``Keyring.opened``.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # ``opened`` says what is wrong with the folder
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield Keyring.opened(folder)


@dataclass(slots=True)
class Keyring:
    """The keys in ``folder``; ``grants`` says by public name what each may do, and who has it.

    They expire if a ``signer`` signs them.
    """

    folder: Path
    grants: dict[str, Grant] = field(default_factory=dict[str, Grant])
    signer: Signer | None = None

    @classmethod
    def begun(cls, folder: Path, days: int | None = None) -> Keyring:
        """Return a keyring without keys; ConfigError if its folder has some.

        New keys live for ``days``; None: for ever.
        """
        try:
            is_taken = bool(mode_of(folder / REGISTER))
        except OSError as error:
            raise _unreadable(folder, error) from error
        if is_taken:
            msg = (
                f"{folder} has keys already: `skerry keys add` makes one more, and `skerry keys"
                f" init --like {folder} --keys OTHER` new ones for all of them."
            )
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
            raise _damaged(folder) from error
        if signer is None and any(grant.until for grant in granted.values()):
            raise _damaged(folder)  # without it the broker would get accounts of static keys
        return cls(folder, granted, signer)

    def seed(self, name: str) -> Path:
        """Return the file with the secret of a key."""
        kind = "nk" if self.signer is None else "creds"
        return self.folder / f"{checked_token(name, 'name')}.{kind}"

    def region(self, name: str) -> Path:
        """Return the folder with what the broker of a region includes."""
        return self.folder / "regions" / checked_token(name, "region")

    def add(self, *grants: Grant, days: int | None = None) -> bool:
        """Make a key for each grant; return True if a broker has to reload.

        Raises ConfigError, and makes none, for a name that has one, or for ``days`` where keys do
        not expire.
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

    def region_of(self, name: str) -> Grant:
        """Return what a region's broker may do at the hub; ConfigError for one that has no key."""
        for grant in self.grants.values():
            if grant.role is Role.REGION and grant.name == name:
                return grant
        msg = (
            f"{self.folder} knows no region {name!r}, or it was promoted: `skerry region init"
            f" {name}` makes its keys."
        )
        raise ConfigError(msg, path="region")

    def grant(self, name: str) -> Grant:
        """Return what the key of this name may do; ConfigError where there is none."""
        return self.grants[self._known(name)]

    def promote(self, region: str) -> None:
        """Move a region's learners to the hub's own broker, and drop the keys of the region's."""
        self.region_of(region)
        for key, grant in tuple(self.grants.items()):
            if home_of(grant) in {account_of(region), f"{region}/{CACHE}"}:
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
        """Revoke a key, and remove its secret."""
        self._drop(self._known(name))
        self._write()
        self.seed(name).unlink(missing_ok=True)

    def _expiry(self, days: int | None = None) -> int:
        if self.signer is not None:
            return self.signer.expiry(days)
        if days is not None:
            raise _for_ever(self.folder)
        return 0

    def _known(self, name: str) -> str:
        for key, grant in self.grants.items():
            if grant.name == name:
                return key
        msg = f"No key in {self.folder} is named {name!r}: `skerry keys show` lists them."
        raise ConfigError(msg, path="name")

    def _drop(self, key: str) -> Grant:
        grant = self.grants.pop(key)
        if self.signer is not None:
            self.signer.revoke(home_of(grant), key, grant.until)
        return grant

    def _make(self, grant: Grant, seed: str, public: str) -> None:
        """Write the secret of a key, and note its grant."""
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
        """Write the files of brokers and later commands; return True if a broker's has changed."""
        rows = [asdict(grant) | {"key": key} for key, grant in self.grants.items()]
        written = {self.folder / ACCOUNTS: included(self.grants, self.signer)}
        for grant in self.grants.values():
            if grant.role is Role.REGION:
                path = self.region(grant.name) / ACCOUNTS
                written[path] = included(self.grants, self.signer, grant.name)
        if self.signer is not None:
            self.signer.write(self.folder / SIGNER)
        write_private(self.folder / REGISTER, json.dumps(rows, indent=1) + "\n")
        changed = {path: text for path, text in written.items() if not _holds(path, text)}
        for path, text in changed.items():
            write_private(path, text, public=True)
        return bool(changed)


def _holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_text("utf-8") == text


def _for_ever(folder: Path) -> ConfigError:
    msg = (
        f"The keys in {folder} do not expire, and have no --days: `skerry keys init --days N --like"
        f" {folder} --keys OTHER` makes keys that do."
    )
    return ConfigError(msg, path="days")


def _damaged(folder: Path) -> ConfigError:
    msg = (
        f"The keys in {folder} cannot be read ({REGISTER} or {SIGNER} is damaged or missing):"
        " restore it from a copy, or make the keys again."
    )
    return ConfigError(msg, path="keys")


def _unreadable(folder: Path, error: OSError) -> ConfigError:
    msg = (
        f"{folder} cannot be read ({error.strerror or error}): start this command as the user who"
        " made its keys, or name another folder with --keys."
    )
    return ConfigError(msg, path="keys")


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
