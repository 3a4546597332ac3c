"""Checkpoints in a bucket of S3 or of anything that speaks its language; needs the extra ``s3``."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO, cast

import obstore

from skerry.errors import CheckpointCorrupt, StoreError
from skerry.store.base import MANIFEST, checked_name
from skerry.store.s3_client import connect, folders, listed, refusals
from skerry.store.s3_draft import S3Draft
from skerry.store.s3_file import PartsFile
from skerry.store.s3_layout import ENTRIES, Entry, entry_path, load, name_of
from skerry.store.s3_sweep import Sweeper

if TYPE_CHECKING:
    from skerry.store.opening import S3Access


class S3Store:
    """The entries below ``s3://bucket/prefix``; implements Store."""

    def __init__(self, url: str, access: S3Access) -> None:
        self.url = url.rstrip("/")
        self._client = connect(self.url, access)
        self._sweeper = Sweeper(self._client, self.url)

    def where(self, name: str) -> str:
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        with refusals(self.url):
            return sorted(name_of(meta["path"]) for meta in listed(self._client, ENTRIES))

    def draft(self, name: str) -> S3Draft:
        """Announce a draft; StoreError if the bucket cannot be written."""
        return S3Draft(self._client, self.url, name)

    def open(self, name: str, file: str) -> BinaryIO:
        entry = self._entry(name)
        if entry is not None and file == MANIFEST:
            return io.BytesIO(entry.manifest)
        if entry is None or file not in entry.files:
            msg = f"There is no {self.where(name)}/{file}: `skerry checkpoints list` shows all."
            raise StoreError(msg)
        parts = PartsFile(self._client, entry.files[file], f"{self.where(name)}/{file}")
        return cast("BinaryIO", io.BufferedReader(parts))

    def delete(self, name: str) -> bool:
        """Delete the entry first, then its parts, where nobody else needs them."""
        try:
            entry = self._entry(name)
        except CheckpointCorrupt:
            entry = Entry("", b"", {})
        if entry is None:
            return False
        self._sweeper.forget(entry_path(name), entry)
        return True

    def sweep(self) -> list[str]:
        return self._sweeper.leftovers()

    def folders(self) -> list[str]:
        """Return the names of the folders below: the runs, where this is the root of a store."""
        with refusals(self.url):
            return folders(self._client)

    def _entry(self, name: str) -> Entry | None:
        path = entry_path(checked_name(name))
        with refusals(self.url):
            try:
                data = bytes(obstore.get(self._client, path).bytes())
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None
        return load(data, self.where(name))
