"""Text and datasets that are tokenised when a run first reads them, and then kept."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

import structlog

from skerry.data.documents import Article, find_sources, fingerprint, read_all
from skerry.data.files import COPIES
from skerry.data.items import fingerprint as fingerprint_of_items
from skerry.data.items import open_dataset, read_items
from skerry.data.prepare import Progress, key_of, prepare
from skerry.data.shards import open_shards, read_manifest
from skerry.data.tokenizer import Words
from skerry.errors import CorpusError
from skerry.settings.models import DataConfig
from skerry.tasks import pause

log = structlog.get_logger()

MOST_BYTES = 8 << 30
"""Most text that a learner tokenises itself: more takes hours, in which it would not train."""
MOST_KEPT_BYTES = 32 << 30
"""Most bytes of tokens that are kept; the least recently used folders are removed first."""
PROGRESS_S = 5.0
PATIENCE_S = 0.2

_used: list[int] = []
"""Locks of the folders that this process has read, which last as long as it does."""


def tokenised(config: DataConfig) -> DataConfig:
    """Return the config of the same text in prepared folders, which are made if missing.

    Each of ``data.paths`` has a folder of its own. Other sources are returned as they are.
    """
    named = config.tokenizer_folder
    words = Words.of(Path(named).expanduser(), digest=config.tokenizer) if named else None
    if config.factory:
        dataset = open_dataset(config)
        key = key_of(fingerprint_of_items(dataset, config), words)
        folders = [_kept(read_items(dataset, config.field), words, key, config.factory)]
    elif config.source == "text" and words is not None:
        folders = [_of_files(path, words, config) for path in config.paths]
    else:
        return config
    paths = tuple(str(folder) for folder in folders)
    return config.model_copy(update={"source": "prepared", "paths": paths, "factory": ""})


def _of_files(path: str, words: Words, config: DataConfig) -> Path:
    files = find_sources([path], config.suffixes)
    key = key_of(fingerprint(files, config.field), words)
    if (size := sum(file.stat().st_size for file in files)) > MOST_BYTES:
        msg = (
            f"{path} has {size / 2**30:.1f} GiB of text, and a learner tokenises at most"
            f" {MOST_BYTES / 2**30:g} GiB itself: do it once with `skerry data prepare`, and set"
            ' data.source = "prepared".'
        )
        raise CorpusError(msg, path="data.paths")
    return _kept(read_all(files, config.field), words, key, path)


def _kept(articles: Iterable[Article], words: Words | None, key: str, source: str) -> Path:
    """Return the folder of this key; only one process of this machine makes it."""
    folder = COPIES / f"tokens-{key}"
    try:
        COPIES.mkdir(parents=True, exist_ok=True)
        held = _lock_of(key).open("w")
    except OSError as error:
        msg = (
            f"Cannot keep tokens in {COPIES.absolute()} ({error.strerror}): start this where that"
            " folder can be written, or prepare the text with `skerry data prepare`."
        )
        raise CorpusError(msg, path="data.tokenizer_folder") from error
    with held as lock:
        _wait_for(lock, source)
        made = not _is_whole(folder)
        if made:
            shutil.rmtree(folder, ignore_errors=True)
            log.info("tokenising", source=source, folder=str(folder))
            prepare(articles, words, folder, [source], _progress(), key=key)
        _used.append(os.open(folder, os.O_RDONLY))
        fcntl.flock(_used[-1], fcntl.LOCK_SH)
        os.utime(folder)
    if made:
        _tidy()
    return folder


def _wait_for(lock: IO[str], source: str) -> None:
    """Lock a file once no other process does; a cancellation ends the wait."""
    waits = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waits:
                log.info("waits_for_tokens", source=source, hint="another process makes them")
            waits = True
            pause(PATIENCE_S)
        else:
            return


def _is_whole(folder: Path) -> bool:
    """Return True if a folder has the files that its manifest names, in their sizes."""
    try:
        for _ in open_shards(folder, read_manifest(folder)):
            pass
    except CorpusError:
        return False
    return True


def _lock_of(key: str) -> Path:
    """Return the lock file that a process holds while it makes or removes a folder of tokens."""
    return COPIES / f".tokens-{key}.lock"


def _tidy() -> None:
    """Remove the least recently used folders, finished or not, beyond MOST_KEPT_BYTES."""
    found = [path for path in COPIES.glob("*tokens-*") if path.is_dir()]
    with suppress(OSError):  # another process tidies as well
        known = [
            (path, path.stat().st_mtime, sum(file.stat().st_size for file in path.iterdir()))
            for path in found
        ]
        for path in beyond(known, MOST_KEPT_BYTES):
            _remove(path)


def beyond(known: Iterable[tuple[Path, float, int]], most: int) -> list[Path]:
    """Return the folders beyond ``most`` bytes; ``known``: folder, last use and bytes of each."""
    total, found = 0, list[Path]()
    for path, _, size in sorted(known, key=lambda one: one[1], reverse=True):
        total += size
        if total > most:
            found.append(path)
    return found


def _remove(path: Path) -> None:
    """Remove a folder of tokens, unless a process reads or makes it."""
    key = path.name.partition("tokens-")[2].partition(".")[0]
    with _lock_of(key).open("w") as lock, suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = path.rename(COPIES / f".tokens-{key}.removed")
            shutil.rmtree(gone)
            log.info("tokens_removed", folder=str(path), why="they were used longest ago")
        finally:
            os.close(handle)


def _progress() -> Progress:
    """Return a function that logs the progress of tokenising now and then."""
    said_s = time.monotonic()

    def say(documents: int, tokens: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= PROGRESS_S:
            said_s = time.monotonic()
            log.info("tokenising", documents=documents, tokens=tokens)

    return say
