"""The batches of a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from skerry.client.batches import from_cursor


def test_a_loader_begins_once_for_each_time_that_it_is_read() -> None:
    begun = list[int]()

    class Loader:
        def __iter__(self) -> Iterator[int]:
            begun.append(1)
            return iter(range(3))

    batches = from_cursor(Loader(), 4, 4)
    assert list(islice(batches, 4)) == [1, 2, 0, 1]
    assert len(begun) == 2
