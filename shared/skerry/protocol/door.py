"""The one door: bounds on every number and name that comes from a log, a checkpoint or a cache.

A client that may publish may publish anything that decodes. What a record of a kind can honestly
say follows from the names of its fields, which carry their unit; ``skerry.protocol.records.decode``
and ``skerry.protocol.chunks.unseal`` check it, so that no state machine sees a value outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache
from math import isfinite
from typing import Any

from skerry.algorithm import fragments
from skerry.errors import Corrupt, Implausible, PlanError
from skerry.protocol.messages import Commit, ContributionHeader, RunRecord
from skerry.protocol.subjects import TOKEN

MOST_COUNT = 2**53
"""No count of steps, tokens, versions, bytes or starts is larger: above it floats skip numbers."""
MOST_NS = 2**63 - 1
MOST_S = 1e11
"""Three thousand years: no duration is longer."""
LEAST_STEP_S, MOST_STEP_S = 1e-6, 1e6
"""No training step that was measured is shorter, or longer (eleven days)."""
LARGEST = {"config_json": 2**20}
MOST_DIMENSIONS = 32
"""The most dimensions of one tensor; numpy takes 64, JAX and PyTorch fewer."""
MOST_TEXT = 4096
"""Characters of any other text in a record."""
NAMES = frozenset({"learner", "syncer"})
UNBOUNDED = frozenset({"plan_digest", "text_digest", "params_digest", "master_digest", "previous"})
"""Digests use all of their 64 bits."""


def check(record: object) -> None:
    """Raise Implausible for a record with a value that no honest service writes.

    Of a commit only the durations are checked: a fenced writer made it, and what it names as
    refused is what others claimed.
    """
    if isinstance(record, RunRecord):
        _check_leaves(record)
    for name, allowed in _bounds(type(record)):  # type: ignore[arg-type] # mypy: of a class it asks its instances' hash
        if not allowed(getattr(record, name)):
            msg = f"A {type(record).__name__} has an impossible {name}."
            raise Implausible(msg)


def check_contribution(header: ContributionHeader, slices: int) -> None:
    """Raise Implausible or Corrupt for a header that contradicts itself or its fragment."""
    check(header)
    norms = header.norms
    if len(norms) not in {0, slices}:
        msg = f"{len(norms)} norms came for the {slices} slices of the fragment."
        raise Corrupt(msg)
    if not all(isfinite(norm) and norm >= 0 for norm in norms):
        msg = "A norm is negative or not finite."
        raise Corrupt(msg)
    if len(header.slice_tokens) not in {0, slices}:
        msg = f"{len(header.slice_tokens)} counts of tokens came for the {slices} slices."
        raise Corrupt(msg)
    if max(header.slice_tokens, default=0) > header.tokens:
        msg = f"A slice had more tokens than the {header.tokens} of its contribution."
        raise Implausible(msg)
    if header.cursor_to < header.cursor_from:
        msg = f"A contribution read from {header.cursor_from} back to {header.cursor_to}."
        raise Implausible(msg)


def _check_leaves(record: RunRecord) -> None:
    """Raise Implausible for leaves and numbers of fragments and shards that no plan has."""
    if any(len(leaf.shape) > MOST_DIMENSIONS for leaf in record.leaves):
        msg = f"A leaf of run {record.run!r} has more than {MOST_DIMENSIONS} dimensions."
        raise Implausible(msg)
    if max([record.fragments, *(leaf.size for leaf in record.leaves)]) > MOST_COUNT:
        msg = f"Run {record.run!r} has more parameters or fragments than can be counted."
        raise Implausible(msg)
    if not record.shards:
        msg = (
            f"Run {record.run!r} keeps all of its state in one stream, as skerry"
            f" {record.skerry_version} did: end it with that release."
        )
        raise Implausible(msg)
    if record.shards > record.fragments:
        msg = f"Run {record.run!r} deals {record.fragments} fragments to {record.shards} shards."
        raise Implausible(msg)
    try:
        fragments.check(record.leaves, record.fragments)
    except PlanError as error:
        msg = f"Run {record.run!r} has no fragment plan: {error}"
        raise Implausible(msg) from error


def saturated(counts: Iterable[int]) -> int:
    """Return the sum of counts, ``MOST_COUNT`` where it would be more."""
    return min(sum(counts), MOST_COUNT)


@cache
def _bounds(kind: type[Any]) -> list[tuple[str, Callable[[Any], bool]]]:
    """Return the fields of a class that have bounds, each with a test for a value within them."""
    found = [
        (f.name, _bound(f.name, str(f.type)))
        for f in fields(kind)
        if f.name not in UNBOUNDED and (kind is not Commit or f.name.endswith("_s"))
    ]
    return [(name, allowed) for name, allowed in found if allowed is not None]


def _bound(name: str, kind: str) -> Callable[[Any], bool] | None:
    if name in NAMES:
        return lambda text: TOKEN.fullmatch(text) is not None
    if kind == "str":
        return lambda text: len(text) <= LARGEST.get(name, MOST_TEXT)
    if kind == "int":
        return lambda count: 0 <= count <= (MOST_NS if name.endswith("_ns") else MOST_COUNT)
    if name == "step_time_s":  # 0: none was measured
        return lambda s: s == 0 or LEAST_STEP_S <= s <= MOST_STEP_S
    if kind == "float" and name.endswith("_s"):
        return lambda s: 0.0 <= s <= MOST_S
    return None
