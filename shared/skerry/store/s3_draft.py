"""An entry in the making in a bucket: its files go up in parts while they are produced.

Parts are named after their content. What is there already, because an upload was interrupted or
because a fragment has not changed since the last checkpoint, is not sent again.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Semaphore
from typing import TYPE_CHECKING, Protocol

import obstore
from obstore.exceptions import AlreadyExistsError

from skerry.errors import CheckpointCorrupt, StoreError
from skerry.store.base import StoredFile, checked_name
from skerry.store.s3_client import listed, refusals
from skerry.store.s3_layout import (
    DRAFTS,
    LEAST_BYTES,
    PART_BYTES,
    PARTS,
    SWEEPS,
    Entry,
    PartRef,
    dump,
    entry_path,
    load,
)
from skerry.store.s3_sweep import CERTAIN_S, DEAD_S, REFRESH_S, alive, announce

if TYPE_CHECKING:
    from concurrent.futures import Future

    from obstore.store import S3Store as Client

    from skerry.store.base import Buffer

UPLOADS = 4
"""Parts on their way at once; with the one being filled they bound a writer's memory."""


class Digest(Protocol):
    """What ``hashlib`` returns."""

    def update(self, data: Buffer, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(slots=True)
class _File:
    """A file being written: its hash, the parts that went up, and the bytes of the next one."""

    digest: Digest = field(default_factory=hashlib.sha256)
    size: int = 0
    parts: list[Future[PartRef]] = field(default_factory=list["Future[PartRef]"])
    rest: bytearray = field(default_factory=bytearray)


class S3Draft:
    """Implements Draft; ``sent_bytes`` and ``reused_bytes`` say what went over the wire."""

    def __init__(self, client: Client, url: str, name: str) -> None:
        self._client = client
        self._url = url
        self._name = checked_name(name)
        self._id = uuid.uuid4().hex
        self._files: dict[str, _File] = {}
        self._began_s = self._said_s = time.monotonic()
        self._over = self._sealed = False
        self.sent_bytes = self.reused_bytes = 0
        with refusals(url):
            now = announce(client, f"{DRAFTS}/{self._id}")
            self._suffix = f"-{self._id[:8]}" if alive(client, SWEEPS, now) else ""
            youngest = now - timedelta(seconds=CERTAIN_S / 2)
            # Parts that somebody may be about to delete are not reused: see s3_sweep.
            self._there = {
                meta["path"].removeprefix(f"{PARTS}/"): meta["size"]
                for meta in ([] if self._suffix else listed(client, PARTS))
                if meta["last_modified"] > youngest
            }
        self._uploads = ThreadPoolExecutor(UPLOADS, thread_name_prefix="s3-write")
        self._room = Semaphore(UPLOADS)

    def append(self, file: str, data: Buffer) -> None:
        held = self._files.setdefault(checked_name(file), _File())
        self._refresh()
        for part in held.parts:
            if part.done():
                part.result()  # a part that was refused ends the draft here
        view = memoryview(data).cast("B")
        held.digest.update(view)
        held.size += len(view)
        while len(held.rest) + len(view) >= PART_BYTES:
            room = PART_BYTES - len(held.rest)
            held.rest += view[:room]
            view = view[room:]
            self._flush(held)
        held.rest += view
        if len(held.rest) >= LEAST_BYTES:
            self._flush(held)

    def drop(self, file: str) -> None:
        self._files.pop(file, None)  # its parts are swept in time, unless the next one has them too

    def seal(self) -> tuple[StoredFile, ...]:
        """Wait for every part and make sure that the bucket lists them all.

        What arrived is what was sent: every upload is signed together with its SHA-256.
        """
        self._refresh()
        for held in self._files.values():
            if held.rest:
                self._flush(held)
        wanted = {ref.key: ref.size for refs in self._refs().values() for ref in refs}
        with refusals(self._url):
            there = {meta["path"]: meta["size"] for meta in listed(self._client, PARTS)}
        for key, size in wanted.items():
            if there.get(f"{PARTS}/{key}") != size:
                msg = (
                    f"{self._url}/{PARTS}/{key} is not there as it was sent: look who else "
                    "deletes objects in this bucket."
                )
                raise CheckpointCorrupt(msg, path=f"{self._url}/{PARTS}/{key}")
        self._sealed = True
        return tuple(
            StoredFile(name, held.size, held.digest.hexdigest())
            for name, held in self._files.items()
        )

    def commit(self, manifest: bytes, name: str | None = None) -> str:
        if not self._sealed:
            self.seal()
        self._refresh()
        wanted = checked_name(name or self._name)
        data = dump(Entry(self._id, manifest, self._refs()))
        with refusals(self._url):
            taken = next(at for at in _candidates(wanted) if self._put_entry(entry_path(at), data))
        self._end()
        return taken

    def discard(self) -> None:
        """Forget the draft; its parts stay for a while, for whoever writes the same again."""
        if not self._over:
            self._end()

    def _end(self) -> None:
        self._over = True
        self._uploads.shutdown(cancel_futures=True)
        with suppress(StoreError), refusals(self._url):  # it is forgotten in time by itself, too
            obstore.delete(self._client, f"{DRAFTS}/{self._id}")

    def _put_entry(self, path: str, data: bytes) -> bool:
        """Create an entry; False if somebody else has that name."""
        try:
            obstore.put(self._client, path, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            found = bytes(obstore.get(self._client, path).bytes())
            return load(found, f"{self._url}/{path}").draft == self._id  # our own lost answer
        return True

    def _flush(self, held: _File) -> None:
        data, held.rest = bytes(held.rest), bytearray()
        self._room.acquire()
        try:
            upload = self._uploads.submit(self._upload, data)
        except BaseException:
            self._room.release()
            raise
        held.parts.append(upload)

    def _upload(self, data: bytes) -> PartRef:
        try:
            sha256 = hashlib.sha256(data).hexdigest()
            ref = PartRef(sha256 + self._suffix, len(data), sha256)
            if self._there.get(ref.key) == ref.size:
                self.reused_bytes += ref.size
                return ref
            with refusals(self._url):
                obstore.put(self._client, f"{PARTS}/{ref.key}", data, use_multipart=False)
            self._there[ref.key] = ref.size
            self.sent_bytes += ref.size
            return ref
        finally:
            self._room.release()

    def _refs(self) -> dict[str, tuple[PartRef, ...]]:
        return {
            name: tuple(part.result() for part in held.parts) for name, held in self._files.items()
        }

    def _refresh(self) -> None:
        """Say that this draft is alive; StoreError if it was silent for too long to be sure."""
        now_s = time.monotonic()
        if now_s - self._said_s > DEAD_S / 2 or now_s - self._began_s > CERTAIN_S / 2:
            msg = (
                f"Writing to {self._url} stood still for too long, and others may have cleaned "
                "up meanwhile: the checkpoint is begun anew."
            )
            raise StoreError(msg)
        if now_s - self._said_s > REFRESH_S:
            with refusals(self._url):
                announce(self._client, f"{DRAFTS}/{self._id}")
            self._said_s = now_s


def _candidates(name: str) -> list[str]:
    return [name, *(f"{name}-{attempt}" for attempt in range(2, 1000))]
