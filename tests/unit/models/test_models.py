"""The built-in transformer and the model protocol."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skerry.algorithm.fragments import LeafSpec
from skerry.errors import ModelError
from skerry.models.base import (
    Layout,
    batch_loss,
    build_model,
    has_bfloat16,
    leaf_specs,
    leaves_by_name,
    specs_of,
)
from skerry.models.sizes import PRESETS, Sizes, leaf_specs_of, sizes_of
from skerry.models.transformer import Transformer
from skerry.settings.models import ModelConfig, TrainConfig

TINY = Sizes(layers=2, d_model=32, heads=4, kv_heads=2, d_ff=48)


def init(model: Transformer, seed: int = 0) -> Any:
    """Compiled as a whole, like all here: step by step every operation is compiled alone."""
    return jax.jit(model.init)(jax.random.key(seed))


def loss(model: Transformer, params: Any, text: jax.Array) -> jax.Array:
    return jax.jit(model.loss)(params, text)


def logits(model: Transformer, params: Any, text: jax.Array) -> jax.Array:
    return jax.jit(model.logits)(params, text)


def tokens(batch: int, seq: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, seq), 0, TINY.vocab)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_tensors_named_without_jax_are_those_that_the_model_builds(preset: str) -> None:
    sizes = sizes_of(ModelConfig.model_validate({"preset": preset, "vocab": 512}))
    assert leaf_specs_of(sizes) == specs_of(Transformer(sizes))


@pytest.mark.parametrize("width", [TINY.d_model, 256, 1024])
def test_loss_of_fresh_parameters_is_that_of_a_uniform_guess(width: int) -> None:
    model = Transformer(replace(TINY, d_model=width))
    found = loss(model, init(model, 0), tokens(4, 33))
    assert found.shape == ()
    assert float(found) == pytest.approx(math.log(256), rel=0.05)


def test_a_later_token_does_not_change_earlier_scores() -> None:
    model = Transformer(TINY)
    params = init(model, 0)
    text = tokens(1, 16)
    before = logits(model, params, text)
    after = logits(model, params, text.at[0, 10].set((text[0, 10] + 1) % 256))
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    assert not np.array_equal(before[:, 10:], after[:, 10:])


def test_an_earlier_token_changes_later_scores() -> None:
    model = Transformer(TINY)
    params = init(model, 0)
    text = tokens(1, 16)
    other = text.at[0, 2].set((text[0, 2] + 1) % 256)
    assert not np.allclose(logits(model, params, text)[0, 9], logits(model, params, other)[0, 9])


def test_texts_of_one_batch_do_not_see_each_other() -> None:
    model, texts = Transformer(TINY), tokens(3, 9, seed=2)
    params = init(model, 3)
    alone = [logits(model, params, texts[row : row + 1])[0] for row in range(3)]
    together = logits(model, params, texts)
    np.testing.assert_allclose(together, np.stack(alone), rtol=1e-4, atol=1e-5)
    assert not np.allclose(together[0], together[1], atol=1e-3)


def test_grouped_attention_equals_full_attention_with_its_keys_repeated() -> None:
    grouped = Transformer(TINY)
    full = Transformer(Sizes(layers=2, d_model=32, heads=4, kv_heads=4, d_ff=48))
    params = init(grouped, 3)
    repeated = jax.tree_util.tree_map_with_path(_repeat_heads, params)
    text = tokens(2, 12)
    np.testing.assert_allclose(
        logits(full, repeated, text), logits(grouped, params, text), rtol=1e-4, atol=1e-5
    )


def _repeat_heads(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
    if path[-1].key not in {"key", "value"}:
        return leaf
    heads = leaf.reshape(leaf.shape[0], TINY.kv_heads, TINY.head_dim)
    return jnp.repeat(heads, TINY.heads // TINY.kv_heads, axis=1).reshape(leaf.shape[0], -1)


def test_bfloat16_arithmetic_stays_close_and_keeps_float32_loss() -> None:
    params = init(Transformer(TINY), 0)
    exact = loss(Transformer(TINY), params, tokens(2, 17))
    rough = loss(Transformer(TINY, jnp.bfloat16), params, tokens(2, 17))
    assert rough.dtype == jnp.float32
    assert float(rough) == pytest.approx(float(exact), rel=0.02)


def test_leaf_specs_name_every_tensor_and_mark_the_embedding() -> None:
    model = Transformer(TINY)
    specs = specs_of(model)
    leaves = leaves_by_name(init(model, 0))
    assert [s.shape for s in specs] == [leaf.shape for leaf in leaves]
    assert [s for s in specs if s.embedding] == [LeafSpec("embed", (256, 32), embedding=True)]
    assert specs[0].name == "blocks.000.gate"


def test_overrides_replace_their_part_of_the_preset() -> None:
    sizes = sizes_of(ModelConfig(preset="nano", layers=2, d_ff=64))
    assert (sizes.layers, sizes.d_ff, sizes.d_model) == (2, 64, 128)


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(d_model=100, heads=3),
        ModelConfig(heads=4, kv_heads=3),
        ModelConfig(factory="no_such_module:build"),
        ModelConfig(factory="json:no_such_function"),
        ModelConfig(factory="builtins:dict"),
    ],
)
def test_a_model_that_cannot_be_built_is_one_clear_error(
    config: ModelConfig, allow_code: Callable[..., None]
) -> None:
    allow_code("no_such_module", "json", "builtins")
    with pytest.raises(ModelError, match="model"):
        build_model(config, TrainConfig())


class Scalars:
    """The smallest model that follows the protocol."""

    def __init__(self, start: float = 0.0) -> None:
        self.start = start

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        del key
        return {"a": jnp.float32(self.start), "emb": jnp.ones((3,), jnp.float32)}

    def loss(self, params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        return jnp.mean(tokens) * params["a"]


def test_a_factory_of_your_own_gets_its_options(allow_code: Callable[..., None]) -> None:
    allow_code(__name__)
    config = ModelConfig(factory=f"{__name__}:Scalars", options={"start": 2.0})
    model = build_model(config, TrainConfig())
    assert isinstance(model, Scalars)
    assert model.start == 2.0
    assert [s.shape for s in specs_of(model)] == [(), (3,)]


def test_embedding_parts_are_the_models_own_choice() -> None:
    specs = leaf_specs({"emb": jnp.ones((3,), jnp.float32)}, ("emb",))
    assert specs[0].embedding


def test_leaves_are_sorted_by_name_whatever_the_order_of_the_tree() -> None:
    one, two, three = (jnp.full((n,), n, jnp.float32) for n in (1, 2, 3))
    nested = {"a": {"b": one}, "a-c": two, "a.a": three}
    assert [s.name for s in leaf_specs(nested)] == ["a-c", "a.a", "a.b"]
    layout = Layout.of(nested)
    assert layout.leaves(nested) == [two, three, one]
    assert layout.params([two, three, one]) == nested


def test_a_loss_of_tokens_alone_takes_batches_too() -> None:
    text = tokens(2, 9)
    mean, aux = batch_loss(Scalars(2.0))({"a": jnp.float32(3.0)}, {"tokens": text})
    assert float(mean) == pytest.approx(3.0 * float(jnp.mean(text)))
    assert (float(aux.tokens), aux.expert_tokens) == (2 * 8, {})


class Adapted:
    """A frozen base beside an adapter and a stack of two experts."""

    vocab = 9

    def init(self, key: jax.Array) -> Any:
        base = jax.random.normal(key, (4,))
        return {"base": base, "adapter": jnp.zeros(4), "experts": jnp.ones((2, 4))}

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        scale = (params["base"] + params["adapter"]).sum() + params["experts"].sum()
        return scale * tokens.sum()

    def trainable(self, name: str) -> bool:
        return name != "base"

    def unit(self, name: str, shape: tuple[int, ...]) -> int:
        return shape[-1] if name == "experts" else 0


def test_only_what_a_model_trains_is_its_parameters(allow_code: Callable[..., None]) -> None:
    allow_code(__name__)
    config = ModelConfig(factory=f"{__name__}:Adapted")
    model: Any = build_model(config, TrainConfig(seed=3))
    assert specs_of(model) == (
        LeafSpec("adapter", (4,)),
        LeafSpec("experts", (2, 4), unit=4),
        LeafSpec("base", (4,), trainable=False),
    )
    whole = Adapted()
    params, ones = whole.init(jax.random.key(3)), jnp.ones(2)
    trained = {"adapter": params["adapter"] + 1, "experts": params["experts"]}
    found, gradients = jax.jit(jax.value_and_grad(model.loss))(trained, ones)
    assert found == pytest.approx(whole.loss({**params, **trained}, ones))
    assert set(gradients) == {"adapter", "experts"}
    assert model.vocab == 9
    assert not hasattr(model, "logits")


def test_parameters_that_are_not_float32_are_refused() -> None:
    with pytest.raises(ModelError, match="float32"):
        leaf_specs({"a": jnp.ones((3,), jnp.int32)})


@pytest.mark.parametrize(
    ("platform", "capability", "fast"),
    [
        ("cpu", None, False),
        ("gpu", "7.0", False),
        ("gpu", "7.5", False),
        ("gpu", "8.0", True),
        ("gpu", "10.0", True),
        ("gpu", "gfx90a", True),
        ("tpu", None, True),
    ],
)
def test_bfloat16_is_taken_where_the_device_has_it(
    platform: str, capability: str | None, *, fast: bool
) -> None:
    told = {} if capability is None else {"compute_capability": capability}
    assert has_bfloat16(SimpleNamespace(platform=platform, **told)) is fast
