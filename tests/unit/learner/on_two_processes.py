"""One of two processes with four fake devices each: on_two_processes.py ADDRESS PROCESS.

Both hold one model together; a second copy lies on one device of each. What they capture, send and
adopt must be what that one does, bit by bit.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import jax
import numpy as np

from skerry.algorithm import fragments
from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import BLOCK, Fragment, Plan
from skerry.client.encode import quantised_part
from skerry.client.jax_fragments import JaxFragments
from skerry.client.jax_inner import kind_of
from skerry.client.jax_processes import Crew, SharedFragments
from skerry.client.meeting import Group
from skerry.models import mesh
from skerry.models.base import build_model, leaves_by_name, specs_of
from skerry.models.stacks import Stacks, places_of, stacked
from skerry.settings.models import ModelConfig, SyncConfig, TrainConfig

MODEL = ModelConfig(layers=2, d_model=64, heads=4, kv_heads=2, d_ff=128)


def drawn(seed: int, plan: Plan) -> list[Any]:
    """Return leaves of values that bf16 holds, alike in both processes."""
    draw = np.random.default_rng(seed)
    leaves = [draw.normal(size=leaf.shape).astype(np.float32) for leaf in plan.leaves]
    return [(leaf.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for leaf in leaves]


def held(leaves: list[Any], places: Any, names: list[str]) -> dict[str, jax.Array]:
    pairs = zip(leaves, places, strict=True)
    return dict(zip(names, (mesh.put(leaf, place) for leaf, place in pairs), strict=True))


def compare(cut: Fragment, shared: SharedFragments, alone: JaxFragments) -> None:
    """Compare our blocks of a capture with those of the same capture on one device."""
    gradient = shared.capture(cut.index)
    planes, norms = gradient.quantise("int4", cut)
    whole = np.array(alone.capture(cut.index))
    wanted = cpu().quantise("int4", whole)
    own = [n for blocks in shared.own_blocks(cut.index) for n in blocks]
    np.testing.assert_array_equal(planes.codes[own], wanted.codes[own])
    np.testing.assert_array_equal(planes.scales[own], wanted.scales[own])
    decoded = cpu().dequantise("int4", wanted, None)
    ends = zip(cut.slices, cut.offsets, strict=False)
    lengths = [float(np.linalg.norm(decoded[at : at + piece.size])) for piece, at in ends]
    np.testing.assert_allclose(norms, lengths, rtol=1e-5)
    everyone = sorted(n for ranges in gradient.shares.ranges for r in ranges for n in r)
    assert everyone == list(range(cut.padded_size // BLOCK)), "each block is with one process"


def compare_feedback(
    cut: Fragment, shared: SharedFragments, alone: JaxFragments, owed: dict[int, Any]
) -> None:
    """Compare our blocks, and what they do not hold, with error feedback on one device."""
    gradient, index = shared.capture(cut.index), cut.index
    own = [n for blocks in shared.own_blocks(index) for n in blocks]
    before = owed.get(index, np.zeros(cut.padded_size, np.float32))
    mine = before.reshape(-1, BLOCK)[own].reshape(-1)
    planes, squares, residual = quantised_part(gradient, cut, mine)
    meant = np.array(alone.capture(index)) + before
    wanted = cpu().quantise("int2", meant)
    decoded = cpu().dequantise("int2", wanted, None)
    owed[index] = meant - decoded
    np.testing.assert_array_equal(planes.codes[own], wanted.codes[own])
    np.testing.assert_array_equal(planes.scales[own], wanted.scales[own])
    ours = owed[index].reshape(-1, BLOCK)[own].reshape(-1)
    np.testing.assert_array_equal(residual, ours)
    total = float(np.square(decoded.reshape(-1, BLOCK)[own].astype(np.float64)).sum())
    np.testing.assert_allclose(sum(squares), total, rtol=1e-6)


def compare_saves(moments: dict[str, Any], stacks: Stacks) -> None:
    """Compare what this process saves at its end, of moments uncopied, with a save on the way."""
    kind = kind_of(moments, stacks)
    named = kind.named(moments)
    copied, handed = kind.copying()(named), kind.handed(named)
    assert copied.keys() == handed.keys() == kind.described(named).keys()
    for name, tensor in copied.items():
        np.testing.assert_array_equal(np.asarray(handed[name]), np.asarray(tensor), name)


def main(address: str, process: str) -> None:
    group = Group(2, int(process), "", 0)
    with Crew(group, address, None, None).computing():
        model: Any = build_model(MODEL, TrainConfig.model_validate({"layers": sys.argv[4]}))
        stacks: Stacks = model.stacks
        specs, sync = specs_of(model), SyncConfig(fragments=3)
        plan, names = fragments.plan(specs, 3), [spec.name for spec in specs]
        everywhere = mesh.shardings(model, specs, mesh.make_mesh(sys.argv[3]))
        here = [jax.sharding.SingleDeviceSharding(jax.local_devices()[0])] * len(specs)
        places = places_of(dict(zip(names, everywhere, strict=True)), stacks)
        first = drawn(0, plan)

        def on_all(leaves: list[Any]) -> Any:
            named = held(leaves, everywhere, names)
            like = jax.eval_shape(partial(stacked, stacks=stacks), named)
            lying = {name: places[name] for name in like}
            return jax.jit(partial(stacked, stacks=stacks), out_shardings=lying)(named)

        spread = JaxFragments(plan, sync, on_all(first), stacks)
        alone = JaxFragments(plan, sync, held(first, here, names))
        shared = SharedFragments(spread, plan, sync)
        feedback = sync.model_copy(update={"contribution_scheme": "int2"})
        owing, owed = SharedFragments(spread, plan, feedback), dict[int, Any]()
        for round_ in range(2):
            for cut in plan.fragments:
                vector = fragments.gather(cut, drawn(10 + round_, plan))
                shared.adopt(cut.index, vector)
                alone.adopt(cut.index, vector.copy())
            moved = drawn(20 + round_, plan)
            spread.params, alone.params = on_all(moved), held(moved, here, names)
            for cut in plan.fragments:
                compare(cut, shared, alone)
                compare_feedback(cut, owing, alone, owed)
        assert alone.params is not None
        compare_saves({"mu": spread.params}, stacks)
        wanted = stacked(alone.params, stacks)
        for leaf, one in zip(*map(leaves_by_name, (spread.params, wanted)), strict=True):
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(np.array(shard.data), np.array(one)[shard.index])
    print("equal")


if __name__ == "__main__":
    main(*sys.argv[1:3])
