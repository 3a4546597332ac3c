"""Makes a user's torch training loop a learner: ``skerry.torch.join``."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from skerry.algorithm.fragments import LeafSpec, Plan
from skerry.client import torch_inner
from skerry.client.asked import Config, settings_of, with_units
from skerry.client.joined import Joining, name_or_host
from skerry.client.loop_island import Follower, LoopIsland, Obey
from skerry.client.processes import Assignment, FollowingProcess, LeadProcess
from skerry.client.torch_fragments import TorchFragments, leaves_of, reshard, sharded, trained
from skerry.client.torch_ranks import FollowerFragments, LeadFragments, met
from skerry.errors import ConfigError, ModelError
from skerry.models.machine import Machine
from skerry.settings.local import Settings
from skerry.settings.models import RunConfig


class PendingLoss:
    """A loss that a device still computes; it is read once it is there, without waiting."""

    def __init__(self, loss: torch.Tensor) -> None:
        self._host = torch.empty((), dtype=loss.dtype, device="cpu").pin_memory()
        self._host.copy_(loss.reshape(()), non_blocking=True)
        self._there = torch.cuda.current_stream(loss.device).record_event()

    def is_ready(self) -> bool:
        return bool(self._there.query())

    def __float__(self) -> float:
        self._there.synchronize()
        return float(self._host)


def pending(loss: Any) -> Any:
    """Return a loss as an island reads it."""
    if not isinstance(loss, torch.Tensor):
        return loss
    loss = loss.detach()
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    return PendingLoss(loss) if loss.device.type == "cuda" and loss.numel() == 1 else loss


class TorchIsland(LoopIsland):
    """One learner of a run, whose parameters are a torch module's; they change in place.

    When the block begins they are the log's.
    """

    def __init__(
        self,
        settings: Settings,
        run: str,
        name: str | None,
        model: torch.nn.Module,
        leaves: tuple[LeafSpec, ...],
        optimizer: Any,
        process: LeadProcess | FollowingProcess | None,
    ) -> None:
        self._model = model
        self._trained = trained(model)
        self._sharded = sharded(model)
        self._optimizer = optimizer
        lead, follower = None, None
        if isinstance(process, FollowingProcess):
            follower = Follower(process, settings, leaves, partial(self._follow, process.number))
        else:
            lead = process
        about, on = described(model), machine_of(model, 1 if lead is None else lead.processes)
        joining = Joining(settings, run, name_or_host(name), leaves, self._hold, on, about, lead)
        super().__init__(joining, process, follower)

    def __enter__(self) -> Self:
        """Join, and go on with the optimizer's state that an earlier start has saved."""
        super().__enter__()
        if self._optimizer is None:
            return self
        try:
            tensors = self._resume(torch_inner.kind_of(self._optimizer, self._model))
            if tensors:
                torch_inner.restore(self._optimizer, self._model, tensors)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def step(
        self,
        *,
        tokens: int,
        loss: Any,
        cursor: int | None = None,
        routed: Mapping[str, Any] | None = None,
    ) -> None:
        """Count a step that the optimizer has taken; answer, and adopt into the parameters.

        It waits only in a blocking mode. If several processes train the module, each calls it:
        ``tokens`` are those of all, and the first one's ``loss`` counts. If the global state
        replaced values that were not finite, the optimizer's state of the parameters is cleared.
        That state is saved on this machine now and then.
        ``JoinedIsland.boundary`` says the rest. Raises ModelError if the module has other
        parameters to train than it had at ``join``.
        """
        reshard(self._sharded)
        if not trained(self._model).items() <= self._trained.items():
            msg = (
                f"Parameter {named_beside(self._model, self._trained)} is not as it was at join:"
                " add, replace, resize or unfreeze parameters before join."
            )
            raise ModelError(msg, path="model")
        state = None
        if self._optimizer is not None:
            state = partial(torch_inner.state_of, self._optimizer, self._model)
        loss = pending(loss)
        self._boundary(tokens=tokens, loss=loss, cursor=cursor, routed=routed, state=state)
        if self.fell_back:
            forget(self._optimizer, self._model)

    def _at_boundary(self, act: Callable[[], object], ends: BaseException | None = None) -> None:
        reshard(self._sharded)  # else a module goes on with parameters that FSDP gathered before
        super()._at_boundary(act, ends)

    def _hold(self, plan: Plan, config: RunConfig) -> TorchFragments | LeadFragments:
        held = TorchFragments(plan, config.sync, self._model)
        return (
            LeadFragments(held, self._process) if isinstance(self._process, LeadProcess) else held
        )

    def _follow(self, rank: int, _: Assignment, plan: Plan, config: RunConfig) -> Obey:
        held = TorchFragments(plan, config.sync, self._model, rank=rank)
        return FollowerFragments(held, plan).do


