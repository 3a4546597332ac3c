"""Our training step against one written out by hand: ``python tests/bench/bench_model.py``.

Both train the same model on the same batch with AdamW, on one core, taking turns. The plain one is
what one would write in JAX for this model alone, without families, packed rows or chunks:
activations ``[batch, seq, d]``, matrices ``[in, out]``. First both must agree on the loss. With
``--torch`` the transformers model takes a PyTorch loop's steps afterwards: in turns, JAX is slower.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs] - it is typed in parts
from harness import Goal, one_core, parser, write

from skerry.models.base import build_model
from skerry.models.decoder import Decoder
from skerry.models.stacks import stacked
from skerry.settings.models import ModelConfig, RunConfig, TrainConfig
from skerry_learner.trainer.step import TrainState, make_step, optimizer_of, stacks_of

GOAL = 0.97
ALIKE = 1e-4


@dataclass(frozen=True, slots=True)
class Verdict:
    """CPU milliseconds of a step, and how fast ours is beside the plain one; torch's, or 0."""

    preset: str
    ours_ms: float
    plain_ms: float
    torch_ms: float
    speed: float
    steps: int


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * (1.0 + gain)


def rope(x: jax.Array) -> jax.Array:
    seq, half = x.shape[1], x.shape[-1] // 2
    angle = np.arange(seq)[:, None] * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = (f(angle)[None, :, None, :].astype(np.float32) for f in (np.cos, np.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def plain_loss(params: Any, tokens: jax.Array, heads: int) -> jax.Array:
    """Return the mean loss of a Gemma-like decoder, written out."""
    table = params["embed"]
    x = table[tokens[:, :-1]] * table.shape[1] ** 0.5
    for p in params["blocks"]:
        y = norm(x, p["before"])
        shape = (*y.shape[:2], -1, x.shape[-1] // heads)
        q, k, v = ((y @ p[name]).reshape(shape) for name in ("q", "k", "v"))
        mixed = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
        x = x + mixed.reshape(x.shape) @ p["o"]
        y = norm(x, p["after"])
        x = x + (jax.nn.gelu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
    scores = norm(x, params["norm"]) @ table.T
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()


def plain_params(params: Any, layers: int) -> Any:
    """Return the decoder's parameters as the plain model has them."""
    at = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
    at |= {
        "o": "self_attn.o_proj",
        "before": "input_layernorm",
        "after": "post_attention_layernorm",
    }
    at |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    blocks = [
        {name: params[f"model.layers.{i}.{where}.weight"].T for name, where in at.items()}
        for i in range(layers)
    ]
    table = params["model.embed_tokens.weight"]
    return {"embed": table, "norm": params["model.norm.weight"], "blocks": blocks}


def plain_step(config: TrainConfig, heads: int) -> tuple[Any, Callable[..., Any]]:
    """Return the optimizer and ``(params, moments, tokens) -> (params, moments, loss)``."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            config.lr,
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params),
        ),
    )

    def step(params: Any, moments: Any, tokens: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(plain_loss)(params, tokens, heads)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    return optimizer, jax.jit(step, donate_argnums=(0, 1))


def torch_step(config: ModelConfig, tokens: Any) -> Callable[[], float]:
    """Return a step of the same model in PyTorch, which returns its loss."""
    import torch

    import skerry.torch

    torch.set_num_threads(1)
    model = skerry.torch.model_of(RunConfig(model=config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.from_numpy(np.array(tokens)).long()

    def step() -> float:
        scores = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def measure(config: ModelConfig, steps: int, batch: int, seq: int, *, torch: bool) -> Verdict:
    """Let both take steps in turn on the same batch and compare their CPU times."""
    train = TrainConfig(precision="float32")
    model = build_model(config, train)
    assert isinstance(model, Decoder)
    tokens = jax.random.randint(jax.random.key(1), (batch, seq + 1), 0, 256)
    named = jax.jit(model.init)(jax.random.key(0))
    params = stacked(named, stacks_of(model, train))
    optimizer, step = plain_step(train, model.arch.heads)
    theirs = jax.tree.map(jnp.copy, plain_params(named, len(model.arch.layers)))
    moments = optimizer.init(theirs)
    our_step = make_step(model, train)
    state = TrainState(params, jax.jit(optimizer_of(model, train).init)(params))
    half, whole = np.float32(0.5), np.float32(1.0)
    times: tuple[list[float], list[float]] = [], []
    for number in range(steps + 3):
        began = time.process_time()
        state, result = our_step(state, {"tokens": tokens}, half, whole)
        ours = float(result.loss)
        between = time.process_time()
        theirs, moments, loss = step(theirs, moments, tokens)
        gap = abs(float(loss) - ours)
        ended = time.process_time()
        if number == 0 and gap > ALIKE:
            message = f"the two models differ by {gap:g} in their first loss"
            raise RuntimeError(message)
        if number >= 3:
            times[0].append(between - began)
            times[1].append(ended - between)
    mine, plain = (statistics.median(found) for found in times)
    torch_ms = 1e3 * step_s(torch_step(config, tokens), steps) if torch else 0.0
    return Verdict(config.preset, 1e3 * mine, 1e3 * plain, torch_ms, plain / mine, steps)


def step_s(step: Callable[[], float], steps: int) -> float:
    """Return the median CPU time of a step, after three that are not timed."""
    times: list[float] = []
    for _ in range(steps + 3):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    return statistics.median(times[3:])


def main() -> None:
    options = parser("Our step beside a plain hand-written one of the same model.")
    options.add_argument("--preset", default="nano", help="nano, micro or small (default nano)")
    options.add_argument("--layers", type=int, help="other than the preset's")
    options.add_argument("--vocab", type=int, help="other than the preset's")
    options.add_argument("--torch", action="store_true", help="time a PyTorch loop as well")
    options.add_argument("--steps", type=int, default=40, help="steps of each (default 40)")
    options.add_argument("--batch", type=int, default=8, help="rows of a batch (default 8)")
    options.add_argument("--seq", type=int, default=128, help="tokens of a row (default 128)")
    chosen = options.parse_args()
    one_core()
    sizes = {name: getattr(chosen, name) for name in ("preset", "layers", "vocab")}
    config = ModelConfig.model_validate(sizes)
    found = measure(config, chosen.steps, chosen.batch, chosen.seq, torch=chosen.torch)
    print(f"model: {found.preset}, {found.steps} steps each, median CPU time of a step")
    print(f"  ours:  {found.ours_ms:.1f} ms")
    print(f"  plain: {found.plain_ms:.1f} ms")
    if chosen.torch:
        print(f"  torch: {found.torch_ms:.1f} ms")
    goal = Goal("speed of a step", GOAL, found.speed, "of a plain one")
    write("model", [asdict(found)], [goal], chosen.json)


if __name__ == "__main__":
    main()
