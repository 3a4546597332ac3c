"""One of two processes of a JAX loop, two devices each.

spread.py URL RUN ADDRESS CONFIG FAILS RANK: the one of rank FAILS ends by an error of its own.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs] - it is typed in parts
from jax.sharding import NamedSharding, PartitionSpec

import skerry

OPTIMIZER = optax.sgd(0.1, momentum=0.1)


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(params: Any, state: Any) -> tuple[Any, Any, jax.Array]:
    """Go towards one; the loss is over all devices."""
    loss, gradient = jax.value_and_grad(
        lambda params: sum(jnp.sum((leaf - 1.0) ** 2) for leaf in jax.tree.leaves(params))
    )(params)
    updates, state = OPTIMIZER.update(gradient, state)
    return optax.apply_updates(params, updates), state, loss


def momentum(state: Any) -> float:
    """Return the sum of all that lies here of an optimizer's momentum."""
    return sum(
        float(np.asarray(shard.data).astype(np.float64).sum())
        for leaf in jax.tree.leaves(state)
        for shard in leaf.addressable_shards
        if shard.replica_id == 0 or leaf.is_fully_replicated
    )


def main(url: str, run: str, address: str, config: str, fails: str, rank: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, int(rank), heartbeat_timeout_seconds=10)
    mesh = jax.make_mesh((4,), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    whole = np.linspace(0.0, 0.5, 640, dtype=np.float32).reshape(16, 40)
    params = {"w": jax.make_array_from_callback(whole.shape, rows, lambda index: whole[index])}
    with skerry.join(url, run=run, name="a", params=params, config=json.loads(config)) as island:
        params = island.params
        state = island.restored(OPTIMIZER.init(params))
        print(f"begins with {momentum(state)!r}", flush=True)
        for _ in island.batches(range(7)):
            if rank == fails and island.cursor == 20:
                msg = "an error of the loop's own"
                raise ValueError(msg)
            params, state, loss = train_step(params, state)
            float(loss)
            params = island.step(params, tokens=16, loss=loss, state=state)
    close = int(
        sum((abs(np.asarray(s.data) - 1.0) < 0.1).sum() for s in params["w"].addressable_shards)
    )
    print(f"ends after {island.cursor} with {close} values close to the goal", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
