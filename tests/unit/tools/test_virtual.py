"""The loop of a simulation: what a process leaves behind when it is killed."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator

from skerry_tools.virtual import VirtualLoop


def test_a_generator_that_is_dropped_half_way_is_not_closed() -> None:
    closed: list[bool] = []

    async def numbers() -> AsyncGenerator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    async def read_one() -> None:
        assert await anext(numbers()) == 1

    loop = VirtualLoop()
    try:
        assert loop.run_until(loop.create_task(read_one()), 1.0)
        gc.collect()
    finally:
        loop.settle()
        loop.close()
    assert not closed
