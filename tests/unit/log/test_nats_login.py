"""Who a client is, by the files that its settings name."""

from __future__ import annotations

import base64
import json
import re
import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest

from skerry.errors import ConfigError
from skerry.log.nats.login import JWT_MARK, NatsOptions, inbox_prefix, login_of, tls_of


def creds(folder: Path, claims: object) -> Path:
    """Write a credentials file whose JWT makes these claims."""
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    path = folder / "a.creds"
    path.write_text(f"{JWT_MARK}\nhead.{body}.signature\n------END NATS USER JWT------\n")
    return path


def test_a_jwt_names_its_user(tmp_path: Path) -> None:
    path = creds(tmp_path, {"name": "eu-1"})
    login = login_of(NatsOptions(credentials=path))
    assert (login.name, login.given) == ("eu-1", {"user_credentials": str(path)})


NOW = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("made_s", "until_s", "sentence"),
    [
        (-90, -1, r"a\.creds, expired at 2026-11-28 11:59:59 UTC: .* `skerry keys renew eu-1`"),
        (600, 900, "was made at 2026-11-28 12:10:00 UTC, and this machine's clock says .*12:00:00"),
        (60, 900, "was revoked .*, or the clock there is past 2026-11-28 12:15:00 UTC: have an"),
        (0, None, "was revoked or replaced, or is for another broker: have an admin"),
    ],
)
def test_who_must_do_what_where_a_key_is_refused(
    tmp_path: Path, made_s: int, until_s: int | None, sentence: str
) -> None:
    now_s = NOW.timestamp()
    claims = {"name": "eu-1", "iat": now_s + made_s}
    claims |= {} if until_s is None else {"exp": now_s + until_s}
    login = login_of(NatsOptions(credentials=creds(tmp_path, claims)))
    assert re.search(sentence, login.remedy(NOW))


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("eu-1", "_INBOX.eu-1"), ("", "_INBOX"), ("a.>", "_INBOX"), ("*", "_INBOX")],
)
def test_answers_come_below_a_name_that_is_one_token(name: str, prefix: str) -> None:
    assert inbox_prefix(NatsOptions(), name) == prefix


@pytest.mark.parametrize("text", ["", "hello", "SUAA", JWT_MARK, f"{JWT_MARK}\na.%%.c", "\xff"])
def test_a_file_that_holds_no_key_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.creds"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"nats\.credentials is .*a\.creds"):
        login_of(NatsOptions(credentials=path))


def test_a_jwt_without_a_name_or_with_no_time_is_damaged(tmp_path: Path) -> None:
    for claims in ({}, [], "x", {"name": "a", "exp": 1e300}, {"name": "a", "iat": "x"}):
        with pytest.raises(ConfigError, match="damaged"):
            login_of(NatsOptions(credentials=creds(tmp_path, claims)))


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"nats\.ca_file"):
        tls_of(NatsOptions(ca_file=bad))
    with pytest.raises(ConfigError, match=r"nats\.cert_file"):
        tls_of(NatsOptions(cert_file=tmp_path / "none.pem"))
    assert tls_of(NatsOptions()) is None
    context = tls_of(NatsOptions(handshake_first=True))
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
