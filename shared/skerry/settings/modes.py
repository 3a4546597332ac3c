"""Modes: settings that together are an algorithm with a name.

A mode is no code path. It sets what the user has left open, and refuses what contradicts it.
Sources: DiLoCo (arXiv 2311.08105), Streaming DiLoCo (2501.18512), Decoupled DiLoCo (2604.21428).
Those named after a paper have its H, merge, outer step and formats unless you set others. Streaming
DiLoCo has H = 100: 96 here, which the usual numbers of fragments divide.

============= =====================================================================================
decoupled     K = 1 and a grace window, overlap tau: no learner waits for another; the defaults
streaming     K = M, fragments in turn, overlap tau: all meet, and train on meanwhile; H = 96, E3M0,
              the mean, Nesterov 0.7 / 0.9, half of the global state adopted
diloco        K = M, P = 1, tau = 0: all stop every H steps and meet; H = 500, the mean in f32,
              Nesterov 0.7 / 0.9
data-parallel K = M, P = 1, H = 1, tau = 0, bare gradients in f32, AdamW on the syncer
single        M = 1: the one learner's own optimizer
============= =====================================================================================

``decoupled`` and ``single`` train small models from scratch with Muon, see ``MUON_LR``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Mode: TypeAlias = Literal["decoupled", "streaming", "diloco", "data-parallel", "single"]

Value: TypeAlias = str | int | float | None


@dataclass(frozen=True, slots=True)
class Clause:
    """One setting of a mode, by its dotted path, and its ``value`` unless the user sets one.

    ``because`` says why no other value is allowed; if it is empty, any value is. ``least`` allows
    all numbers from it on.
    """

    path: str
    value: Value
    because: str = ""
    least: int | None = None

    def holds(self, value: object) -> bool:
        """Return True if the mode allows this value."""
        if not self.because or value == self.value:
            return True
        return self.least is not None and isinstance(value, int) and value >= self.least


WITH_MUON: tuple[Mode, ...] = ("decoupled", "single")
MUON_LR = {"nano": 1.2e-2, "micro": 6e-3}
"""Learning rates of the built-in models that are trained from scratch with Muon, in a mode of
``WITH_MUON``, if neither ``train.inner`` nor ``train.lr`` is set (experiments ``optimizer`` and
``size`` of docs/quality.md). Given weights, adapters on them, and larger models, for which no rate
was measured, use AdamW."""
RATES = {"adamw": (3e-4, 2.4e-2), "muon": (3e-3, 4.8e-2)}
"""The lowest and the highest learning rate that was measured with each inner optimizer, on models
of 0.1 to 1 M parameters trained from scratch (docs/quality.md)."""


def clauses(mode: Mode, learners: int) -> tuple[Clause, ...]:
    """Return the clauses of a mode for a run of ``learners`` learners."""
    meeting = Clause("sync.quorum", learners, "in which every round waits for all learners")
    mean = Clause("sync.merge", "average"), Clause("outer.preset", "nesterov")
    if mode == "streaming":
        return (
            meeting,
            Clause("sync.overlap_steps", 2, "in which learners train on while they meet", least=1),
            Clause("sync.grace_gamma", 0.0),
            Clause("sync.h_steps", 96),
            Clause("sync.contribution_scheme", "e3m0"),
            Clause("sync.adoption", "blend"),
            *mean,
        )
    if mode == "diloco":
        whole = "in which the whole model is synchronised at once"
        return (
            meeting,
            Clause("sync.fragments", 1, whole),
            Clause("sync.overlap_steps", 0, "in which learners stop until they have met"),
            Clause("sync.h_steps", 500),
            Clause("sync.contribution_scheme", "f32"),
            Clause("sync.adoption", "overwrite"),
            *mean,
        )
    if mode == "data-parallel":
        return (meeting, *_DATA_PARALLEL)
    return _SINGLE if mode == "single" else ()


def turns_are_even(mode: Mode, h_steps: int, fragments: int) -> bool:
    """Return False in mode ``streaming`` if neither of H and P divides the other, else True."""
    return mode != "streaming" or not (h_steps % fragments and fragments % h_steps)


_DATA_PARALLEL = (
    Clause("sync.fragments", 1, "in which the whole gradient is averaged at once"),
    Clause("sync.shards", 1, "which has one fragment"),
    Clause("sync.h_steps", 1, "in which every step is averaged"),
    Clause("sync.overlap_steps", 0, "in which every step waits for the one before"),
    Clause("sync.max_staleness", 0, "in which a late gradient is of no use"),
    Clause("sync.adoption", "overwrite", "in which all have the same parameters"),
    Clause("sync.merge", "average", "in which gradients are averaged"),
    Clause("sync.contribution_scheme", "f32", "which is the exact baseline"),
    Clause("sync.global_scheme", "f32", "which is the exact baseline"),
    Clause("sync.delta_scheme", "none", "which is the exact baseline"),
    # Noise alone may make the gradient of a single step long; it counts as one step's tokens,
    # whatever its learner claims.
    Clause("contain.clip", 0.0),
    Clause("contain.share", 0.0),
    Clause("contain.steps", 1.0),
    Clause("contain.opposed", value=False),
    Clause("train.inner", "gradient", "in which learners send bare gradients"),
    Clause("train.duration_s", None, "whose optimizer, on the syncer, counts steps and no time"),
    Clause("train.tokens", None, "whose optimizer, on the syncer, counts steps and no tokens"),
    Clause("outer.preset", "adamw", "in which the syncer does what a learner's AdamW would"),
    Clause("outer.lr", None, "which takes its learning rate from train.lr"),
    Clause("outer.momentum", None, "which takes its decays from train.b1 and train.b2"),
)

_SINGLE = (
    Clause("sync.learners", 1, "which is one learner"),
    Clause("sync.quorum", 1, "which is one learner"),
    Clause("sync.contribution_scheme", "f32"),
    Clause("sync.global_scheme", "f32"),
    Clause("sync.delta_scheme", "none"),
    Clause("sync.merge", "average"),
    Clause("outer.preset", "direct"),
)
