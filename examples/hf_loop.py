# pyright: basic
"""A PyTorch loop as one more learner of a run that ``skerry up`` has begun: its model, its data.

    skerry up small.toml --run small --set sync.learners=2 --learners 1  # one learner of ours
    python examples/hf_loop.py small site-b                             # this one, in that folder

The run's config names a Hugging Face model and prepared data; transformers makes the model, so both
learners train the same tensors. On another machine set ``SKERRY_NATS__URL`` to the broker's address
and ``SKERRY_DATA__PATHS`` to that machine's own folder of prepared data.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import skerry
import skerry.torch
from skerry.algorithm.rates import learning_rate


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the mean loss over the targets of a batch; documents do not see each other."""
    rows = {name: torch.from_numpy(array) for name, array in batch.items()}
    tokens, segments, counted = rows["tokens"].long(), rows.get("segments"), rows.get("weights")
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    if segments is not None:  # positions that begin again show transformers where documents begin
        targets[(segments[:, 1:] != segments[:, :-1]) | (segments[:, 1:] == 0)] = -100
    if counted is not None:
        targets[counted == 0] = -100
    places = rows["positions"][:, :-1].long() if segments is not None else None
    scores = model(input_ids=inputs, position_ids=places, use_cache=False).logits
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


def main(run: str, name: str) -> None:
    """Train until the run is over, and save the global state."""
    config = skerry.config_of(run=run)  # waits until the run is there
    model = skerry.torch.model_of(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.train.lr)
    loss = torch.tensor(torch.inf)
    with skerry.torch.join(run=run, name=name, model=model, optimizer=optimizer) as island:
        print(f"goes on from sequence {island.start}", flush=True)
        for data in island.batches():
            for group in optimizer.param_groups:
                group["lr"] = float(learning_rate(config.train, island.progress))
            loss = loss_of(model, data.batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip)
            optimizer.step()
            optimizer.zero_grad()
            island.step(tokens=data.tokens, loss=loss)
    model.save_pretrained(f"{run}-{name}")
    print(f"loss {loss:.4f} after {island.cursor} sequences", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 2 else sys.exit(__doc__)
