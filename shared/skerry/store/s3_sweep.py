"""Who may reuse a part and who may delete one, so that nobody deletes what another one needs.

Parts are named after their content and outlive a writer that died, so that its successor need not
send them again. That makes deleting them the dangerous act. The rules:

- A writer announces its draft, *then* looks who sweeps. It reuses what lies there only if nobody
  does; otherwise it sends everything under names of its own.
- Who deletes announces a sweep, *then* looks who writes. With no draft alive, what no entry names
  is garbage: parts of an entry that was deleted at once, others after RESUME_S, for a successor.
- Of two that begin at the same instant, at least one sees the other.
- With a draft alive, only parts older than CERTAIN_S are deleted: a draft reuses no part, and is
  itself no older, than half of that.
- A draft says that it is alive every REFRESH_S; after DEAD_S of silence it counts as dead, and one
  that was silent for half of that gives up by itself.

All ages are by the bucket's own clock.
"""

from __future__ import annotations

import uuid
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError

from skerry.errors import CheckpointCorrupt
from skerry.store.s3_client import listed, refusals
from skerry.store.s3_layout import DRAFTS, ENTRIES, PARTS, SWEEPS, load, name_of

if TYPE_CHECKING:
    from collections.abc import Generator
    from datetime import datetime

    from obstore import ObjectMeta
    from obstore.store import S3Store as Client

    from skerry.store.s3_layout import Entry

REFRESH_S = 60.0
DEAD_S = 900.0
RESUME_S = 3600.0
CERTAIN_S = 24 * 3600.0


def announce(client: Client, path: str) -> datetime:
    """Write an announcement, or write it again, and return the bucket's time."""
    obstore.put(client, path, b"", use_multipart=False)
    return obstore.head(client, path)["last_modified"]


def alive(client: Client, folder: str, now: datetime) -> bool:
    """Tell whether an announcement below ``folder`` is young enough to count; remove the dead."""
    found = listed(client, folder)
    dead = [meta["path"] for meta in found if _age_s(meta, now) > DEAD_S]
    if dead:
        obstore.delete(client, dead)
    return len(found) > len(dead)


def _age_s(meta: ObjectMeta, now: datetime) -> float:
    return (now - meta["last_modified"]) / timedelta(seconds=1)


class Sweeper:
    """Deletes parts that nobody needs; one per store."""

    def __init__(self, client: Client, url: str) -> None:
        self._client = client
        self._url = url
        self._known: dict[str, tuple[object, Entry]] = {}

    def leftovers(self) -> list[str]:
        """Delete what writers that died have left, and return the names of the parts."""
        with refusals(self._url):
            found = listed(self._client, PARTS)
            if not found:
                return []
            with self._announced() as (now, alone):
                limit_s = RESUME_S if alone else CERTAIN_S
                old = {_key(meta) for meta in found if _age_s(meta, now) > limit_s}
                return self._delete(old)

    def forget(self, path: str, entry: Entry | None) -> None:
        """Delete an entry, and its parts if nobody else needs or may be reusing them."""
        with refusals(self._url), self._announced() as (_, alone):
            obstore.delete(self._client, path)
            if entry is not None and alone:
                self._delete(set(entry.keys))

    def _delete(self, keys: set[str]) -> list[str]:
        """Delete those of the parts that no entry names; none if an entry cannot be read."""
        try:
            needed = self._needed() if keys else set[str]()
        except CheckpointCorrupt:
            return []
        doomed = sorted(keys - needed)
        if doomed:
            obstore.delete(self._client, [f"{PARTS}/{key}" for key in doomed])
        return doomed

    def _needed(self) -> set[str]:
        """Return every part that an entry names; an entry that is being deleted names none."""
        known: dict[str, tuple[object, Entry]] = {}
        for meta in listed(self._client, ENTRIES):
            path, tag = meta["path"], meta["e_tag"]
            held = self._known.get(path)
            if held is not None and held[0] == tag:
                known[path] = held
                continue
            with suppress(FileNotFoundError):
                data = bytes(obstore.get(self._client, path).bytes())
                known[path] = (tag, load(data, f"{self._url}/{name_of(path)}"))
        self._known = known
        return {key for _, entry in known.values() for key in entry.keys}

    @contextmanager
    def _announced(self) -> Generator[tuple[datetime, bool]]:
        """Sweep: yield the bucket's time and whether nobody is writing."""
        mine = f"{SWEEPS}/{uuid.uuid4().hex}"
        now = announce(self._client, mine)
        try:
            yield now, not alive(self._client, DRAFTS, now)
        finally:
            with suppress(BaseError):  # it is forgotten in time by itself, too
                obstore.delete(self._client, mine)


def _key(meta: ObjectMeta) -> str:
    return meta["path"].removeprefix(f"{PARTS}/")
