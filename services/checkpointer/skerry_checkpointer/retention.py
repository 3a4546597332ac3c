"""Which checkpoints stay: the newest N, and every Mth for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def keep(indices: Mapping[str, int], newest: int, every: int) -> frozenset[str]:
    """Return the names that stay, given each name's index in the order of writing.

    Deleting never changes an index, so applying this after every checkpoint leaves the same set as
    applying it once at the end.

    Args:
        indices: names and their indices, counted from 0 over all that were ever written.
        newest: how many of the highest indices stay.
        every: multiples of this stay as well, 0 among them; 0 keeps none for ever.
    """
    by_age = sorted(indices, key=lambda name: (indices[name], name), reverse=True)
    periodic = {name for name, index in indices.items() if every and index % every == 0}
    return frozenset(by_age[:newest]) | periodic
