"""The batches of a user's training loop: from its loader, or from the run's data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol, TypeAlias, TypeVar

from skerry.data.corpus import load_corpus
from skerry.data.stream import Prefetch, Prefetched, stream_of
from skerry.errors import ConfigError
from skerry.models.presets import OWN, arch_of
from skerry.settings.checks import refuse_data
from skerry.settings.models import RunConfig

Batch = TypeVar("Batch")
Loader: TypeAlias = Iterable[Batch] | Callable[[int], Iterable[Batch]]


def from_cursor(
    loader: Loader[Batch], cursor: int, each: int, *, begun: bool = False
) -> Iterator[Batch]:
    """Iterate over a loader of ``each`` sequences a batch from a cursor on.

    An iterator that was ``begun`` before goes on where it is. A loader that cannot be read a second
    time ends, as an iterator does.
    """
    at = cursor // each
    if callable(loader):
        return iter(loader(cursor))
    batches = iter(loader)
    if batches is loader:  # an iterator cannot be read again
        return islice(batches, 0 if begun else at, None)
    first = list(islice(batches, 1))
    if not first:
        msg = "The loader gives no batch: check what it reads."
        raise ConfigError(msg)
    return islice(chain(first, batches, _again(loader)), at, None)


def _again(loader: Iterable[Batch]) -> Iterator[Batch]:
    given = True
    while given:
        given = False
        for batch in loader:
            given = True
            yield batch


def of_run(config: RunConfig, shard: int, cursor: int) -> Iterator[Prefetched]:
    """Read a learner's part of the run's data (``data.*``) from a cursor on, ahead in a thread.

    Raises ConfigError for data that this machine does not offer, and CorpusError for what cannot be
    read.
    """
    refuse_data(config.data)
    stream, batch = stream_of(load_corpus(config.data), shard), config.data.batch
    named = config.model
    vocab = None if named.factory or named.preset == OWN else arch_of(named).vocab
    with Prefetch(stream, cursor, batch=batch, vocab=vocab) as ready:
        yield from ready


class Reading(Protocol):
    """A learner as its batches need it."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def shard(self) -> int: ...
    @property
    def cursor(self) -> int: ...
    @property
    def done(self) -> bool: ...


def until_done(
    island: Reading, loader: Loader[Any] | None, *, begun: bool = False
) -> Iterator[tuple[int, Any]]:
    """Yield batches from where this learner's data goes on, each with the cursor after it.

    ``loader`` is called with the cursor to begin at, or is iterated over, repeatedly if it can be,
    and skips the batches that were used; an iterator that was ``begun`` here skips none. Without a
    loader, batches come from this learner's part of the run's data. They end with the run.
    """
    each, at = island.config.data.batch, island.cursor
    own = partial(of_run, island.config, island.shard)
    batches = from_cursor(own if loader is None else loader, at, each, begun=begun)
    ended = object()
    while not island.done:  # else a loader that waits for its data would hold up the run's end
        batch = next(batches, ended)
        if batch is ended or island.done:
            return
        at += each
        yield at, batch
