"""The tables of a simulation's file: what each value means, its unit, default and bound."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from skerry.settings.models import Table
from skerry_tools.plan.closed import Clock
from skerry_tools.plan.laws import Law, Shape
from skerry_tools.plan.process import Upscale
from skerry_tools.plan.quantities import Count, Time

Layout: TypeAlias = Literal["decoupled", "elastic", "data-parallel"]


class Fleet(Table):
    """The chips, and how they train together."""

    layout: Layout = "decoupled"
    """``decoupled``: sync.learners islands, each elastic within itself; ``elastic`` and
    ``data-parallel``: one island of all chips, which goes on without what failed, or waits."""
    chips: Count = Field(default=2.4e6, ge=1)
    """All chips together; learners share them equally."""
    slice_chips: Count = Field(default=256, ge=1)
    """Chips that fail, leave and come back together."""
    elastic: bool | None = None
    """Whether a learner goes on without a slice; empty: by the layout."""


class Failures(Table):
    """How often something breaks, and by which clock."""

    chip_mtbi: Time = Field(default=365.25 * 86400.0, gt=0)
    """Mean time between interruptions of one chip."""
    clock: Clock = Clock.RUNNING
    """``running``: only what trains is struck; ``calendar``: whatever the hour."""


class Recovery(Table):
    """How long a slice that failed is away."""

    law: Shape = Shape.LOG_NORMAL
    mean_s: float = Field(default=60.0, ge=0)
    """Mean, in seconds."""
    spread: float = Field(default=0.5, gt=0)
    """Sigma of the logarithm (log-normal), or shape (exponentiated-weibull)."""
    exponent: float = Field(default=1.0, gt=0)
    """Second parameter of the exponentiated-weibull law."""

    @property
    def drawn(self) -> Law:
        """The law itself."""
        return Law(self.mean_s, self.law, self.spread, self.exponent)


class Pauses(Table):
    """What it costs to go on with fewer slices, and to take them back or start again."""

    downscale_s: float = Field(default=15.0, ge=0)
    """Pause to leave a slice out."""
    upscale_s: float = Field(default=18.0, ge=0)
    """Pause to take slices back; where nothing is elastic, to start again."""
    upscale: Upscale = Upscale.BATCH
    """``eager``, ``batch`` (no more often than batch_s) or ``all-back``."""
    batch_s: float = Field(default=180.0, ge=0)
    """Least time between two upscales, with ``batch``."""
    replay_s: float = Field(default=0.0, ge=0)
    """Work that a learner which is not elastic does again after each start."""


class Checkpoints(Table):
    """What is written against losing work, where learners are not elastic."""

    every: Time | None = Field(default=None, gt=0)
    """Training between two checkpoints; empty: none."""
    cost_s: float = Field(default=0.0, ge=0)
    """Pause to write one."""
    rollback: bool = False
    """Whether a failure loses the work since the last one."""


class Timing(Table):
    """Steps, and rounds on their way."""

    step: Time = Field(default=2.0, gt=0)
    """Training step of the middle learner."""
    spread: float = Field(default=0.0, ge=0, lt=1)
    """Learners' step times lie evenly between 1 - spread and 1 + spread times that."""
    upload_s: float = Field(default=0.5, ge=0)
    """From a learner's boundary until the syncer has its contribution."""
    commit_s: float = Field(default=0.2, ge=0)
    """From the close of a round until learners can read what it made."""
    idle: float = Field(default=0.0, ge=0, lt=1)
    """Share of the time between pauses that is inside no step."""
    tokens_per_step: Count | None = Field(default=None, gt=0)
    """Tokens of each learner's step."""
    tokens: Count | None = Field(default=None, gt=0)
    """How many to train on: says how long that takes."""


class Away(Table):
    """Learners that are away for a while, known before; ``every`` repeats it."""

    learners: tuple[int, ...] = ()
    """Which, from 0; empty: all, or those of the site."""
    site: str = ""
    """The learners of this site, where the file has [sites]."""
    begin: Time | None = Field(default=None, gt=0)
    """After the start; empty: at the start."""
    lasts: Time = Field(gt=0)
    """How long."""
    every: Time | None = Field(default=None, gt=0)
    """How long from one beginning to the next; empty: once."""


class Simulation(Table):
    """How much is simulated."""

    days: float = Field(default=30.0, gt=0, le=36525.0)
    """Days of the run."""
    seed: int = Field(default=0, ge=0)
    """All chance; the same seed gives the same bytes."""
    rounds: int = Field(default=200, ge=0, le=1_000_000)
    """Rounds that are looked at, in samples over the run; 0: none."""


class Sweep(Table):
    """A table of goodputs over chips; each cell ends after so many failures."""

    chips: tuple[Count, ...] = ()
    learners: tuple[int, ...] = ()
    """Rows of layout decoupled; data-parallel and elastic are always there."""
    failures: int = Field(default=10_000, ge=1, le=10_000_000)
    """Failures after which a cell knows enough, if that is sooner than the days."""
    published: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)
    """What somebody else found, in per cent, by row; null where nothing is known."""


class Scene(Table):
    """All tables of a simulation."""

    fleet: Fleet = Fleet()
    failures: Failures = Failures()
    recovery: Recovery = Recovery()
    pauses: Pauses = Pauses()
    checkpoints: Checkpoints = Checkpoints()
    timing: Timing = Timing()
    outages: tuple[Away, ...] = ()
    """A site that is gone: paid for, and lost."""
    preemptions: tuple[Away, ...] = ()
    """Chips that are lent out and come back: not the run's while they are away."""
    simulation: Simulation = Simulation()
    sweep: Sweep = Sweep()
    published_goodput: float | None = Field(default=None, gt=0, le=1)
    """What was measured where this happened: the prediction is held to it."""
