"""What the trainer and the network hand each other; no step ever waits for it.

Each slot keeps the newest value only. The lock is held for a dictionary access at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from skerry.protocol.learner import MissingCheck
from skerry.protocol.messages import ContributionHeader, Manifest, Pulse, Round

if TYPE_CHECKING:
    import jax

Gradient: TypeAlias = "jax.Array | NDArray[np.float32]"


@dataclass(frozen=True, slots=True)
class Fresh:
    """A global fragment on its way in: decoded, f32 [padded_size]."""

    manifest: Manifest
    vector: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class OutgoingContribution:
    """A contribution on its way out: the header without norms, the gradient f32 [padded_size]."""

    header: ContributionHeader
    gradient: Gradient
    scheme: str


class Changed(AbstractContextManager[Any], Protocol):
    """What of ``threading.Condition`` a mailbox needs."""

    def notify_all(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Mailbox:
    """The only thing that both threads touch."""

    def __init__(
        self, room: int, notify: Callable[[], None], changed: Changed | None = None
    ) -> None:
        """``room`` bounds the fragments in each direction; ``notify`` wakes the network.

        ``changed`` is another condition than a thread's, for a trainer that has none.
        """
        self._room = room
        self._notify = notify
        self._changed: Changed = changed or threading.Condition()
        self._rounds: tuple[Round, ...] = ()
        self._fresh: dict[int, Fresh] = {}
        self._outgoing: dict[int, OutgoingContribution] = {}
        self._diverged: dict[int, int] = {}
        self._checks: list[MissingCheck] = []
        self._lost: set[MissingCheck] = set()
        self._pulse: Pulse | None = None
        self._began_s: float | None = None
        self._stopping = False
        self._news = False

    # the network's side

    def post_rounds(self, rounds: tuple[Round, ...]) -> None:
        """Replace the rounds that are open; they come in the order of their fragments."""
        with self._changed:
            if rounds != self._rounds:
                self._rounds = rounds
                self._wake_trainer()

    def takes_fresh(self, fragment: int, reading: int = 0) -> bool:
        """Return True if a global fragment can be read without exceeding the bound.

        ``reading`` are being read. One more than the bound may be, to replace one that waits here.
        """
        with self._changed:
            held = len(self._fresh) + reading
            return held < self._room + (fragment in self._fresh)

    def post_fresh(self, fresh: Fresh) -> None:
        with self._changed:
            self._fresh[fresh.manifest.commit.fragment] = fresh
            self._wake_trainer()

    def post_genesis(self, began_s: float) -> None:
        """Say when the run's first commit was made, by the trainer's monotonic clock."""
        with self._changed:
            self._began_s = began_s
            self._wake_trainer()

    def next_outgoing(self, besides: Collection[int] = ()) -> OutgoingContribution | None:
        """Return the oldest contribution that is not sent yet; it stays until ``sent``.

        ``besides`` are fragments whose contribution is on its way already.
        """
        with self._changed:
            waiting = (o for f, o in self._outgoing.items() if f not in besides)
            return next(waiting, None)

    def sent(self, outgoing: OutgoingContribution) -> None:
        """Drop a contribution that the log has."""
        with self._changed:
            del self._outgoing[outgoing.header.fragment]
            self._wake_trainer()

    def diverged(self, outgoing: OutgoingContribution) -> None:
        """Drop a contribution that is not finite and can never be sent."""
        with self._changed:
            del self._outgoing[outgoing.header.fragment]
            self._diverged[outgoing.header.fragment] = outgoing.header.identity
            self._wake_trainer()

    def take_checks(self) -> list[MissingCheck]:
        """Take the contributions to be looked for in the log."""
        with self._changed:
            taken, self._checks = self._checks, []
            return taken

    def post_lost(self, check: MissingCheck) -> None:
        """Say that a contribution has left the log unmerged."""
        with self._changed:
            self._lost.add(check)
            self._wake_trainer()

    def take_pulse(self) -> Pulse | None:
        with self._changed:
            pulse, self._pulse = self._pulse, None
            return pulse

    def stop(self) -> None:
        """Ask the trainer to end at its next boundary."""
        with self._changed:
            self._stopping = True
            self._wake_trainer()

    # the trainer's side

    def stopping(self) -> bool:
        """Return True if the trainer has been asked to end."""
        return self._stopping

    @property
    def began_s(self) -> float | None:
        """When the run's first commit was made; None until that is known."""
        return self._began_s

    def rounds(self) -> tuple[Round, ...]:
        """Return the newest round of every fragment, by fragment."""
        return self._rounds

    def fresh(self) -> tuple[Fresh, ...]:
        """Return what can be adopted, without taking it."""
        with self._changed:
            return tuple(self._fresh.values())

    def take_fresh(self, fresh: Fresh) -> None:
        """Drop this one, unless a newer one has come meanwhile."""
        with self._changed:
            fragment = fresh.manifest.commit.fragment
            if self._fresh.get(fragment) is fresh:
                del self._fresh[fragment]
        self._notify()

    def take_diverged(self) -> dict[int, int]:
        """Take the fragments whose contribution was dropped because it was not finite.

        With the identity that each would have had.
        """
        with self._changed:
            taken, self._diverged = self._diverged, {}
            return taken

    def post_check(self, check: MissingCheck) -> None:
        """Ask whether a contribution can still be merged."""
        with self._changed:
            self._checks.append(check)
        self._notify()

    def take_lost(self) -> frozenset[MissingCheck]:
        """Take the contributions that no commit will merge any more."""
        with self._changed:
            taken, self._lost = frozenset(self._lost), set()
            return taken

    def busy(self) -> frozenset[int]:
        """Return the fragments that take up memory here."""
        with self._changed:
            return frozenset(self._fresh) | frozenset(self._outgoing)

    def unsent(self) -> int:
        """Return how many contributions have not left yet."""
        with self._changed:
            return len(self._outgoing)

    def sending(self, fragment: int) -> bool:
        """Return True if a contribution to this fragment has not left yet."""
        with self._changed:
            return fragment in self._outgoing

    def post_outgoing(self, outgoing: OutgoingContribution) -> None:
        with self._changed:
            self._outgoing[outgoing.header.fragment] = outgoing
        self._notify()

    def post_pulse(self, pulse: Pulse) -> None:
        with self._changed:
            self._pulse = pulse
        self._notify()

    def wait(self, timeout_s: float) -> None:
        """Wait until the network has posted something; only for a trainer that takes no steps.

        What was posted since the last wait ends this one at once: the trainer may have looked
        before it came.
        """
        with self._changed:
            if not (self._stopping or self._news):
                self._changed.wait(timeout_s)
            self._news = False

    def _wake_trainer(self) -> None:
        """Wake the trainer; the lock is held."""
        self._news = True
        self._changed.notify_all()
