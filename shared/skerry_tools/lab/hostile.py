"""A learner that keeps the protocol and sends something else than what it has learnt."""

from __future__ import annotations

import random
from dataclasses import replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from skerry.client.connection import LearnerConnection
from skerry.client.mailbox import OutgoingContribution
from skerry.client.sending import ContributionSender
from skerry.protocol.learner import MissingCheck
from skerry.protocol.messages import ContributionHeader, ContributionKind
from skerry.settings.models import DataConfig

FACTOR = 50.0
"""How many times too long ``scaled`` is."""
NOISE = 10.0
"""How many times as long as the learner's own ``noise`` is."""
CONSTANT = 99.0
"""Every value of ``constants``: the largest that may be merged whatever the parameters are."""
CLAIMED_STEPS = 2**24
"""Steps that ``zeros`` claims, with all the tokens and data that they would take."""


class Attack(StrEnum):
    """What is sent in place of an outer gradient."""

    SCALED = "scaled"
    FLIPPED = "flipped"
    NOISE = "noise"
    CONSTANTS = "constants"
    ZEROS = "zeros"
    REPEATS = "repeats"
    """The first one of each fragment, again and again."""


class HostileSender(ContributionSender):
    """Sends what an attack makes of a learner's outer gradients; initial parameters are left."""

    def __init__(
        self, link: LearnerConnection, data: DataConfig, attack: Attack, seed: str
    ) -> None:
        super().__init__(link)
        self._data = data
        self._attack = attack
        self._draw = np.random.default_rng(random.Random(seed).getrandbits(64))  # noqa: S311 - no secret
        self._first: dict[int, NDArray[np.float32]] = {}

    def take(self, order: OutgoingContribution | MissingCheck) -> None:
        """Send what the attack makes of an outer gradient."""
        if isinstance(order, OutgoingContribution):
            header = order.header
            if header.kind is ContributionKind.OUTER_GRADIENT:
                meant = np.array(order.gradient, np.float32)
                order = replace(order, gradient=self._sent(header.fragment, meant))
                if self._attack is Attack.ZEROS:
                    order = replace(order, header=self._boasting(header))
        super().take(order)

    def _sent(self, fragment: int, meant: NDArray[np.float32]) -> NDArray[np.float32]:
        match self._attack:
            case Attack.SCALED:
                return meant * np.float32(FACTOR)
            case Attack.FLIPPED:
                return -meant
            case Attack.NOISE:
                noise = self._draw.standard_normal(meant.size, np.float32)
                length = NOISE * np.linalg.norm(meant) / np.linalg.norm(noise)
                return noise * np.float32(length)
            case Attack.CONSTANTS:
                return np.full_like(meant, CONSTANT)
            case Attack.ZEROS:
                return np.zeros_like(meant)
            case Attack.REPEATS:
                return self._first.setdefault(fragment, meant)

    def _boasting(self, header: ContributionHeader) -> ContributionHeader:
        sequences = CLAIMED_STEPS * self._data.batch
        return replace(
            header,
            steps=CLAIMED_STEPS,
            tokens=sequences * self._data.seq_len,
            cursor_to=header.cursor_from + sequences,
        )
