"""A torch training loop of one's own as a learner: ``skerry.torch.join``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, overload

import torch
from torch import distributed

from skerry.algorithm.fragments import LeafSpec, Plan, plan
from skerry.client import torch_inner
from skerry.client.asked import Config, settings_of
from skerry.client.batches import Batch, Loader, until_done
from skerry.client.joined import JoinedIsland
from skerry.client.processes import Deed
from skerry.client.torch_fragments import TorchFragments, leaves_of
from skerry.client.torch_ranks import Follower, LeadFragments, Ranks, Standing
from skerry.data.stream import Prefetched
from skerry.settings import loading
from skerry.settings.models import RunConfig, Settings


class PendingLoss:
    """A loss that a device still computes: read once it is there, without waiting for it."""

    def __init__(self, loss: torch.Tensor) -> None:
        self._host = torch.empty((), dtype=loss.dtype, pin_memory=True)
        self._host.copy_(loss, non_blocking=True)
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
    return PendingLoss(loss) if loss.device.type == "cuda" else loss


class TorchIsland:
    """One learner of a run, whose parameters are a torch module's; they change in place.

    When the block begins they are the log's. Where several processes are one learner, the first one
    leads: only it joins, and the others do at each boundary what it says.
    """

    def __init__(
        self,
        settings: Settings,
        run: str,
        name: str | None,
        model: torch.nn.Module,
        leaves: tuple[LeafSpec, ...],
        optimizer: Any,
        ranks: Ranks | None,
    ) -> None:
        self._model = model
        self._leaves = leaves
        self._optimizer = optimizer
        self._ranks = ranks
        self._standing = Standing()
        self._follower = Follower(ranks, self._follow) if ranks and ranks.rank > 0 else None
        self._lead = JoinedIsland(settings, run, name, leaves, self._hold, described(model))

    def __enter__(self) -> Self:
        self._at_boundary(self._join)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or self._follower is None:
            self._at_boundary(partial(self._lead.__exit__, kind, error, trace), ends=bool(kind))

    @property
    def config(self) -> RunConfig:
        """The run's config, as the ledger holds it."""
        return (self._follower or self._lead).config

    @property
    def shard(self) -> int:
        """The number of this learner's part of the data: no other learner of the run has it."""
        return self._standing.shard

    @property
    def start(self) -> int:
        """The cursor, in sequences, at which this learner's data goes on."""
        return self._standing.start

    @property
    def cursor(self) -> int:
        """How far this learner has used its data, in sequences."""
        return self._standing.cursor

    @property
    def progress(self) -> float:
        """How much of the run was done at the last boundary, in [0, 1]: for schedules."""
        return self._standing.progress

    @property
    def fell_back(self) -> bool:
        """True if the last step put the global state in the place of values not finite."""
        return self._standing.fell_back

    @property
    def done(self) -> bool:
        """True once the run is over; for all processes of a learner after the same step."""
        return self._standing.over

    @overload
    def batches(self) -> Iterator[Prefetched]: ...
    @overload
    def batches(self, loader: Loader[Batch]) -> Iterator[Batch]: ...
    def batches(self, loader: Loader[Any] | None = None) -> Iterator[Any]:
        """Yield each process's batches until the run is over, as ``batches.until_done``."""
        for cursor, batch in until_done(self, loader):
            self._lead.read_to = cursor
            yield batch

    def step(
        self,
        *,
        tokens: int,
        loss: Any,
        cursor: int | None = None,
        routed: Mapping[str, Any] | None = None,
    ) -> None:
        """Count a step that the optimizer has taken; answer, and adopt into the parameters.

        It never waits, but in a blocking mode. Where several processes train the module each calls
        it: ``tokens`` are those of all, and the first one's ``loss`` counts. Once values that were
        not finite gave way to the global state, the optimizer's state of the parameters is cleared.
        That of a module in one process is saved on this machine now and then.
        ``JoinedIsland.boundary`` says the rest.
        """
        loss = pending(loss) if self._follower is None else None
        boundary = partial(self._lead.boundary, tokens=tokens, loss=loss, cursor=cursor)
        state = partial(torch_inner.state_of, self._optimizer, self._model)
        self._at_boundary(partial(boundary, routed=routed, state=state))
        if self.fell_back:
            forget(self._optimizer, self._model)

    def _join(self) -> None:
        """Join, and go on with the optimizer's state that an earlier start has saved."""
        self._lead.__enter__()
        if self._optimizer is None or self._ranks is not None:
            return
        try:
            tensors = self._lead.resume(torch_inner.kind_of(self._optimizer, self._model))
            if tensors:
                torch_inner.restore(self._optimizer, self._model, tensors)
        except BaseException:
            self._lead.__exit__(*sys.exc_info())
            raise

    def _at_boundary(self, act: Callable[[], object], *, ends: bool = False) -> None:
        """Have the first process act, and learn where this learner is then.

        ``ends``: by an error, which the others hear of as they do of any in ``act``.
        """
        if self._follower is not None:
            self._standing = self._follower.follow()
            return
        word, about = Deed.FAIL, tuple[float, ...]()
        try:
            act()
            self._standing = Standing.of(self._lead)
            if self._ranks is not None and not ends:
                word, about = Deed.DONE, astuple(self._standing)
        finally:
            if self._ranks is not None:
                self._ranks.say(word, *about)

    def _hold(self, plan: Plan, config: RunConfig) -> TorchFragments | LeadFragments:
        held = TorchFragments(plan, config.sync, self._model)
        if self._ranks is None:
            return held
        self._ranks.say(Deed.HOLD)
        self._ranks.share(loading.to_json(config))
        return LeadFragments(held, self._ranks)

    def _follow(self, config: RunConfig, rank: int) -> tuple[Plan, TorchFragments]:
        cut = plan(self._leaves, config.sync.fragments)
        return cut, TorchFragments(cut, config.sync, self._model, rank=rank)


