# pyright: basic
"""A client's login to the broker, the TLS that it asks for, and where answers go.

Files are read at every dial: a key or a certificate that was renewed meanwhile counts at once.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import nkeys  # type: ignore[import-untyped] # ships no types

from skerry.errors import ConfigError
from skerry.log.client import ATTEMPTS_WORTH
from skerry.protocol.subjects import TOKEN

JWT_MARK = "-----BEGIN NATS USER JWT-----"
SEED_START = "SU"
"""The prefix of the seed of a user's NKey."""
SEED_BYTES = 32
CLOCKS_DIFFER = timedelta(minutes=5)
"""Clocks that differ by less are not mentioned."""
WHEN = "%Y-%m-%d %H:%M:%S UTC"

Event = Callable[[str, Mapping[str, str]], None]


@dataclass(frozen=True, slots=True)
class NatsOptions:
    """How a client logs in, how long it waits, and where it reports on its connection.

    ``credentials`` is a file with a user's JWT and seed, or with the seed of an NKey alone. Answers
    come below ``inbox_prefix``; empty: ``_INBOX.`` and the login's name. With ``ca_file`` or
    ``cert_file`` nothing is sent to a broker that does not speak TLS. Calls that are safe to repeat
    are repeated for ``patience_s`` (0: four request timeouts); a login that is refused though one
    was taken before is tried for ``login_patience_s``.
    """

    credentials: Path | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    inbox_prefix: str = ""
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    handshake_first: bool = False
    connect_timeout_s: float = 30.0
    request_timeout_s: float = 5.0
    login_patience_s: float = 120.0
    publish_window: int = 64
    patience_s: float = 0.0
    on_event: Event = lambda *_: None

    @property
    def waits_s(self) -> float:
        return self.patience_s or ATTEMPTS_WORTH * self.request_timeout_s

    @property
    def needs_tls(self) -> bool:
        return bool(self.ca_file or self.cert_file or self.handshake_first)


class Login(NamedTuple):
    """One login: its name to the broker, '' for none, and what nats-py is given for it.

    ``key`` is the file that holds it. A token in that file says when it was ``made``, and ``until``
    when it is valid if it expires.
    """

    name: str
    given: dict[str, Any]
    key: Path | None = None
    made: datetime | None = None
    until: datetime | None = None

    def __str__(self) -> str:
        if self.key is not None:
            return f"the key in {self.key}"
        return f"the login {self.name!r}" if self.name else "a client without a login"

    def remedy(self, now: datetime) -> str:
        """Return why a broker may refuse this login, and who must do what."""
        if self.key is None:
            return "set nats.credentials, or nats.user and nats.password_file"
        key = f"the key in nats.credentials, {self.key},"
        if self.until is not None and self.until <= now:
            return (
                f"{key} expired at {self.until:{WHEN}}: have an admin `skerry keys renew"
                f" {self.name}`, and put the new file there"
            )
        if self.made is not None and self.made > now + CLOCKS_DIFFER:
            return (
                f"{key} was made at {self.made:{WHEN}}, and this machine's clock says"
                f" {now:{WHEN}}: set the clock that is wrong, here, at the broker or at the admin's"
            )
        late = "" if self.until is None else f", or the clock there is past {self.until:{WHEN}}"
        return (
            f"{key} was revoked or replaced, or is for another broker{late}: have an admin look for"
            " it with `skerry keys show`"
        )


def login_of(options: NatsOptions) -> Login:
    """Return the login that the options name; ConfigError where its files hold none."""
    if options.credentials is None:
        given = {"user": options.user, "password": options.password} if options.user else {}
        return Login(options.user, given)
    path = options.credentials
    try:
        text = path.read_text(encoding="utf-8").strip()
        if JWT_MARK in text:
            said = _claims_in(text)
            made, until = (
                datetime.fromtimestamp(said[at], UTC) if at in said else None
                for at in ("iat", "exp")
            )
            return Login(str(said["name"]), {"user_credentials": str(path)}, path, made, until)
        if text.startswith(SEED_START):
            return Login(_public_name(text), {"nkeys_seed_str": text}, path)
    except OSError as error:
        why = error.strerror or "unreadable"
    except (ValueError, TypeError, LookupError, OverflowError, nkeys.NkeysError, binascii.Error):
        why = "what it holds is damaged"
    else:
        why = "it holds neither a user's JWT with its seed nor the seed of an NKey"
    msg = f"nats.credentials is {path}, which cannot be used ({why}): name the file of your key."
    raise ConfigError(msg, path="nats.credentials")


def new_key(prefix: int = nkeys.PREFIX_BYTE_USER) -> tuple[str, str]:
    """Return the secret seed and the public name of a new NKey, by default a user's."""
    seed: bytes = nkeys.encode_seed(os.urandom(SEED_BYTES), prefix)
    pair: Any = nkeys.from_seed(seed)
    return seed.decode(), pair.public_key.decode()


def _public_name(seed: str) -> str:
    """Return the public name of an NKey's seed; ValueError where its checksum does not match."""
    given: Any = nkeys
    prefix, raw = given.decode_seed(seed.encode())
    if given.encode_seed(raw, prefix).decode() != seed:
        raise ValueError
    return str(given.from_seed(seed.encode()).public_key.decode())


def _claims_in(text: str) -> dict[str, Any]:
    """Return what a user's JWT says; the broker checks its signature."""
    token = text.split(JWT_MARK, 1)[1].split(maxsplit=1)[0]
    payload = token.split(".")[1]
    claims: dict[str, Any] = json.loads(
        base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
    )
    return claims


def inbox_prefix(options: NatsOptions, name: str) -> str:
    """Return what the subjects of answers begin with: by the login, so that keys can name it."""
    if options.inbox_prefix:
        return options.inbox_prefix
    return f"_INBOX.{name}" if TOKEN.fullmatch(name) else "_INBOX"


def tls_of(options: NatsOptions) -> ssl.SSLContext | None:
    """Return the TLS that the options ask for, None for nats-py's own; ConfigError for bad files.

    Without a ``ca_file`` the machine's own authorities vouch for the broker (SSL_CERT_FILE).
    """
    if not options.needs_tls:
        return None
    named = "nats.ca_file"
    try:
        context = ssl.create_default_context(cafile=options.ca_file)
        if options.cert_file is not None:
            named = "nats.cert_file or nats.key_file"
            context.load_cert_chain(options.cert_file, options.key_file)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "reason", None) or error.strerror or "unreadable"
        msg = f"{named} cannot be used ({why}): name files in PEM that belong together."
        raise ConfigError(msg, path=named) from error
    return context
