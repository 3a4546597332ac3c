"""A plain JAX training loop that takes turns: joined to a run by ``skerry.join``, and alone.

``joined_loop.py OUT CORE CONFIG URL RUN TURNS STEPS`` writes what each turn took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax  # pyright: ignore[reportMissingTypeStubs] - it is typed in parts

import skerry
from skerry.models.base import build_model, token_loss
from skerry.settings import loading

optimizer = optax.adamw(1e-3)


def main() -> None:
    out, core, path, url, run, turns, steps = sys.argv[1:]
    if core != "-":
        os.sched_setaffinity(0, {int(core)})
    config = loading.load(Path(path)).run
    model = build_model(config.model, config.train)
    loss_of, data = token_loss(model), config.data
    shape = (data.batch, data.seq_len + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, 256)
    boundaries: list[tuple[float, float]] = []

    @jax.jit
    def train_step(params: Any, moments: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    def turn(state: Any, boundary: Callable[[Any, Any], Any], count: int) -> tuple[Any, Any]:
        """Take steps; the loss of the step before is read, as a loop that prints it does."""
        params, moments = state
        before, began_s, began_cpu_s = jnp.float32(0.0), time.monotonic(), time.process_time()
        for _ in range(count):
            params, moments, loss = train_step(params, moments)
            params = boundary(params, loss)
            float(before)
            before = loss
        took = {"wall_s": time.monotonic() - began_s, "cpu_s": time.process_time() - began_cpu_s}
        return (params, moments), took | {"steps": count}

    initial = jax.jit(model.init)(jax.random.key(0))
    with skerry.join(url, run=run, name="loop", params=initial, config=config) as island:

        def boundary(params: Any, loss: Any) -> Any:
            began_s, began_cpu_s = time.monotonic(), time.thread_time()
            params = island.step(params, tokens=data.batch * data.seq_len, loss=loss)
            took = time.monotonic() - began_s, time.thread_time() - began_cpu_s
            boundaries.append(took)
            return params

        params = island.params
        ours, plain = (params, optimizer.init(params)), (initial, optimizer.init(initial))
        ours, _ = turn(ours, boundary, 8)
        boundaries.clear()
        found: dict[str, list[Any]] = {"ours": [], "plain": []}
        for _ in range(int(turns)):
            ours, took = turn(ours, boundary, int(steps))
            found["ours"].append(took)
            plain, took = turn(plain, lambda params, _: params, int(steps))
            found["plain"].append(took)
    walls, cpus = zip(*boundaries, strict=True)
    Path(out).write_text(json.dumps(found | {"boundaries": walls, "boundary_cpu_s": sum(cpus)}))


if __name__ == "__main__":
    main()
