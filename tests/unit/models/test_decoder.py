"""What the decoder does beyond plain text: packed rows, chunks, experts, and what it keeps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skerry.models import attention, experts
from skerry.models.arch import arch_from
from skerry.models.decoder import Decoder
from skerry.models.names import AXES, averaged, unit_of
from skerry.models.presets import PRESETS
from skerry.models.tensors import tensors_of

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "intermediate_size": 48,
    "vocab_size": 64,
}
EXPERTS = {"num_experts": 5, "moe_intermediate_size": 24}


@cache
def dense(**keys: Any) -> Decoder:
    return Decoder(arch_from({**PRESETS["0.1b"], **SMALL, **keys}))


@cache
def sparse(**keys: Any) -> Decoder:
    return Decoder(arch_from({**PRESETS["moe-0.3b"], **SMALL, **EXPERTS, **keys}))


@cache
def made(model: Decoder) -> Any:
    return jax.jit(model.init)(jax.random.key(0))


def text(rows: int, length: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (rows, length), 0, 64)


def loss_and_gradients(model: Decoder, params: Any, batch: Any) -> Any:
    return jax.jit(jax.value_and_grad(model.loss, has_aux=True))(params, batch)


def assert_close(one: Any, other: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), one, other)


@pytest.mark.parametrize("make", [dense, sparse])
def test_packed_sequences_learn_what_they_would_alone(make: Any) -> None:
    model = make(router_aux_loss_coef=0.0)
    params, one, two = made(model), text(1, 9), text(1, 6, seed=1)
    pads = jnp.zeros((1, 2), jnp.int32)
    packed = {
        "tokens": jnp.concatenate([one, two, pads], axis=1),
        "segments": jnp.asarray([[1] * 9 + [2] * 6 + [0] * 2]),
        "positions": jnp.asarray([[*range(9), *range(6), 0, 0]]),
    }
    loss, aux = jax.jit(model.loss)(params, packed)
    alone = [jax.jit(model.loss)(params, {"tokens": tokens}) for tokens in (one, two)]
    assert float(aux.tokens) == 8 + 5
    total = sum(float(mean) * float(found.tokens) for mean, found in alone)
    assert float(loss) == pytest.approx(total / 13, rel=1e-4)


def test_targets_without_weight_teach_nothing() -> None:
    model = dense()
    params, tokens = made(model), text(2, 9)
    weights = jnp.ones((2, 8)).at[:, 4:].set(0.0)
    (loss, aux), gradients = loss_and_gradients(
        model, params, {"tokens": tokens, "weights": weights}
    )
    (cut, _), wanted = loss_and_gradients(model, params, {"tokens": tokens[:, :5]})
    assert float(aux.tokens) == 8
    assert float(loss) == pytest.approx(float(cut), rel=1e-5)
    assert_close(gradients, wanted)


def test_a_batch_without_targets_has_no_loss_and_no_gradient() -> None:
    model = dense()
    batch = {"tokens": text(1, 5), "weights": jnp.zeros((1, 4))}
    (loss, _), gradients = loss_and_gradients(model, made(model), batch)
    assert float(loss) == 0.0
    assert all(bool((leaf == 0).all()) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.drill), True])
def test_a_loss_in_chunks_is_the_whole_loss(
    monkeypatch: pytest.MonkeyPatch, *, weighted: bool
) -> None:
    model = dense(tie_word_embeddings=True)
    batch = {"tokens": text(2, 12)}
    if weighted:
        batch["weights"] = jax.random.uniform(jax.random.key(3), (2, 11))
    params = made(model)
    whole = loss_and_gradients(model, params, batch)
    monkeypatch.setattr("skerry.models.loss.LOGITS", 2 * 3 * 64)
    assert_close(loss_and_gradients(replace(model), params, batch), whole)


@pytest.mark.parametrize(
    ("window", "cap", "packed"),
    [
        (5, 4.0, 0),
        pytest.param(None, None, 0, marks=pytest.mark.drill),
        pytest.param(5, None, 7, marks=pytest.mark.drill),
    ],
)
def test_attention_in_chunks_is_the_whole_attention(
    monkeypatch: pytest.MonkeyPatch, window: int | None, cap: float | None, packed: int
) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    parts = [jax.random.normal(k, (2, 21, h, 8)) for k, h in zip(keys, (4, 2, 2), strict=True)]
    segments = jnp.broadcast_to(jnp.arange(21) // packed, (2, 21)) if packed else None

    def squared(*parts: Any) -> Any:
        mixed = attention.attention(*parts, scale=0.3, window=window, cap=cap, segments=segments)
        return jnp.sum(mixed**2), mixed

    found = jax.value_and_grad(squared, argnums=(0, 1, 2), has_aux=True)
    whole = jax.jit(found)(*parts)
    for size in ("CPU_CHUNK", "CHUNK"):
        monkeypatch.setattr(attention, size, 6)
        jax.clear_caches()
        assert_close(jax.jit(found)(*parts), whole)


@pytest.mark.parametrize(
    "remat", ["blocks", pytest.param("attention,mlp", marks=pytest.mark.drill)]
)
def test_what_a_block_keeps_changes_no_number(remat: str) -> None:
    model, batch = sparse(), {"tokens": text(2, 9)}
    params = made(model)
    kept = loss_and_gradients(model, params, batch)
    assert_close(loss_and_gradients(replace(model, remat=remat), params, batch), kept)


def test_experts_say_how_many_tokens_they_saw() -> None:
    model, tokens = sparse(), text(2, 9)
    segments = jnp.asarray([[1] * 9, [1] * 5 + [0] * 4])
    _, aux = jax.jit(model.loss)(made(model), {"tokens": tokens, "segments": segments})
    stacks = [name for name, tensor in tensors_of(model.arch).items() if len(tensor.shape) == 3]
    assert sorted(aux.expert_tokens) == sorted(stacks)
    for counts in aux.expert_tokens.values():
        assert float(counts.sum()) == 2 * (8 + 5), "two experts for each token that is no padding"


def test_the_balance_of_experts_is_that_of_transformers() -> None:
    torch: Any = pytest.importorskip("torch")
    moe: Any = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    scores = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    chosen = sparse().arch.experts
    assert chosen is not None
    _, routed = experts.choose(jnp.asarray(scores), chosen, None)
    wanted = moe.load_balancing_loss_func((torch.tensor(scores),), 5, chosen.chosen)
    assert float(routed.balance) == pytest.approx(float(wanted), rel=1e-5)


def test_the_balance_is_in_the_loss_and_can_be_told_apart() -> None:
    model, plain, batch = sparse(), sparse(router_aux_loss_coef=0.0), {"tokens": text(2, 9)}
    params = made(model)
    loss, aux = jax.jit(model.loss)(params, batch)
    assert float(aux.balance) > 0
    assert float(loss - aux.balance) == pytest.approx(
        float(jax.jit(plain.loss)(params, batch)[0]), rel=1e-6
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_every_large_tensor_has_axes(preset: str) -> None:
    import re

    for name, tensor in tensors_of(arch_from({**PRESETS[preset], "head_dim": 64})).items():
        found = [axes for pattern, axes in AXES.items() if re.fullmatch(pattern, name)]
        assert len(found) == (len(tensor.shape) > 1), name
        assert not found or len(found[0]) == len(tensor.shape)


def test_names_say_what_is_averaged_and_where_experts_end() -> None:
    assert averaged("model.embed_tokens.weight")
    assert averaged("lm_head.weight")
    assert averaged("model.layers.3.mlp.gate.weight")
    assert averaged("model.layers.3.router.proj.weight")
    assert averaged("embed")
    assert not averaged("model.layers.3.mlp.gate_proj.weight")
    assert unit_of("model.layers.3.mlp.experts.gate_up_proj", (4, 6, 5)) == 30
    assert unit_of("model.layers.3.mlp.gate_proj.weight", (6, 5)) == 0
