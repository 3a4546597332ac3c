"""Text and datasets that are tokenised when a run first reads them, and then kept."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterable
from pathlib import Path

import structlog

from skerry.data.documents import Article, find_sources, fingerprint, read_all
from skerry.data.files import COPIES
from skerry.data.items import fingerprint as fingerprint_of_items
from skerry.data.items import open_dataset, read_items
from skerry.data.prepare import Progress, key_of, prepare
from skerry.data.shards import MANIFEST
from skerry.data.tokenizer import Words
from skerry.errors import CorpusError
from skerry.settings.models import DataConfig

log = structlog.get_logger()

MOST_BYTES = 8 << 30
"""Of text that a learner tokenises itself: more takes hours, in which it would do nothing else."""
PROGRESS_S = 5.0


def tokenised(config: DataConfig) -> DataConfig:
    """Return the config of the same text in prepared folders, made where they are not there yet.

    Each of ``data.paths`` has a folder of its own. Other sources are returned as they are.
    """
    words = (
        Words.of(Path(config.tokenizer_folder).expanduser()) if config.tokenizer_folder else None
    )
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
    if (size := sum(file.stat().st_size for file in files)) > MOST_BYTES:
        msg = (
            f"{path} has {size / 1e9:.1f} GB of text: tokenise it once with `skerry data prepare`,"
            ' and set data.source = "prepared".'
        )
        raise CorpusError(msg, path="data.paths")
    key = key_of(fingerprint(files, config.field), words)
    return _kept(read_all(files, config.field), words, key, path)


def _kept(articles: Iterable[Article], words: Words | None, key: str, source: str) -> Path:
    """Return the folder of this key, made once however many processes of this machine want it."""
    COPIES.mkdir(parents=True, exist_ok=True)
    folder = COPIES / f"tokens-{key}"
    with (COPIES / f".tokens-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / MANIFEST).is_file():
            log.info("tokenising", source=source, folder=str(folder))
            prepare(articles, words, folder, [source], _progress(), key=key)
    return folder


def _progress() -> Progress:
    """Return a function that logs how far tokenising is, every now and then."""
    said_s = time.monotonic()

    def say(documents: int, tokens: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= PROGRESS_S:
            said_s = time.monotonic()
            log.info("tokenising", documents=documents, tokens=tokens)

    return say
