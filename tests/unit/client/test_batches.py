"""The batches of a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from skerry.client.batches import from_cursor, until_done
from skerry.settings.models import RunConfig


def test_a_loader_begins_once_for_each_time_that_it_is_read() -> None:
    begun = list[int]()

    class Loader:
        def __iter__(self) -> Iterator[int]:
            begun.append(1)
            return iter(range(3))

    batches = from_cursor(Loader(), 4, 4)
    assert list(islice(batches, 4)) == [1, 2, 0, 1]
    assert len(begun) == 2


def test_a_loader_that_gives_nothing_a_second_time_ends() -> None:
    class Once:
        def __init__(self) -> None:
            self.left = iter(range(3))

        def __iter__(self) -> Iterator[int]:
            yield from self.left

    assert list(from_cursor(Once(), 4, 4)) == [1, 2]


def test_nothing_of_an_iterator_that_was_begun_is_left_out() -> None:
    loader = iter(range(4))
    assert next(from_cursor(loader, 4, 4)) == 1
    assert list(from_cursor(loader, 8, 4, begun=True)) == [2, 3]


class Island:
    config = RunConfig()
    shard = cursor = 0
    done = False


def test_a_loader_is_asked_for_no_batch_once_the_run_is_over() -> None:
    island, asked = Island(), list[int]()

    def loader() -> Iterator[int]:
        for number in range(4):
            asked.append(number)
            yield number

    batches = until_done(island, loader())
    assert [next(batches)[1], next(batches)[1]] == [0, 1]
    island.done = True
    assert list(batches) == []
    assert asked == [0, 1]


def test_a_batch_that_comes_after_the_run_is_over_is_not_trained_on() -> None:
    island = Island()

    def loader() -> Iterator[int]:
        yield 0
        island.done = True
        yield 1

    assert [batch for _, batch in until_done(island, loader())] == [0]
