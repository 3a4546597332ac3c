"""A region's broker: the configuration of a leaf node, and the mirrors that are its cache."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skerry.errors import ConfigError
from skerry.log.base import PER_SUBJECT
from skerry.log.streams import specs
from skerry.protocol.roles import HUB_API, REGION_MARK, Grant, Role, delivers_to
from skerry.protocol.subjects import Subjects
from skerry.service.entry import bus_from
from skerry.service.keyring import ACCOUNTS, LINK
from skerry.service.private import write_private
from skerry.settings.checks import is_address, masked_url

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from skerry.service.keyring import Keyring
    from skerry.settings.local import NatsSettings

CONFIG = "nats.conf"
LINKS = frozenset({"nats", "nats-leaf", "tls", "ws", "wss"})
"""Schemes that an address for leaf nodes may have."""


def begin_region(
    keyring: Keyring, region: Grant, learners: Sequence[str], hub: str, ca: str = ""
) -> Path:
    """Make the keys of a region and its broker's configuration; return the folder to copy there.

    Keys that it has stay as they are: only those that are missing are made. ``hub`` is where the
    hub takes leaf nodes, one address or several with commas. ``ca`` is the file on the region's
    machine with the authority that signed the hub's certificate; empty: the machine's own
    authorities. Raises ConfigError for an address that is none, and as ``Keyring.add``.
    """
    name, urls = region.name, [url.strip() for url in hub.split(",")]
    for url in urls:
        if not is_address(url, LINKS) or "@" in url:
            msg = f"--hub is {masked_url(url)}, but it must look like tls://host:7422."
            raise ConfigError(msg, path="hub")
    there = replace(region, role=Role.LEARNER, region=name)
    cache = replace(there, role=Role.CACHE, name=cache_of(name))
    held = {replace(grant, until=0) for grant in keyring.grants.values()}
    wanted = region, cache, *(replace(there, name=learner) for learner in learners)
    keyring.add(*(grant for grant in wanted if grant not in held))
    folder = keyring.region(name)
    write_private(folder / CONFIG, leaf_config(name, urls, ca), public=True)
    return folder


def cache_of(region: str) -> str:
    """Return the name of the key that makes a region's cache."""
    return f"{region}-cache"


def leaf_config(region: str, hub: Sequence[str], ca: str = "") -> str:
    """Return the configuration of a region's broker, as nats-server reads it."""
    tls = f"\n    tls {{ ca_file: {json.dumps(ca)} }}" if ca else ""
    return f"""\
# The broker of region {region}: a leaf node that reaches the hub, and keeps what learners all read.
server_name: "{region}" # quoted: an unquoted 12, or off, is no text there
listen: "0.0.0.0:4222"

jetstream {{
  store_dir: "/data"
  domain: "{REGION_MARK}{region}"
}}

leafnodes {{
  remotes: [{{
    urls: {json.dumps(hub)}
    include "{LINK}" # the secret of this region{tls}
  }}]
}}

# Who may do what: made by `skerry keys`, with public names only.
include "{ACCOUNTS}"

max_payload: 1MB
ping_interval: "10s"
ping_max: 3
write_deadline: "30s"
"""


async def make_cache(settings: NatsSettings, region: Grant, *, standby: bool = False) -> None:
    """Make the cache of a region's broker, in place of the one that is there."""
    async with bus_from(settings, cache_of(region.name)) as bus:
        for mirror in mirrors_of(region, standby=standby):
            await bus.mirrors.make(mirror)


def mirrors_of(region: Grant, *, standby: bool = False) -> list[dict[str, Any]]:
    """Return the settings of the streams in which a region's broker keeps what learners all read.

    Each mirrors a part of a stream of the hub, under its name and with its sequences. A ``standby``
    has all of the state, the ledger and the members, from which the run can go on without the hub.
    """
    wanted = {spec.name: spec.retention for spec in specs(region.run, shards=region.shards)}
    external = {"api": HUB_API, "deliver": delivers_to(region.name)}
    mirrors: list[dict[str, Any]] = []
    for shard, stream in enumerate(region.mirrored() if standby else region.kept()):
        patterns = () if standby else Subjects(region.run).shard(shard).shared()
        parts = [{"src": pattern, "dest": ""} for pattern in patterns]
        mirror = {"name": stream, "external": external, "subject_transforms": parts}
        most = PER_SUBJECT.get(wanted[stream], -1)
        settings = {"storage": "file", "max_msgs_per_subject": most, "allow_direct": True}
        mirrors.append({"name": stream, "mirror": mirror} | settings)
    return mirrors
