"""Passes values between the trainer and the network; no step ever waits for it.

Slots hold the newest value only, and queues only what one learner has ordered or sent: a trainer
that compiles for minutes, or a broker that is away for a day, fills no memory. The lock is held for
a few operations on dictionaries at most.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.fragments import Fragment
from skerry.algorithm.planes import Planes
from skerry.protocol.learner import MissingCheck
from skerry.protocol.messages import ContributionHeader, Manifest, Pulse, Round


class DeviceGradient(Protocol):
    """An outer gradient f32 [padded_size] on a device, which quantises it itself."""

    def __array__(self) -> NDArray[np.float32]: ...

    def quantise(self, scheme: str, fragment: Fragment) -> tuple[Planes, tuple[float, ...]]:
        """Return its planes and the norms of what they decode to, by slice.

        Raises Diverged if it is not finite.
        """
        ...


Gradient: TypeAlias = NDArray[np.float32] | DeviceGradient


@dataclass(frozen=True, slots=True)
class Fresh:
    """A global fragment to be adopted: decoded, f32 [padded_size].

    ``vector`` is None for initial parameters: a learner compares its own before it reads them.
    """

    manifest: Manifest
    vector: NDArray[np.float32] | None

    @property
    def fragment(self) -> int:
        return self.manifest.commit.fragment


@dataclass(frozen=True, slots=True)
class OutgoingContribution:
    """A contribution to be sent: the header without norms, the gradient f32 [padded_size].

    ``routed`` are the tokens that reached each unit, at its origin and at its capture.
    """

    header: ContributionHeader
    gradient: Gradient
    scheme: str
    routed: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})


@dataclass(frozen=True, slots=True)
class Initial:
    """A learner's own initial parameters, relative to zero, and the manifest that asks for them."""

    manifest: Manifest
    gradient: Gradient


@dataclass(frozen=True, slots=True)
class Gone:
    """A contribution that is no longer being sent: the log has it, or it was not finite."""

    header: ContributionHeader
    sent: bool


Order: TypeAlias = OutgoingContribution | Initial | MissingCheck | Pulse
"""What the trainer asks the network to send, or to look for."""
Event: TypeAlias = Gone | MissingCheck
"""The fate of a contribution; a ``MissingCheck`` that comes back says that it is lost."""


class Mailbox:
    """The only object that both threads touch.

    ``rounds`` are the newest of every fragment, by fragment. ``began_s`` is when the run's first
    commit was made, by the trainer's monotonic clock; None until that is known. ``to_offer`` are
    the fragments whose initial parameters this learner must offer; None until that is known.
    """

    def __init__(
        self, room: int, notify: Callable[[], None], wake: Callable[[], None] | None = None
    ) -> None:
        """``room`` bounds the global fragments held here; ``notify`` makes the network take orders.

        ``wake`` is called when there is news, for a trainer that waits for it in its own way.
        """
        self.rounds: tuple[Round, ...] = ()
        self.began_s: float | None = None
        self.to_offer: deque[int] | None = None
        self.stopping = False
        self._room = room
        self._notify = notify
        self._news = threading.Event()
        self._wake = wake or self._news.set
        self._lock = threading.Lock()
        self._fresh: dict[int, Fresh] = {}
        self._events: list[Event] = []
        self._orders: list[Order] = []

    # the network's side

    def post(self, event: Event) -> None:
        """Report the fate of a contribution."""
        with self._lock:
            self._events.append(event)
        self._wake()

    def post_rounds(self, rounds: tuple[Round, ...]) -> None:
        """Replace the rounds that are open."""
        if rounds != self.rounds:
            self.rounds = rounds
            self._wake()

    def post_fresh(self, fresh: Fresh) -> None:
        """Replace the global fragment that can be adopted."""
        with self._lock:
            self._fresh[fresh.fragment] = fresh
        self._wake()

    def post_genesis(self, began_s: float) -> None:
        """Say when the run began."""
        self.began_s = began_s
        self._wake()

    def post_to_offer(self, fragments: Iterable[int]) -> None:
        """Have the trainer offer the initial parameters of these fragments."""
        self.to_offer = deque(fragments)
        self._wake()

    def stop(self) -> None:
        """Ask the trainer to end at its next boundary."""
        self.stopping = True
        self._wake()

    def has_room(self, fragment: int, reading: int) -> bool:
        """Return True if the bound allows to read a global fragment beside ``reading`` others.

        One beyond the bound is allowed if it replaces a version that waits here.
        """
        with self._lock:
            return len(self._fresh) + reading < self._room + (fragment in self._fresh)

    def take_orders(self) -> list[Order]:
        """Take what the trainer has asked for, in that order."""
        with self._lock:
            taken, self._orders = self._orders, []
            return taken

    # the trainer's side

    def order(self, order: Order) -> None:
        """Ask the network for something."""
        with self._lock:
            self._orders.append(order)
        self._notify()

    def take_events(self) -> list[Event]:
        """Take the events since the last call."""
        with self._lock:
            taken, self._events = self._events, []
            return taken

    def fresh(self) -> tuple[Fresh, ...]:
        """Return what can be adopted, without taking it."""
        with self._lock:
            return tuple(self._fresh.values())

    def take_fresh(self, fresh: Fresh) -> None:
        """Drop this one, unless a newer one has come meanwhile, and let the network read more."""
        with self._lock:
            if self._fresh.get(fresh.fragment) is fresh:
                del self._fresh[fresh.fragment]
        self._notify()

    def wait(self, timeout_s: float) -> None:
        """Wait until the network has posted something; only for a trainer that takes no steps.

        What was posted since the last wait ends this one at once: the trainer may have looked
        before it came.
        """
        if not self.stopping:
            self._news.wait(timeout_s)
        self._news.clear()
