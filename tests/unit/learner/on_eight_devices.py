"""What a learner does on eight fake devices, run by ``test_eight_devices`` in its own process.

Every function is one check. Prints the traceback of each that failed, by name, as JSON.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import re
import sys
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from skerry.algorithm import fragments
from skerry.algorithm.fragments import Fragment, Plan
from skerry.client import encode, inner_state
from skerry.client.jax_fragments import JaxFragments
from skerry.client.jax_inner import kind_of
from skerry.client.mailbox import OutgoingContribution
from skerry.models import mesh
from skerry.models.base import build_model, leaf_specs, leaves_by_name, specs_of
from skerry.models.presets import PRESETS
from skerry.settings.models import DataConfig, ModelConfig, RunConfig, SyncConfig, TrainConfig
from skerry_learner.trainer.step import TrainState
from skerry_learner.trainer.trainer import Programs, Trainer
from tests.support.builders import header

MESHES = ("fsdp=8", "data=2,fsdp=2,tensor=2")


def config_of(
    layers: int = 2, method: str = "rebase", width: int = 64, how: str = "auto"
) -> RunConfig:
    train = {"steps": 30, "lr": 1e-2, "warmup": 0.0, "layers": how}
    return RunConfig(
        model=ModelConfig(layers=layers, d_model=width, heads=4, kv_heads=2, d_ff=2 * width),
        data=DataConfig(batch=8, seq_len=16),
        train=TrainConfig.model_validate(train),
        sync=SyncConfig.model_validate({"adoption": method, "fragments": 5}),
    )


def trainer_of(setting: str, config: RunConfig, *, blank: bool = False) -> tuple[Trainer, Plan]:
    model = build_model(config.model, config.train)
    plan = fragments.plan(specs_of(model), config.sync.fragments)
    devices = jax.devices() if setting else jax.devices()[:1]
    programs = Programs.of(model, config, mesh.make_mesh(setting or "auto", devices))
    return Trainer(model, config, plan, programs, blank=blank), plan


def batch(seed: int = 0) -> Any:
    drawn = np.random.default_rng(seed).integers(0, 256, (8, 17))
    return {"tokens": drawn.astype(np.int32)}


def held(trainer: Trainer) -> list[NDArray[Any]]:
    return [np.array(leaf) for leaf in leaves_by_name(trainer.state.params)]


def noise(fragment: Fragment, plan: Plan, seed: int) -> NDArray[np.float32]:
    draw = np.random.default_rng(seed)
    drawn = [draw.normal(size=spec.shape).astype(np.float32) * 2**-6 for spec in plan.leaves]
    bits = [leaf.view(np.uint32) & np.uint32(0xFFFF0000) for leaf in map(np.atleast_1d, drawn)]
    return fragments.gather(fragment, [leaf.view(np.float32) for leaf in bits])


def trained(params: Any, seed: int) -> Any:
    """Stand in for steps that come out the same on every mesh."""
    draw = np.random.default_rng(seed)

    def changed(leaf: jax.Array) -> jax.Array:
        moved = np.array(leaf) + draw.normal(size=leaf.shape).astype(np.float32)
        return mesh.put(moved, leaf.sharding)

    return jax.tree.map(changed, params)


def like_one_device_bit_by_bit() -> None:  # noqa: C901 - one scene, told three times
    """Genesis, captures and adoptions of equal parameters are equal, with every method."""
    for setting in MESHES:
        ways = [("rebase", "unrolled"), ("rebase", "scanned")]
        for method, how in [("blend", "unrolled"), *ways] if setting == "fsdp=8" else ways:
            config = config_of(method=method, how=how)
            (spread, plan), (alone, _) = trainer_of(setting, config), trainer_of("", config)
            for before, after in zip(held(alone), held(spread), strict=True):
                np.testing.assert_array_equal(before, after)
            for f in plan.fragments:
                np.testing.assert_array_equal(spread.genesis(f.index), alone.genesis(f.index))
            for round_ in range(3):
                for f in plan.fragments:
                    new = noise(f, plan, 10 * round_ + f.index)
                    for trainer in (spread, alone):
                        trainer.adopt(f.index, new.copy())
                    np.testing.assert_array_equal(np.array(spread.fragments.anchor(f.index)), new)
                for trainer in (spread, alone):
                    trainer.fragments.params = trained(trainer.fragments.params, round_)
                for f in plan.fragments[::2]:
                    np.testing.assert_array_equal(spread.capture(f.index), alone.capture(f.index))
            for before, after in zip(held(alone), held(spread), strict=True):
                np.testing.assert_array_equal(before, after)


def trains_as_on_one_device() -> None:
    """The first loss is the same to rounding; Adam turns that into more, within 1 %."""
    (alone, _), *spread = (
        trainer_of(setting, config_of(how=how))
        for setting, how in (("", "unrolled"), (MESHES[1], "unrolled"), (MESHES[0], "scanned"))
    )
    trainers = [alone, *(trainer for trainer, _ in spread)]
    for trainer in trainers:
        trainer.warm(lambda: None)
    for step in range(15):
        first, *others = (float(t.step(batch(step), step / 30).loss) for t in trainers)
        np.testing.assert_allclose(others, first, rtol=1e-2 if step else 1e-5)


def muon_gathers_one_matrix_at_a_time() -> None:
    """Beyond what AdamW holds, few of the largest matrix, and it turns them as one device does."""
    temporaries: dict[str, int] = {}
    for inner in ("adamw", "muon"):
        plain = config_of(layers=4, width=128)
        update = plain.train.model_copy(update={"inner": inner})
        config = plain.model_copy(update={"train": update})
        trainer, plan = trainer_of("fsdp=8", config)
        given = trainer.state, trainer.place(batch()), np.float32(0), np.float32(1), {}
        taken = trainer._programs.step.lower(*given).compile().memory_analysis()
        temporaries[inner] = taken.temp_size_in_bytes
        losses = [float(trainer.step(batch(n), 0.1).loss) for n in range(2)]
    largest = 4 * max(spec.size for spec in plan.leaves)
    assert temporaries["muon"] - temporaries["adamw"] < 3 * largest, (temporaries, largest)
    alone, _ = trainer_of("", config)
    wanted = [float(alone.step(batch(n), 0.1).loss) for n in range(2)]
    np.testing.assert_allclose(losses, wanted, rtol=1e-3)


def each_device_sends_its_own_rows_to_experts() -> None:
    """A mixture of experts trains as on one device, with the same counts of routed tokens."""
    small = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    experts = {"num_experts": 4, "moe_intermediate_size": 64, "vocab_size": 256}
    text = json.dumps({**PRESETS["moe-0.3b"], **small, **experts})
    config = config_of().model_copy(update={"model": ModelConfig(config=text)})
    alone, _ = trainer_of("", config)
    losses = [float(alone.step(batch(n), 0.1).loss) for n in range(3)]
    for setting in ("data=8", "fsdp=4,expert=2"):
        spread, _ = trainer_of(setting, config)
        found = [float(spread.step(batch(n), 0.1).loss) for n in range(3)]
        np.testing.assert_allclose(found, losses, rtol=1e-3)
        for name, count in alone.routed.items():
            np.testing.assert_array_equal(np.array(spread.routed[name]), np.array(count), name)


def one_program_at_a_time_is_in_flight() -> None:
    """The devices of a CPU share its threads: whatever a learner dispatches there has an end."""
    small = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    experts = {"num_experts": 4, "moe_intermediate_size": 64, "vocab_size": 256}
    text = json.dumps({**PRESETS["moe-0.3b"], **small, **experts})
    config = config_of().model_copy(update={"model": ModelConfig(config=text)})
    trainer, plan = trainer_of("data=2,fsdp=4", config)
    kind = trainer.moments_kind()
    copy = kind.copying()
    ended("init")
    for f in plan.fragments:
        trainer.genesis(f.index)
        ended("genesis")
        trainer.adopt(f.index, noise(f, plan, f.index))
        ended("adopt")
    trainer.step(batch(), 0.1)
    ended("step")
    for f in plan.fragments:
        trainer.capture(f.index)
        ended("capture")
        trainer.adopt(f.index, noise(f, plan, f.index))
        ended("adopt by rebase")
    held = kind.named(trainer.moments)
    kept = copy(held)
    ended("copy")
    trainer.reset()
    ended("reset")
    del kept


def explicit_axes_stay_as_they_are() -> None:
    """Leaves on a mesh as ``jax.make_mesh`` makes it are read and written, and lie as before."""
    rows = jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), jax.sharding.PartitionSpec("x"))
    values = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    params = {"w": jax.device_put(values, rows)}
    plan = fragments.plan(leaf_specs(params), 2)
    held = JaxFragments(plan, SyncConfig(fragments=2), params)
    held.warm(lambda: None)
    for f in plan.fragments:
        vector = noise(f, plan, f.index)
        held.adopt(f.index, vector)
        np.testing.assert_array_equal(np.array(held.capture(f.index)), np.zeros_like(vector))
    (leaf,) = jax.tree.leaves(held.params)
    assert leaf.sharding == rows
    whole = np.array(leaf)
    assert all(
        np.array_equal(fragments.gather(f, [whole]), noise(f, plan, f.index))
        for f in plan.fragments
    )


def ended(what: str) -> None:
    assert all(array.is_ready() for array in jax.live_arrays()), what


def on_first() -> int:
    """Return the bytes that live on the first device."""
    shards = {
        id(shard.data): shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
        if shard.device == jax.devices()[0]
    }
    return sum(shards.values())


def each_device_holds_an_eighth() -> None:
    """Parameters, moments and anchors over eight devices, within 5 %, and nothing else lives.

    So it is when all is compiled, after a step, and while the inner state is saved, but for the
    portion on its way; with layers one by one, and in stacks.
    """
    for how in ("unrolled", "scanned"):
        _each_device_holds_an_eighth(config_of(width=256, how=how))
        gc.collect()


def _each_device_holds_an_eighth(config: RunConfig) -> None:
    trainer, plan = trainer_of("fsdp=8", config, blank=True)
    trainer.warm(lambda: None)
    assert on_first() < 1.05 * 12 * plan.parameters / 8, "the end of warm-up: no anchors yet"
    for f in plan.fragments:
        trainer.adopt(f.index, noise(f, plan, f.index))
    trainer.step(batch(), 0.1)
    wanted = 14 * plan.parameters / 8
    assert on_first() < 1.05 * wanted, (on_first(), wanted)
    kind = trainer.moments_kind()
    copy, arrays = kind.copying(), kind.named(trainer.moments)
    inner_state.LEAST_PORTION = 1  # the model is tiny
    portion = max(8 * plan.parameters / 16, 4 * max(leaf.size for leaf in plan.leaves)) / 8
    for names in inner_state.portions_of(arrays):
        copied = copy({name: arrays[name] for name in names})
        assert on_first() < 1.05 * (wanted + portion), (names, on_first())
        del copied
    params = leaves_by_name(trainer.state.params)
    moments = jax.tree.leaves(trainer.state.optimizer)
    anchors = [part for f in plan.fragments for part in trainer.fragments.anchor(f.index).parts]
    for name, held_by, each in (
        ("parameters", params, 4),
        ("moments", moments, 8),
        ("anchors", anchors, 2),
    ):
        mine = sum(array.addressable_shards[0].data.nbytes for array in held_by)
        assert abs(mine - each * plan.parameters / 8) < 0.05 * each * plan.parameters / 8, name


def moments_of_a_loop_of_ones_own_are_copied() -> None:
    """As optax makes them: the count lies on one device alone, until a step moves it."""
    place = mesh.by_rows(mesh.make_mesh("fsdp=8"))
    fresh = {"count": jnp.int32(0), "mu": mesh.put(np.ones((16, 4), np.float32), place)}
    stepped = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree))(fresh)
    kind = kind_of(fresh)
    copy = kind.copying()
    for state in (fresh, stepped):
        assert len(state["mu"].sharding.device_set) == 8
        for name, copied in copy(kind.named(state)).items():
            np.testing.assert_array_equal(np.asarray(copied), np.asarray(state[name]), name)


def frozen_weights_are_spread() -> None:
    """Beside adapters each device holds an eighth of the frozen weights, which change no loss."""
    plain = config_of(width=256)
    adapted = plain.model.model_copy(update={"lora_rank": 2})
    config = plain.model_copy(update={"model": adapted})
    (spread, plan), (alone, _) = trainer_of("fsdp=8", config), trainer_of("", config)
    frozen = spread._programs.frozen
    assert frozen.keys() == {spec.name for spec in plan.frozen}
    mine = sum(leaf.addressable_shards[0].data.nbytes for leaf in frozen.values())
    total = sum(leaf.nbytes for leaf in frozen.values())
    assert mine < 1.05 * total / 8, (mine, total)
    losses = [[float(t.step(batch(n), 0.1).loss) for n in range(3)] for t in (spread, alone)]
    np.testing.assert_allclose(*losses, rtol=1e-3)
    for name, leaf in alone._programs.frozen.items():
        np.testing.assert_array_equal(np.array(frozen[name]), np.array(leaf), name)


def the_formula_is_what_a_step_takes() -> None:
    """The estimate of a step's memory is what XLA says, within a fifth.

    On a CPU blocks keep all that they compute, whatever ``remat`` says: that is not compared.
    """
    for setting, layers, how, rows in (
        ("fsdp=8", 2, "unrolled", (32, 128)),
        ("data=2,fsdp=4", 2, "unrolled", (32, 128)),
        ("fsdp=8", 24, "scanned", (8, 16)),
    ):
        data = DataConfig(batch=rows[0], seq_len=rows[1])
        config = config_of(layers=layers, width=128, how=how).model_copy(update={"data": data})
        model, on = build_model(config.model, config.train), mesh.make_mesh(setting)
        programs = Programs.of(model, config, on)
        need, places = programs.need, programs.places
        shapes = jax.eval_shape(programs.init, jax.random.key(0))
        moments = jax.eval_shape(programs.init_moments, shapes)
        state = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            TrainState(shapes, moments),
            places,
        )
        shape = data.batch, data.seq_len + 1
        tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=mesh.by_rows(on))
        lowered = programs.step.lower(state, {"tokens": tokens}, np.float32(0), np.float32(1))
        found: Any = lowered.compile().memory_analysis()
        wanted = need.gradients + need.activations
        assert abs(found.temp_size_in_bytes / wanted - 1) < 0.2, (found, need)
        held = need.parameters + need.moments
        assert abs(found.argument_size_in_bytes / held - 1) < 0.05, (found, need)


def no_leaf_is_gathered() -> None:
    """No program has a leaf gathered: adopting, a device is given no more than it holds.

    That is where a mesh copies parameters: each device has adopted a part of them. Of a stack no
    program moves more than a row.
    """
    for setting, how in itertools.product(MESHES, ("unrolled", "scanned")):
        trainer, plan = trainer_of(setting, config_of(layers=6, how=how))
        sizes = {leaf.name: leaf.size for leaf in plan.leaves}
        sizes |= {stack: sizes[held[0]] for stack, held in trainer._programs.stacks.items()}
        copies = mesh.sizes_on(trainer._programs.mesh).data
        for name, program in trainer.fragments.programs():
            kind, leaf = name.split("[")[0].split(" ")
            if "norm" in name:
                continue  # small: every device holds it
            made = program.compile()
            found = re.findall(r"\[([\d,]+)\]\S* all-gather", made.as_text())
            gathered = [math.prod(map(int, shape.split(","))) for shape in found]
            own = sizes[leaf] * copies // 8 if copies > 1 and kind == "adopt" else 0
            assert max(gathered, default=0) <= own, (setting, how, name, gathered)
            passing = made.memory_analysis().temp_size_in_bytes
            most = 4 * 3 * sizes[leaf] * copies / 8 + 4096
            assert passing < most, (setting, how, name, passing, most)


def quantised_where_it_lies() -> None:
    """What leaves the mesh is what the host's kernels make of the same gradient, bit by bit."""
    trainer, plan = trainer_of("fsdp=4,tensor=2", config_of())
    for f in plan.fragments:
        item = OutgoingContribution(header(), trainer.genesis(f.index), "int4")
        on_mesh, norms = trainer.fragments.genesis(f.index).quantise("int4", f)
        on_host, host_norms, _ = encode._on_host(item, f, None, feedback=False)
        np.testing.assert_array_equal(on_mesh.codes, on_host.codes)
        np.testing.assert_array_equal(on_mesh.scales, on_host.scales)
        np.testing.assert_allclose(norms, host_norms, rtol=1e-5)


