"""Bytes that services hold and that the log keeps: the equations of docs/planning.md."""

from __future__ import annotations

from dataclasses import replace

from skerry.models.arch import Arch
from skerry.models.axes import MeshSizes, held_elements
from skerry.models.layers import scanned
from skerry.models.memory import MemoryNeed, activation_bytes, learner_memory, moment_bytes
from skerry.models.names import AXES
from skerry.models.tensors import leaf_specs_of
from skerry.settings.models import RunConfig
from skerry_tools.plan.measured import STATE_COPIES
from skerry_tools.plan.traffic import Deployment, ModelSize, PlannedSite, SyncLoad

FUSED_HEAD = 256
"""Widest head of a fused kernel on Hopper (``models.attention``)."""


def learner_need(at: Deployment, site: PlannedSite) -> MemoryNeed:
    """Return what each chip of a site's learner holds: what the learner itself counts.

    Of a bare count of parameters no activations.
    """
    load, known = at.load, dict(site.known)
    frozen, sizes = known.pop("frozen", 0.0), site.mesh or MeshSizes()
    need = learner_memory(
        load.parameters, sizes, at.run.train, load.sync, fragment=load.fragment, **known
    )
    return replace(need, frozen=frozen)


def known_of(
    arch: Arch, load: SyncLoad, model: ModelSize, sizes: MeshSizes, run: RunConfig, tokens: float
) -> dict[str, float]:
    """Return what no choice of H, P and shards changes, of GPUs with bf16 and fused attention."""
    train, seq = run.train, run.data.seq_len
    width, rows = 4 if train.precision == "float32" else 2, max(1, round(tokens / seq))
    fits = all(layer.head_dim % 8 == 0 and layer.head_dim <= FUSED_HEAD for layer in arch.layers)
    fused = width == 2 and arch.score_cap is None and fits
    frozen = leaf_specs_of(arch) if model.frozen else ()
    loops = scanned(train.layers, arch.layers, adapters=bool(model.frozen))
    return {
        "held": held_elements(load.leaves, AXES, sizes),
        "moments": moment_bytes(train, load.leaves, AXES, sizes),
        "activations": activation_bytes(
            arch, sizes, train, rows, seq, width=width, fused=fused, scanned=loops
        ),
        "frozen": width * held_elements(frozen, AXES, sizes),
    }


def syncer_bytes(at: Deployment) -> float:
    """Return the memory of one shard's syncer.

    That is f32 master, outer state and result, the global fragment, and a round's contributions.
    """
    load = at.load
    shared = 4 if load.sync.global_scheme == "f32" else 2
    whole = (4 * (2 + load.outer_vectors) + shared) * load.parameters / load.sync.shards
    return whole + at.learners * load.fragment * load.up_bits / 8


def initial_bytes(at: Deployment) -> float:
    """Return what all learners send when a run begins, in f32: more than in any round."""
    return 4 * at.learners * at.load.parameters


def contributions_bytes(at: Deployment) -> float:
    """Return what the log keeps of contributions, one replica: of its window, by age and size.

    Left alone, the window holds twice what all learners send at the beginning.
    """
    log, load = at.run.log, at.load
    sent_s = at.learners * load.parameters * load.up_bits / 8 / at.period_s
    most = float(log.window_bytes)
    if "window_bytes" not in log.model_fields_set:
        most = max(most, 2 * initial_bytes(at))
    return min(most, sent_s * log.window_s)


def state_disk_bytes(at: Deployment) -> float:
    """Return what the state streams keep, one replica, and what is not swept.

    That is the last deltas and one more, and keyframe and snapshot twice.
    """
    load = at.load
    whole = load.whole_bits / 8
    deltas = (load.parts.delta_bits or 0.0) / 8 * (load.parts.keyframe_every + 1)
    return STATE_COPIES * (whole + deltas / 2 + load.snapshot_bytes) * load.parameters
