"""The tables of a plan's or a simulation's file, beside a run's own: meaning, unit, bound, default.

One TOML file may hold ``[plan]``, ``[sites.<name>]`` and ``[hub]``, which ``skerry plan`` answers,
and ``[fleet]`` to ``[simulation]``, which ``skerry simulate`` does. Quantities are as people write
them: ``"5 Gbit/s"``, ``"50 ms"``, ``"12B"``. A rate or a size must name its unit, and one that
could mean bits as well as bytes is refused: plans go wrong by that factor of eight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from skerry.settings.models import Table
from skerry_tools.plan.measured import BROKER_WRITE_B_S

DAY_S = 86400.0
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_PREFIXES = {**_DECIMAL, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_FORM = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(.*?)\s*\Z")
_BITS_OR_BYTES = re.compile(r"[kKMGT]?i?b(/s|ps)?", re.IGNORECASE)


def _units(prefixes: Mapping[str, float], **names: float) -> dict[str, float]:
    return {p + name: scale * one for p, scale in prefixes.items() for name, one in names.items()}


def _read(
    form: str, bounds: tuple[float, float], unit: str, units: Mapping[str, float], text: object
) -> float:
    """Return the quantity that a text has in a dimension; PydanticCustomError where it is none.

    The bounds keep every figure within what a float can hold.
    """
    found = _FORM.fullmatch(str(text).removeprefix("+"))
    (low, high), value, wrong = bounds, math.nan, f"write {form}"
    if found is not None and found[2] in units:
        value = float(found[1].replace("_", "")) * units[found[2]]
        wrong = f"it must be from {low:g} to {high:g} {unit}"
    elif found is not None and unit == "bit/s" and _BITS_OR_BYTES.fullmatch(found[2]):
        wrong = f'"{found[2]}" could mean bits or bytes a second: write Gbit/s or GB/s'
    if low <= value <= high:
        return value
    if str(text).strip().startswith("-") or value == 0 or math.isinf(value):
        wrong = "it must be more than 0 and finite"
    raise PydanticCustomError("quantity", "{message}", {"message": wrong})  # noqa: EM101 - a kind


_RATES = _units(_PREFIXES, **{"bit/s": 1.0, "bits/s": 1.0, "bps": 1.0, "B/s": 8.0})
_SPEEDS = _units(_DECIMAL, **dict.fromkeys(("FLOP/s", "FLOPS", "flops", "flop/s"), 1.0))
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": DAY_S}
_COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_RATE = 'a rate with its unit, such as "5 Gbit/s" or "625 MB/s"'
_SIZE = 'a size with its unit, such as "80 GB" or "16 GiB"'
_TIME = 'a time, such as "2 s", "50 ms" or "8 h"'
rate_bits = partial(_read, _RATE, (1, 1e18), "bit/s", _RATES)
size_bytes = partial(_read, _SIZE, (1, 1e21), "B", _units(_PREFIXES, B=1.0))
seconds = partial(_read, _TIME, (1e-9, 1e11), "s", {"": 1.0, **_TIMES})
flops = partial(_read, 'a speed, such as "989 TFLOP/s"', (1, 1e24), "FLOP/s", {"": 1.0, **_SPEEDS})
count = partial(_read, 'a number, such as 12e9 or "12B"', (1, 1e20), "in all", _COUNTS)

Rate: TypeAlias = Annotated[float, BeforeValidator(rate_bits)]  # in bit/s
ByteRate: TypeAlias = Annotated[float, BeforeValidator(lambda text: rate_bits(text) / 8)]  # in B/s
Size: TypeAlias = Annotated[float, BeforeValidator(size_bytes)]  # in bytes
Time: TypeAlias = Annotated[float, BeforeValidator(seconds)]
Between: TypeAlias = Annotated[
    float, BeforeValidator(lambda text: NEVER_S if text == "never" else seconds(text))
]
Flops: TypeAlias = Annotated[float, BeforeValidator(flops)]  # in FLOP/s
Count: TypeAlias = Annotated[float, BeforeValidator(count)]  # B is a billion

NEVER_S = 1e30
MOST = 10**9  # keeps figures within what a float can hold, as the bounds of quantities do
Whole: TypeAlias = Annotated[int, Field(ge=1, le=MOST)]
Share: TypeAlias = Annotated[float, Field(ge=1e-6, le=1)]
Price: TypeAlias = Annotated[float, Field(ge=0, le=MOST)]
Seconds: TypeAlias = Annotated[float, Field(ge=0)]
Layout: TypeAlias = Literal["decoupled", "elastic", "data-parallel"]


class PlanTable(Table):
    """What is trained, how much of it, and how the baselines work."""

    parameters: Count | None = None  # those that are synchronised; empty: those of [model]
    active_parameters: Count | None = None  # of one token, for step times from FLOP/s; empty: all
    layers: Whole = 48  # for how well data-parallel hides its all-reduce
    tokens: Count | None = None  # to train on; empty: 20 for each parameter
    tokens_per_step: Count | None = None  # of each learner; empty: data.seq_len * data.batch
    utilisation_target: float = Field(default=0.9, ge=1e-6, lt=1)  # where learners stop for rounds
    gradient_bits: float = Field(default=16.0, ge=1, le=64)  # per value, of data-parallel
    currency: str = Field(default="USD", pattern="^[A-Z]{3}$")  # of all prices


class SiteTable(Table):
    """One place with learners; its link is the one between it and the hub."""

    learners: Whole = 1  # they share the site's link
    chips: Whole = 1  # of each learner; empty: as many as its mesh has
    mesh: str = "auto"  # of each learner's chips, as learner.mesh: "data=2,fsdp=4"
    step_time: Time | None = None  # pure compute; empty: from flops_per_chip and utilisation
    tokens_per_step: Count | None = None  # of each learner; empty: plan.tokens_per_step
    flops_per_chip: Flops | None = None  # peak, in the precision that is trained in
    utilisation: Share = 0.4  # share of that peak that a step gets (MFU)
    up: Rate  # from the site to the hub, for all its learners together
    down: Rate | None = None  # from the hub to the site; empty: as up
    rtt: Time = 0.05  # round trip to the hub
    derating: Share = 1.0  # share of up and down that training gets
    cores: Whole = 1  # of each learner's host, to encode and decode
    memory: Size = Field(default=80e9, validate_default=False)  # of one chip
    price_chip_hour: Price | None = None  # of one chip
    price_egress_gb: Price | None = None  # of 1e9 bytes that leave the site


class HubTable(Table):
    """Where the broker and the syncers are; a link that is empty is not judged."""

    site: str = ""  # the site that the hub is at: no wide-area link to its learners
    down: Rate | None = None  # what reaches the hub from all sites together
    up: Rate | None = None  # what leaves it to all sites together
    write: ByteRate = Field(default=BROKER_WRITE_B_S, validate_default=False)  # one replica
    disk: Size | None = None  # for the log, of one broker; empty: whether it fits is not judged
    price_egress_gb: Price | None = None  # of 1e9 bytes to sites, where the hub is at none
    max_payload: Size = Field(default=1024.0**2, validate_default=False)  # of the broker
    cores: Whole = 1  # of each syncer, to encode and decode; a merge runs on one


class FleetTable(Table):
    """The chips of a simulation, and how they train together."""

    layout: Layout = "decoupled"  # sync.learners; else one learner of all chips
    chips: Count = 2.4e6  # in all; learners share them equally
    slice_chips: Count = 256.0  # chips that fail, leave and come back together


class FailureTable(Table):
    """How often something breaks: only what trains does."""

    chip_mtbi: Between = 365.25 * DAY_S  # mean time between interruptions of one chip; "never"

    @property
    def never(self) -> bool:
        return self.chip_mtbi >= NEVER_S


class RecoveryTable(Table):
    """How long a slice that failed is away."""

    law: Literal["deterministic", "exponential", "log-normal"] = "log-normal"
    mean_s: Seconds = 60.0
    spread: float = Field(default=0.5, gt=0)  # sigma of the logarithm, of log-normal


class PauseTable(Table):
    """What it costs to go on with fewer slices, and to take them back or start again."""

    downscale_s: Seconds = 15.0  # to leave a slice out
    upscale_s: Seconds = 18.0  # to take slices back; where nothing is elastic, to start again
    batch_s: Seconds = 180.0  # least time between two upscales; 0: at once


class SavingTable(Table):
    """Checkpoints against losing work, where learners are not elastic."""

    every: Time | None = None  # training between two of them; empty: none
    cost_s: Seconds = 0.0  # the pause to write one
    rollback: bool = False  # a failure loses the work since the last one


class TimingTable(Table):
    """Steps, and rounds on their way."""

    step: Time = 2.0  # of the middle learner
    spread: float = Field(default=0.0, ge=0, lt=1)  # steps lie evenly in 1 -+ spread times that
    upload_s: Seconds = 0.5  # from a learner's step boundary to the syncer
    commit_s: Seconds = 0.2  # from a round's close until learners can read what it made
    tokens_per_step: Count | None = None  # of each learner
    tokens: Count | None = None  # how many to train on: gives the time that it takes


class AwayTable(Table):
    """Learners that are away for a planned while."""

    learners: tuple[int, ...] = ()  # by number from 0; empty: all, or those of the site
    site: str = ""  # the learners of this site, where the file has [sites]
    begin: Time | None = None  # after the start; empty: at the start
    lasts: Time
    every: Time | None = None  # from one beginning to the next; empty: once


class SimulationTable(Table):
    """How much is simulated."""

    days: float = Field(default=30.0, gt=0, le=36525.0)
    seed: int = Field(default=0, ge=0)  # the same seed gives the same bytes
    rounds: int = Field(default=500_000, ge=1, le=MOST)  # the first ones, where all stop


class ScenarioTables(Table):
    """Every table that plans and simulations add to a run's config."""

    source: str = ""  # where a scenario's values come from, and by dotted path,
    status: dict[str, str] = Field(default_factory=dict)  # published, fitted, assumed or derived
    plan: PlanTable = PlanTable()
    sites: dict[str, SiteTable] = Field(default_factory=dict)
    hub: HubTable = HubTable()
    fleet: FleetTable = FleetTable()
    failures: FailureTable = FailureTable()
    recovery: RecoveryTable = RecoveryTable()
    pauses: PauseTable = PauseTable()
    checkpoints: SavingTable = SavingTable()
    timing: TimingTable = TimingTable()
    outages: tuple[AwayTable, ...] = ()  # learners that are gone
    simulation: SimulationTable = SimulationTable()