def layers_share_their_programs() -> None:
    """Warming compiles about as much for 12 layers as for 3, and later nothing more."""
    made: dict[int, int] = {}
    for layers in (3, 12):
        before = compiled.count
        trainer, plan = trainer_of("fsdp=8", config_of(layers=layers, width=128))
        trainer.fragments.warm(lambda: None)
        made[layers] = compiled.count - before
        for f in plan.fragments:
            trainer.adopt(f.index, noise(f, plan, 0))
            trainer.capture(f.index)
            trainer.adopt(f.index, noise(f, plan, 1))
            jax.block_until_ready(jax.live_arrays())
    assert made[12] <= made[3] + 8, made


def a_return_goes_on() -> None:
    """A learner that was killed takes up parameters from the log and moments from its disk."""
    config = config_of()
    first, plan = trainer_of("fsdp=8", config)
    for f in plan.fragments:
        first.adopt(f.index, noise(f, plan, f.index))
    for step in range(3):
        first.step(batch(step), step / 30)
    names = [name for name, _ in named(first)]
    saved = {name: np.array(leaf) for name, leaf in named(first)}
    for setting in ("fsdp=8", "data=2,fsdp=2,tensor=2"):
        again, _ = trainer_of(setting, config, blank=True)
        for f in plan.fragments:
            again.adopt(f.index, noise(f, plan, f.index))
        again.restore_moments(saved)
        assert [name for name, _ in named(again)] == names
        for name, leaf in named(again):
            np.testing.assert_array_equal(np.array(leaf), saved[name])
        assert np.isfinite(float(again.step(batch(9), 0.2).loss))


