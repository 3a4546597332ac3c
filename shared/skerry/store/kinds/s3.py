"""Checkpoints in a bucket of S3, or of anything that speaks its protocol; needs the extra ``s3``.

One object per file, below the address of a run's store::

    <name>/.writer        the id of the draft that has this name; created first, and only once
    <name>/<file>         each file of the checkpoint
    <name>/manifest.json  created last, and only once: before, there is no checkpoint

The files are those of a local checkpoint: what any S3 tool downloads is one. A name is taken for as
long as its ``.writer`` exists, so two writers never share a prefix; deleting takes the manifest
first and ``.writer`` last. A writer that died leaves a prefix without a manifest, which is deleted
once it is a day older than the newest object in the store.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError

from skerry.errors import CheckpointCorrupt, StoreError
from skerry.store import s3_earlier
from skerry.store.base import MANIFEST, NAME, StoredFile, checked_name, room_for
from skerry.store.s3_client import connect, folders, listed, refusals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from obstore import ObjectMeta
    from obstore.store import S3Store as Client

    from skerry.settings.models import StoreSettings
    from skerry.store.base import Buffer, OnBytes

WRITER = ".writer"
DEAD_S = 24 * 3600.0
"""A draft to which nothing was added for so long is deleted; half of that, and it gives up."""
PART_BYTES = 8 * 1024**2
MOST_PARTS = 10_000
"""S3 takes no more parts of one object, so parts of a large file are larger."""
TRANSFERS = 4
"""Parts on their way at once; they bound a writer's memory."""
MOST_NAMES = 1000


def open_store(url: str, access: StoreSettings) -> S3Store:
    """Return the store at ``s3://bucket/prefix``; ConfigError if that cannot be used."""
    return S3Store(url, access)


class S3Store:
    """The entries below ``s3://bucket/prefix``; implements Store."""

    def __init__(self, url: str, access: StoreSettings) -> None:
        self.url = url.rstrip("/")
        self._client = connect(self.url, access)

    def where(self, name: str) -> str:
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        with refusals(self.url):
            found = listed(self._client)
        whole = {name for name, held in _by_name(found).items() if MANIFEST in held}
        return sorted(whole | s3_earlier.names(found))

    def folders(self) -> list[str]:
        with refusals(self.url):
            return folders(self._client)

    def draft(self, name: str) -> S3Draft:
        """Take the name, or the next one that is free, and begin the entry."""
        writer = uuid.uuid4().hex.encode()
        with refusals(self.url):
            taken = s3_earlier.names(listed(self._client, s3_earlier.ENTRIES))
            for at in _candidates(checked_name(name)):
                if at not in taken and _create(self._client, f"{at}/{WRITER}", writer):
                    return S3Draft(self._client, self.url, at)
        msg = f"{self.where(name)} and {MOST_NAMES} names like it are taken: clean up there."
        raise StoreError(msg)

    def read(self, name: str, file: str, most: int, on_bytes: OnBytes | None = None) -> memoryview:
        """Read an object by ranges, several at a time."""
        path, where = f"{checked_name(name)}/{checked_name(file)}", f"{self.where(name)}/{file}"
        with refusals(where), ThreadPoolExecutor(TRANSFERS, "s3-read") as threads:
            try:
                size = obstore.head(self._client, path)["size"]
            except FileNotFoundError:
                return s3_earlier.read(self._client, name, file, where)[:most]
            data = room_for(min(size, most), where)

            def fetch(start: int) -> int:
                piece = data[start : start + PART_BYTES]
                got = obstore.get_range(self._client, path, start=start, length=len(piece))
                if len(got) != len(piece):
                    msg = f"{where} became shorter while it was read: use another checkpoint."
                    raise CheckpointCorrupt(msg, path=where)
                piece[:] = memoryview(got)
                return len(piece)

            for count in threads.map(fetch, range(0, len(data), PART_BYTES)):
                if on_bytes is not None:
                    on_bytes(count)
        return data

    def delete(self, name: str) -> bool:
        with refusals(self.where(name)):
            held = listed(self._client, checked_name(name))
            if all(meta["path"] != f"{name}/{MANIFEST}" for meta in held):
                return False
            _remove(self._client, held)
        return True

    def sweep(self) -> list[str]:
        with refusals(self.url):
            found = listed(self._client)
            drafts = {
                name: list(held.values())
                for name, held in _by_name(found).items()
                if WRITER in held and MANIFEST not in held
            }
            if not drafts:
                return []
            now = max(meta["last_modified"] for meta in found)  # no machine's clock is asked
            limit = now - timedelta(seconds=DEAD_S)
            dead = [
                n for n, held in drafts.items() if all(m["last_modified"] < limit for m in held)
            ]
            for name in dead:
                _remove(self._client, drafts[name])
        return sorted(dead)


