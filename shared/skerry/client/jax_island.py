"""Makes a user's JAX training loop a learner: ``skerry.join``."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from skerry.algorithm.fragments import LeafSpec, Plan
from skerry.client import jax_inner
from skerry.client.asked import Config, settings_of, with_units
from skerry.client.following import Following
from skerry.client.jax_fragments import JaxFragments, check_values
from skerry.client.jax_processes import SharedFragments, met
from skerry.client.joined import Joining, name_or_host
from skerry.client.loop_island import Follower, LoopIsland, Obey
from skerry.client.loop_thread import LoopThread
from skerry.client.peer import Deed
from skerry.client.processes import Assignment, FollowingProcess, LeadProcess
from skerry.models.base import Params, leaf_specs
from skerry.models.mesh import in_turn, machine_of_arrays
from skerry.models.names import unit_of
from skerry.service.entry import bus_from
from skerry.settings.local import Settings
from skerry.settings.models import RunConfig


class JaxIsland(LoopIsland):
    """One learner of a run, whose parameters are a tree of JAX arrays.

    If several processes hold them, each sends and reads its own part.
    """

    def __init__(
        self,
        settings: Settings,
        run: str,
        name: str | None,
        params: Params,
        leaves: tuple[LeafSpec, ...],
        process: LeadProcess | FollowingProcess | None,
    ) -> None:
        self._settings = settings
        self._given: Params = params
        self._held: JaxFragments
        self._taken = False
        lead, follower = None, None
        if isinstance(process, FollowingProcess):
            follower = Follower(process, settings, leaves, partial(self._follow, process))
        else:
            lead = process
        on = machine_of_arrays(params, socket.gethostname())
        joining = Joining(settings, run, name_or_host(name), leaves, self._hold, on, lead=lead)
        super().__init__(joining, process, follower)

    @property
    def params(self) -> Params:
        """The parameters as they are now: the log's, when the block begins."""
        _ = self._now.shard  # raises outside the block
        self._taken = True
        return self._held.params

    def step(
        self,
        params: Params,
        *,
        tokens: int,
        loss: Any,
        cursor: int | None = None,
        routed: Mapping[str, Any] | None = None,
        state: Any = None,
    ) -> Params:
        """Take the parameters that a step has made, and return those to go on with.

        It answers and adopts; it waits only in a blocking mode. The arrays passed in are donated;
        ModelError unless they are a tree like that of ``join``. If a loop has not read ``params``,
        its first step started from its own initial ones: the step is discarded, and the log's are
        returned. ``state`` is the optimizer's after this step, to be saved on this machine now and
        then; ``restored`` gives it back after a restart. If a learner has several processes, each
        calls it: ``tokens`` are those of all. ``JoinedIsland.boundary`` says the rest.
        """
        if self._taken:
            self._held.take(params)
            held = None if state is None else lambda: state
            with jax.transfer_guard("allow"):  # a guard of the loop is not meant for ours
                self._boundary(tokens=tokens, loss=loss, cursor=cursor, routed=routed, state=held)
        return self.params

    def restored(self, state: Any) -> Any:
        """Return an optimizer's state as an earlier start of this learner saved it, or as given.

        ``state`` is a fresh one, with the shapes and shardings that steps will pass.
        """
        tensors = self._resume(jax_inner.kind_of(state))
        if not tensors:
            return state
        return jax_inner.restored(state, tensors)

    def _hold(self, plan: Plan, config: RunConfig) -> JaxFragments | SharedFragments:
        held = self._copied(plan, config)
        if isinstance(self._process, LeadProcess):
            return SharedFragments(held, plan, config.sync, self._process)
        return held

    def _follow(
        self, process: FollowingProcess, place: Assignment, plan: Plan, config: RunConfig
    ) -> Obey:
        """Hold this process's part, and serve the first process from a thread."""
        shared = SharedFragments(self._copied(plan, config), plan, config.sync)
        thread = LoopThread("skerry")
        self._around.callback(thread.close)
        bus = bus_from(self._settings.local.nats, place.origin.learner)
        thread.result(bus.__aenter__())
        self._around.callback(lambda: thread.result(bus.__aexit__(None, None, None)))
        following = Following(bus, place, plan, config.sync.chunk_bytes, shared, process)
        serving = thread.begin(following.requests())

        def ended(_: object) -> None:
            if not serving.cancelled() and (error := serving.exception()) is not None:
                process.orders.put((Deed.FAIL, [f"this process does not reach the log: {error}"]))

        serving.add_done_callback(ended)
        return following.do

    def _copied(self, plan: Plan, config: RunConfig) -> JaxFragments:
        """Hold a copy, because adopting writes into it and the caller keeps its own arrays.

        It is committed to its devices, as adopted arrays are: so programs are compiled once.
        """
        given = self._held.params if self._given is None else self._given  # None: it joins again
        check_values(given)
        copies = jax.tree.map(lambda leaf: in_turn(jnp.copy(leaf)), given)
        held: Params = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding), copies)
        self._held = JaxFragments(plan, config.sync, held)
        self._held.warm(lambda: None)  # else the first round would compile between two steps
        self._given, self._taken = None, False
        return self._held


def join(
    url: str | None = None,
    *,
    params: Params,
    run: str = "main",
    name: str | None = None,
    config: Config = None,
    embeddings: tuple[str, ...] | None = None,
    units: Mapping[str, int] | None = None,
) -> JaxIsland:
    """Return one learner of a run, for a ``with`` block around a training loop of your own.

    If the run does not exist, it is created with these parameters as its first global state; else
    they only give the tensors' names and shapes, and the log's values replace them. If JAX runs in
    several processes (``jax.distributed.initialize``), these are one learner: each joins, and the
    first one decides.

    Args:
        url: The broker; by default that of the settings (``SKERRY_NATS__URL``), or that of the
            run's ``skerry up`` in this folder.
        params: A tree of float32 arrays, of any structure. Names are its paths, joined by ``.``.
        run: The run's id.
        name: The learner's name, unique in the run; by default the host's.
        config: Settings by table, such as ``{"train": {"steps": 5000}}``, or a TOML file of them;
            the run's count only if it is created here. Credentials are in table ``nats``.
        embeddings: Name parts that mark embeddings, which are averaged and not merged by direction;
            by default those with ``embed`` in a part.
        units: The elements of one tensor in each stack of tensors, by the stack's name; by default
            those of the experts of Hugging Face's models.

    Raises:
        ConfigError: a setting that is invalid, or does not fit.
        ModelError: parameters that are not float32, or have no names of their own or no values.

    Entering the block raises BrokerUnavailable where no broker answers, RunMismatch where the run
    has other tensors, RunFinished where it is over; a step raises Superseded once another learner
    has taken this one's name.

    """
    settings = settings_of(url, run, config)
    specs = leaf_specs(params, embeddings)
    leaves = with_units((replace(s, unit=unit_of(s.name, s.shape)) for s in specs), units)
    check_values(params)
    process = met(run, name) if jax.process_count() > 1 else None
    return JaxIsland(settings, run, name, params, leaves, process)
