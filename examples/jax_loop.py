# pyright: basic
"""A JAX training loop of one's own as a learner of Skerry: model, data and optimizer are its own.

    skerry syncer --run copy                                  # once, anywhere
    python examples/jax_loop.py nats://127.0.0.1:4222 site-a  # on each island, under its own name

It learns to repeat the first half of a sequence. If it is killed, start it again: it continues in
its data where the ledger says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import skerry

VOCAB, HALF, WIDTH, BATCH = 32, 4, 64, 32
CONFIG = {
    "data": {"batch": BATCH, "seq_len": 8},  # their product: the most tokens of a step
    "train": {"steps": 400},
    "sync": {"learners": 2, "fragments": 4, "h_steps": 20},
}

Params = dict[str, jax.Array]
optimizer = optax.adamw(3e-3)


def init(key: jax.Array) -> Params:
    """Return fresh float32 parameters."""
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (VOCAB, WIDTH)) * 0.1,
        "up": jax.random.normal(keys[1], (HALF * WIDTH, 4 * WIDTH)) * 0.05,
        "down": jax.random.normal(keys[2], (4 * WIDTH, HALF * VOCAB)) * 0.05,
    }


def loss_of(params: Params, batch: jax.Array) -> jax.Array:
    """Return the mean loss of repeating ``batch``, int32 [batch, HALF]."""
    seen = params["embed"][batch].reshape(len(batch), -1)
    scores = (jax.nn.relu(seen @ params["up"]) @ params["down"]).reshape(*batch.shape, VOCAB)
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch).mean()


@jax.jit
def train_step(params: Params, opt_state: Any, batch: jax.Array) -> Any:
    """Take one step."""
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def batches(shard: int, start: int) -> Iterator[jax.Array]:
    """Yield a learner's own data from sequence ``start`` on; yours must be able to start there."""
    for first in count(start, BATCH):
        drawn = np.random.default_rng((shard, first)).integers(0, VOCAB, (BATCH, HALF))
        yield jnp.asarray(drawn, jnp.int32)


def main(url: str, name: str, run: str = "copy") -> None:
    """Train until the run is over."""
    params = init(jax.random.key(0))
    with skerry.join(url, run=run, name=name, params=params, config=CONFIG) as island:
        print(f"goes on from sequence {island.start}", flush=True)
        params = island.params
        opt_state = island.restored(optimizer.init(params))  # the newest that was saved, or this
        loss = jnp.inf
        for batch in island.batches(lambda start: batches(island.shard, start)):
            params, opt_state, loss = train_step(params, opt_state, batch)
            params = island.step(params, tokens=batch.size, loss=loss, state=opt_state)
            if island.fell_back:
                opt_state = optimizer.init(params)
    print(f"loss {loss:.4f} after {island.cursor} sequences", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 2 else sys.exit(__doc__)
