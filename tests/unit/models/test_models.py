"""The built-in decoder and the model protocol."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skerry.algorithm.fragments import LeafSpec
from skerry.errors import ModelError
from skerry.models.arch import arch_from
from skerry.models.base import (
    Layout,
    batch_loss,
    build_model,
    has_bfloat16,
    leaf_specs,
    leaves_by_name,
    specs_of,
    token_loss,
    whole,
)
from skerry.models.decoder import Decoder
from skerry.models.mesh import frozen_leaves
from skerry.models.presets import PRESETS, arch_of, written_out
from skerry.models.tensors import leaf_specs_of
from skerry.settings.models import ModelConfig, TrainConfig

TINY = {**PRESETS["nano"], "head_dim": 8, "num_hidden_layers": 2, "intermediate_size": 48}


def decoder(d_model: int = 32, **keys: Any) -> Decoder:
    """Make a small decoder; ``keys`` replace those of its config."""
    return Decoder(arch_from(TINY | {"hidden_size": d_model} | keys))


def init(model: Decoder, seed: int = 0) -> Any:
    return jax.jit(model.init)(jax.random.key(seed))


def loss(model: Decoder, params: Any, text: jax.Array) -> jax.Array:
    return jax.jit(token_loss(model))(params, text)


def logits(model: Decoder, params: Any, text: jax.Array) -> jax.Array:
    return jax.jit(model.logits)(params, text)


def tokens(batch: int, seq: int, seed: int = 1) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, seq), 0, 256)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_tensors_named_without_jax_are_those_that_the_model_builds(preset: str) -> None:
    arch = arch_of(ModelConfig.model_validate({"preset": preset, "vocab": 512}))
    assert leaf_specs_of(arch) == specs_of(Decoder(arch))


SIZES = {
    "nano": 0.77e6,
    "micro": 4.5e6,
    "small": 75.7e6,
    "base": 271e6,
    "0.1b": 98e6,
    "0.3b": 303e6,
    "1b": 984e6,
    "3b": 3.02e9,
    "7b": 7.25e9,
    "12b": 11.7e9,
    "moe-0.3b": 270e6,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_size_that_they_are_named_for(preset: str) -> None:
    specs = leaf_specs_of(arch_of(ModelConfig.model_validate({"preset": preset})))
    assert sum(leaf.size for leaf in specs) == pytest.approx(SIZES[preset], rel=0.01)


@pytest.mark.parametrize(("width", "tied"), [(32, True), (1024, True), (256, False)])
def test_a_fresh_model_predicts_about_uniformly(width: int, *, tied: bool) -> None:
    model = decoder(d_model=width, tie_word_embeddings=tied)
    params = init(model)
    assert float(loss(model, params, tokens(4, 33))) == pytest.approx(math.log(256), abs=0.3)


def test_equal_keys_give_equal_parameters_and_others_differ() -> None:
    model = decoder()
    one, two, other = init(model, 0), init(model, 0), init(model, 1)
    name = "model.embed_tokens.weight"
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, two))
    assert not np.array_equal(one[name], other[name])


def test_no_position_sees_what_comes_after_it() -> None:
    model = decoder()
    params, text = init(model), tokens(1, 12)
    before = logits(model, params, text)
    after = logits(model, params, text.at[0, 8].set((text[0, 8] + 1) % 256))
    np.testing.assert_array_equal(before[:, :8], after[:, :8])
    assert not np.allclose(before[:, 8:], after[:, 8:], atol=1e-3)


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    model, texts = decoder(), tokens(3, 9, seed=2)
    params = init(model)
    alone = [logits(model, params, texts[row : row + 1])[0] for row in range(3)]
    together = logits(model, params, texts)
    np.testing.assert_allclose(together, np.stack(alone), rtol=1e-4, atol=1e-5)
    assert not np.allclose(together[0], together[1], atol=1e-3)


def test_bfloat16_arithmetic_stays_close_and_keeps_float32_loss() -> None:
    model = decoder()
    params = init(model)
    exact = loss(model, params, tokens(2, 17))
    rough = loss(replace(model, compute=jnp.bfloat16), params, tokens(2, 17))
    assert rough.dtype == jnp.float32
    assert float(rough) == pytest.approx(float(exact), rel=0.02)


def test_leaf_specs_name_every_tensor_and_mark_the_embedding() -> None:
    model = decoder()
    specs = specs_of(model)
    leaves = leaves_by_name(init(model, 0))
    assert [s.shape for s in specs] == [leaf.shape for leaf in leaves]
    table = LeafSpec("model.embed_tokens.weight", (256, 32), embedding=True)
    assert [s for s in specs if s.embedding] == [table]
    assert specs[1].name == "model.layers.0.input_layernorm.weight"


def test_overrides_replace_their_part_of_the_preset() -> None:
    arch = arch_of(ModelConfig(preset="nano", layers=2, d_ff=64))
    assert (len(arch.layers), arch.layers[0].mlp, arch.width) == (2, 64, 128)
    text = json.dumps(dict(PRESETS["moe-0.3b"]))
    assert len(arch_of(ModelConfig(config=text, layers=3)).layers) == 3


def test_a_run_records_the_text_of_a_folders_config_and_not_its_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(PRESETS["1b"])))
    given = ModelConfig(path=str(tmp_path), vocab=64)
    recorded = written_out(given)
    assert not recorded.path
    assert arch_of(recorded) == arch_of(given)
    assert written_out(recorded) == recorded


def test_a_factory_gets_the_precision_if_it_takes_one(allow_code: Callable[..., None]) -> None:
    allow_code(__name__)
    config = ModelConfig(factory=f"{__name__}:precise")
    model: Any = build_model(config, TrainConfig(precision="bfloat16"))
    assert model.start == "bfloat16"


def precise(precision: Any) -> Any:
    return Scalars(precision)


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(d_model=100, heads=4, kv_heads=1),
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


class Wrong:
    """A model whose loss is one that a person may write."""

    def __init__(self, loss: Callable[[jax.Array], Any]) -> None:
        self._loss = loss

    def init(self, key: jax.Array) -> Any:
        return {"a": jax.random.normal(key)}

    def loss(self, _: Any, tokens: jax.Array) -> Any:
        return self._loss(jnp.float32(tokens))


@pytest.mark.parametrize(
    ("loss", "about"),
    [
        (lambda x: x, r"loss returned numbers of shape \(2, 9\)"),
        (lambda x: (x.mean(), {}), "loss returned tuple"),
        (lambda x: x @ x, r"loss failed \(.*; test_models\.py, line \d+\)"),
        (lambda x: x.mean() if x.mean() > 1 else x.sum(), "loss failed .*conversion of traced"),
    ],
)
def test_a_models_own_loss_that_is_wrong_is_one_sentence(
    loss: Callable[[jax.Array], Any], about: str
) -> None:
    with pytest.raises(ModelError, match=about) as raised:
        jax.eval_shape(batch_loss(Wrong(loss)), {}, {"tokens": tokens(2, 9)})
    assert len(str(raised.value).splitlines()) == 1


class Adapted:
    """A frozen base beside an adapter and a stack of two experts."""

    vocab = 9
    stacks: ClassVar = {"all": ("base", "adapter")}

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
    params, ones = Adapted().init(jax.random.key(3)), jnp.ones(2)
    trained = {"adapter": params["adapter"] + 1, "experts": params["experts"]}
    frozen = frozen_leaves(model)
    assert set(frozen) == {"base"}
    found = jax.jit(model.loss)(whole(trained, frozen), ones)
    assert found == pytest.approx(Adapted().loss({**params, **trained}, ones))
    assert model.vocab == 9
    assert not hasattr(model, "logits")
    assert not model.stacks, "they hold a leaf that is not trained"


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
