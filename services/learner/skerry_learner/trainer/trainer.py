"""The learner's training state: parameters and moments on a mesh, and the fragments of them.

Used by one thread. Every call only dispatches; nothing here waits for the device except ``warm``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from skerry.algorithm.fragments import LeafSpec, Plan, plan
from skerry.client.inner_state import StateKind
from skerry.client.jax_fragments import JaxFragments
from skerry.client.jax_inner import kind_of, restored
from skerry.client.jax_processes import SharedFragments
from skerry.client.peer import Deed
from skerry.client.processes import LeadProcess
from skerry.client.weights import FolderWeights
from skerry.models import mesh as meshes
from skerry.models.axes import check_batch, held_elements
from skerry.models.base import Batch, Frozen, Layout, Model, Params, shapes_of, specs_of
from skerry.models.decoder import Decoder
from skerry.models.memory import MemoryNeed, activation_bytes, learner_memory
from skerry.models.stacks import Stacks, places_of, stacked
from skerry.settings.models import RunConfig
from skerry_learner.trainer.step import (
    StepFunction,
    StepResult,
    TrainState,
    make_step,
    optimizer_of,
    stacks_of,
)

TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Programs:
    """What is compiled for a model and a config on a mesh; trainers may share it.

    ``places`` are the shardings of all that a step changes, ``need`` is what each device holds,
    ``frozen`` are the model's leaves that no step changes. ``stacks`` are in the place of the
    parameters that they hold. ``compiled`` has the step for batches with parts of these names, once
    a trainer has warmed up.
    """

    mesh: Mesh
    places: TrainState
    need: MemoryNeed
    init: Callable[[jax.Array], Params]
    init_moments: Callable[[Params], Any]
    step: StepFunction
    frozen: Frozen
    stacks: Stacks
    compiled: dict[frozenset[str], StepFunction] = field(
        default_factory=dict[frozenset[str], StepFunction]
    )

    @classmethod
    def of(cls, model: Model, config: RunConfig, mesh: Mesh | None = None) -> Programs:
        """Return the programs for a mesh, by default that of one device.

        Raises ConfigError if the mesh does not divide the batch, or has too little memory.
        """
        mesh = mesh or meshes.one_device()
        check_batch(meshes.sizes_on(mesh), config.data.batch // config.train.accumulate)
        stacks, specs = stacks_of(model, config.train), specs_of(model)
        shapes = _shapes(model, stacks)
        layout = Layout.of(shapes)
        named = dict(
            zip((s.name for s in specs), meshes.shardings(model, specs, mesh), strict=True)
        )
        named = places_of(named, stacks)
        init_moments = optimizer_of(model, config.train).init
        moments = jax.eval_shape(init_moments, shapes)
        leaves = zip(layout.names, layout.leaves(shapes), strict=True)
        held = {(name, leaf.shape): named[name] for name, leaf in leaves}
        places = TrainState(layout.named(named), meshes.with_params(moments, held))
        need = memory_of(model, config, specs, mesh, moments, places)
        meshes.check_memory(mesh, need)
        return cls(
            mesh=mesh,
            places=places,
            need=need,
            init=jax.jit(lambda key: stacked(model.init(key), stacks), out_shardings=places.params),
            init_moments=jax.jit(init_moments, out_shardings=places.optimizer),
            step=make_step(model, config.train, places),
            frozen=meshes.frozen_leaves(model, mesh),
            stacks=stacks,
        )


def memory_of(
    model: Model,
    config: RunConfig,
    specs: Sequence[LeafSpec],
    mesh: Mesh,
    moments: Any,
    places: TrainState,
) -> MemoryNeed:
    """Return what each device will hold, activations included where the model's arch is known."""
    sizes, train, data = meshes.sizes_on(mesh), config.train, config.data
    cut = plan(specs, config.sync.fragments, config.sync.shards)
    decoder = getattr(model, "decoder", model)
    activations = 0.0
    if isinstance(decoder, Decoder):
        width, shape = jnp.dtype(decoder.compute).itemsize, (data.batch, data.seq_len)
        activations = activation_bytes(
            decoder.arch,
            sizes,
            train,
            *shape,
            width=width,
            fused=decoder.fused,
            loops="held" if stacks_of(model, train) else "made" if decoder.scanned else "none",
        )
    need = learner_memory(
        cut.parameters,
        sizes,
        train,
        config.sync,
        held=held_elements(specs, getattr(model, "axes", {}), sizes),
        fragment=max(fragment.size for fragment in cut.fragments),
        moments=meshes.held_bytes(moments, places.optimizer),
        activations=activations,
    )
    return replace(need, frozen=meshes.held_bytes(meshes.frozen_shapes(model, mesh)))


