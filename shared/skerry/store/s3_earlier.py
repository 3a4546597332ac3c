"""Reading the checkpoints that Skerry 0.1 wrote in buckets; nothing writes or deletes them.

``entries/<name>.json`` holds a checkpoint's manifest and lists the parts of each of its files: the
objects ``parts/<key>``.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, cast

import obstore

from skerry.errors import CheckpointCorrupt, StoreError
from skerry.store.base import MANIFEST, MOST_MANIFEST_BYTES, NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from obstore import ObjectMeta
    from obstore.store import S3Store as Client

ENTRIES = "entries"
ENTRY = re.compile(rf"{ENTRIES}/({NAME.pattern})\.json")
MOST_PARTS = 10_000
MOST_PART_BYTES = 8 * 1024**2
KEY = re.compile(r"[0-9a-f]{64}(-[0-9a-f]{8})?")


def names(found: Sequence[ObjectMeta]) -> set[str]:
    """Return the names of the checkpoints of 0.1 among the objects of a bucket."""
    return {entry[1] for meta in found if (entry := ENTRY.fullmatch(meta["path"]))}


def read(client: Client, name: str, file: str, where: str) -> memoryview:
    """Return a file of a checkpoint of 0.1; StoreError if it is not there."""
    try:
        found = obstore.get(client, f"{ENTRIES}/{name}.json")
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error):
            raise
        msg = f"There is no {where}: `skerry checkpoints list` shows all."
        raise StoreError(msg) from error
    fits = found.meta["size"] <= 2 * MOST_MANIFEST_BYTES
    try:
        entry = cast("dict[str, Any]", json.loads(bytes(found.bytes()) if fits else b""))
        if file == MANIFEST:
            return memoryview(entry["manifest"].encode("utf-8", "surrogateescape"))
        parts = [_part(client, part["key"]) for part in entry["files.v1"][file][:MOST_PARTS]]
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        FileNotFoundError,
    ) as error:
        msg = f"{where} is damaged (its entry cannot be read): use another checkpoint."
        raise CheckpointCorrupt(msg, path=where) from error
    return memoryview(bytearray().join(parts))


def _part(client: Client, key: str) -> bytes:
    if not KEY.fullmatch(key):
        raise ValueError(key)
    found = obstore.get(client, f"parts/{key}")
    if found.meta["size"] > MOST_PART_BYTES:
        raise ValueError(key)
    return bytes(found.bytes())
