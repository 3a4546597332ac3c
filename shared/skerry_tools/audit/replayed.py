"""What a replay starts from and what it has to tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from skerry.errors import StateLost

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from skerry_tools.audit.branch import Curve
    from skerry_tools.audit.survey import Survey

    Vector = NDArray[np.float32]


class Base(NamedTuple):
    """One fragment of a checkpoint: its version, its vectors by part name, and where it is from."""

    version: int
    vectors: Mapping[str, Vector]
    origin: str


Bases = Callable[[int], "Base | None"]
"""Gives the base of each fragment, asked for in their order; None: from genesis."""


def from_genesis(_fragment: int) -> Base | None:
    """Give no base: every fragment begins with its first version."""
    return None


@dataclass(frozen=True, slots=True)
class Difference:
    """A version whose replay is not what was committed."""

    fragment: int
    version: int
    sentence: str


@dataclass(frozen=True, slots=True)
class FragmentReplay:
    """One fragment: replayed from ``base`` (0: genesis) to ``reached``, of ``version`` wanted.

    ``stopped`` says why it did not get there, empty if it did. ``digest`` is that of the master.
    """

    fragment: int
    base: int
    version: int
    reached: int
    digest: int
    stopped: str = ""
    curve: Curve | None = None

    @property
    def whole(self) -> bool:
        return self.reached == self.version and not self.stopped


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay did; ``sequence`` is the ledger's at the moment that was rebuilt."""

    run: str
    sequence: int
    survey: Survey
    fragments: tuple[FragmentReplay, ...]
    wrong: tuple[Difference, ...]

    @property
    def whole(self) -> bool:
        """Whether every fragment was rebuilt up to the moment asked for."""
        return all(f.whole for f in self.fragments)


def lost_sentence(fragment: int, found: Survey) -> str:
    """Return why a fragment cannot be replayed from where it was asked to be, and what helps."""
    reach = found.reach[fragment]
    if not reach.lost:
        return (
            f"Fragment {fragment} begins at version {reach.base} in this log, where the run was"
            " restored: name that checkpoint with --from."
        )
    return (
        f"The window has dropped contributions to fragment {fragment} up to version {reach.base}:"
        f" name a checkpoint of version {reach.base} or newer with --from; a log.window_bytes of"
        f" about {reach.raise_to()} would have kept all."
    )


def require_whole(replayed: Replayed) -> None:
    """Raise StateLost with the first reason why a replay could not reach its moment."""
    for result in replayed.fragments:
        if not result.whole:
            raise StateLost(result.stopped)
