"""Which faults come when: plain values, the same for a simulation and for a running cluster.

A plan says everything that chance decides: run twice, it puts the same faults at the same times.
``amount`` means, by kind: seconds a message is held up (slow), seconds the clock moves (clock_jump,
also backwards), the share of messages that are hit (corrupt, duplicate, reorder, lost_ack,
redeliver) or dropped (window_drop); the others have none.
"""

from __future__ import annotations

import json
import math
import random
import reprlib
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from skerry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

FORMAT = 1
"""Version of the JSON form; a file of another one is refused."""

BROKER = "broker"
ANY = "any"
LONGEST_DURATION = 0.25
"""Random faults last up to this share of the plan's duration,"""
LONGEST_DURATION_S = 10.0
"""and no longer than this."""


MOST_DIGITS = 9
"""Nobody counts more services of a kind."""
MOST_S = 1e9
"""No number of a plan file is larger, and nothing is drawn beyond it."""
MOST_FAULTS = 100_000
"""More than this are not drawn: they would take memory without end, and nobody would read them."""


class Kind(StrEnum):
    """What happens; the last group exists in the simulation only."""

    KILL = "kill"
    PAUSE = "pause"
    PARTITION = "partition"
    SLOW = "slow"
    BROKER_KILL = "broker_kill"
    BROKER_PAUSE = "broker_pause"
    CLOCK_JUMP = "clock_jump"
    DISK_FULL = "disk_full"
    CORRUPT = "corrupt"
    DUPLICATE = "duplicate"
    REORDER = "reorder"

    LOST_ACK = "lost_ack"
    REDELIVER = "redeliver"
    WINDOW_DROP = "window_drop"


