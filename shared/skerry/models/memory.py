"""The memory that a learner needs on each device: one formula, for its own check and for a plan.

Without JAX. Parameters, moments and anchors are exact; activations are an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from skerry.algorithm.fragments import LeafSpec
from skerry.algorithm.schedule import Schedule, learner_room
from skerry.models.arch import Arch, Layer
from skerry.models.axes import LogicalAxes, MeshSizes, held_elements
from skerry.models.layers import runs_of
from skerry.models.names import AXES
from skerry.models.tensors import leaf_specs_of
from skerry.settings.models import SyncConfig, TrainConfig

F32, BF16 = 4, 2
MOMENTS = {"gradient": 0, "muon": 4}
"""Bytes per parameter of an inner optimizer's state; AdamW, and any other, has 8. Muon keeps one
moment of matrices; embeddings, which AdamW trains here, have two."""
ADAM = 8
CHUNK = 1024
"""Queries whose scores attention holds at once without a fused kernel; more for long texts."""
LOGITS = 1 << 27
"""Scores of the vocabulary that the loss holds at once, in f32."""


Loops: TypeAlias = Literal["none", "made", "held"]
"""How layers that repeat are computed: one by one, in loops over stacks that each step makes, or in
loops over stacks that the learner holds."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on one device.

    ``flight`` are fragments being sent or adopted, ``frozen`` parameters that are not trained.
    """

    parameters: float
    moments: float
    anchors: float
    gradients: float
    activations: float
    flight: float
    frozen: float = 0.0

    @property
    def state(self) -> float:
        """Bytes between steps, when nothing is in flight."""
        return self.parameters + self.frozen + self.moments + self.anchors

    @property
    def total(self) -> float:
        """Peak bytes."""
        return self.state + self.gradients + self.activations + self.flight

    def __str__(self) -> str:
        parts = (
            ("parameters", self.parameters),
            ("frozen weights", self.frozen),
            ("moments", self.moments),
            ("anchors", self.anchors),
            ("gradients", self.gradients),
            ("activations (an estimate)", self.activations),
            ("fragments in flight", self.flight),
        )
        return ", ".join(f"{name} {size:,.0f}" for name, size in parts if size)


def learner_memory(
    parameters: float,
    sizes: MeshSizes,
    train: TrainConfig,
    sync: SyncConfig,
    *,
    held: float | None = None,
    fragment: float | None = None,
    moments: float | None = None,
    activations: float = 0.0,
) -> MemoryNeed:
    """Return the memory that each device of a mesh needs for a number of trained parameters.

    ``held`` are the parameters that a device has (``axes.held_elements``), by default an even
    share; ``fragment`` those of the largest fragment, by default an even share too. ``moments`` are
    the bytes of the inner optimizer's state on a device, if known. A fragment in flight is two
    vectors, spread over all devices: the outer gradient, and the captured values.
    """
    held = parameters * sizes.data / sizes.devices if held is None else held
    fragment = parameters / sync.fragments if fragment is None else fragment
    if moments is None:
        moments = held * MOMENTS.get(train.inner, ADAM)
    kept = BF16 if sync.global_scheme == "bf16" else F32
    schedule = Schedule(sync.fragments, sync.h_steps, sync.overlap_steps)
    vectors = 2 * learner_room(schedule, sync.shards)
    return MemoryNeed(
        parameters=F32 * held,
        moments=moments,
        anchors=kept * parameters / sizes.devices,
        gradients=F32 * held * (1 + (train.accumulate > 1)),
        activations=activations,
        flight=F32 * vectors * fragment / sizes.devices,
    )


def moment_bytes(
    train: TrainConfig, leaves: Sequence[LeafSpec], axes: LogicalAxes, sizes: MeshSizes
) -> float:
    """Return the bytes of the inner optimizer's state on each device, from its tensors."""
    held = held_elements(leaves, axes, sizes)
    if train.inner != "muon":
        return held * MOMENTS.get(train.inner, ADAM)
    matrices = held_elements([leaf for leaf in leaves if leaf.is_matrix], axes, sizes)
    return ADAM * held - (ADAM - MOMENTS["muon"]) * matrices


