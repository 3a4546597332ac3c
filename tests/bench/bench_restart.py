"""How long a learner takes to its first step after a restart, by depth of its model.

``python tests/bench/bench_restart.py`` starts processes on one compile cache, which the first start
of each depth and each ``train.layers`` fills: model, programs, the log's parameters (zeros here)
and a step. Counted is the CPU time of a process up to the step, so that other work on the machine
does not count; beside it stand what a step takes and holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from harness import Goal, parser, write

from skerry.cli.programs import computing
from skerry.service.entry import collect_rarely

GOAL = 1.2
STEPS = 8
TIMES = 3
"""Starts with a warm cache, of which the shortest counts: other work only lengthens one."""
DEPTHS = 6, 12, 24
TRACING = "jaxpr_trace_duration", "jaxpr_to_mlir_module_duration"
LOADING = "backend_compile_duration"
"""What JAX calls its stages, the last also where the program comes from the cache."""
ENDS = min(DEPTHS), max(DEPTHS)
LAYERS = "unrolled", "scanned", "auto"
AUTO = ("auto",)


@dataclass(frozen=True, slots=True)
class Start:
    """CPU seconds of a start until its first step is handed to the device; stages by the clock."""

    layers: int
    how: str
    inner: str
    total_s: float
    import_s: float
    trace_s: float
    load_s: float
    adopt_s: float
    step_s: float
    held_mib: float


def start(layers: int, how: str, inner: str) -> Start:
    """Come to the first step in this process."""
    collect_rarely()
    import jax
    import numpy as np

    from skerry.algorithm.fragments import plan
    from skerry.models.base import build_model, specs_of
    from skerry.settings.models import DataConfig, ModelConfig, RunConfig, TrainConfig
    from skerry_learner.trainer.trainer import Programs, Trainer

    imported = time.process_time()
    took: Counter[str] = Counter()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: took.update({event.rpartition("/")[2]: duration_secs})
    )
    model = ModelConfig(layers=layers, d_model=256, heads=4, kv_heads=2, d_ff=768)
    train = TrainConfig.model_validate({"layers": how, "inner": inner})
    config = RunConfig(model=model, data=DataConfig(batch=4, seq_len=64), train=train)
    built = build_model(config.model, config.train)
    cut, programs = plan(specs_of(built), 8), Programs.of(built, config)
    trainer = Trainer(built, config, cut, programs, blank=True)
    trainer.fragments.warm(lambda: None)
    trainer.warm(lambda: None)
    warmed = time.process_time()
    for fragment in cut.fragments:
        trainer.adopt(fragment.index, np.zeros(fragment.padded_size, np.float32))
    jax.block_until_ready(trainer.state.params)
    adopted = time.process_time()
    batch: Any = {"tokens": np.zeros((4, 65), np.int32)}
    trainer.step(batch, 0.0)
    total = time.process_time()
    stages = sum(took[name] for name in TRACING), took[LOADING]
    jax.block_until_ready(trainer.state)
    first = time.process_time()
    for _ in range(STEPS):
        trainer.step(batch, 0.0)
    jax.block_until_ready(trainer.state)
    step = (time.process_time() - first) / STEPS
    factors = np.float32(0), np.float32(1), programs.frozen
    lowered = programs.step.lower(trainer.state, trainer.place(batch), *factors)
    held = lowered.compile().memory_analysis().temp_size_in_bytes / 2**20
    spent = total, imported, *stages, adopted - warmed
    return Start(layers, how, inner, *spent, step, held)


def measured(layers: int, how: str, inner: str, cache: Path) -> Start:
    command = [sys.executable, __file__, "--layers", str(layers), "--how", how, "--inner", inner]
    environ = os.environ | computing(cache)
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    return Start(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    options = parser("A learner's first step after a restart, compile cache warm.")
    options.add_argument("--layers", type=int, help="start in this process, and print one line")
    options.add_argument("--how", help="with --layers: what train.layers is", default="auto")
    options.add_argument("--inner", help="with --layers: train.inner", default="adamw")
    chosen = options.parse_args()
    if chosen.layers:
        print(json.dumps(asdict(start(chosen.layers, chosen.how, chosen.inner))))
        return
    found: list[Start] = []
    for layers, how, inner in (*product(DEPTHS, LAYERS, ["adamw"]), *product(ENDS, AUTO, ["muon"])):
        with tempfile.TemporaryDirectory() as folder:
            cold = measured(layers, how, inner, Path(folder))
            warm = [measured(layers, how, inner, Path(folder)) for _ in range(TIMES)]
            found.append(min(warm, key=lambda one: one.total_s))
        one = found[-1]
        print(
            f"{layers:>3} layers {how:>9} {inner:>6}: {one.total_s:.2f} s of CPU to the first step;"
            f" imports {one.import_s:.2f}, tracing {one.trace_s:.2f}, loading its program"
            f" {one.load_s:.2f} (compiling it {cold.load_s:.1f}), adopting {one.adopt_s:.2f};"
            f" a step {one.step_s:.3f} s, {one.held_mib:.0f} MiB",
            flush=True,
        )
    goals = [
        Goal(f"24 layers' first step after a restart, {inner}", GOAL, ratio, "of 6's", at_most=True)
        for inner in ("adamw", "muon")
        for ratio in [growth([one for one in found if (one.how, one.inner) == ("auto", inner)])]
    ]
    write("restart", [asdict(one) for one in found], goals, chosen.json)


def growth(found: Sequence[Start]) -> float:
    """Return what the deepest model's start takes, in units of the flattest's, without adopting."""
    took = {one.layers: one.total_s - one.adopt_s for one in found}
    return took[max(took)] / took[min(took)]


if __name__ == "__main__":
    main()
