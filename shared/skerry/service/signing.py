# pyright: basic
"""Keys that expire: NATS's operator, account and user tokens (JWTs), and who signs them.

The operator signs accounts, whose tokens stand in the broker's configuration. A role in a run has a
signing key in its account, whose scope says what its users may do, with their names filled in by
the broker: a user's own token says no more than who it is and until when. So a new or renewed key
changes nothing at the broker, and a role's signing key can do all that the role can.
"""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import nkeys  # type: ignore[import-untyped] # ships no types
from pydantic import TypeAdapter

from skerry.errors import ConfigError
from skerry.log.nats.login import JWT_MARK, new_key
from skerry.protocol.subjects import OWN
from skerry.service.private import write_private

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from skerry.protocol.roles import Grant

SIGNER = "signer.json"
DAY_S = 86_400
MOST_DAYS = 3650
HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
UNLIMITED: dict[str, Any] = dict.fromkeys(("subs", "data", "payload"), -1)
LIMITS = UNLIMITED | dict.fromkeys(("imports", "exports", "conn", "leaf"), -1) | {"wildcards": True}
JETSTREAM = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
OPERATOR, SYSTEM = "operator", "SYS"


@dataclass(slots=True)
class Signer:
    """The seeds that sign, by what each signs for, and the keys that were revoked.

    ``days`` is how long a key lives by default. ``revoked`` has, by account, when each revoked key
    would have expired, in seconds since 1970: no token of it can be newer.
    """

    days: int
    seeds: dict[str, str] = field(default_factory=dict[str, str])
    revoked: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])

    @classmethod
    def opened(cls, path: Path) -> Signer | None:
        """Return the signer of a folder's keys; None if the broker knows each key instead.

        Raises OSError, or ValueError for a file that is damaged.
        """
        if not path.exists():
            return None
        return TypeAdapter(Signer).validate_json(path.read_bytes())

    def write(self, path: Path) -> None:
        """Replace the file, for its owner alone."""
        write_private(path, TypeAdapter(Signer).dump_json(self).decode() + "\n")

    def expiry(self, days: int | None) -> int:
        """Return when a key made now expires, in seconds since 1970; ConfigError for bad days."""
        return int(time.time()) + checked_days(self.days if days is None else days) * DAY_S

    def credentials(self, account: str, grant: Grant, seed: str, public: str) -> str:
        """Return the file with which a user logs in: its token, and its seed."""
        times = {"iat": int(time.time()), "exp": grant.until}
        said = {"issuer_account": self.public(account)}
        token = self._signed(_scope(account, grant), "user", grant.name, public, said, times)
        return (
            f"{JWT_MARK}\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
        )

    def revoke(self, account: str, key: str, until: int) -> None:
        """Revoke every token of a key; revocations of keys that have expired are forgotten."""
        held = self.revoked.get(account, {}) | {key: until}
        now_s = time.time()
        self.revoked[account] = {key: end for key, end in held.items() if end > now_s}

    def accounts(
        self, place: str, accounts: Mapping[str, Any], grants: Mapping[str, Grant]
    ) -> dict[str, Any]:
        """Return a broker's configuration for ``accounts``, which are as for static keys."""
        system, operator = self.public(SYSTEM), self.public(OPERATOR)
        tokens = {
            self.public(place + name): self._account(place, name, body, grants)
            for name, body in accounts.items()
        }
        tokens[system] = self._signed(OPERATOR, "account", SYSTEM, system, {"limits": LIMITS})
        said = {"system_account": system}
        return {
            "operator": self._signed(OPERATOR, "operator", OPERATOR, operator, said),
            "resolver": "MEMORY",
            "resolver_preload": tokens,
        }

    def _account(
        self, place: str, name: str, body: Mapping[str, Any], grants: Mapping[str, Grant]
    ) -> str:
        account, scopes = place + name, dict[str, Any]()
        for user in body["users"]:
            grant, template = grants[user["nkey"]], UNLIMITED
            if "permissions" in user:
                says = replace(grant, name=OWN).publishes()
                may = {"pub": {"allow": says}, "sub": {"allow": [f"_INBOX.{OWN}.>"]}}
                template = UNLIMITED | may
            key = self.public(_scope(account, grant))
            scopes[key] = {"kind": "user_scope", "key": key, "role": grant.role}
            scopes[key]["template"] = template
        said = {
            "limits": LIMITS | (JETSTREAM if "jetstream" in body else {}),
            "exports": [_exported(export) for export in body.get("exports", ())],
            "imports": [self._imported(place, found) for found in body.get("imports", ())],
            "mappings": {
                source: [{"subject": to}] for source, to in body.get("mappings", {}).items()
            },
            "signing_keys": list(scopes.values()),
            "revocations": self.revoked.get(account, {}),
        }
        return self._signed(OPERATOR, "account", account, self.public(account), said)

    def _imported(self, place: str, found: Mapping[str, Any]) -> dict[str, Any]:
        kind = "stream" if "stream" in found else "service"
        subject, account = found[kind]["subject"], self.public(place + found[kind]["account"])
        claims = {"name": subject, "subject": subject, "account": account, "type": kind}
        return claims | ({"local_subject": found["to"]} if "to" in found else {})

    def public(self, name: str) -> str:
        """Return the public name of the operator, an account, or a role's signing key."""
        public: bytes = self._pair(name).public_key
        return public.decode()

    def _pair(self, name: str) -> Any:
        if name not in self.seeds:
            prefix = nkeys.PREFIX_BYTE_OPERATOR if name == OPERATOR else nkeys.PREFIX_BYTE_ACCOUNT
            self.seeds[name], _ = new_key(prefix)
        return nkeys.from_seed(self.seeds[name].encode())

    def _signed(
        self,
        by: str,
        kind: str,
        name: str,
        public: str,
        said: Mapping[str, Any],
        times: Mapping[str, int] | None = None,
    ) -> str:
        """Return a token; equal claims give equal ones, so that a broker sees what has changed."""
        about = {"iss": self.public(by), "sub": public, "name": name} | dict(times or {})
        claims = about | {"nats": {"type": kind, "version": 2} | dict(said)}
        text = ".".join(_base64(json.dumps(part).encode()) for part in (HEADER, claims))
        return f"{text}.{_base64(self._pair(by).sign(text.encode()))}"


def checked_days(days: int) -> int:
    """Return ``days`` if a key may live that long; ConfigError below 1 or above ten years."""
    if not 0 < days <= MOST_DAYS:
        msg = f"--days is {days}, but a key lives for 1 to {MOST_DAYS} days."
        raise ConfigError(msg, path="days")
    return days


def _scope(account: str, grant: Grant) -> str:
    return f"{account}/{grant.role}/{grant.run}/{grant.shards}"


def _exported(export: Mapping[str, Any]) -> dict[str, Any]:
    """Return an export as a token has it; only accounts that our operator signed can import it."""
    kind = "stream" if "stream" in export else "service"
    claims = {"name": export[kind], "subject": export[kind], "type": kind}
    if "response_type" in export:
        claims["response_type"] = export["response_type"].capitalize()
    return claims


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
