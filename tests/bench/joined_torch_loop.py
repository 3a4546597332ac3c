"""A plain PyTorch training loop that takes turns: joined by ``skerry.torch.join``, and alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from turns import Asked

import skerry.torch


class Loop:
    """A model in training."""

    def __init__(self, config: Any, tokens: torch.Tensor) -> None:
        torch.manual_seed(0)
        self.model = skerry.torch.model_of(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._tokens = tokens

    def step(self) -> torch.Tensor:
        scores = self.model(input_ids=self._tokens[:, :-1], use_cache=False).logits
        loss = cross_entropy(scores.flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def main() -> None:
    asked = Asked.of_command_line()
    data = asked.config.data
    torch.set_num_threads(1)
    tokens = torch.randint(0, 256, (data.batch, data.seq_len + 1))
    ours, plain = Loop(asked.config, tokens), Loop(asked.config, tokens)
    about: dict[str, Any] = {"run": asked.run, "name": "loop", "config": asked.config}
    about |= {"model": ours.model, "optimizer": ours.optimizer}
    with skerry.torch.join(asked.url, **about) as island:

        def boundary(loss: Any) -> None:
            island.step(tokens=data.batch * data.seq_len, loss=loss)

        asked.take_turns(ours.step, boundary, plain.step)


if __name__ == "__main__":
    main()
