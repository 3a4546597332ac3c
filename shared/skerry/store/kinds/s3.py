"""Checkpoints in a bucket of S3, or of anything that speaks its protocol; needs the extra ``s3``.

One object per file, below the address of a run's store::

    <name>/.writer        the id of the draft that has this name; created first, and only once
    <name>/<file>         each file of the checkpoint
    <name>/manifest.json  created last, and only once: before, there is no checkpoint

The files are those of a local checkpoint, so any S3 tool can download one. A name is taken for as
long as its ``.writer`` exists, so two writers never share a prefix; deleting removes the manifest
first and ``.writer`` last. A writer that died leaves a prefix without a manifest, which is deleted
once it is a day older than the newest object in the store.

Credentials come from ``store.credentials`` (a file in AWS's own format), or from where every cloud
tool looks: the environment, ``~/.aws/credentials``, and what the cloud gives a machine, a container
or a pod. They are never part of an address, of a config file or of a log line.
"""

# pyright: basic
# obstore's listings are typed in parts.

from __future__ import annotations

import configparser
import hashlib
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store as Client

from skerry.errors import CheckpointCorrupt, ConfigError, StoreError
from skerry.store.base import MANIFEST, NAME, StoredFile, checked_name, room_for

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from obstore import ObjectMeta

    from skerry.settings.local import StoreSettings
    from skerry.store.base import Buffer

WRITER = ".writer"
DEAD_S = 24 * 3600.0
"""A draft to which nothing was added for this long is deleted; its writer gives up at half."""
PART_BYTES = 8 * 1024**2
MOST_PARTS = 10_000
"""Most parts that S3 allows one object: parts of a very large file are larger."""
TRANSFERS = 4
"""Parts in transfer at once, which bounds a writer's memory."""
MOST_NAMES = 1000
RETRIES = 10
"""They take about 4 s, unless ``store.timeout_s`` ends them before."""
CREDENTIALS = Path("~/.aws/credentials")
KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")

SENTENCES = {
    "NoSuchBucket": "There is no bucket {bucket!r}: create it or change store.url.",
    "169.254.169.254, Missing SecretAccessKey": "There are no credentials for {where}: set"
    " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or store.credentials.",
    "RequestTimeTooSkewed": "The clock of this machine is wrong, so S3 refuses what it signs for"
    " {where}: set it right.",
    "AccessDenied, SignatureDoesNotMatch, InvalidAccessKeyId, 403 Forbidden, Unauthenticated": "S3"
    " allows these credentials too little at {where}: they must read, write, list and delete there;"
    " check the keys and the bucket's policy.",
    "error sending request, timed out, dns error, Connection refused, TimeoutError": "S3 does not"
    " answer for {where}: check store.endpoint, store.region and the network.",
    "503 Service, 429 Too, 500 Internal": "S3 is too busy, or out of order, at {where}: try again"
    " later, or set store.timeout_s higher.",
    "FileNotFoundError, NotFoundError": "There is no {where}: check the address.",
}
"""Parts of S3's messages, separated by commas, and our sentence for them; the first match wins."""


def open_store(url: str, access: StoreSettings) -> S3Store:
    """Return the store at ``s3://bucket/prefix``; ConfigError if address or settings are wrong."""
    return S3Store(url, access)