class S3Draft:
    """An entry whose name is taken; implements Draft."""

    def __init__(self, client: Client, url: str, name: str) -> None:
        self._client = client
        self._url = url
        self._name = name
        self._files: dict[str, StoredFile] = {}
        self._added_s = time.monotonic()
        self._over = False

    def write(self, file: str, data: Sequence[Buffer]) -> StoredFile:
        path = f"{self._name}/{checked_name(file)}"
        size = sum(memoryview(piece).nbytes for piece in data)
        part_bytes = max(PART_BYTES, -(-size // MOST_PARTS))
        digest = hashlib.sha256()

        def hashed() -> Iterator[memoryview]:
            for piece in _slices(data, part_bytes):
                digest.update(piece)
                yield piece

        with refusals(f"{self._url}/{path}"):
            obstore.put(
                self._client,
                path,
                hashed(),
                use_multipart=size > part_bytes,
                chunk_size=part_bytes,
                max_concurrency=TRANSFERS,
            )
        self._check_alive()
        self._files[file] = StoredFile(file, size, digest.hexdigest())
        return self._files[file]

    def commit(self, manifest: bytes) -> str:
        """Make sure that the bucket lists every file whole, then create the manifest.

        What arrived is what was sent: every upload is signed together with its SHA-256.
        """
        path = f"{self._name}/{MANIFEST}"
        with refusals(f"{self._url}/{path}"):
            there = {meta["path"]: meta["size"] for meta in listed(self._client, self._name)}
            for file in self._files.values():
                if there.get(f"{self._name}/{file.name}") != file.size:
                    raise self._disturbed(file.name)
            self._check_alive()
            if not _create(self._client, path, manifest):
                raise self._disturbed(MANIFEST)
        self._over = True
        return self._name

    def discard(self) -> None:
        if self._over:
            return
        self._over = True
        with suppress(StoreError), refusals(f"{self._url}/{self._name}"):  # else a sweep deletes it
            _remove(self._client, listed(self._client, self._name))

    def _check_alive(self) -> None:
        """Raise StoreError if nothing was added for so long that others may have cleaned up."""
        now_s = time.monotonic()
        if now_s - self._added_s > DEAD_S / 2:
            msg = (
                f"Writing to {self._url}/{self._name} stood still for too long: it is begun again."
            )
            raise StoreError(msg)
        self._added_s = now_s

    def _disturbed(self, file: str) -> CheckpointCorrupt:
        path = f"{self._url}/{self._name}/{file}"
        msg = f"{path} is not as it was sent: find out what else changes objects in this bucket."
        return CheckpointCorrupt(msg, path=path)


def _create(client: Client, path: str, data: bytes) -> bool:
    """Create an object; False if there is another one already."""
    try:
        obstore.put(client, path, data, mode="create", use_multipart=False)
    except AlreadyExistsError:  # perhaps our own, whose answer was lost
        return bytes(obstore.get(client, path).bytes()) == data
    return True


def _remove(client: Client, held: Sequence[ObjectMeta]) -> None:
    """Delete the objects of an entry: readers lose it first, other writers gain its name last."""
    by_turn: list[list[str]] = [[], [], []]
    for meta in held:
        file = meta["path"].rpartition("/")[2]
        by_turn[0 if file == MANIFEST else 2 if file == WRITER else 1].append(meta["path"])
    for paths in filter(None, by_turn):
        obstore.delete(client, paths)


def _by_name(found: Sequence[ObjectMeta]) -> dict[str, dict[str, ObjectMeta]]:
    """Return the objects by entry and file."""
    held: dict[str, dict[str, ObjectMeta]] = {}
    for meta in found:
        name, _, file = meta["path"].partition("/")
        if NAME.fullmatch(name):
            held.setdefault(name, {})[file] = meta
    return held


def _slices(data: Sequence[Buffer], most: int) -> Iterator[memoryview]:
    for piece in data:
        view = memoryview(piece).cast("B")
        for start in range(0, len(view), most):
            yield view[start : start + most]


def _candidates(name: str) -> Iterator[str]:
    yield name
    for attempt in range(2, MOST_NAMES):
        yield f"{name}-{attempt}"