def activation_bytes(
    arch: Arch,
    sizes: MeshSizes,
    train: TrainConfig,
    batch: int,
    seq: int,
    *,
    width: int = BF16,
    fused: bool = True,
    loops: Loops = "none",
) -> float:
    """Estimate a device's bytes for the gradient of one part of a batch, besides gradients.

    ``width`` is the bytes of a number in the model's arithmetic, ``fused`` says whether a kernel
    computes attention without its scores in memory, ``loops`` how layers that repeat are
    computed. To what every block keeps come the needs of one block while its gradient is computed,
    the loss with the head's gradient before it is spread, and the matrices that fsdp gathers. The
    numbers are fitted to measurements of XLA on CPUs (docs/results/memory.md).
    """
    rows = batch / train.accumulate / sizes.rows
    tokens = rows * seq
    runs = [run for run in runs_of(arch.layers) if run.repeats > 1 and loops != "none"]
    looped = {number for run in runs for number in run.layers}
    blocks = [_Block.of(arch, layer, sizes, seq, width, fused=fused) for layer in arch.layers]
    kept = tokens * sum(
        block.kept(train.remat, looped=number in looped) for number, block in enumerate(blocks)
    )
    largest = max((block.whole for block in blocks), default=0.0) * tokens
    again = 0.0 if train.remat == "none" and not looped else largest
    chunk = max((block.chunk for block in blocks), default=0.0) * rows
    scores = min(tokens * arch.vocab / sizes.tensor, LOGITS / sizes.rows / sizes.tensor)
    head = arch.vocab * arch.width / sizes.tensor if sizes.fsdp > 1 else 0.0
    passing = kept + max(again, chunk, F32 * (head + 2 * scores))
    return _weights(arch, sizes, train, width, looped, passing, own=loops == "held")


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes per token of one block's activations; ``chunk`` is per row of a batch.

    ``products`` are the results of matrix products and attention.
    """

    stream: float
    attention: float
    mlp: float
    products: float
    whole: float
    chunk: float

    @classmethod
    def of(
        cls, arch: Arch, layer: Layer, sizes: MeshSizes, seq: int, width: int, *, fused: bool
    ) -> _Block:
        heads = arch.heads / sizes.tensor
        query = heads * layer.head_dim
        keys = layer.kv_heads * layer.head_dim / sizes.tensor
        inner = layer.mlp / sizes.tensor
        if layer.experts and arch.experts is not None:
            inner += arch.experts.chosen * arch.experts.width / sizes.tensor
        seen = min(seq, arch.window or seq) if layer.kind != "full_attention" else seq
        scores = 0.0 if fused else F32 * heads * seen
        streams = 6 + 2 * arch.sandwich
        routed = arch.experts.chosen * arch.width if layer.experts and arch.experts else 0
        plain = width * (streams * arch.width + 4 * (query + keys) + 4.75 * inner + 4 * routed)
        products = width * (2 * arch.width + 2 * (query + keys) + 2 * inner + routed)
        short = seq <= CHUNK
        return cls(
            stream=width * arch.width,
            attention=width * query,
            mlp=width * inner,
            products=products + (scores if short else 0.0),
            whole=plain + (2.25 * scores if short else 0.0),
            chunk=0.0 if short else CHUNK * 2.25 * scores,
        )

    def kept(self, remat: str, *, looped: bool) -> float:
        """Return what stays until the block's gradient is computed."""
        if remat == "none":
            return self.stream + self.products if looped else self.whole
        named = {"attention": self.attention, "mlp": self.mlp}
        return self.stream + sum(named.get(name, 0.0) for name in remat.split(","))


def _weights(
    arch: Arch,
    sizes: MeshSizes,
    train: TrainConfig,
    width: int,
    looped: set[int],
    passing: float,
    *,
    own: bool,
) -> float:
    """Return the bytes of activations with those of gathered, stacked or copied weights.

    Unrolled layers need the matrices that fsdp gathers: one block's, or all if no block is computed
    again, because XLA keeps them from the forward pass for the backward pass; it keeps stacks of
    experts transposed as well. A loop gathers one block's. If its stacks are not the parameters
    themselves, it holds two, of weights and of gradients, before the gradients that are counted
    elsewhere exist, and one stack beside these. Muon transposes a copy of its gradients.
    """
    blocks: dict[int, int] = {}
    within: list[LeafSpec] = []
    for leaf in leaf_specs_of(arch):
        _, layer, rest = leaf.name.partition("model.layers.")
        if layer:
            number = int(rest.partition(".")[0])
            blocks[number] = blocks.get(number, 0) + leaf.size * (2 if leaf.unit else 1)
            within += [leaf] if number in looped else []
    apart = [size for number, size in blocks.items() if number not in looped]
    held = sum(apart) if train.remat == "none" else 0
    gathered = max(held, *blocks.values()) if sizes.fsdp > 1 else 0
    passing += width * gathered / (sizes.tensor * sizes.expert)
    copies = held_elements(within, AXES, sizes)
    if width < F32 or not own:
        passing = max(passing + (2 * width - F32) * copies, width * copies)
    return max(passing, F32 * copies if own and train.inner == "muon" else 0.0)