BROKER_KINDS = frozenset({Kind.BROKER_KILL, Kind.BROKER_PAUSE, Kind.DISK_FULL, Kind.WINDOW_DROP})
"""Faults of the broker itself; every other kind strikes one of its clients."""
SIMULATED = frozenset({Kind.LOST_ACK, Kind.REDELIVER, Kind.WINDOW_DROP})
SHARES = frozenset({
    Kind.CORRUPT, Kind.DUPLICATE, Kind.REORDER, Kind.LOST_ACK, Kind.REDELIVER, Kind.WINDOW_DROP
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: from ``at_s`` after the plan's start, for ``duration_s``.

    ``target`` is a kind of service (one of them, by the plan's seed), ``<kind>:<n>`` counted from
    0 by name, a service's own name, ``broker``, or ``any`` service. A kill's duration is the time
    until the service is started again. ConfigError for numbers that mean nothing.
    """

    at_s: float
    kind: Kind
    target: str = ANY
    duration_s: float = 0.0
    amount: float = 0.0

    def __post_init__(self) -> None:
        for name in ("at_s", "duration_s", "amount"):
            value = float(getattr(self, name))
            negative = value < 0 and not (name == "amount" and self.kind is Kind.CLOCK_JUMP)
            if not math.isfinite(value) or negative:
                msg = f"{name} of a {self.kind} is {value}: give a finite number, 0 or more."
                raise ConfigError(msg, path=name)
        if self.kind in SHARES and self.amount > 1:
            msg = f"amount of a {self.kind} is {self.amount}: give a share from 0 to 1."
            raise ConfigError(msg, path="amount")
        if (self.kind in BROKER_KINDS) != (self.target == BROKER):
            other = BROKER if self.kind in BROKER_KINDS else "a service (the broker has broker_…)"
            msg = f"A {self.kind} cannot strike {_short(self.target)}: its target is {other}."
            raise ConfigError(msg, path="target")

    @property
    def end_s(self) -> float:
        return self.at_s + self.duration_s


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults in the order of their times; afterwards everything is left alone for ``heal_s``."""

    seed: int
    faults: tuple[Fault, ...]
    heal_s: float = 30.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.heal_s) and self.heal_s >= 0):
            msg = f"heal_s is {self.heal_s}: give a finite number of seconds, 0 or more."
            raise ConfigError(msg, path="heal_s")
        if any(before.at_s > after.at_s for before, after in pairwise(self.faults)):
            msg = "The faults of a plan are not in the order of their at_s: sort them."
            raise ConfigError(msg, path="faults")

    @property
    def end_s(self) -> float:
        """When the last fault is over, in seconds from the start."""
        return max((fault.end_s for fault in self.faults), default=0.0)


def random_plan(
    seed: int,
    rate_s: float,
    duration_s: float,
    kinds: Sequence[Kind],
    targets: Sequence[str],
    *,
    heal_s: float = 30.0,
) -> FaultPlan:
    """Draw a plan: a fault every ``rate_s`` seconds on average, none after ``duration_s``.

    The same arguments give the same plan on every machine and Python: only ``Random.random``,
    whose sequence is promised, is drawn from. Kinds that no target can suffer are left out.
    ConfigError for numbers that mean nothing, or far too many faults.
    """
    for name, value in (("rate_s", rate_s), ("duration_s", duration_s)):
        if not 0 < value <= MOST_S:  # which is false for nan, too
            what = "the mean seconds between two faults" if name == "rate_s" else "seconds"
            msg = f"{name} is {value}: give {what}, above 0 and at most {MOST_S:.0f}."
            raise ConfigError(msg, path=name)
    if duration_s / rate_s > MOST_FAULTS:
        msg = (
            f"A fault every {rate_s:g} s for {duration_s:g} s are more than {MOST_FAULTS:,} faults:"
            " give a shorter time, or fewer of them."
        )
        raise ConfigError(msg, path="duration_s")
    draw = random.Random(f"skerry/{seed}").random  # noqa: S311 - faults, no secrets
    services = [target for target in targets if target != BROKER]
    possible = [k for k in kinds if (BROKER in targets if k in BROKER_KINDS else services)]
    found: list[Fault] = []
    longest_s = min(LONGEST_DURATION * duration_s, LONGEST_DURATION_S)
    at_s = 0.0
    while possible and (at_s := at_s - rate_s * math.log(1.0 - draw())) < duration_s:
        kind = possible[int(draw() * len(possible))]
        which = draw()
        target = BROKER if kind in BROKER_KINDS else services[int(which * len(services))]
        lasts_s = round(longest_s * draw() ** 2, 3)
        begins_s = min(round(at_s, 3), math.floor(duration_s * 1000 - 1) / 1000)
        found.append(Fault(begins_s, kind, target, lasts_s, _amount(kind, draw())))
    return FaultPlan(seed, tuple(found), heal_s)


def _amount(kind: Kind, drawn: float) -> float:
    if kind is Kind.SLOW:
        return round(0.01 + drawn * 0.5, 3)
    if kind is Kind.CLOCK_JUMP:
        return round((drawn - 0.5) * 7200.0, 3)
    return round(0.05 + 0.9 * drawn, 3) if kind in SHARES else 0.0


def candidates(target: str, services: Mapping[str, str]) -> tuple[str, ...]:
    """Return the services (name to kind) that a target may mean, by name; empty: none."""
    if target in services:
        return (target,)
    if target == ANY:
        return tuple(sorted(name for name, kind in services.items() if kind != BROKER))
    kind, _, number = target.partition(":")
    alike = tuple(sorted((n for n, k in services.items() if k == kind), key=_natural))
    if not number:
        return alike
    if not number.isdecimal() or len(number) > MOST_DIGITS:
        return ()
    return alike[int(number) : int(number) + 1]


def choose(plan: FaultPlan, index: int, services: Mapping[str, str]) -> str:
    """Return the one service that the plan's fault number ``index`` strikes, by the plan's seed."""
    fault = plan.faults[index]
    found = candidates(fault.target, services)
    if not found:
        raise _unknown_target(fault, services)
    drawn = random.Random(f"{plan.seed}/{index}").random()  # noqa: S311 - faults, no secrets
    return found[int(drawn * len(found))]


def check(
    plan: FaultPlan, services: Mapping[str, str], kinds: Iterable[Kind] = tuple(Kind)
) -> None:
    """Raise ConfigError for the first fault whose kind or target does not exist here.

    ``services`` maps the name of everything that can be struck to its kind, the broker included.
    """
    able = set(kinds)
    for fault in plan.faults:
        if fault.kind not in able:
            msg = f"A {fault.kind} cannot be done here: use one of {', '.join(sorted(able))}."
            raise ConfigError(msg, path="kind", nearest=_nearest(fault.kind, able))
        if not candidates(fault.target, services):
            raise _unknown_target(fault, services)


def _natural(name: str) -> tuple[int, str]:
    return len(name), name


def _nearest(wanted: str, known: Iterable[str]) -> str:
    return next(iter(get_close_matches(wanted, sorted(known), n=1, cutoff=0.0)), "")


def _unknown_target(fault: Fault, services: Mapping[str, str]) -> ConfigError:
    nearest = _nearest(fault.target, {*services, *services.values(), ANY})
    msg = (
        f"There is no {_short(fault.target)} for the {fault.kind} at {fault.at_s} s:"
        f" did you mean {nearest!r}?"
    )
    return ConfigError(msg, path="target", nearest=nearest)


def dumps(plan: FaultPlan) -> str:
    """Return the plan as JSON, one fault per line."""
    lines = [
        json.dumps({f.name: getattr(fault, f.name) for f in fields(fault)}) for fault in plan.faults
    ]
    faults = ",\n    ".join(lines)
    return (
        f'{{\n  "format": {FORMAT},\n  "seed": {plan.seed},\n'
        f'  "heal_s": {json.dumps(plan.heal_s)},\n  "faults": [\n    {faults}\n  ]\n}}\n'
    )


def dump(plan: FaultPlan, path: Path) -> None:
    """Write the plan to a file that ``load`` reads."""
    path.write_text(dumps(plan), "utf-8")


def load(path: Path) -> FaultPlan:
    """Read a plan from a JSON file; ConfigError says what is wrong with it."""
    try:
        return loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        msg = f"The fault plan {path} cannot be read ({error}): name a file that `dump` wrote."
        raise ConfigError(msg, path=str(path)) from error
    except ConfigError as error:
        msg = f"The fault plan {path} is of no use: {error}"
        raise ConfigError(msg, path=error.path, nearest=error.nearest) from error


def loads(text: str) -> FaultPlan:
    """Read a plan from JSON; ConfigError names the key that is wrong, and the one meant."""
    try:
        return _plan(json.loads(text))
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        msg = f"It is not JSON ({_short(str(error))}): see docs/faults.md for the form."
        raise ConfigError(msg, path="faults") from error


def _plan(parsed: object) -> FaultPlan:
    table = _table(parsed, {"format", "seed", "heal_s", "faults"})
    if table.get("format") != FORMAT:
        msg = f"Its format is {_short(table.get('format'))}, and this release reads {FORMAT}."
        raise ConfigError(msg, path="format")
    faults: object = table.get("faults")
    if not isinstance(faults, list):
        msg = "It has no list of faults: give one under the key 'faults'."
        raise ConfigError(msg, path="faults")
    seed: object = table.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        msg = f"seed is {_short(seed)}: give a whole number."
        raise ConfigError(msg, path="seed")
    read = tuple(_fault(fault) for fault in cast("list[object]", faults))
    return FaultPlan(seed, read, _number(table, "heal_s", 30.0))


def _fault(given: object) -> Fault:
    table = _table(given, {f.name for f in fields(Fault)})
    named, target = table.get("kind"), table.get("target", ANY)
    if not isinstance(named, str):
        msg = f"kind is {_short(named)}: use one of {', '.join(sorted(Kind))}."
        raise ConfigError(msg, path="kind")
    if named not in set(Kind):
        nearest = _nearest(named, set(Kind))
        msg = f"There is no fault {_short(named)}: did you mean {nearest!r}?"
        raise ConfigError(msg, path="kind", nearest=nearest)
    if not isinstance(target, str) or "at_s" not in table:
        msg = f"The fault {_short(table)} needs a number at_s and a target that is text."
        raise ConfigError(msg, path="faults")
    numbers = (_number(table, name, 0.0) for name in ("at_s", "duration_s", "amount"))
    at_s, duration_s, amount = numbers
    return Fault(at_s, Kind(named), target, duration_s, amount)


def _table(given: object, known: set[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        msg = f"{_short(given)} is not a table: write it in braces."
        raise ConfigError(msg, path="faults")
    table = cast("dict[str, Any]", given)
    for key in table:
        if key not in known:
            nearest = _nearest(key, known)
            msg = f"There is no key {_short(key)}: did you mean {nearest!r}?"
            raise ConfigError(msg, path=key, nearest=nearest)
    return table


def _number(table: Mapping[str, Any], key: str, default: float) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > MOST_S:
        msg = f"{key} is {_short(value)}: give a number, at most {MOST_S:.0f}."
        raise ConfigError(msg, path=key)
    return value


def _short(value: object) -> str:
    """Return how a sentence names a value that may be of any size."""
    return reprlib.repr(value)
