"""What a question's model, mesh and sites come to: sizes, steps, and what is synchronised."""

from __future__ import annotations

import math

from skerry.algorithm.fragments import LeafSpec
from skerry.errors import ConfigError
from skerry.models.axes import AUTO, MeshSizes, check_batch, sizes_of
from skerry.models.presets import arch_of
from skerry.models.tensors import leaf_specs_of, token_flops
from skerry.settings.models import RunConfig
from skerry_tools.plan.memory import known_of
from skerry_tools.plan.question import Question, refuse
from skerry_tools.plan.tables import MOST, SiteTable
from skerry_tools.plan.traffic import Deployment, PlannedSite, SyncLoad


def deployment(asked: Question) -> Deployment:
    """Return what is to be judged, with nothing left open but H, P and shards.

    A step takes the time given, or else that of the model's operations. Raises ConfigError for a
    model of the user's own without plan.parameters, and for a mesh that a learner would refuse.
    """
    tables, run = asked.tables, asked.run
    load = trained(asked)
    sites: dict[str, PlannedSite] = {}
    for name, table in tables.sites.items():
        given = table.tokens_per_step or tables.plan.tokens_per_step
        mesh = _mesh(name, table, 0 if given else run.data.batch // run.train.accumulate)
        site = table.model_copy(update={"chips": max(table.chips, mesh.devices)})
        tokens = given or float(run.data.seq_len * run.data.batch)
        speed = (site.flops_per_chip or 1.0) * mesh.devices * site.utilisation
        step_s = site.step_time or load.token_flops * tokens / speed
        known = known_of(load.arch, load, mesh, run, tokens) if load.arch else {}
        local = name == tables.hub.site
        sites[name] = PlannedSite(name, site, step_s, tokens, local, mesh, known)
    return Deployment(load, sites, tables.hub, tables, run, speeds=asked.speeds)


def trained(asked: Question) -> SyncLoad:
    """Return what is synchronised and what a step computes: of plan.parameters, or of [model].

    For a bare count, a step takes six operations per active parameter and token; with adapters
    four, since frozen parameters have no gradient of their own.
    """
    table, sync, outer = asked.tables.plan, asked.run.sync, asked.run.outer
    if (whole := table.parameters) is not None:
        if sync.fragments > whole:
            count = f"{sync.fragments} but the model has {whole:.0f} parameters"
            refuse(f"sync.fragments is {count}: lower it.")
        flops = 6 * (table.active_parameters or whole)
        return SyncLoad(sync, whole, (), outer, flops, table.layers)
    config = asked.run.model
    if config.factory:
        why = "a plan does not build a model of your own"
        refuse(f"plan.parameters is missing: {why}; give --params 12e9.")
    arch = arch_of(config)
    leaves, frozen = leaf_specs_of(arch), 0
    if config.lora_rank:
        from skerry.models.adapters import adapters_of  # imports numpy

        adapters = adapters_of(arch, config.lora_rank, config.lora_targets)
        frozen = sum(leaf.size for leaf in leaves)
        leaves = tuple(LeafSpec(name, tensor.shape) for name, tensor in adapters.items())
    flops = token_flops(config, arch, asked.run.data.seq_len)
    size = sum(leaf.size for leaf in leaves)
    change = asked.run.train.lr * math.sqrt(arch.width) if from_scratch(asked.run) else 0.0
    return SyncLoad(sync, size, leaves, outer, flops, len(arch.layers), frozen, arch, change)


def from_scratch(run: RunConfig) -> bool:
    """Return True if a run trains all parameters, and from random ones on."""
    return not (run.model.lora_rank or run.model.path)


def _mesh(name: str, site: SiteTable, rows: int) -> MeshSizes:
    """Return a site's mesh, as its learners would; ``rows``: those of a batch, 0 if unknown."""
    sizes = MeshSizes(fsdp=site.chips)
    try:
        if site.mesh != AUTO:
            sizes = sizes_of(site.mesh, site.chips if "chips" in site.model_fields_set else MOST)
        if rows:
            check_batch(sizes, rows)
    except ConfigError as error:
        msg = f"sites.{name}.mesh: {error}"
        raise ConfigError(msg, path=f"sites.{name}.mesh") from error
    return sizes
