"""Lab runs in a pool of worker processes; what is in the store already is not run again."""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import structlog

from skerry.errors import LabError, SkerryError, first_cause
from skerry_tools.lab.scenario import LabScenario

from .cells import Wanted
from .sources import SourcesEdited, check_sources, sources
from .store import Store

RUNS_PER_PROCESS = 25
"""A worker is replaced after that many: compiled programs of past runs are let go with it."""
POOLS = 3
"""How often a pool whose worker was killed is made again without a run in between."""
Runner = Callable[[str, str, str], float]
"""Runs a scenario (JSON) by these sources, stores its result in a folder; returns the loss."""


def lab_run(scenario_json: str, folder: str, expected: str) -> float:
    """Run one scenario in this process and store what it found, on what and by which sources.

    Raises SourcesEdited where what this process has imported is not what ``expected`` tells.
    """
    import jax

    from skerry_tools.lab.lab import Lab

    check_sources(expected, _imported())
    scenario = LabScenario.model_validate_json(scenario_json)
    result = Lab(scenario).run()
    machine = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
    }
    if not math.isfinite(result.loss):
        msg = f"{scenario.name} ended with a loss of {result.loss}."
        raise LabError(msg)
    kept = {**asdict(result), "machine": machine, "sources": expected}
    Store(Path(folder)).put(scenario, kept)
    return result.loss


@functools.cache
def _imported() -> str:
    """Return the digest of the sources as they were when this process had imported the lab.

    What is edited later does not reach it.
    """
    return sources()


def single_threaded(folder: str) -> None:
    """Prepare a worker, before it imports jax: one thread, and what others have compiled."""
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    )
    os.environ["NPROC"] = "1"  # threads of XLA's own pool
    os.environ["NUMBA_NUM_THREADS"] = "1"
    _shared(folder)


def _shared(folder: str) -> None:
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(folder) / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # workers share a GPU
    quiet = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(wrapper_class=quiet)


@dataclass(slots=True)
class Progress:
    """How far a set of runs is; ``cost`` is in tokens of the small model."""

    total: int
    cost: float
    done: int = 0
    spent: float = 0.0
    began_s: float = field(default_factory=time.monotonic)

    def add(self, cost: float) -> None:
        """Count a run that has ended."""
        self.done += 1
        self.spent += cost

    def left_s(self, now_s: float) -> float | None:
        """Return how many seconds are left at the pace so far, None before the first end."""
        if not self.spent:
            return None
        return (now_s - self.began_s) * (self.cost - self.spent) / self.spent

    def line(self, text: str) -> str:
        """Return what is told about a run that has ended."""
        left_s = self.left_s(time.monotonic())
        eta = "" if left_s is None else f"  {clock(left_s)} left"
        return f"[{self.done}/{self.total}] {text}{eta}"


def clock(seconds: float) -> str:
    """Write a duration as hours and minutes, or minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def run_all(
    wanted: Sequence[Wanted],
    store: Store,
    *,
    workers: int,
    tell: Callable[[str], None],
    runner: Runner = lab_run,
) -> list[str]:
    """Run what the store does not have; returns a sentence for each run that failed.

    A run that fails does not keep the others from running, and is tried again next time. A worker
    that is killed takes the others of its pool with it; a new pool goes on. When somebody edits the
    sources it ends with those runs that have begun.
    """
    have = store.all()
    left = [run for run in wanted if run.scenario.digest not in have]
    tell(f"{len(wanted)} runs, {len(wanted) - len(left)} of them made before.")
    progress = Progress(len(left), sum(run.cell.cost for run in left))
    failed: list[str] = []
    given = str(store.folder), sources()
    broken = 0
    while left and broken < POOLS:
        ended: set[str] = set()
        try:
            with _pool(workers, store.folder) as pool:
                for run, outcome in _outcomes(pool, left, given, workers, runner):
                    ended.add(run.scenario.digest)
                    broken = 0
                    if isinstance(outcome, str):
                        failed.append(f"{run.name}: {outcome}")
                    progress.add(run.cell.cost)
                    said = outcome if isinstance(outcome, str) else f"loss {outcome:.4f}"
                    tell(progress.line(f"{run.name}  {said}"))
        except BrokenProcessPool:
            broken += 1
            tell("A worker was killed (out of memory?): another pool goes on.")
        except SourcesEdited as error:
            return [*failed, str(error)]
        left = [run for run in left if run.scenario.digest not in ended]
    failed += [f"{run.name}: its worker was killed." for run in left]
    return failed


@contextmanager
def _pool(workers: int, folder: Path) -> Generator[ProcessPoolExecutor]:
    """Give a pool that drops what has not begun when it is left by an exception."""
    alone = workers == 1
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_shared if alone else single_threaded,
        initargs=(str(folder),),
        max_tasks_per_child=RUNS_PER_PROCESS,
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _outcomes(
    pool: ProcessPoolExecutor,
    runs: Sequence[Wanted],
    given: tuple[str, str],
    workers: int,
    runner: Runner,
) -> Iterator[tuple[Wanted, float | str]]:
    """Yield each run with its loss, or with why it failed, as they end.

    ``given`` is what the runner takes beside the scenario: the folder and the sources.

    Few are handed over at a time, in their order, so that an interrupt has little to wait for.
    """
    waiting = iter(runs)
    flying: dict[Future[float], Wanted] = {}
    while True:
        while len(flying) < workers + 1 and (run := next(waiting, None)) is not None:
            text = run.scenario.model_dump_json()
            flying[pool.submit(runner, text, *given)] = run
        if not flying:
            return
        done, _ = wait(flying, return_when=FIRST_COMPLETED)
        for future in done:
            run = flying.pop(future)
            try:
                yield run, future.result()
            except (BrokenProcessPool, SourcesEdited):
                raise
            except SkerryError as error:
                yield run, str(error)
            except Exception as error:  # noqa: BLE001 - one run's fault is not the others'
                cause = first_cause(error) if isinstance(error, BaseExceptionGroup) else error
                yield run, f"{type(cause).__name__}: {cause}"
