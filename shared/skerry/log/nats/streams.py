"""Stream settings in JetStream's own words, there and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skerry.log.base import Retention, Room, Storage, StreamInfo, StreamSpec

NANOSECONDS = 1_000_000_000


def config_of(spec: StreamSpec) -> dict[str, Any]:
    """Return the stream's settings as JetStream wants them.

    Only a window drops its oldest messages: elsewhere a bound refuses new ones. What is kept for
    ever cannot be deleted or purged message by message. Its small records repeat each other's names
    and so take a third of the room compressed (when a block is full); payloads are packed already.
    """
    for_ever = spec.retention is Retention.EVERYTHING
    window = spec.duplicate_window_s
    if spec.max_age_s > 0:
        window = min(window, spec.max_age_s)
    return {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": "limits",
        "storage": spec.storage.value,
        "discard": "old" if spec.retention is Retention.WINDOW else "new",
        "max_msgs_per_subject": 1 if spec.retention is Retention.LAST_PER_SUBJECT else -1,
        "max_bytes": spec.max_bytes if spec.max_bytes > 0 else -1,
        "max_age": int(spec.max_age_s * NANOSECONDS),
        "num_replicas": spec.replicas,
        "duplicate_window": int(window * NANOSECONDS),
        "allow_direct": True,
        "deny_delete": for_ever,
        "deny_purge": for_ever,
        "compression": "s2" if for_ever else "none",
    }


def spec_of(config: Mapping[str, Any]) -> StreamSpec:
    """Return what a stream's settings amount to."""
    retention = Retention.WINDOW
    if config.get("max_msgs_per_subject") == 1:
        retention = Retention.LAST_PER_SUBJECT
    elif config.get("discard") == "new":
        retention = Retention.EVERYTHING
    return StreamSpec(
        name=config["name"],
        subjects=tuple(config.get("subjects", ())),
        retention=retention,
        storage=Storage(config["storage"]),
        max_bytes=config.get("max_bytes", -1),
        max_age_s=config.get("max_age", 0) / NANOSECONDS,
        replicas=config.get("num_replicas", 1),
        duplicate_window_s=config.get("duplicate_window", 0) / NANOSECONDS,
    )


def hidden_changes(spec: StreamSpec, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the differences in settings that no StreamSpec has a word for."""
    wanted = config_of(spec)
    names = ("allow_direct", "deny_delete", "deny_purge")
    return tuple(
        f"stream {spec.name}: {name} is off, should be on; changed"
        for name in names
        if wanted[name] and not config.get(name, False)
    )


def info_of(reply: Mapping[str, Any]) -> StreamInfo:
    """Read one entry of a stream listing."""
    state = reply["state"]
    return StreamInfo(
        name=reply["config"]["name"],
        messages=state["messages"],
        bytes=state["bytes"],
        first_seq=state["first_seq"],
        last_seq=state["last_seq"],
        spec=spec_of(reply["config"]),
    )


def rooms_of(reply: Mapping[str, Any]) -> tuple[Room, ...]:
    """Read what the server says of an account; limits by number of replicas are not told."""
    limits = reply["limits"]
    return (
        Room(Storage.FILE, reply["storage"], max(0, limits.get("max_storage", 0))),
        Room(Storage.MEMORY, reply["memory"], max(0, limits.get("max_memory", 0))),
    )
