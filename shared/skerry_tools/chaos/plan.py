"""Which faults come when: plain values, the same for a simulation and for a running cluster.

A plan says everything that chance decides: run twice, it puts the same faults at the same times.
``amount`` means, by kind: seconds a message is held up (slow), seconds the clock moves (clock_jump,
also backwards), the share of messages that are hit (corrupt, duplicate, reorder, lost_ack,
redeliver), dropped (window_drop) or, of a connection's segments, lost (lost_packets); the others
have none.
"""

from __future__ import annotations

import json
import math
import random
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from skerry.errors import ConfigError
from skerry.status.format import clip

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

FORMAT = 1
"""Version of the JSON form; a file of another one is refused."""
BROKER = "broker"
LEARNER = "learner"
ANY = "any"
LONGEST_DURATION = 0.25
"""Random faults last up to this share of the plan's duration."""
LONGEST_DURATION_S = 10.0
"""Random faults last no longer than this."""
MOST_DIGITS = 9
"""A cluster has fewer services of a kind than can be counted with these."""
MOST_S = 1e9
"""No number of a plan is larger."""
MOST_SHOWN = 100
"""Characters of a value that a sentence names."""
MOST_FAULTS = 100_000
"""More than this are not drawn: they would take memory without end."""


class Kind(StrEnum):
    """What happens."""

    KILL = "kill"
    PAUSE = "pause"
    PARTITION = "partition"
    SLOW = "slow"
    LOST_PACKETS = "lost_packets"
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

    PULSE_TINY_STEP_TIME = "pulse_tiny_step_time"
    PULSE_FAR_STEP = "pulse_far_step"
    TOKENS_2_64 = "tokens_2_64"
    STATUS_HEADER = "status_header"
    DEDUP_IDS = "dedup_ids"
    CONTRIB_FLOOD = "contrib_flood"
    JUNK_MEMBER = "junk_member"


BROKER_KINDS = frozenset({Kind.BROKER_KILL, Kind.BROKER_PAUSE, Kind.DISK_FULL, Kind.WINDOW_DROP})
"""Faults of the broker itself; every other kind is one of its clients'."""
SIMULATED = frozenset({Kind.LOST_ACK, Kind.REDELIVER, Kind.WINDOW_DROP})
"""Faults that exist in the simulation only."""
SHARES = frozenset({
    Kind.LOST_PACKETS, Kind.CORRUPT, Kind.DUPLICATE, Kind.REORDER, Kind.LOST_ACK, Kind.REDELIVER,
    Kind.WINDOW_DROP,
})  # fmt: skip
"""Faults whose amount is a share of what passes."""
ROUTE = frozenset({Kind.PARTITION, Kind.SLOW, Kind.LOST_PACKETS})
"""A route to the broker suffers one of these at a time."""
HOSTILE = frozenset({
    Kind.PULSE_TINY_STEP_TIME, Kind.PULSE_FAR_STEP, Kind.TOKENS_2_64, Kind.STATUS_HEADER,
    Kind.DEDUP_IDS, Kind.CONTRIB_FLOOD, Kind.JUNK_MEMBER,
})  # fmt: skip
"""Messages that a hostile learner can send; their targets are learners."""
DRAWN = tuple(kind for kind in Kind if kind not in {*HOSTILE, Kind.LOST_PACKETS})
"""What is drawn where no kinds are named: hostile messages and losses have to be asked for."""