class S3Store:
    """The entries below ``s3://bucket/prefix``; implements Store."""

    def __init__(self, url: str, access: StoreSettings) -> None:
        self.url = url.rstrip("/")
        self._client = _connect(self.url, access)

    def where(self, name: str) -> str:
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        with _refusals(self.url):
            found = _by_name(_listed(self._client))
        return sorted(name for name, held in found.items() if MANIFEST in held)

    def folders(self) -> list[str]:
        with _refusals(self.url):
            found = obstore.list_with_delimiter(self._client, "")["common_prefixes"]
        names = [prefix.rstrip("/").rpartition("/")[2] for prefix in found]
        return sorted(name for name in names if NAME.fullmatch(name))

    def draft(self, name: str) -> S3Draft:
        """Take the name, or the next one that is free, and begin the entry."""
        writer = uuid.uuid4().hex.encode()
        checked_name(name)
        with _refusals(self.url):
            for at in (name, *(f"{name}-{attempt}" for attempt in range(2, MOST_NAMES))):
                if _create(self._client, f"{at}/{WRITER}", writer):
                    return S3Draft(self._client, self.url, at)
        msg = f"{self.where(name)} and {MOST_NAMES} names like it are taken: clean up there."
        raise StoreError(msg)

    def read(self, name: str, file: str, most: int) -> memoryview:
        """Read an object by ranges, several at a time."""
        path, where = f"{checked_name(name)}/{checked_name(file)}", f"{self.where(name)}/{file}"
        with _refusals(where), ThreadPoolExecutor(TRANSFERS, "s3-read") as threads:
            data = room_for(min(obstore.head(self._client, path)["size"], most), where)

            def fetch(start: int) -> None:
                piece = data[start : start + PART_BYTES]
                got = obstore.get_range(self._client, path, start=start, length=len(piece))
                if len(got) != len(piece):
                    msg = f"{where} became shorter while it was read: use another checkpoint."
                    raise CheckpointCorrupt(msg, path=where)
                piece[:] = memoryview(got)

            for _ in threads.map(fetch, range(0, len(data), PART_BYTES)):
                pass
        return data

    def delete(self, name: str) -> bool:
        with _refusals(self.where(name)):
            held = _listed(self._client, checked_name(name))
            if all(meta["path"] != f"{name}/{MANIFEST}" for meta in held):
                return False
            _remove(self._client, held)
        return True

    def sweep(self) -> list[str]:
        swept: list[str] = []
        with _refusals(self.url):
            found = _listed(self._client)
            times = [meta["last_modified"] for meta in found]  # no machine's clock is asked
            for name, held in _by_name(found).items():
                idle = max(times) - max(meta["last_modified"] for meta in held.values())
                is_draft = WRITER in held and MANIFEST not in held
                if is_draft and idle.total_seconds() > DEAD_S:
                    _remove(self._client, list(held.values()))
                    swept.append(name)
        return sorted(swept)


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
        views = [memoryview(piece).cast("B") for piece in data]
        size = sum(view.nbytes for view in views)
        part_bytes = max(PART_BYTES, -(-size // MOST_PARTS))
        digest = hashlib.sha256()

        def hashed() -> Iterator[memoryview]:
            for view in views:
                for start in range(0, len(view), part_bytes):
                    digest.update(view[start : start + part_bytes])
                    yield view[start : start + part_bytes]

        self._check_alive()
        with _refusals(f"{self._url}/{path}"):
            obstore.put(
                self._client,
                path,
                hashed(),
                use_multipart=size > part_bytes,
                chunk_size=part_bytes,
                max_concurrency=TRANSFERS,
            )
        self._files[file] = StoredFile(file, size, digest.hexdigest())
        return self._files[file]

    def commit(self, manifest: bytes) -> str:
        """Make sure that the bucket lists every file whole, then create the manifest.

        What arrived is what was sent: every upload is signed together with its SHA-256.
        """
        path = f"{self._name}/{MANIFEST}"
        with _refusals(f"{self._url}/{path}"):
            there = {meta["path"]: meta["size"] for meta in _listed(self._client, self._name)}
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
        with suppress(StoreError), _refusals(self._url):  # what stays, a sweep deletes
            _remove(self._client, _listed(self._client, self._name))

    def _check_alive(self) -> None:
        """Raise StoreError if nothing was added for so long that the name may be another's now."""
        now_s = time.monotonic()
        if now_s - self._added_s > DEAD_S / 2:
            msg = f"{self._url}/{self._name} stood still for too long: it is begun again."
            raise StoreError(msg)
        self._added_s = now_s

    def _disturbed(self, file: str) -> CheckpointCorrupt:
        path = f"{self._url}/{self._name}/{file}"
        msg = f"{path} is not as it was sent: find out what else changes objects in this bucket."
        return CheckpointCorrupt(msg, path=path)


def copies(url: str, access: StoreSettings, folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Copy the object at ``s3://bucket/key``, or those with these suffixes below it, to a folder.

    Each copy has a folder of its own, named by a hash of the object's address and ETag; an object
    that was copied before is not read again.
    """
    bucket, _, key = url.partition("://")[2].strip("/").partition("/")
    root = f"s3://{bucket}"
    client = _connect(root, access)
    with _refusals(url):
        found = [meta for meta in _listed(client, key or None) if meta["path"].endswith(suffixes)]
        if not found and key.endswith(suffixes):
            found = [obstore.head(client, key)]
    return [_copy(client, root, meta, folder) for meta in sorted(found, key=itemgetter("path"))]


def _copy(client: Client, root: str, meta: ObjectMeta, folder: Path) -> Path:
    """Return a whole copy of an object; StoreError if it has not the size that the bucket says."""
    where = f"{root}/{meta['path']}"
    contents = f"{client.config.get('endpoint')} {where} {meta['e_tag'] or meta['last_modified']}"
    own = folder / hashlib.sha256(contents.encode()).hexdigest()[:32]
    target = own / meta["path"].rpartition("/")[2]
    if target.exists() and target.stat().st_size == meta["size"]:
        return target
    own.mkdir(parents=True, exist_ok=True)
    size, draft = 0, own / f".{uuid.uuid4().hex}"
    try:
        with _refusals(where), draft.open("wb") as file:
            for part in obstore.get(client, meta["path"]).stream(PART_BYTES):
                size += file.write(part)
        if size != meta["size"]:
            msg = f"{where} changed while it was copied: try again once it is written."
            raise StoreError(msg)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def _create(client: Client, path: str, data: bytes) -> bool:
    """Create an object; False if one with other contents exists."""
    try:
        obstore.put(client, path, data, mode="create", use_multipart=False)
    except AlreadyExistsError:  # perhaps our own, whose answer was lost
        return bytes(obstore.get(client, path).bytes()) == data
    return True


def _listed(client: Client, folder: str | None = None) -> list[ObjectMeta]:
    """Return all objects in a folder and below it."""
    return [meta for batch in obstore.list(client, prefix=folder) for meta in batch]


def _by_name(found: Sequence[ObjectMeta]) -> dict[str, dict[str, ObjectMeta]]:
    """Return the objects by entry and file."""
    held: dict[str, dict[str, ObjectMeta]] = {}
    for meta in found:
        name, _, file = meta["path"].partition("/")
        if NAME.fullmatch(name):
            held.setdefault(name, {})[file] = meta
    return held


def _remove(client: Client, held: Sequence[ObjectMeta]) -> None:
    """Delete the objects of an entry: readers lose it first, other writers gain its name last."""
    by_turn: list[list[str]] = [[], [], []]
    for meta in held:
        file = meta["path"].rpartition("/")[2]
        by_turn[0 if file == MANIFEST else 2 if file == WRITER else 1].append(meta["path"])
    for paths in filter(None, by_turn):
        obstore.delete(client, paths)


def _connect(url: str, access: StoreSettings) -> Client:
    """Return a client for the folder ``s3://bucket/prefix``; nothing is sent yet.

    Raises ConfigError for an address or credentials that cannot be used.
    """
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc or "@" in parts.netloc:
        msg = f"{url.rpartition('@')[2]!r} is not a bucket's address: write s3://bucket/prefix."
        raise ConfigError(msg, path="store.url")
    given = {"endpoint": access.endpoint, "region": access.region}
    config = {key: value for key, value in given.items() if value} | _keys(access)
    timeout = timedelta(seconds=access.timeout_s)
    try:
        return Client(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            config=config,  # type: ignore[arg-type] # its keys are literals
            client_options={"allow_http": True, "timeout": timeout},  # an endpoint says which
            retry_config={"max_retries": RETRIES, "retry_timeout": timeout},
        )
    except BaseError as error:
        msg = f"The S3 settings for {url} cannot be used: {_first_line(error)}"
        raise ConfigError(msg, path="store.url") from error


def _keys(access: StoreSettings) -> dict[str, str]:
    """Return keys from a credentials file, or nothing if the environment must have them."""
    with suppress(BaseError):  # half of a pair of keys: the client itself will say so
        if access.credentials is None and "access_key_id" in Client("any").config:
            return {}
    parser = configparser.ConfigParser(interpolation=None)
    with suppress(OSError, UnicodeDecodeError, configparser.Error):
        path = (access.credentials or CREDENTIALS).expanduser()
        parser.read_string(path.read_text(encoding="utf-8"))
    section = parser[access.profile] if parser.has_section(access.profile) else {}
    found = {key: section[key] for key in KEYS if key in section}
    if set(KEYS[:2]) <= found.keys():
        return found
    if access.credentials is None:
        return {}
    msg = (
        f"store.credentials is {access.credentials}, which holds no keys under "
        f"[{access.profile}]: write aws_access_key_id and aws_secret_access_key there."
    )
    raise ConfigError(msg, path="store.credentials")


@contextmanager
def _refusals(where: str) -> Generator[None]:
    """Raise an error of S3 as a StoreError that says what to do."""
    try:
        yield
    except (BaseError, FileNotFoundError, PermissionError, TimeoutError) as error:
        raise StoreError(_sentence(where, error)) from error


def _sentence(where: str, error: Exception) -> str:
    """Return a sentence that says what S3 refused at ``where``, and what to do."""
    said = f"{type(error).__name__}: {error}"
    for marks, sentence in SENTENCES.items():
        if any(mark in said for mark in marks.split(", ")):
            return sentence.format(where=where, bucket=urlsplit(where).netloc)
    return f"S3 refused {where}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]