def named(trainer: Trainer) -> list[tuple[str, Any]]:
    found = jax.tree_util.tree_flatten_with_path(trainer.state.optimizer)[0]
    return [(jax.tree_util.keystr(p, simple=True, separator="."), leaf) for p, leaf in found]


class Compiled:
    """Counts what XLA compiles."""

    count = 0

    def __call__(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        self.count += event == "/jax/core/compile/backend_compile_duration"


compiled = Compiled()
CHECKS = (
    like_one_device_bit_by_bit,
    trains_as_on_one_device,
    muon_gathers_one_matrix_at_a_time,
    each_device_holds_an_eighth,
    moments_of_a_loop_of_ones_own_are_copied,
    frozen_weights_are_spread,
    the_formula_is_what_a_step_takes,
    each_device_sends_its_own_rows_to_experts,
    no_leaf_is_gathered,
    quantised_where_it_lies,
    layers_share_their_programs,
    a_return_goes_on,
    one_program_at_a_time_is_in_flight,
    explicit_axes_stay_as_they_are,
)


def main() -> None:
    jax.monitoring.register_event_duration_secs_listener(compiled)
    failed: dict[str, str] = {}
    by_name = {check.__name__: check for check in CHECKS}
    for check in [by_name[name] for name in sys.argv[1:]] or CHECKS:
        began_s = time.perf_counter()
        try:
            check()
        except Exception:  # noqa: BLE001 - reported, and the next one is tried
            failed[check.__name__] = traceback.format_exc()
        print(check.__name__, round(time.perf_counter() - began_s, 1), file=sys.stderr)
    print(json.dumps(failed))


if __name__ == "__main__":
    main()
