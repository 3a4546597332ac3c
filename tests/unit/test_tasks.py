"""What tasks and threads leave behind in the task that waited for them."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from skerry.tasks import TaskGroup, in_thread


async def fails() -> None:
    await asyncio.sleep(0)
    raise ValueError


def cancels() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


@pytest.mark.parametrize("waits_inside", [False, True])
async def test_a_failure_leaves_no_cancellation_counted_and_a_timeout_after_it_is_one(
    waits_inside: bool,
) -> None:
    with pytest.raises(ExceptionGroup):  # noqa: PT012 - the block is what waits
        async with TaskGroup() as group:
            group.create_task(fails())
            if waits_inside:
                await asyncio.Event().wait()
    assert cancels() == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()


async def test_a_cancellation_that_meets_a_failure_still_ends_the_task() -> None:
    waits, ended = asyncio.Event(), asyncio.Event()

    async def fails_when_cancelled() -> None:
        waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError from None

    async def work() -> None:
        try:
            async with TaskGroup() as group:
                group.create_task(fails_when_cancelled())
        except ExceptionGroup:
            ended.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await waits.wait()
    task.cancel()
    _, pending = await asyncio.wait({task}, timeout=5)
    assert ended.is_set(), "the group did not report the failure"
    assert not pending, "the task lives on though it was cancelled"
    assert task.cancelled()


async def test_a_group_inside_a_cancelled_clean_up_leaves_that_cancellation_counted() -> None:
    waits, counts = asyncio.Event(), list[int]()

    async def work() -> None:
        waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            with pytest.raises(ExceptionGroup):
                async with TaskGroup() as group:
                    group.create_task(fails())
            counts.append(cancels())
            raise

    task = asyncio.create_task(work())
    await waits.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
    assert counts == [1]


async def test_a_call_that_fails_once_cancelled_is_not_reported_as_forgotten() -> None:
    began, reported, goes_on = asyncio.Event(), list[object](), threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, about: reported.append(about))

    def fail() -> None:
        loop.call_soon_threadsafe(began.set)
        goes_on.wait()
        raise ValueError

    calling = asyncio.ensure_future(in_thread(fail))
    await began.wait()
    calling.cancel()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    del calling
    gc.collect()
    await asyncio.sleep(0)
    assert not reported
