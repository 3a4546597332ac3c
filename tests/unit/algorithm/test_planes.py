"""Memory of vectors is used again as soon as, and never before, nobody holds the vector."""

from __future__ import annotations

import gc
import threading

import jax
import numpy as np
import pytest

from skerry.algorithm.planes import LEAST_ELEMENTS, MOST_IDLE, Vectors

SIZE = 2 * LEAST_ELEMENTS


def place(vector: np.ndarray) -> int:
    return int(vector.__array_interface__["data"][0])


def test_memory_of_a_vector_that_is_gone_is_used_again() -> None:
    vectors = Vectors()
    first = vectors.empty(SIZE)
    where = place(first)
    del first

    assert place(vectors.empty(SIZE)) == where


def test_memory_that_a_view_of_a_view_shows_is_not_used_again() -> None:
    vectors = Vectors()
    first = vectors.empty(SIZE)
    first[:] = 1.0
    rest = memoryview(first.reshape(2, -1)[1].view(np.uint32)[10:20])
    del first
    other = vectors.empty(SIZE)
    other[:] = 2.0

    assert np.frombuffer(rest, np.float32).tolist() == [1.0] * 10
    where = place(other)
    del rest, other  # the last one to go is kept
    assert place(vectors.empty(SIZE)) == where


def test_memory_that_jax_shows_is_not_used_again() -> None:
    """On a CPU JAX takes the memory itself, which is why it is aligned: no copy is made."""
    vectors = Vectors()
    vector = vectors.empty(SIZE)
    vector[:] = 1.0
    where = place(vector)
    shown = jax.device_put(vector)
    assert shown.unsafe_buffer_pointer() == where
    del vector
    other = vectors.empty(SIZE)
    other[:] = 2.0

    assert float(shown.min()) == 1.0
    del shown
    gc.collect()
    assert place(vectors.empty(SIZE)) == where


def test_vectors_that_live_at_once_lie_apart() -> None:
    vectors = Vectors()
    held = [vectors.empty(SIZE) for _ in range(5)]
    for number, vector in enumerate(held):
        vector[:] = number

    assert [set(vector.tolist()) for vector in held] == [{float(i)} for i in range(5)]


@pytest.mark.parametrize("size", [SIZE // 2 - 1, SIZE // 2 + 1, SIZE, SIZE + 1])
def test_a_smaller_vector_may_lie_in_larger_memory_of_up_to_twice_its_size(size: int) -> None:
    vectors = Vectors()
    where = place(vectors.empty(SIZE))

    vector = vectors.empty(size)
    assert vector.size == size
    assert (place(vector) == where) == (SIZE // 2 < size <= SIZE)


def test_no_more_than_a_few_wait_to_be_used_again() -> None:
    vectors = Vectors()
    held = [vectors.empty(SIZE) for _ in range(4 * MOST_IDLE)]
    held.clear()

    assert len(vectors._idle) == MOST_IDLE


def test_memory_that_fits_nothing_that_is_asked_for_is_let_go() -> None:
    vectors = Vectors()
    vectors.empty(8 * SIZE)
    vectors.empty(SIZE)

    assert [memory.nbytes // SIZE for memory in vectors._idle] == [4]


def test_planes_take_memory_that_is_hardly_larger() -> None:
    """Those of a global fragment stay for ever, and what they do not fill would be lost."""
    vectors = Vectors(slack=1.25)
    where = place(vectors.empty(SIZE))

    assert place(vectors.empty(SIZE * 9 // 10)) == where
    assert place(vectors.empty(SIZE // 2 + 1)) != where


def test_threads_never_share_memory() -> None:
    vectors, wrong = Vectors(), list[float]()

    def use(number: float) -> None:
        for _ in range(200):
            vector = vectors.empty(LEAST_ELEMENTS)
            vector[:100] = number
            wrong.extend(value for value in vector[:100].tolist() if value != number)

    threads = [threading.Thread(target=use, args=(float(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
