"""Text to token shards: train a tokenizer on it, and write its tokens as files that a run maps.

Shards are ``.npy`` files of one row, for ``data.source = "tokens"``. A document's tokens end with
the tokenizer's end token, where it has one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from skerry.data.source import documents
from skerry.data.tokenizer import COMPANIONS, FILE, SETTINGS, Words
from skerry.errors import CorpusError

END = "<|endoftext|>"
SHARD_TOKENS = 1 << 26
MANIFEST = "corpus.json"
BATCH = 64
"""Documents that are tokenised at once, on all cores."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a folder of shards holds; ``tokenizer`` is xxh3-128 of the file that made them."""

    documents: int
    text_bytes: int
    tokens: int
    vocab: int
    tokenizer: str


def train_tokenizer(
    paths: Sequence[str], suffixes: Sequence[str], vocab: int, out: Path
) -> tuple[Path, int]:
    """Train byte-level BPE (arXiv 1508.07909) on text; returns its folder and how many tokens.

    Every text has tokens in it. Raises CorpusError for text that cannot be read, and for a folder
    that holds anything.
    """
    import tokenizers

    trained: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer: Any = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(documents(paths, suffixes), trainer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    with _folder(out) as draft:
        trained.save(str(draft / FILE))
        (draft / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
    return out, trained.get_vocab_size()


def prepare(paths: Sequence[str], suffixes: Sequence[str], words: Words, out: Path) -> Prepared:
    """Write the tokens of text files as shards beside a copy of their tokenizer's files.

    Raises CorpusError for text that cannot be read, and for a folder that holds anything.
    """
    kind = np.uint16 if words.size <= 1 << 16 else np.uint32
    count = text_bytes = total = shards = 0
    held: list[np.ndarray[Any, Any]] = []
    with _folder(out) as draft:

        def flush() -> None:
            nonlocal shards, held
            if held:
                np.save(draft / f"tokens-{shards:05d}.npy", np.concatenate(held))
                shards, held = shards + 1, []

        for texts in _batches(documents(paths, suffixes)):
            for text, ids in zip(texts, words.encode_batch(texts), strict=True):
                count, text_bytes = count + 1, text_bytes + len(text.encode())
                held.append(np.array([*ids, *words.end], kind))
                total += held[-1].size
            if sum(part.size for part in held) >= SHARD_TOKENS:
                flush()
        flush()
        if not total:
            msg = "The text has no tokens: name files with text."
            raise CorpusError(msg, path="data.paths")
        for name in COMPANIONS:
            if (words.folder / name).is_file():
                shutil.copyfile(words.folder / name, draft / name)
        digest = xxhash.xxh3_128_hexdigest((words.folder / FILE).read_bytes())
        found = Prepared(count, text_bytes, total, words.size, digest)
        (draft / MANIFEST).write_text(json.dumps(asdict(found), indent=2) + "\n")
    return found


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


@contextmanager
def _folder(target: Path) -> Generator[Path]:
    """Yield a draft of a folder that appears when it is whole.

    Raises CorpusError for one that holds anything.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        msg = f"{target} is not empty: name a new folder."
        raise CorpusError(msg, path="out")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield draft
        draft.chmod(0o755)
        with suppress(FileNotFoundError):
            target.rmdir()
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
