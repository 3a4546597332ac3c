"""A learner in a user's training loop, in one process or in several.

With several, the first one leads: only it joins. At each boundary the others do what it says, until
it sends them the learner's new standing. Nothing here depends on JAX or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import astuple, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, overload

import structlog
from numpy.typing import NDArray

from skerry.algorithm.fragments import LeafSpec, Plan, plan
from skerry.client.batches import Batch, Loader, until_done
from skerry.client.inner_state import InnerStateSaver, StateKind
from skerry.client.joined import JoinedIsland, Joining
from skerry.client.peer import Deed
from skerry.client.processes import Assignment, FollowingProcess, LeadProcess
from skerry.client.standing import Standing, StandingView
from skerry.data.stream import Prefetched
from skerry.errors import ConfigError, RunMismatch, SkerryError, first_cause
from skerry.service.reporting import configure
from skerry.settings import loading
from skerry.settings.local import Settings
from skerry.settings.models import RunConfig

Obey: TypeAlias = Callable[..., None]
"""Repeats what the first process does to fragments: takes a deed, a fragment, perhaps a version."""


class Follower:
    """A process of a learner other than the first: it does what the first one says.

    ``hold`` makes the object that holds its part of the parameters. ``state`` returns the
    optimizer's state.
    """

    def __init__(
        self,
        process: FollowingProcess,
        settings: Settings,
        leaves: tuple[LeafSpec, ...],
        hold: Callable[[Assignment, Plan, RunConfig], Obey],
    ) -> None:
        self.config = RunConfig()
        self.state: Callable[[], Any] = lambda: None
        self.restored: Mapping[str, NDArray[Any]] = {}
        self._process = process
        self._settings = settings
        self._leaves = leaves
        self._hold = hold
        self._saver: InnerStateSaver | None = None

    def follow(self) -> Standing:
        """Do what the first process does at a boundary; SkerryError once it has failed."""
        while True:
            deed, words = self._process.next_order()
            match deed:
                case Deed.DONE:
                    return Standing.read(words)
                case Deed.END:
                    msg = "The first process of this learner has left its block: leave it in all."
                    raise SkerryError(msg)
                case Deed.HOLD:
                    self._join(Assignment.read(words))
                case Deed.MEET:
                    self._process.meet()
                case Deed.RESTORE | Deed.SAVE:
                    if self._saver is not None:
                        found = self._saver.follow(deed, words, self.state)
                        self.restored = found or self.restored
                case _:
                    self._obey(deed, *words)

    def begin_saving(self, kind: StateKind) -> None:
        """Look for a state that an earlier start has saved, and save from now on."""
        local, place = self._settings.local.learner, self._place
        if not local.save_every_s:
            self._process.tell(Deed.FOUND)
        elif self._saver is None:
            origin = replace(place.origin, process=self._process.number)
            self._saver = InnerStateSaver(
                local, origin, place.incarnation, kind, process=self._process
            )
            self._saver.start()

    def end(self, error: BaseException | None) -> None:
        """End with the others, or have them end."""
        if self._saver is not None:
            self._saver.close()
        if error is None:
            self._process.close()
        else:
            self._process.break_off()

    def _join(self, place: Assignment) -> None:
        if not structlog.is_configured():
            configure(self._settings.local.log_level, service="learner")
        config = loading.run_config_from_json(place.config, "this release")
        self.config = loading.with_own_data(config, self._settings.run, reads=False)
        cut = plan(self._leaves, config.sync.fragments, config.sync.shards)
        if cut.digest != place.origin.plan_digest:
            msg = "This process has other tensors than the first one: give all the same model."
            raise RunMismatch(msg)
        self._place = place
        self._obey = self._hold(place, cut, config)


def not_joined() -> ConfigError:
    """Return the error of a learner that is used outside its block."""
    msg = "This learner has not joined yet: use it in a block, `with join(...) as island`."
    return ConfigError(msg)


class LoopIsland(StandingView):
    """One learner of a run, for a ``with`` block around a user's training loop.

    If a learner has several processes, each has one of these, and all make the same calls.
    """

    def __init__(
        self,
        joining: Joining,
        process: LeadProcess | FollowingProcess | None,
        follower: Follower | None,
    ) -> None:
        self._joining = joining
        self._process = process
        self._follower = follower
        self._joined: JoinedIsland | None = None
        self._standing: Standing | None = None
        self._around, self._leaving = ExitStack(), ExitStack()
        self._left = False
        self._begun: Any = None

    def __enter__(self) -> Self:
        if self._left and self._process is not None:
            msg = "This learner's processes have parted: call join again, in each of them."
            raise ConfigError(msg)
        if not self._left and (self._joined is not None or self._standing is not None):
            msg = "This learner is in its block already: use it there, without another `with`."
            raise ConfigError(msg)
        self._left = False
        try:
            self._at_boundary(self._join)
        except BaseException as error:
            self._left = True
            self._end(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left = True
        try:
            if kind is None or self._follower is None:
                self._at_boundary(partial(self._leaving.__exit__, kind, error, trace), error)
        finally:
            self._end(error)

    def _join(self) -> None:
        with ExitStack() as around:
            self._joined = self._joining.join(around)
            self._leaving = around.pop_all()

    def _end(self, error: BaseException | None) -> None:
        with self._around:
            if self._follower is not None:
                self._follower.end(error)
            elif self._process is not None:
                self._process.close()

    @property
    def config(self) -> RunConfig:
        """The run's config, as the ledger holds it."""
        return (self._follower or self._lead).config

    @overload
    def batches(self) -> Iterator[Prefetched]: ...
    @overload
    def batches(self, loader: Loader[Batch]) -> Iterator[Batch]: ...
    def batches(self, loader: Loader[Any] | None = None) -> Iterator[Any]:
        """Yield each process's batches until the run is over, as ``batches.until_done`` says.

        While they are read, a step's cursor is how far they were read, however many they are.
        """
        joined, begun = self._joined, loader is not None and loader is self._begun
        self._begun = loader
        try:
            for cursor, batch in until_done(self, loader, begun=begun):
                if joined is not None:
                    joined.read_to, joined.reads = cursor, True
                yield batch
        finally:
            if joined is not None:
                joined.reads = False

    @property
    def _lead(self) -> JoinedIsland:
        if self._joined is None:
            raise not_joined()
        return self._joined

    @property
    def _now(self) -> Standing:
        """Where the learner is: with several processes, where it was at the last boundary."""
        if self._process is None:
            return self._lead.standing
        if self._standing is None:
            raise not_joined()
        return self._standing

    def _boundary(
        self,
        *,
        tokens: int,
        loss: Any,
        cursor: int | None,
        routed: Mapping[str, Any] | None,
        state: Callable[[], Any] | None,
    ) -> None:
        """Do what ``JoinedIsland.boundary`` says, in all processes; ConfigError after the block."""
        if self._left:
            msg = "This learner has left its run: call step inside its block, or join again."
            raise ConfigError(msg)
        if self._follower is not None:
            self._follower.state = state or self._follower.state
        self._at_boundary(
            lambda: self._lead.boundary(
                tokens=tokens, loss=loss, cursor=cursor, routed=routed, state=state
            )
        )

    def _resume(self, kind: StateKind) -> Mapping[str, NDArray[Any]]:
        """Return this process's part of the optimizer's state that an earlier start has saved."""
        if self._follower is not None:
            self._follower.begin_saving(kind)
        found = list[Mapping[str, NDArray[Any]]]()
        self._at_boundary(lambda: found.append(self._lead.resume(kind)))
        return found[0] if self._follower is None else self._follower.restored

    def _at_boundary(self, act: Callable[[], object], ends: BaseException | None = None) -> None:
        """Have the first process ``act``, and learn where this learner is then.

        An error in ``act``, or ``ends``, which is raised instead, reaches the others too.
        """
        if self._follower is not None:
            self._standing = self._follower.follow()
            return
        lead = self._process if isinstance(self._process, LeadProcess) else None
        try:
            act()
        except BaseException as error:
            ends = error
            raise
        finally:
            if lead is not None and ends is not None:
                lead.post(Deed.FAIL, str(first_cause(ends)))
            elif lead is not None:
                self._standing = self._lead.standing
                lead.post(Deed.DONE, *astuple(self._standing))
