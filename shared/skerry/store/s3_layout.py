"""What lies in a bucket: parts named after their content, and one object per entry that lists them.

Below the store's address::

    entries/<name>.json   an entry: its manifest, and the parts of each of its files
    parts/<sha256>[-<id>] at most PART_BYTES of one file
    drafts/<id>           somebody is writing and may reuse any part (see s3_sweep)
    sweeps/<id>           somebody is deleting parts

The entry is put last and create-only: before that nobody sees anything, afterwards all of it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, cast

from skerry.errors import CheckpointCorrupt

ENTRIES, PARTS, DRAFTS, SWEEPS = "entries", "parts", "drafts", "sweeps"
PART_BYTES = 8 * 1024**2
"""Largest part; every reader holds two of them and every writer a few."""
LEAST_BYTES = 1024**2
"""A part may end where an append ends once it has this much: equal vectors give equal parts."""
FILES = "files.v1"
"""The key says the format: a release that lists parts in another way uses another one."""


@dataclass(frozen=True, slots=True)
class PartRef:
    """One part of a file: its object below ``parts/``, its size and its SHA-256 in hex."""

    key: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry; ``draft`` is the id of the draft that it was."""

    draft: str
    manifest: bytes
    files: dict[str, tuple[PartRef, ...]]

    @property
    def keys(self) -> frozenset[str]:
        """The objects below ``parts/`` that this entry needs."""
        return frozenset(part.key for parts in self.files.values() for part in parts)


def entry_path(name: str) -> str:
    return f"{ENTRIES}/{name}.json"


def name_of(path: str) -> str:
    """Return the entry's name of an object below ``entries/``."""
    return path.removeprefix(f"{ENTRIES}/").removesuffix(".json")


def dump(entry: Entry) -> bytes:
    """Return an entry as JSON; a manifest that is no text survives it too."""
    values = {
        "draft": entry.draft,
        FILES: {name: [asdict(part) for part in parts] for name, parts in entry.files.items()},
        "manifest": entry.manifest.decode("utf-8", "surrogateescape"),
    }
    return json.dumps(values).encode()


def load(data: bytes, where: str) -> Entry:
    """Return the entry that an object holds; CheckpointCorrupt naming ``where`` if it is none."""
    try:
        values = cast("dict[str, Any]", json.loads(data))
        files = {
            str(name): tuple(PartRef(p["key"], int(p["size"]), p["sha256"]) for p in parts)
            for name, parts in values[FILES].items()
        }
        manifest = values["manifest"].encode("utf-8", "surrogateescape")
        return Entry(str(values["draft"]), manifest, files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{where} is damaged (its entry cannot be read): use another checkpoint."
        raise CheckpointCorrupt(msg, path=where) from error
