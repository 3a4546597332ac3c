"""What torch's all-reduce over gloo takes to average one model: wall, CPU, bytes, memory.

``allreduce.py RANK WORLD PORT PARAMETERS DTYPE TIMES`` is one process of it, and needs torch.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.backends import free_port

LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")
LONGEST = timedelta(minutes=10)


class Averaging(NamedTuple):
    """One average of a model: seconds, CPU seconds and bytes of all, most resident of one."""

    name: str
    wall_s: float
    cpu_s: float
    moved_bytes: float
    peak_bytes: float


def averagings(parameters: int, learners: int, times: int) -> Iterator[Averaging]:
    """Yield what f32 and bf16 take; nothing where torch is not installed."""
    if find_spec("torch") is None:
        return
    for dtype in ("float32", "bfloat16"):
        given = str(free_port()), str(parameters), dtype, str(times)
        before = int(LOOPBACK.read_text())
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(learners), *given],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(learners)
        ]
        said = [json.loads(rank.communicate()[0]) for rank in ranks]
        moved = (int(LOOPBACK.read_text()) - before) / (times + 1)
        yield Averaging(
            f"all-reduce, gloo, {dtype}",
            max(one["wall_s"] for one in said),
            sum(one["cpu_s"] for one in said),
            moved,
            max(one["peak_bytes"] for one in said),
        )


def rank(number: int, world: int, port: int, parameters: int, dtype: str, times: int) -> None:
    """Average a vector once to begin with, then so many times, and print what one took."""
    torch: Any = import_module("torch")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group: Any = import_module("torch.distributed")
    group.init_process_group("gloo", rank=number, world_size=world, timeout=LONGEST)
    vector = torch.ones(parameters, dtype=getattr(torch, dtype))
    group.all_reduce(vector)
    group.barrier()
    began_s, cpu_s = time.monotonic(), time.process_time()
    for _ in range(times):
        group.all_reduce(vector)
    group.barrier()
    took = (time.monotonic() - began_s) / times, (time.process_time() - cpu_s) / times
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"wall_s": took[0], "cpu_s": took[1], "peak_bytes": peak}))
    group.destroy_process_group()


if __name__ == "__main__":
    who, world, port, parameters, dtype, times = sys.argv[1:]
    rank(int(who), int(world), int(port), int(parameters), dtype, int(times))
