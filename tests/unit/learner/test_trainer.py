"""The training step and fragments on the device."""

from __future__ import annotations

import json
import logging
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from skerry.algorithm import adoption, fragments
from skerry.algorithm.fragments import Plan
from skerry.client.inner_state import shapes_in
from skerry.client.jax_inner import flat
from skerry.models.base import Model, build_model, leaves_by_name, specs_of, token_loss
from skerry.models.decoder import Decoder
from skerry.settings.models import DataConfig, ModelConfig, RunConfig, SyncConfig, TrainConfig
from skerry_learner.trainer.trainer import Programs, Trainer
from tests.support.hf_folder import MOE

MODEL = ModelConfig(layers=1, d_model=32, heads=2, kv_heads=1, d_ff=40, vocab=256)


@cache
def compiled(method: str) -> tuple[Model, RunConfig, Programs]:
    """Make what the trainers of all tests share."""
    config = RunConfig(
        model=MODEL,
        data=DataConfig(batch=2, seq_len=16),
        train=TrainConfig(steps=30, lr=1e-2, warmup=0.0),
        sync=SyncConfig.model_validate({"adoption": method, "blend_alpha": 0.25}),
    )
    model = build_model(MODEL, config.train)
    return model, config, Programs.of(model, config)


def trainer_of(
    method: str = "rebase", fragment_count: int = 3, *, blank: bool = False
) -> tuple[Trainer, Plan]:
    model, config, programs = compiled(method)
    plan = fragments.plan(specs_of(model), fragment_count)
    return Trainer(model, config, plan, programs, blank=blank), plan


def batch(seed: int = 0) -> dict[str, jax.Array]:
    return {"tokens": jax.random.randint(jax.random.key(seed), (2, 17), 0, 256)}


def local(trainer: Trainer, plan: Plan, fragment: int) -> NDArray[np.float32]:
    leaves = [np.array(leaf) for leaf in leaves_by_name(trainer.state.params)]
    return fragments.gather(plan.fragments[fragment], leaves)


def as_global(values: NDArray[Any]) -> NDArray[np.float32]:
    """Cut values down to what bf16 holds."""
    bits = np.asarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def noise(plan: Plan, fragment: int, seed: int) -> NDArray[np.float32]:
    """A global fragment: values of bf16 and zeros in the padding, as the wire decodes it."""
    draw = np.random.default_rng(seed)
    leaves = [as_global(draw.normal(size=spec.shape)) for spec in plan.leaves]
    return fragments.gather(plan.fragments[fragment], leaves)


def break_norm(trainer: Trainer) -> None:
    """Make a parameter infinite."""
    broken: Any = dict(trainer.state.params)
    broken["model.norm.weight"] = broken["model.norm.weight"].at[0].set(jnp.inf)
    trainer.state = trainer.state._replace(params=broken)


def test_steps_lower_the_loss_on_one_batch() -> None:
    trainer, _ = trainer_of()
    losses = [float(trainer.step(batch(), step / 30).loss) for step in range(15)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.drill
def test_a_mixture_counts_the_tokens_that_taught_each_expert() -> None:
    config = RunConfig(
        model=ModelConfig(config=json.dumps(MOE)),
        data=DataConfig(batch=2, seq_len=16),
        train=TrainConfig(steps=30, lr=1e-2, warmup=0.0),
    )
    model = build_model(config.model, config.train)
    cut = fragments.plan(specs_of(model), 3)
    trainer = Trainer(model, config, cut)
    trainer.warm(lambda: None)
    assert trainer.routed == {}
    trainer.step(batch(), 0.1)
    first = dict(trainer.routed)
    trainer.step(batch(1), 0.1)
    units = {leaf.name for leaf in cut.leaves if leaf.unit}
    assert units == trainer.routed.keys()
    chosen = 2 * 16 * MOE["num_experts_per_tok"]
    assert all(int(first[name].sum()) == chosen for name in units)
    assert all(int(trainer.routed[name].sum()) == 2 * chosen for name in units)
    before = trainer.routed
    trainer.state = trainer.state._replace(
        params={name: leaf * jnp.nan for name, leaf in trainer.state.params.items()}
    )
    trainer.step(batch(), 0.1)
    assert all(np.array_equal(trainer.routed[name], before[name]) for name in units)


def looped(layers: str, inner: str = "adamw") -> tuple[Trainer, Plan]:
    """Return a trainer of three layers, by how a program has them."""
    train = {"steps": 30, "lr": 1e-2, "warmup": 0.0, "inner": inner, "layers": layers}
    config = RunConfig(
        model=MODEL.model_copy(update={"layers": 3}),
        data=DataConfig(batch=2, seq_len=16),
        train=TrainConfig.model_validate(train),
    )
    model = build_model(config.model, config.train)
    plan = fragments.plan(specs_of(model), 4)
    return Trainer(model, config, plan), plan


@pytest.mark.parametrize("inner", ["adamw", "muon"])
@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
def test_moments_are_saved_by_leaf_however_layers_are_held(layers: str, inner: str) -> None:
    before, after = looped(layers, inner)[0], looped("scanned", inner)[0]
    for step in range(2):
        before.step(batch(step), 0.1)
    kind = before.moments_kind()
    arrays = kind.named(before.moments)
    assert shapes_in(arrays) == after.moments_kind().shapes
    copied = kind.copying()(arrays)
    after.restore_moments({name: np.array(copied[name]) for name in arrays})
    held = after.moments_kind()
    found = held.copying()(held.named(after.moments))
    assert found.keys() == copied.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, copied[name], name)


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_layers_in_a_loop_are_stacks_and_train_as_they_do_one_by_one(inner: str) -> None:
    found: list[list[NDArray[np.float32]]] = []
    for layers in ("unrolled", "scanned"):
        trainer, plan = looped(layers, inner)
        assert any(leaf.ndim == 3 for leaf in trainer.state.params.values()) == (
            layers == "scanned"
        )
        first = [as_global(-np.array(trainer.genesis(f.index))) for f in plan.fragments]
        for f in plan.fragments:
            trainer.adopt(f.index, first[f.index])
        for step in range(3):
            trainer.step(batch(step), 0.1)
        moved = [np.array(trainer.capture(f.index)) for f in plan.fragments]
        for f in plan.fragments:
            trainer.adopt(f.index, as_global(first[f.index] - moved[f.index]))
        trainer.reset()
        trainer.step(batch(), 0.1)
        found.append(
            [*first, *moved, *(np.array(trainer.capture(f.index)) for f in plan.fragments)]
        )
    for apart, stacked in zip(*found, strict=True):
        differ = stacked - apart
        far = np.abs(differ) > 0.01 * np.abs(apart).max()
        assert far.mean() < 1e-3  # Adam turns an element whose gradient is nothing but rounding
        assert np.linalg.norm(differ[~far]) < 1e-3 * np.linalg.norm(apart)


