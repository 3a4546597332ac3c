"""Users' datasets: any object with ``__len__`` and ``__getitem__``.

Examples are sources of grain, and map-style datasets of Hugging Face and of torch. An item is text,
the messages of a conversation, or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from skerry import code
from skerry.data.documents import MESSAGES, Article, article
from skerry.errors import CorpusError, SkerryError
from skerry.settings.models import DataConfig

MOST_ITEMS = 1 << 30
SAMPLED = 64
"""Items that a dataset's fingerprint reads."""
IGNORED = -100
"""The label of a token that is no target, as Hugging Face and torch have it."""
TOKENS = ("tokens", "input_ids")
MOST_ID = np.iinfo(np.uint32).max


class Dataset(Protocol):
    """What ``data.factory`` returns; the same items in the same order each time."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def open_dataset(config: DataConfig) -> Dataset:
    """Return the dataset that ``data.factory`` makes.

    Raises CodeRefused for code that this machine does not allow, CorpusError if it is not one.
    """
    made: Any = code.build(config.factory, "data.factory", config.options, CorpusError)
    if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
        msg = (
            f"data.factory {config.factory!r} returned a {type(made).__name__} without __len__ and"
            " __getitem__: return a dataset whose items have numbers."
        )
        raise CorpusError(msg, path="data.factory")
    if not 0 < len(made) <= MOST_ITEMS:
        msg = (
            f"data.factory {config.factory!r} returned {len(made)} items: return 1 to {MOST_ITEMS}"
        )
        raise CorpusError(msg + ", without repeating them.", path="data.factory")
    return cast("Dataset", made)


def read_items(dataset: Dataset, field: str) -> Iterator[Article]:
    """Yield the items of a dataset as documents; CorpusError names one that cannot be."""
    for index in range(len(dataset)):
        yield from _read(dataset, index, field)


def fingerprint(dataset: Dataset, config: DataConfig) -> str:
    """Return a text of a dataset's factory, length and some items, which changes when they do."""
    known = [config.factory, config.options, config.field, len(dataset)]
    own = str(getattr(dataset, "_fingerprint", ""))  # as Hugging Face's have one
    digest = xxhash.xxh3_128(json.dumps([*known, own]).encode())
    for index in np.unique(np.linspace(0, len(dataset) - 1, SAMPLED).astype(np.int64)):
        for one in _read(dataset, int(index), config.field):
            digest.update(json.dumps([one.text, one.messages]).encode())
            for array in (one.tokens, one.weights):
                digest.update(b"" if array is None else array.tobytes())
    return digest.hexdigest()


def _read(dataset: Dataset, index: int, field: str) -> Iterator[Article]:
    place = f"Item {index} of data.factory"
    try:
        yield from _article(dataset[index], place, field)
    except SkerryError:
        raise
    except Exception as error:  # a user's dataset may raise anything
        msg = f"{place} cannot be read ({type(error).__name__}: {error}): mend the dataset."
        raise CorpusError(msg, path="data.factory") from error


def _article(item: Any, place: str, field: str) -> Iterator[Article]:
    """Yield the document that an item is; nothing for an empty one."""
    if isinstance(item, bytes):
        item = item.decode()
    if isinstance(item, str):
        yield from article(item, place, "text")
    elif not isinstance(item, Mapping):
        yield from _tokens(item, {}, place)
    elif name := next((name for name in TOKENS if name in item), ""):
        yield from _tokens(item[name], cast("Mapping[str, Any]", item), place)
    else:
        name = MESSAGES if MESSAGES in item and field not in item else field
        yield from article(cast("Mapping[str, Any]", item).get(name), place, name)


def _tokens(given: Any, item: Mapping[str, Any], place: str) -> Iterator[Article]:
    """Yield a document of tokens, without the padding that its attention mask marks."""
    tokens = _row(given, place)
    ids = tokens.dtype.kind in "iu" and (
        not tokens.size or 0 <= int(tokens.min()) <= int(tokens.max()) <= MOST_ID
    )
    if not ids:
        msg = (
            f"{place} is neither text nor a row of token ids, 0 to {MOST_ID}: it holds"
            f" {tokens.dtype}."
        )
        raise CorpusError(msg, path="data.factory")
    labels, weights, mask = (
        _row(item[name], place) if item.get(name) is not None else None
        for name in ("labels", "weights", "attention_mask")
    )
    for name, more in (("labels", labels), ("weights", weights), ("attention_mask", mask)):
        if more is not None and len(more) != len(tokens):
            msg = f"{place} has {len(tokens)} tokens and {len(more)} {name}: give each token one."
            raise CorpusError(msg, path="data.factory")
    if labels is not None:
        if np.any((labels != IGNORED) & (labels != tokens)):
            msg = f"{place} has labels that are neither its tokens nor {IGNORED}: use weights."
            raise CorpusError(msg, path="data.factory")
        weights = (labels != IGNORED).astype(np.float32) * (1.0 if weights is None else weights)
    if weights is not None:
        weights = weights.astype(np.float32)
        if not np.all(np.isfinite(weights) & (weights >= 0)):
            msg = f"{place} has weights that are negative or no numbers: give each 0 or more."
            raise CorpusError(msg, path="data.factory")
    if mask is not None:
        kept = mask.astype(np.bool_)
        tokens, weights = tokens[kept], None if weights is None else weights[kept]
    if tokens.size:
        yield Article(tokens=tokens.astype(np.uint32), weights=weights)


def _row(given: Any, place: str) -> NDArray[Any]:
    """Return a list, an array, a tensor, or the only one in a tuple, as one row of numbers."""
    row = np.asarray(given)
    if row.ndim == 2 and len(row) == 1:  # a tensor of a TensorDataset's tuple
        row = row[0]
    if row.ndim != 1:
        msg = f"{place} is neither text nor one row of token ids: its shape is {row.shape}."
        raise CorpusError(msg, path="data.factory")
    return row
