"""Decides which checkpoints stay: the newest, and fewer and fewer of the older ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.settings.models import CheckpointConfig

MULTIPLES = 8
MONTH_S = 30 * 86_400.0
MOST_WRITTEN = 1e15
"""Most checkpoints that a month is taken to have, however short ``every_s`` is."""


def keep(
    indices: Mapping[str, int], newest: int, every: int, *, thin: bool = True
) -> frozenset[str]:
    """Return the names that stay: the highest ``newest`` indices, and some multiples of ``every``.

    Indices are counted from 0 over all checkpoints that were ever written. The last MULTIPLES
    multiples all stay; of the last twice as many every second one does, and so on: a few dozen in a
    run of any length, with the first among them. Deleting never changes an index, so applying this
    after every checkpoint leaves the same set as applying it once at the end. With ``every`` 0, no
    multiple stays; if not ``thin``, all of them do.
    """
    by_age = sorted(indices, key=lambda name: (indices[name], name), reverse=True)
    turns = {
        name: index // every for name, index in indices.items() if every and index % every == 0
    }
    last = max(indices.values(), default=0) // (every or 1)
    # turn & -turn is the largest power of two that divides it
    rare = {n for n, turn in turns.items() if not turn or last - turn < MULTIPLES * (turn & -turn)}
    return frozenset(by_age[:newest]) | (rare if thin else turns.keys())


def after_a_month(config: CheckpointConfig) -> int:
    """Return how many checkpoints there are after a month, with one every ``every_s`` seconds."""
    written = int(min(MONTH_S / config.every_s, MOST_WRITTEN))
    if not (written and config.keep_every):
        return config.keep_newest
    last = (written - 1) // config.keep_every
    # Of the turns whose largest power-of-two divisor is 2^k, at most the newest four stay.
    rare = sum(min(MULTIPLES // 2, ((last >> k) + 1) // 2) for k in range(last.bit_length()))
    return config.keep_newest + 1 + (rare if config.thin else last)
