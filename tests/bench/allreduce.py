"""What others take to average one model: torch's all-reduce over gloo, hivemind's averaging.

``allreduce.py PEER FORMAT RANK WORLD ADDRESS PARAMETERS TIMES`` is one process of it. They run
where they are installed, and are no dependency of ours: ``make torch``, and ``pip install hivemind
'numpy<2.4'``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psutil

from tests.support.ports import free_port

Average: TypeAlias = Callable[[], object]
LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")
LONGEST = timedelta(minutes=10)
FORMATS = {"torch": ("float32", "bfloat16"), "hivemind": ("float32", "float16", "8 bits")}
"""What each peer can send."""


class Averaging(NamedTuple):
    """One average of a model: seconds, CPU seconds and bytes of all, most resident of one."""

    name: str
    wall_s: float
    cpu_s: float
    moved_bytes: float
    peak_bytes: float


def averagings(parameters: int, learners: int, times: int) -> Iterator[Averaging]:
    """Yield what each format of each peer takes; nothing of a peer that is not installed."""
    for peer, formats in FORMATS.items():
        if find_spec("torch") is None or find_spec(peer) is None:
            continue
        for form in formats:
            yield _averaging(peer, form, parameters, learners, times)


def _averaging(peer: str, form: str, parameters: int, learners: int, times: int) -> Averaging:
    before = int(LOOPBACK.read_text())

    def start(rank: int, address: str) -> subprocess.Popen[str]:
        given = peer, form, str(rank), str(learners), address, str(parameters), str(times)
        return subprocess.Popen(
            [sys.executable, __file__, *given], stdout=subprocess.PIPE, text=True
        )

    first = start(0, str(free_port()))
    assert first.stdout is not None
    address = first.stdout.readline().strip()
    ranks = [first, *(start(rank, address) for rank in range(1, learners))]
    said = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    return Averaging(
        f"{peer}, {form}",
        max(one["wall_s"] for one in said),
        sum(one["cpu_s"] for one in said),
        (int(LOOPBACK.read_text()) - before) / (times + 1),
        max(one["peak_bytes"] for one in said),
    )


@contextmanager
def torch(form: str, rank: int, world: int, address: str, parameters: int) -> Generator[Average]:
    """Join a group over gloo and yield its all-reduce of a vector; ``address`` is a port."""
    print(address, flush=True)
    library: Any = import_module("torch")
    library.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": address}
    group: Any = import_module("torch.distributed")
    group.init_process_group("gloo", rank=rank, world_size=world, timeout=LONGEST)
    vector = library.ones(parameters, dtype=getattr(library, form))

    def average() -> None:
        group.all_reduce(vector)
        group.barrier()

    yield average
    group.destroy_process_group()


@contextmanager
def hivemind(form: str, rank: int, world: int, address: str, parameters: int) -> Generator[Average]:
    """Join the others at ``address`` and yield hivemind's averaging of a vector with them."""
    library: Any = import_module("torch")
    library.set_num_threads(1)
    warnings.simplefilter("ignore")  # theirs, about what torch will remove
    package: Any = import_module("hivemind")
    compression: Any = import_module("hivemind.compression")
    forms = {
        "float32": compression.NoCompression,
        "float16": compression.Float16Compression,
        "8 bits": compression.Uniform8BitQuantization,
    }
    table = package.DHT(
        initial_peers=[address] if rank else [],
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        use_relay=False,
        use_auto_relay=False,
        start=True,
    )
    print(table.get_visible_maddrs()[0], flush=True)
    averager = package.averaging.DecentralizedAverager(
        [library.ones(parameters)],
        table,
        prefix="bench",
        target_group_size=world,
        min_group_size=world,
        compression=forms[form](),
        start=True,
    )

    def average() -> None:
        met = averager.step(timeout=LONGEST.total_seconds())
        assert len(met) == world

    yield average
    time.sleep(2)  # others may still wait for what this one has
    averager.shutdown()
    table.shutdown()


def take(average: Average, times: int) -> None:
    """Average once to begin with, then so many times, and print what one took."""
    average()
    began_s, cpu_s = time.monotonic(), _cpu_s()
    for _ in range(times):
        average()
    took = (time.monotonic() - began_s) / times, (_cpu_s() - cpu_s) / times
    peak = max(_peak_bytes(process.pid) for process in _processes())
    print(json.dumps({"wall_s": took[0], "cpu_s": took[1], "peak_bytes": peak}), flush=True)


def _processes() -> list[psutil.Process]:
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _cpu_s() -> float:
    times = [process.cpu_times() for process in _processes()]
    return sum(one.user + one.system for one in times)


def main() -> None:
    peer, form, rank, world, address, parameters, times = sys.argv[1:]
    join = {"torch": torch, "hivemind": hivemind}[peer]
    with join(form, int(rank), int(world), address, int(parameters)) as average:
        take(average, int(times))


if __name__ == "__main__":
    main()
