"""How long things take that chance decides: laws given by their mean, and drawn from uniforms.

Only the generator's uniform doubles are used and turned into each law by its own formula, so that
a seed means the same whatever numpy's own distributions become.

Exponentiated Weibull: G. S. Mudholkar, D. K. Srivastava, "Exponentiated Weibull family for
analyzing bathtub failure-rate data", IEEE Transactions on Reliability 42 (1993):
``F(x) = (1 - exp(-(x / scale)^shape))^exponent``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from skerry.errors import ConfigError

if TYPE_CHECKING:
    from numpy.random import Generator
    from numpy.typing import NDArray

GRID = 8192
"""Points by which the mean of an exponentiated Weibull law is integrated; error below 1e-6."""


class Shape(StrEnum):
    """The form of a law."""

    DETERMINISTIC = "deterministic"
    EXPONENTIAL = "exponential"
    LOG_NORMAL = "log-normal"
    EXPONENTIATED_WEIBULL = "exponentiated-weibull"


@dataclass(frozen=True)
class Law:
    """A law of durations with this mean in seconds.

    ``spread`` is the sigma of the logarithm of a log-normal law, and the shape of an exponentiated
    Weibull one, whose second parameter is ``exponent``; the others have neither. ConfigError for
    numbers that make no law.
    """

    mean_s: float
    shape: Shape = Shape.DETERMINISTIC
    spread: float = 1.0
    exponent: float = 1.0

    def __post_init__(self) -> None:
        """Refuse numbers that make no law."""
        if not (math.isfinite(self.mean_s) and self.mean_s >= 0):
            msg = f"The mean of a law is {self.mean_s} s: give a finite number, 0 or more."
            raise ConfigError(msg, path="mean_s")
        for name in ("spread", "exponent"):
            value = float(getattr(self, name))
            if not (math.isfinite(value) and value > 0):
                msg = f"The {name} of a law is {value}: give a finite number above 0."
                raise ConfigError(msg, path=name)

    def draw(self, chance: Generator, count: int) -> NDArray[np.float64]:
        """Return ``count`` durations in seconds, shape [count]."""
        if self.shape is Shape.DETERMINISTIC:
            return np.full(count, self.mean_s)
        uniform = chance.random(count)
        if self.shape is Shape.EXPONENTIAL:
            return -self.mean_s * np.log1p(-uniform)
        if self.shape is Shape.LOG_NORMAL:
            normal = np.sqrt(-2.0 * np.log1p(-uniform)) * np.cos(2 * np.pi * chance.random(count))
            return self.mean_s * np.exp(self.spread * normal - 0.5 * self.spread**2)
        root = np.power(uniform, 1.0 / self.exponent)
        unit = np.power(-np.log1p(-np.minimum(root, 1.0 - 1e-16)), 1.0 / self.spread)
        return self.mean_s / self._unit_mean * unit

    @cached_property
    def _unit_mean(self) -> float:
        """The mean of the exponentiated Weibull law of scale 1, the integral of 1 - F."""
        logs = np.linspace(-60.0, math.log(800.0) / self.spread, GRID)
        x = np.exp(logs)
        above = -np.expm1(self.exponent * np.log(-np.expm1(-np.power(x, self.spread))))
        return float(np.trapezoid(above * x, logs))


def exponentials(chance: Generator, count: int) -> NDArray[np.float64]:
    """Return draws of the exponential law of mean 1: the hazard until each next failure."""
    return -np.log1p(-chance.random(count))