def described(model: Any) -> str:
    """Return the config.json of a transformers model; empty for any other module."""
    text = getattr(getattr(model, "config", None), "to_json_string", None)
    return str(text(use_diff=False)) if text is not None else ""


def forget(optimizer: Any, model: torch.nn.Module) -> None:
    """Clear an optimizer's state of a module's parameters; None has none."""
    if optimizer is not None:
        for parameter in model.parameters():
            optimizer.state.pop(parameter, None)


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

    The run is created where there is none: with this module's parameters as its first global state.
    Else the log's values come in their place. Where ``torch.distributed`` runs, its processes are
    one learner: each joins, and the first one talks to the log.

    Args:
        url: The broker; by default that of the settings (``SKERRY_NATS__URL``), or that of the
            run's ``skerry up`` in this folder.
        model: The module: its parameters that require gradients take part, by their names. They
            are float32, bfloat16 or float16, whole or sharded by rows (``fully_shard``).
        run: The run's id.
        name: The learner's own, which no other learner of the run has; by default the host's.
        optimizer: What trains the module: its state is saved on this machine, given back after a
            restart, and cleared when training falls back.
        config: Settings by table, such as ``{"train": {"steps": 5000}}``, or a TOML file of them;
            those of the run count if it is created here. Credentials are in table ``nats``.
        embeddings: Name parts that mark embeddings, which are averaged and not merged by direction;
            by default those of Hugging Face's models.
        units: By the name of a stack of tensors, how many elements one of them has; by default
            the experts of Hugging Face's models.

    Raises:
        ConfigError: a setting that is none, or does not fit.
        ModelError: parameters of another kind, or none to train.

    Entering the block raises BrokerUnavailable where no broker answers, RunMismatch where the run
    has other tensors, RunFinished where it is over; a step raises Superseded once another learner
    has taken this one's name.

    """
    sizes = dict(units or {})
    leaves = tuple(
        replace(leaf, unit=sizes.get(leaf.name, leaf.unit)) for leaf in leaves_of(model, embeddings)
    )
    several = distributed.is_available() and distributed.is_initialized()
    ranks = Ranks() if several and distributed.get_world_size() > 1 else None
    settings = settings_of(url, run, config)
    return TorchIsland(settings, run, name, model, leaves, optimizer, ranks)