def bare(model: Any) -> torch.nn.Module:
    """Return a module without the wrappers of torch.compile and DistributedDataParallel."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, (DataParallel, DistributedDataParallel)) else model


def machine_of(model: torch.nn.Module, processes: int) -> Machine:
    """Return the machine of a module's loop: one device for each of its processes."""
    at = next(model.parameters()).device
    name = torch.cuda.get_device_name(at) if at.type == "cuda" else at.type
    return Machine(socket.gethostname(), f"processes={processes}" if processes > 1 else "", name)


def described(model: Any) -> str:
    """Return the config.json of a transformers model; empty for any other module."""
    text = getattr(getattr(model, "config", None), "to_json_string", None)
    return str(text(use_diff=False)) if text is not None else ""


def named_beside(model: torch.nn.Module, known: Mapping[Any, Any]) -> str:
    """Return the name of a parameter to train that is not known, or known in another shape."""
    named = model.named_parameters()
    return str(next(n for n, p in named if p.requires_grad and known.get(p) != p.shape))


def forget(optimizer: Any, model: torch.nn.Module) -> None:
    """Clear an optimizer's state of a module's parameters; None has none."""
    if optimizer is not None:
        for parameter in model.parameters():
            optimizer.state.pop(parameter, None)


def check(optimizer: Any, model: torch.nn.Module) -> None:
    """Raise ConfigError unless ``optimizer`` is None or a torch optimizer of the module."""
    if optimizer is None:
        return
    if not hasattr(optimizer, "param_groups"):
        msg = f"optimizer must be one of torch's or None, not {optimizer!r:.80}."
        raise ConfigError(msg)
    given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if given.isdisjoint(trained(model)):
        msg = (
            "optimizer trains no parameter of the model: make it of this model's parameters, once"
            " the model is whole."
        )
        raise ConfigError(msg)


def join(
    url: str | None = None,
    *,
    model: torch.nn.Module,
    run: str = "main",
    name: str | None = None,
    optimizer: Any = None,
    config: Config = None,
    embeddings: tuple[str, ...] | None = None,
    units: Mapping[str, int] | None = None,
) -> TorchIsland:
    """Return one learner of a run, for a ``with`` block around a training loop of your own.

    If the run does not exist, it is created with this module's parameters as its first global
    state; else the log's values replace them. If ``torch.distributed`` runs, its processes are one
    learner: each joins, and the first one talks to the log.

    Args:
        url: The broker; by default that of the settings (``SKERRY_NATS__URL``), or that of the
            run's ``skerry up`` in this folder.
        model: The module: its parameters that require gradients take part, by their names. They
            are float32, bfloat16 or float16, whole or sharded by rows (``fully_shard``).
        run: The run's id.
        name: The learner's name, unique in the run; by default the host's.
        optimizer: The module's optimizer: its state is saved on this machine, given back after a
            restart, and cleared when training falls back. Give one of several, or none.
        config: Settings by table, such as ``{"train": {"steps": 5000}}``, or a TOML file of them;
            the run's count only if it is created here. Credentials are in table ``nats``.
        embeddings: Name parts that mark embeddings, which are averaged and not merged by direction;
            by default those of Hugging Face's models.
        units: The elements of one tensor in each stack of tensors, by the stack's name; by default
            those of the experts of Hugging Face's models.

    Raises:
        ConfigError: a setting or an optimizer that is invalid, or does not fit.
        ModelError: not a module, parameters of another kind, or none to train.

    Entering the block raises BrokerUnavailable where no broker answers, RunMismatch where the run
    has other tensors, RunFinished where it is over; a step raises Superseded once another learner
    has taken this one's name.

    """
    model = bare(model)
    leaves = with_units(leaves_of(model, embeddings), units)
    check(optimizer, model)
    settings, process = settings_of(url, run, config), met(run, name)
    return TorchIsland(settings, run, name, model, leaves, optimizer, process)
