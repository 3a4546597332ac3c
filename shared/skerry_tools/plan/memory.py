"""Bytes that services hold and that the log keeps: the equations of docs/planning.md."""

from __future__ import annotations

from dataclasses import replace

from skerry.models.arch import Arch
from skerry.models.axes import MeshSizes, held_elements
from skerry.models.layers import scanned, trains_stacks
from skerry.models.memory import Loops, MemoryNeed, activation_bytes, learner_memory, moment_bytes
from skerry.models.names import AXES
from skerry.models.tensors import leaf_specs_of
from skerry.settings.models import RunConfig
from skerry_tools.plan.measured import RAW_BITS, STATE_COPIES
from skerry_tools.plan.traffic import Deployment, PlannedSite, SyncLoad

FUSED_HEAD = 256
"""Widest head of a fused kernel on Hopper (``models.attention``)."""


def learner_need(at: Deployment, site: PlannedSite) -> MemoryNeed:
    """Return what each chip of a site's learner holds: what the learner itself counts.

    A model given only by its number of parameters counts no activations.
    """
    load, known = at.load, dict(site.known)
    frozen = known.pop("frozen", 0.0)
    need = learner_memory(
        load.parameters, site.mesh, at.run.train, load.sync, fragment=load.fragment, **known
    )
    return replace(need, frozen=frozen)


def known_of(
    arch: Arch, load: SyncLoad, sizes: MeshSizes, run: RunConfig, tokens: float
) -> dict[str, float]:
    """Return what a learner holds whatever H, P and shards are, on GPUs with fused attention."""
    train, seq = run.train, run.data.seq_len
    width, rows = 4 if train.precision == "float32" else 2, max(1, round(tokens / seq))
    fits = all(layer.head_dim % 8 == 0 and layer.head_dim <= FUSED_HEAD for layer in arch.layers)
    fused = width == 2 and arch.score_cap is None and fits
    frozen = leaf_specs_of(arch) if load.frozen else ()
    adapters = bool(load.frozen)
    loops: Loops = "none"
    if scanned(train.layers, arch.layers, adapters=adapters):
        loops = "held" if trains_stacks(train.inner) and not adapters else "made"
    return {
        "held": held_elements(load.leaves, AXES, sizes),
        "moments": moment_bytes(train, load.leaves, AXES, sizes),
        "activations": activation_bytes(
            arch, sizes, train, rows, seq, width=width, fused=fused, loops=loops
        ),
        "frozen": width * held_elements(frozen, AXES, sizes),
    }


def syncer_bytes(at: Deployment) -> float:
    """Return the memory of one shard's syncer.

    That is f32 master and outer state, and the global fragments; for one fragment also the result
    of a merge, its delta, and a round's contributions, unpacked.
    """
    load = at.load
    held, shared = load.snapshot_bytes, 4 if load.sync.global_scheme == "f32" else 2
    codes = at.learners * RAW_BITS[load.sync.contribution_scheme] + RAW_BITS[load.down_scheme]
    whole = (held + shared) * load.parameters / load.sync.shards
    return whole + (held + codes / 8) * load.fragment


def contributions_bytes(at: Deployment) -> float:
    """Return what the log keeps of contributions, one replica: of its window, by age and size."""
    return min(at.window_bytes, at.contributed_bytes / at.period_s * at.run.log.window_s)


def state_disk_bytes(at: Deployment) -> float:
    """Return what the state streams keep, one replica, and what is not swept.

    That is the last deltas and one more, and keyframe and snapshot twice.
    """
    load = at.load
    whole = load.whole_bits / 8
    deltas = load.delta_bits / 8 * (load.keyframe_every + 1)
    return STATE_COPIES * (whole + deltas / 2 + load.snapshot_bytes) * load.parameters


def recovery(at: Deployment) -> tuple[float, float]:
    """Return the most bytes that a syncer reads to take a shard over, and the seconds it takes.

    It waits for the lease's end, reads a snapshot, the global fragments and what was contributed
    since, from a broker that reads as fast as it stores, and merges that again.
    """
    load, speeds, cores, sync = at.load, at.speeds, at.hub.cores, at.load.sync
    params, again, up = load.parameters / sync.shards, at.uncovered - 1, sync.contribution_scheme
    redone = again * at.contributed_bytes / sync.shards
    read = (load.snapshot_bytes + load.catch_up_bits / 8) * params + redone
    once_s = speeds.decode_s("f32", load.snapshot_bytes / 4 * params, cores)
    once_s += speeds.decode_s(sync.global_scheme, params, cores)
    once_s += (load.keyframe_every - 1) * speeds.decode_s(load.down_scheme, params, cores)
    each_s = at.learners * speeds.decode_s(up, params, cores)
    each_s += speeds.merge_s(up, params, at.learners)
    return read, sync.lease_s + read / at.hub.write + once_s + again * each_s
