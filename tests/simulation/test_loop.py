"""Virtual time: it passes only when nothing else can happen, and a frozen owner misses it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context

import pytest

from skerry.tasks import TaskGroup
from skerry_tools.virtual import OWNER, Stuck, VirtualLoop


def run(main: Coroutine[None, None, None], loop: VirtualLoop | None = None) -> None:
    loop = loop or VirtualLoop()
    task = loop.create_task(main)
    assert loop.run_until(task, 1e9)
    task.result()
    loop.close()


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_day_of_sleep_takes_no_time() -> None:
    async def sleeper() -> None:
        await asyncio.sleep(86_400)
        assert now() == 86_400

    run(sleeper())


def test_timers_ring_in_order_of_their_times() -> None:
    rung: list[float] = []

    async def ring(at_s: float) -> None:
        await asyncio.sleep(at_s)
        rung.append(now())

    async def main() -> None:
        async with TaskGroup() as group:
            for at_s in (3.0, 1.0, 2.0):
                group.create_task(ring(at_s))

    run(main())
    assert rung == [1.0, 2.0, 3.0]


def test_a_timeout_ends_what_takes_longer() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        assert now() == 5

    run(main())


def test_work_for_a_thread_is_done_in_line() -> None:
    async def main() -> None:
        assert await asyncio.to_thread(lambda: 42) == 42
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    run(main())


def test_waiting_for_what_cannot_come_is_an_error() -> None:
    loop = VirtualLoop()
    waiting = loop.create_task(asyncio.Event().wait())
    with pytest.raises(Stuck):
        loop.run_until(waiting, 10.0)
    loop.close()


def test_a_run_ends_at_its_deadline() -> None:
    async def for_ever() -> None:
        for _ in range(1_000):
            await asyncio.sleep(1)

    loop = VirtualLoop()
    task = loop.create_task(for_ever())
    assert not loop.run_until(task, 10.5)
    assert loop.time() == 10.0


def test_a_frozen_owner_wakes_up_late_and_finds_that_time_has_passed() -> None:
    loop, woke = VirtualLoop(), list[tuple[str, float]]()

    async def tick(name: str) -> None:
        await asyncio.sleep(1.0)
        woke.append((name, now()))

    async def main() -> None:
        tasks: list[asyncio.Task[None]] = []
        for name in ("frozen", "free"):
            context = copy_context()
            context.run(OWNER.set, name)
            tasks.append(loop.create_task(tick(name), context=context))
        await asyncio.sleep(0.5)
        loop.freeze("frozen")
        await asyncio.sleep(9.5)
        loop.thaw("frozen")
        await asyncio.gather(*tasks)

    run(main(), loop)
    assert woke == [("free", 1.0), ("frozen", 10.0)]


def test_a_task_keeps_its_own_context_also_when_that_began_empty() -> None:
    mine = ContextVar("mine", default=0)
    seen: list[int] = []

    async def main() -> None:
        token = mine.set(1)
        await asyncio.sleep(1)
        seen.append(mine.get())
        mine.reset(token)

    Context().run(run, main())
    assert seen == [1]
