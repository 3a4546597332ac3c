"""A plain JAX training loop that takes turns: joined to a run by ``skerry.join``, and alone."""

from __future__ import annotations

from typing import Any

import jax
import optax  # pyright: ignore[reportMissingTypeStubs] - it is typed in parts
from turns import Asked

import skerry
from skerry.models.base import build_model, token_loss

optimizer = optax.adamw(1e-3)


class Loop:
    """A model in training, its state donated to nothing."""

    def __init__(self, params: Any, train_step: Any) -> None:
        self.params, self._moments, self._step = params, optimizer.init(params), train_step

    def step(self) -> Any:
        self.params, self._moments, loss = self._step(self.params, self._moments)
        return loss


def main() -> None:
    asked = Asked.of_command_line()
    model, data = build_model(asked.config.model, asked.config.train), asked.config.data
    loss_of = token_loss(model)
    tokens = jax.random.randint(jax.random.key(1), (data.batch, data.seq_len + 1), 0, 256)

    @jax.jit
    def train_step(params: Any, moments: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    initial = jax.jit(model.init)(jax.random.key(0))
    about: dict[str, Any] = {"run": asked.run, "name": "loop", "config": asked.config}
    with skerry.join(asked.url, params=initial, **about) as island:
        ours, plain = Loop(island.params, train_step), Loop(initial, train_step)

        def boundary(loss: Any) -> None:
            ours.params = island.step(ours.params, tokens=data.batch * data.seq_len, loss=loss)

        asked.take_turns(ours.step, boundary, plain.step)


if __name__ == "__main__":
    main()