def test_a_step_that_is_not_finite_changes_nothing_and_says_so() -> None:
    trainer, plan = trainer_of()
    break_norm(trainer)
    before = [local(trainer, plan, f) for f in range(3)]
    result = trainer.step(batch(), 0.5)
    assert not bool(result.finite)
    for fragment in range(3):
        np.testing.assert_array_equal(local(trainer, plan, fragment), before[fragment])


def test_bare_gradients_are_what_a_step_takes_away_unless_they_are_not_finite() -> None:
    config = RunConfig(mode="data-parallel", model=MODEL, data=DataConfig(batch=2, seq_len=16))
    model = build_model(MODEL, config.train)
    plan = fragments.plan(specs_of(model), 1)
    trainer = Trainer(model, config, plan)
    trainer.adopt(0, local(trainer, plan, 0))
    loss, gradients = jax.jit(jax.value_and_grad(token_loss(model)))(
        trainer.state.params, batch()["tokens"]
    )
    result = trainer.step(batch(), 0.5, share=0.1)
    sent = np.array(trainer.capture(0))
    wanted = fragments.gather(plan.fragments[0], [np.array(g) for g in leaves_by_name(gradients)])
    np.testing.assert_allclose(sent, wanted, rtol=0, atol=2e-7)
    assert float(result.loss) == pytest.approx(float(loss), rel=1e-6)
    assert not jax.tree.leaves(trainer.moments_like()), "no moments are kept"
    break_norm(trainer)
    before = local(trainer, plan, 0)
    assert not bool(trainer.step(batch(), 0.5).finite)
    np.testing.assert_array_equal(local(trainer, plan, 0), before)


def test_nothing_is_compiled_after_warming(caplog: pytest.LogCaptureFixture) -> None:
    trainer, plan = trainer_of()
    vectors = [local(trainer, plan, f) for f in range(3)]
    trainer.warm(lambda: None)
    jax.block_until_ready(trainer.step(batch(), 0.1).loss)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for captured in (False, False, True, False):  # at first, not answered, answered, missed
            for fragment, vector in enumerate(vectors):
                if captured:
                    trainer.capture(fragment)
                trainer.adopt(fragment, vector.copy())
    assert [text for text in caplog.messages if text.startswith("Compiling")] == []


def test_warming_leaves_a_fresh_state() -> None:
    trainer, plan = trainer_of()
    before = local(trainer, plan, 1)
    ticks: list[None] = []
    trainer.warm(lambda: ticks.append(None))
    np.testing.assert_array_equal(local(trainer, plan, 1), before)
    assert ticks


def test_genesis_is_the_negated_initial_fragment() -> None:
    trainer, plan = trainer_of()
    np.testing.assert_array_equal(trainer.genesis(0), -local(trainer, plan, 0))


@pytest.mark.parametrize("method", ["overwrite", "blend", "rebase"])
@pytest.mark.parametrize("fragment_count", [1, 7])
def test_the_first_adoption_takes_the_global_value_bit_by_bit(
    method: str, fragment_count: int
) -> None:
    trainer, plan = trainer_of(method, fragment_count)
    last = fragment_count - 1
    vector = noise(plan, last, 1)
    trainer.adopt(last, vector.copy())
    np.testing.assert_array_equal(local(trainer, plan, last), vector)
    np.testing.assert_array_equal(np.array(trainer.fragments.anchor(last)), vector)