class Trainer:
    """One model being trained: ``fragments`` holds its parameters, ``moments`` are the optimizer's.

    A session sees those fragments; a reset makes fresh moments. ``routed`` adds up the tokens that
    taught each unit, as ``TrainingProgress`` has them. To save memory, state is dropped before it
    is made again.
    """

    def __init__(
        self,
        model: Model,
        config: RunConfig,
        plan: Plan,
        programs: Programs | None = None,
        *,
        blank: bool = False,
        weights: FolderWeights | None = None,
        lead: LeadProcess | None = None,
    ) -> None:
        """``programs``: those of another trainer of the same model and config.

        A ``blank`` one begins with zeros, for parameters that are all adopted before a step.
        ``weights`` are offered as initial parameters instead of its own. ``lead`` is the learner's
        first process, if that is this one and there are others.
        """
        self._lead = lead
        self._config = config
        self._programs = programs or Programs.of(model, config)
        key, init = jax.random.key(config.train.seed), self._programs.init
        params = meshes.in_turn(_blank(model, self._programs) if blank else init(key))
        self.fragments = JaxFragments(plan, config.sync, params, self._programs.stacks)
        self.moments = meshes.in_turn(self._programs.init_moments(params))
        self.routed: Mapping[str, jax.Array] = {}
        self.fragment_port: JaxFragments | SharedFragments = self.fragments
        if jax.process_count() > 1:
            self.fragment_port = SharedFragments(self.fragments, plan, config.sync, lead)
            self.own_blocks = self.fragment_port.own_blocks
        self.genesis = (weights or self.fragment_port).genesis
        self.capture = self.fragment_port.capture
        self.release = self.fragment_port.release
        self.adopt = self.fragment_port.adopt

    @property
    def state(self) -> TrainState:
        """What the next step begins with."""
        return TrainState(self.fragments.params, self.moments)

    @state.setter
    def state(self, state: TrainState) -> None:
        self.fragments.params, self.moments = state

    def warm(self, tick: Callable[[], None], batch: Mapping[str, Any] | None = None) -> None:
        """Compile everything, calling ``tick`` meanwhile; nothing is run, nothing changes.

        ``batch`` is one of those that steps will get; None: tokens alone. A thread compiles the
        step, which takes longer than others wait for a sign of life.
        """
        data = self._config.data
        self._say(Deed.WARM)
        self.fragments.warm(tick)
        blank = {"tokens": np.zeros((data.batch, data.seq_len + 1), np.int32)}
        blank = self.place(blank if batch is None else batch)
        factors = np.float32(0), np.float32(1)
        lowered = self._programs.step.lower(self.state, blank, *factors, self._programs.frozen)
        with ThreadPoolExecutor(1, "compile") as thread:
            step = thread.submit(lowered.compile)
            while wait([step], TICK_S).not_done:
                tick()
        self._programs.compiled[frozenset(blank)] = step.result()
        if self._lead is not None:
            self._lead.meet(tick)
        tick()

    def step(self, batch: Batch, done: float, share: float = 1.0) -> StepResult:
        """Dispatch one step on a batch at progress ``done`` in [0, 1].

        ``share`` in (0, 1] is a factor on the learning rate.
        """
        self._say(Deed.STEP, float(done), float(share))
        factors = np.float32(done), np.float32(share)
        step = self._programs.compiled.get(frozenset(batch), self._programs.step)
        frozen = self._programs.frozen
        made = step(self.state, self.place(batch), *factors, frozen)
        (self.fragments.params, self.moments), result = meshes.in_turn(made)
        if result.expert_tokens:
            before = self.routed or meshes.in_turn(_zeros_of(result))
            self.routed = meshes.in_turn(_added(before, result.expert_tokens))
        return result

    def moments_kind(self) -> StateKind:
        """Return what a saver of the inner optimizer's state has to know."""
        return kind_of(self.moments_like(), self._programs.stacks)

    def moments_like(self) -> Any:
        """Return the inner optimizer's state as shapes and dtypes, and where each tensor lies."""
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            jax.eval_shape(self._programs.init_moments, self.fragments.params),
            self._programs.places.optimizer,
        )

    def restore_moments(self, tensors: Mapping[str, NDArray[Any]], *point: int) -> None:
        """Go on with moments of an earlier incarnation, named and shaped as ``moments_like``.

        ``point`` is when they were saved, for the learner's other processes.
        """
        self._say(Deed.RESTORE, *point)
        self.moments = None
        self.moments = restored(self.moments_like(), tensors, self._programs.stacks)

    def reset(self) -> None:
        """Fall back to the anchors with fresh moments, after the loss has diverged."""
        self.fragment_port.reset()
        self.moments = None
        self.moments = meshes.in_turn(self._programs.init_moments(self.fragments.params))

    def own_rows(self, count: int) -> range:
        """Return which of a batch's rows this process's devices need."""
        return meshes.own_rows(self._programs.mesh, count)

    def place(self, batch: Any, first: int = 0, count: int | None = None) -> Any:
        """Return a batch on the mesh, each device with its own rows.

        It may hold only some of ``count`` rows: those from ``first`` on that this process needs.
        """
        rows = meshes.by_rows(self._programs.mesh)

        def placed(leaf: Any) -> jax.Array:
            there: jax.Array = (
                jax.device_put(leaf, rows)
                if isinstance(leaf, jax.Array)
                else meshes.put_rows(leaf, rows, first, count or len(leaf))
            )
            return there

        return jax.tree.map(placed, batch)

    def _say(self, deed: Deed, *values: float) -> None:
        if self._lead is not None:
            self._lead.post(deed, *values)


@jax.jit
def _added(
    before: Mapping[str, jax.Array], more: Mapping[str, jax.Array]
) -> Mapping[str, jax.Array]:
    return {name: before[name] + count for name, count in more.items()}


def _zeros_of(result: StepResult) -> Mapping[str, jax.Array]:
    return {name: jnp.zeros_like(count) for name, count in result.expert_tokens.items()}


def _shapes(model: Model, stacks: Stacks) -> Params:
    """Return what a trainer holds of a model's parameters as shapes and dtypes."""
    return jax.eval_shape(partial(stacked, stacks=stacks), shapes_of(model.init))


def _blank(model: Model, programs: Programs) -> Params:
    """Return zeros in the place of what ``init`` would make, without compiling or running it."""
    return jax.tree.map(
        lambda leaf, place: meshes.put(np.zeros(leaf.shape, leaf.dtype), place),
        _shapes(model, programs.stacks),
        programs.places.params,
    )