def check_number(
    name: str, value: float, of: str = "", *, least: float = 0.0, above: bool = False
) -> None:
    """Raise ConfigError unless a number is from ``least``, or ``above`` it, to MOST_S."""
    # A NaN is not between any two numbers.
    if not least <= value <= MOST_S or (above and value == least):
        bounds = f"above {least:.0f}, up to" if above else f"from {least:.0f} to"
        msg = f"{name}{of} is {value}: give a number {bounds} {MOST_S:.0f}."
        raise ConfigError(msg, path=name)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: from ``at_s`` after the plan's start, for ``duration_s``.

    ``target`` is a kind of service (one of them, by the plan's seed), ``<kind>:<n>`` counted from
    0 by name, a service's own name, ``broker``, or ``any`` service. A kill's duration is the time
    until the service is started again. ConfigError for numbers that mean nothing.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    at_s: float
    kind: Kind
    target: str = ANY
    duration_s: float = 0.0
    amount: float = 0.0

    def __post_init__(self) -> None:
        for name in ("at_s", "duration_s", "amount"):
            least = -MOST_S if name == "amount" and self.kind is Kind.CLOCK_JUMP else 0.0
            check_number(name, float(getattr(self, name)), f" of a {self.kind}", least=least)
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
        check_number("heal_s", self.heal_s)
        if any(before.at_s > after.at_s for before, after in pairwise(self.faults)):
            msg = "The faults of a plan are not in the order of their at_s: sort them."
            raise ConfigError(msg, path="faults")

    @property
    def end_s(self) -> float:
        """When the last fault is over, in seconds from the start."""
        return max((fault.end_s for fault in self.faults), default=0.0)


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan as a file holds it."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    format: Literal[1]
    faults: tuple[Fault, ...]
    seed: int = 0
    heal_s: float = 30.0


PLAN_FILE = TypeAdapter(PlanFile)


def random_plan(
    seed: int,
    every_s: float,
    duration_s: float,
    kinds: Sequence[Kind],
    targets: Sequence[str],
    *,
    heal_s: float = 30.0,
) -> FaultPlan:
    """Draw a plan: a fault every ``every_s`` seconds on average, none after ``duration_s``.

    The same arguments give the same plan on every machine and Python: only ``Random.random``,
    whose sequence is promised, is drawn from. Kinds that no target can suffer are left out.
    ConfigError for numbers that mean nothing, or far too many faults.
    """
    check_number("every_s", every_s, above=True)
    check_number("duration_s", duration_s, above=True)
    if duration_s / every_s > MOST_FAULTS:
        msg = (
            f"A fault every {every_s:g} s for {duration_s:g} s are more than {MOST_FAULTS:,}"
            " faults: give a shorter time, or fewer of them."
        )
        raise ConfigError(msg, path="duration_s")
    draw = random.Random(f"skerry/{seed}").random  # noqa: S311 - faults, no secrets
    services = [target for target in targets if target != BROKER]
    possible = [k for k in kinds if (BROKER in targets if k in BROKER_KINDS else services)]
    found: list[Fault] = []
    longest_s = min(LONGEST_DURATION * duration_s, LONGEST_DURATION_S)
    at_s = 0.0
    while possible and (at_s := at_s - every_s * math.log(1.0 - draw())) < duration_s:
        kind = possible[int(draw() * len(possible))]
        which = draw()
        target = BROKER if kind in BROKER_KINDS else services[int(which * len(services))]
        lasts_s = round(longest_s * draw() ** 2, 3)
        begins_s = min(round(at_s, 3), math.floor(duration_s * 1000 - 1) / 1000)
        drawn, amount = draw(), 0.0
        if kind is Kind.SLOW:
            amount = 0.01 + drawn * 0.5
        elif kind is Kind.CLOCK_JUMP:
            amount = (drawn - 0.5) * 7200.0
        elif kind in SHARES:
            amount = 0.05 + 0.9 * drawn
        found.append(Fault(begins_s, kind, target, lasts_s, round(amount, 3)))
    return FaultPlan(seed, tuple(found), heal_s)


def candidates(target: str, services: Mapping[str, str]) -> tuple[str, ...]:
    """Return the services (name to kind) that a target may mean, by name; empty: none."""
    if target in services:
        return (target,)
    if target == ANY:
        return tuple(sorted(name for name, kind in services.items() if kind != BROKER))
    kind, _, number = target.partition(":")
    alike = tuple(sorted((n for n, k in services.items() if k == kind), key=lambda n: (len(n), n)))
    if not number:
        return alike
    if not number.isdecimal() or len(number) > MOST_DIGITS:
        return ()
    return alike[int(number) : int(number) + 1]


def choose(plan: FaultPlan, index: int, services: Mapping[str, str]) -> str:
    """Return the one service that the plan's fault number ``index`` strikes, by the plan's seed."""
    found = _suffering(plan.faults[index], services)
    drawn = random.Random(f"{plan.seed}/{index}").random()  # noqa: S311 - faults, no secrets
    return found[int(drawn * len(found))]


def check(plan: FaultPlan, services: Mapping[str, str]) -> None:
    """Raise ConfigError for the first fault whose target does not exist here.

    ``services`` maps the name of everything that can be struck to its kind, the broker included.
    """
    for fault in plan.faults:
        _suffering(fault, services)


def _suffering(fault: Fault, services: Mapping[str, str]) -> tuple[str, ...]:
    """Return the services that a fault may strike; ConfigError if there is none."""
    if fault.kind in HOSTILE:
        services = {name: kind for name, kind in services.items() if kind == LEARNER}
    if found := candidates(fault.target, services):
        return found
    nearest = _nearest(fault.target, {*services, *services.values(), ANY})
    msg = (
        f"There is no {_short(fault.target)} for the {fault.kind} at {fault.at_s} s:"
        f" did you mean {nearest!r}?"
    )
    raise ConfigError(msg, path="target", nearest=nearest)


def _nearest(wanted: str, known: Iterable[str]) -> str:
    return next(iter(get_close_matches(wanted, sorted(known), n=1, cutoff=0.0)), "")


def dumps(plan: FaultPlan) -> str:
    """Return the plan as JSON, one fault per line."""
    faults = ",\n    ".join(json.dumps(asdict(fault)) for fault in plan.faults)
    return (
        f'{{\n  "format": {FORMAT},\n  "seed": {plan.seed},\n'
        f'  "heal_s": {json.dumps(plan.heal_s)},\n  "faults": [\n    {faults}\n  ]\n}}\n'
    )


def load(path: Path) -> FaultPlan:
    """Read a plan from a JSON file; ConfigError says what is wrong with it."""
    try:
        return loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        msg = (
            f"The fault plan {path} cannot be read ({error}): name a file with what"
            " `skerry chaos --dry-run` prints."
        )
        raise ConfigError(msg, path=str(path)) from error
    except ConfigError as error:
        msg = f"The fault plan {path} is of no use: {error}"
        raise ConfigError(msg, path=error.path, nearest=error.nearest) from error


def loads(text: str) -> FaultPlan:
    """Read a plan from JSON; ConfigError names the key that is wrong, and the one meant."""
    try:
        held = PLAN_FILE.validate_json(text.encode("utf-8", "replace"))
    except ValidationError as error:
        found = error.errors()
        unknown = (e for e in found if e["type"] == "unexpected_keyword_argument")
        raise _refusal(next(unknown, found[0])) from error
    return FaultPlan(held.seed, held.faults, held.heal_s)


def _refusal(error: ErrorDetails) -> ConfigError:
    """Return pydantic's complaint about one value as a sentence with what to write instead."""
    named = [key for key in error["loc"] if isinstance(key, str)]
    path, given = named[-1] if named else "faults", error["input"]
    refused = error.get("ctx", {}).get("error")
    if isinstance(refused, ConfigError):
        return refused
    known: set[str] = set()
    if error["type"] == "unexpected_keyword_argument":
        known, given = {f.name for f in fields(Fault if len(error["loc"]) > 1 else PlanFile)}, path
    elif error["type"] == "enum" and isinstance(given, str):
        known = set(Kind)
    nearest = _nearest(str(given), known)
    fix = f"did you mean {nearest!r}?" if nearest else "see docs/faults.md for the form."
    wrong = f"{_short(path)} is {_short(given)} ({_short(error['msg'])})"
    return ConfigError(f"{wrong}: {fix}", path=path, nearest=nearest)


def _short(value: object) -> str:
    """Return how a sentence names a value that may be of any size."""
    return clip(reprlib.repr(value), MOST_SHOWN)