def test_a_blank_trainer_traces_its_models_init_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, config, _ = compiled("rebase")
    config = config.model_copy(update={"train": TrainConfig(inner="muon")})
    model, traced, init = build_model(MODEL, config.train), list[Any](), Decoder.init

    def counted(self: Decoder, key: jax.Array) -> dict[str, jax.Array]:
        traced.append(key)
        return init(self, key)

    monkeypatch.setattr(Decoder, "init", counted)
    cut = fragments.plan(specs_of(model), 3)
    Trainer(model, config, cut, Programs.of(model, config), blank=True)
    assert len(traced) == 1


def test_a_blank_trainer_that_has_adopted_everything_trains_like_any_other() -> None:
    (blank, plan), (other, _) = trainer_of(blank=True), trainer_of()
    blank.warm(lambda: None)
    for trainer in (blank, other):
        for fragment in range(3):
            trainer.adopt(fragment, noise(plan, fragment, fragment))
        trainer.step(batch(), 0.1)
    for fragment in range(3):
        np.testing.assert_array_equal(local(blank, plan, fragment), local(other, plan, fragment))


def after_a_round(method: str, *, captured: bool) -> tuple[NDArray[np.float32], ...]:
    """Adopt, train, perhaps capture, train, adopt: (anchor, at capture, before, global, after)."""
    trainer, plan = trainer_of(method)
    anchor, new = noise(plan, 1, 1) * np.float32(2**-6), noise(plan, 1, 2)
    trainer.adopt(1, anchor.copy())
    trainer.step(batch(), 0.1)
    at_capture = local(trainer, plan, 1)
    if captured:
        gradient = trainer.capture(1)
        np.testing.assert_array_equal(gradient, anchor - at_capture)
    trainer.step(batch(1), 0.2)
    before = local(trainer, plan, 1)
    trainer.adopt(1, new.copy())
    np.testing.assert_array_equal(np.array(trainer.fragments.anchor(1)), new)
    return anchor, at_capture, before, new, local(trainer, plan, 1)


@pytest.mark.parametrize(
    ("method", "captured"),
    [("overwrite", True), ("blend", True), ("rebase", True), ("rebase", False)],
)
def test_adoption_follows_the_formula_of_its_method(
    method: adoption.Method, *, captured: bool
) -> None:
    anchor, at_capture, before, new, after = after_a_round(method, captured=captured)
    base = at_capture if captured else anchor
    expected = adoption.adopt(method, before, base, new, np.float32(0.25))
    tolerance = 1e-6 if method == "blend" else 0
    np.testing.assert_allclose(after, expected, rtol=tolerance, atol=tolerance)


def test_a_reset_falls_back_to_the_anchors_and_loses_nothing_in_flight() -> None:
    trainer, plan = trainer_of()
    anchors = [noise(plan, f, f) * np.float32(2**-6) for f in range(3)]
    for fragment, anchor in enumerate(anchors):
        trainer.adopt(fragment, anchor.copy())
    trainer.step(batch(), 0.1)
    trainer.capture(2)
    trainer.reset()
    for fragment, anchor in enumerate(anchors):
        np.testing.assert_array_equal(local(trainer, plan, fragment), anchor)
    new = noise(plan, 2, 9)
    trainer.adopt(2, new.copy())
    np.testing.assert_array_equal(local(trainer, plan, 2), new)


def test_restored_moments_make_the_next_step_the_same() -> None:
    """Parameters come from the log, moments from disk: together they are the whole state."""
    before, _ = trainer_of()
    for seed in range(3):
        before.step(batch(seed), 0.5)
    held = jax.tree.map(np.array, before.state)
    after, _ = trainer_of()
    tensors = jax.tree.leaves(held.optimizer)
    after.restore_moments(dict(zip(shapes_in(flat(held.optimizer)), tensors, strict=True)))
    after.state = after.state._replace(params=jax.tree.map(jnp.array, held.params))
    for trainer in (before, after):
        trainer.step(batch(9), 0.6)
    for one, other in zip(jax.tree.leaves(before.state), jax.tree.leaves(after.state), strict=True):
        np.testing.assert_array_equal(one, other)


def test_restored_moments_are_the_devices_own_and_can_be_given_to_a_step() -> None:
    trainer, _ = trainer_of()
    shapes = shapes_in(flat(trainer.moments_like()))
    given = {name: np.full(shape, 2, dtype) for name, (shape, dtype) in shapes.items()}
    trainer.restore_moments(given)
    trainer.step(batch(), 0.5)
    assert all((tensor == 2).all() for tensor in given.values()), "a step wrote into our memory"


def test_share_of_the_rate_scales_the_step() -> None:
    moved: list[NDArray[np.float32]] = []
    for share in (1.0, 0.25):
        trainer, plan = trainer_of()
        before = local(trainer, plan, 0)
        trainer.step(batch(), 0.5, share)
        moved.append(local(trainer, plan, 0) - before)
    np.testing.assert_allclose(moved[1], 0.25 * moved[0], rtol=1e-3, atol=1e-7)
