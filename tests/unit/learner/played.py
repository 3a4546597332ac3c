"""One learner's session whose log is played by the test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan
from skerry.client.mailbox import Fresh, Gone, Mailbox, Order, OutgoingContribution
from skerry.client.session import Session
from skerry.client.telemetry import LearnerIdentity, LearnerTelemetry
from skerry.protocol.learner import MissingCheck, TrainingProgress
from skerry.protocol.messages import Pulse, Round
from skerry.settings.models import SyncConfig
from tests.support.builders import manifest, round_

ME = LearnerIdentity("run", "a", 7)


@dataclass
class PlayedLog:
    """What a network would do for ``session``; ``orders`` is all that it was asked for."""

    plan: Plan
    sync: SyncConfig
    parameters: Any
    start: TrainingProgress
    orders: list[Order] = field(default_factory=list[Order])
    rounds: dict[int, Round] = field(default_factory=dict[int, Round])

    def __post_init__(self) -> None:
        self.mailbox = Mailbox(2, lambda: None)
        self.session = Session(
            LearnerTelemetry(ME),
            self.plan,
            self.sync,
            self.parameters,
            self.mailbox,
            start=self.start,
            wall_ns=lambda: 5,
        )

    def publish(self, fragment: int, version: int, vector: NDArray[np.float32], step: int) -> None:
        """Have a global fragment ready to be adopted."""
        named = manifest(version, fragment, plan_digest=self.plan.digest, step=step)
        self.mailbox.post_fresh(Fresh(named, vector))

    def open(self, fragment: int, version: int, **changes: Any) -> None:
        self.rounds[fragment] = round_(version, fragment, plan_digest=self.plan.digest, **changes)
        self.mailbox.post_rounds(tuple(self.rounds[f] for f in sorted(self.rounds)))

    def taken(self, kind: type[Any]) -> list[Any]:
        """Take all orders of a kind."""
        self.orders += self.mailbox.take_orders()
        found = [order for order in self.orders if isinstance(order, kind)]
        self.orders = [order for order in self.orders if not isinstance(order, kind)]
        return found

    def offered(self) -> OutgoingContribution | None:
        """Return the contribution that the trainer has made since the last one, if any."""
        found = self.taken(OutgoingContribution)
        assert len(found) <= 1
        return found[0] if found else None

    def answer(self) -> OutgoingContribution:
        """Return the contribution that the trainer has made; the log has it now."""
        made = self.offered()
        assert made is not None
        self.mailbox.post(Gone(made.header, sent=True))
        return made

    def lose(self, made: OutgoingContribution) -> None:
        """Report that the log has lost a contribution."""
        header = made.header
        self.mailbox.post(
            MissingCheck("a", 7, header.fragment, header.identity, header.round_version)
        )

    def pulses(self) -> list[Pulse]:
        return self.taken(Pulse)
