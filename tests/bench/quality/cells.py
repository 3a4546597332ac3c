"""What an experiment consists of: cells, each some settings that are run once for each seed.

A cell says how many tokens its learners train on together, and how many steps that takes follows,
so that cells can be compared at equal tokens whatever their learners, speeds and failures are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from skerry.settings.loading import load
from skerry_tools.lab.scenario import Failures, IslandSettings, Judging, LabScenario, LinkSettings

CODE = 2
"""Raised by hand when the code of training, merging or judging changes what a run comes to."""
SEQ_LEN = 64
BATCH = 4
"""Sequences per step of each learner."""
M_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Size:
    """A model; ``cost`` is the time of one of its tokens, in tokens of the small one."""

    name: str
    sets: tuple[str, ...]
    cost: float


SMALL = Size(
    "small",
    (
        "model.layers=2",
        "model.d_model=64",
        "model.heads=2",
        "model.kv_heads=2",
        "model.d_ff=176",
        "train.lr=3e-3",
    ),
    1.0,
)
"""117 k parameters; the learning rate is the default, in the middle of what is tried."""
LARGE = Size(
    "large",
    (
        "model.layers=2",
        "model.d_model=96",
        "model.heads=2",
        "model.kv_heads=2",
        "model.d_ff=256",
        "train.lr=3e-3",
    ),
    1.5,
)
"""246 k parameters."""
LARGEST = Size(
    "largest",
    (
        "model.layers=4",
        "model.d_model=144",
        "model.heads=4",
        "model.kv_heads=4",
        "model.d_ff=384",
        "train.lr=3e-3",
    ),
    7.5,
)
"""1.03 M parameters."""
COMMON = (f"data.seq_len={SEQ_LEN}", "sync.delta_scheme=none", "sync.chunk_bytes=524288")
"""Global fragments are read whole, as most runs were made, but where an experiment says otherwise:
``deltas`` says what deltas change. Chunks are as long as they were by default, which changes no
result."""
AS_DECOUPLED = (
    "sync.h_steps=24",
    "sync.merge=rda",
    "sync.adoption=rebase",
    "sync.contribution_scheme=int4",
    "outer.preset=auto",
)
"""What ``diloco`` and ``streaming`` have of their papers, as decoupled learners have it."""


def mode_sets(mode: str) -> tuple[str, ...]:
    """Return the settings of a mode that differs from decoupled learners in who waits for whom."""
    return (f"mode={mode}", *(AS_DECOUPLED if mode in {"diloco", "streaming"} else ()))


NO_FAILURES, NEAR = Failures(), LinkSettings()


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of a table.

    ``labels`` are its columns, ``key`` its name within the experiment, ``against`` the key of the
    cell that it is compared with, seed by seed. ``share`` is how much of ``learners`` times the
    global clock's steps is expected to be trained: less than 1 where learners are slow or down,
    more where there are extra ones whose tokens do not count.
    """

    key: str
    labels: tuple[tuple[str, str], ...]
    sets: tuple[str, ...]
    learners: int
    tokens: int
    seeds: tuple[int, ...]
    against: str = ""
    size: Size = SMALL
    batch: int = BATCH
    share: float = 1.0
    islands: tuple[IslandSettings, ...] = ()
    failures: Failures = NO_FAILURES
    link: LinkSettings = NEAR
    points: int = 10
    rho: bool = False
    extra: float = 0.0
    """Tokens trained by learners that only help, as a share of ``tokens``."""
    plotted: bool = True
    """Whether its difference is in the plot: not if it is compared with something else."""

    @property
    def said(self) -> str:
        """Its labels, as sentences name it."""
        return ", ".join(text for _, text in self.labels)

    @property
    def steps(self) -> int:
        """Steps on the global clock."""
        per_step = self.learners * self.batch * SEQ_LEN * self.share
        return max(1, round(self.tokens / per_step))

    @property
    def cost(self) -> float:
        """What one run of it takes, in tokens of the small model."""
        return self.tokens * (1 + self.extra) * self.size.cost

    def scenario(self, seed: int) -> LabScenario:
        """Return the lab run; cells of equal settings have equal ones, whatever their names.

        The seed also orders the data, so that runs of one seed can be compared in pairs.
        """
        sets = (
            *COMMON,
            *self.size.sets,
            f"data.batch={self.batch}",
            f"data.seed={seed}",
            f"sync.learners={self.learners}",
            f"train.steps={self.steps}",
            *self.sets,
        )
        return LabScenario(
            name="quality",
            seed=seed,
            run=load(sets=sets, environ={}).run,
            islands=self.islands,
            failures=self.failures,
            link=self.link,
            judging=Judging(points=self.points),
            rho=self.rho,
        )


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question, the cells that answer it, and how its table and plot are made.

    ``columns`` name what is shown beside the loss (see ``tables.COLUMNS``); ``x`` and ``series``
    name the labels on the plot's axis and in its legend. ``ladder`` are the keys of cells that
    differ in how many steps they take, for columns that compare at equal steps or equal loss.
    """

    name: str
    title: str
    question: str
    cells: tuple[Cell, ...]
    columns: tuple[str, ...] = ()
    x: str = ""
    series: str = ""
    ladder: tuple[str, ...] = ()
    curves: bool = False
    notes: str = ""

    @property
    def at_equal_steps(self) -> bool:
        """Whether cells are judged beside the ladder at equal steps, not by equal tokens alone."""
        return "equal steps" in self.columns


@dataclass(frozen=True, slots=True)
class Wanted:
    """One lab run that a cell asks for."""

    experiment: str
    cell: Cell
    seed: int
    scenario: LabScenario = field(compare=False)

    @property
    def name(self) -> str:
        """What it is called in progress reports."""
        return f"{self.experiment}/{self.cell.key}/seed {self.seed}"


def wanted(
    experiments: Sequence[Experiment], seeds: Sequence[int] | None = None
) -> Iterator[Wanted]:
    """Yield all runs of the experiments, those of one seed together, so that pairs come early.

    ``seeds``: run these instead of each cell's own.
    """
    for experiment in experiments:
        every = sorted({seed for cell in experiment.cells for seed in seeds or cell.seeds})
        for seed in every:
            for cell in experiment.cells:
                if seed in (seeds or cell.seeds):
                    yield Wanted(experiment.name, cell, seed, cell.scenario(seed))


def distinct(runs: Sequence[Wanted]) -> list[Wanted]:
    """Return the runs without those whose scenario has come before: experiments share cells."""
    found: dict[str, Wanted] = {}
    for run in runs:
        found.setdefault(run.scenario.digest, run)
    return list(found.values())


def budget(runs: Sequence[Wanted]) -> float:
    """Return what the distinct runs take together, in tokens of the small model."""
    return sum(run.cell.cost for run in distinct(runs))
