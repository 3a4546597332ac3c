# pyright: basic
"""A PyTorch training loop of one's own as a learner of Skerry: the model of ``jax_loop.py`` again.

    skerry syncer --run copy                                    # once, anywhere
    python examples/torch_loop.py nats://127.0.0.1:4222 site-b  # on each island, under its own name

Parameters have the names and shapes of ``jax_loop.py``'s, so both train in one run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count

import numpy as np
import torch
from torch.nn.functional import cross_entropy, relu

import skerry.torch

VOCAB, HALF, WIDTH, BATCH = 32, 4, 64, 32
CONFIG = {
    "data": {"batch": BATCH, "seq_len": 8},  # their product: the most tokens of a step
    "train": {"steps": 400},
    "sync": {"learners": 2, "fragments": 4, "h_steps": 20},
}


class Copier(torch.nn.Module):
    """Learns to repeat the first half of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.1)
        self.up = torch.nn.Parameter(torch.randn(HALF * WIDTH, 4 * WIDTH) * 0.05)
        self.down = torch.nn.Parameter(torch.randn(4 * WIDTH, HALF * VOCAB) * 0.05)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of repeating ``batch``, int64 [batch, HALF]."""
        seen = self.embed[batch].reshape(len(batch), -1)
        scores = (relu(seen @ self.up) @ self.down).reshape(-1, VOCAB)
        return cross_entropy(scores, batch.reshape(-1))


def batches(shard: int, start: int) -> Iterator[torch.Tensor]:
    """Yield a learner's own data from sequence ``start`` on; yours must be able to start there."""
    for first in count(start, BATCH):
        drawn = np.random.default_rng((shard, first)).integers(0, VOCAB, (BATCH, HALF))
        yield torch.from_numpy(drawn)


def main(url: str, name: str, run: str = "copy") -> None:
    """Train until the run is over."""
    model = Copier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.tensor(torch.inf)
    with skerry.torch.join(
        url, run=run, name=name, model=model, optimizer=optimizer, config=CONFIG
    ) as island:
        print(f"goes on from sequence {island.start}", flush=True)
        for batch in island.batches(lambda start: batches(island.shard, start)):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            island.step(tokens=batch.numel(), loss=loss)
    print(f"loss {loss:.4f} after {island.cursor} sequences", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 2 else sys.exit(__doc__)
