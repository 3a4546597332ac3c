"""Experiments about the fleet: speeds, failures, helpers, and what each learner reads."""

from __future__ import annotations

from dataclasses import replace

from skerry_tools.lab.scenario import Failures, IslandSettings

from .cells import LARGEST, M_TOKENS, Cell, Experiment, mode_sets
from .optimizers import muon

LESS = 3 * M_TOKENS // 4
THREE = (0, 1, 2)
TWO = (0, 1)
M = 4
STEP_S = 0.1
SLOW_STEP_S = 0.5
"""Of runs with failures once a minute, so that each of them lasts for several minutes."""


EQUAL_STEPS = (
    "Equal tokens of learners that are slow or away are more steps with fewer learners in each,"
    " which is better by itself: the difference `at equal steps` is from a fleet of equal learners"
    " that never fail, with as many steps and as many tokens trained (of which failing fleets merge"
    " fewer), between fleets of 4, 3 and 2 by the logarithm of steps."
)


def fleet(step_s: float, spread: float = 1.0, jitter: float = 0.0) -> tuple[IslandSettings, ...]:
    """Return M learners, the slowest of which takes ``spread`` times as long as the fastest."""
    return tuple(
        IslandSettings(name=f"learner-{n}", step_s=step_s * spread ** (n / (M - 1)), jitter=jitter)
        for n in range(M)
    )


def pace(islands: tuple[IslandSettings, ...]) -> float:
    """Return the steps of the mean learner while the fastest, whose clock it is, makes one."""
    fastest = min(island.step_s for island in islands)
    return sum(fastest / island.step_s for island in islands) / len(islands)


def ladder(key: str, step_s: float, sets: tuple[str, ...] = ()) -> tuple[Cell, ...]:
    """Return equal learners that never fail, fewer of them in more steps with as many tokens."""
    return tuple(
        Cell(
            key=key if m == M else f"{key}-M{m}",
            labels=(("fleet", f"M = {m}"),),
            sets=sets,
            learners=m,
            tokens=LESS,
            seeds=THREE,
            islands=fleet(step_s)[:m],
            plotted=False,
        )
        for m in (4, 3, 2)
    )


def speeds() -> Experiment:
    """Compare quorums where learners have different speeds, at equal tokens."""
    quorums = {
        "K = M": (f"sync.quorum={M}",),
        "K = 1": ("sync.quorum=1", "sync.grace_gamma=0"),
        "K = 1 + grace": ("sync.quorum=1",),
    }
    spreads = {
        "1x": (1.0, 0.0),
        "1.18x, 10 % jitter": (1.18, 0.1),
        "2x": (2.0, 0.0),
        "4x": (4.0, 0.0),
    }
    rungs = ladder("1x-K=1+grace", STEP_S, quorums["K = 1 + grace"])
    cells: list[Cell] = []
    for spread, (ratio, jitter) in spreads.items():
        islands = fleet(STEP_S, ratio, jitter)
        for name, sets in quorums.items():
            key = f"{spread.split(',')[0]}-{name.replace(' ', '')}"
            cells.append(
                Cell(
                    key=key,
                    labels=(("speeds", spread), ("quorum", name)),
                    sets=sets,
                    learners=M,
                    tokens=LESS,
                    seeds=THREE,
                    against="" if key == "1x-K=1+grace" else "1x-K=1+grace",
                    share=1.0 if name == "K = M" else pace(islands),
                    islands=islands,
                )
            )
    for rung in rungs[1:]:
        (_, fewer), *_ = rung.labels
        labels = (("speeds", f"1x, {fewer}"), ("quorum", "K = 1 + grace"))
        cells.append(replace(rung, labels=labels, against=rungs[0].key))
    return Experiment(
        name="speeds",
        title="Mixed speeds",
        question=(
            "What do slow learners cost? M = 4, the slowest as many times slower than the fastest"
            " as it says, the others evenly between (on a logarithmic scale); against equal speeds"
            " with the default quorum."
        ),
        cells=tuple(cells),
        columns=("tokens", "time", "steps", "equal steps", "staleness"),
        x="speeds",
        series="quorum",
        ladder=tuple(rung.key for rung in rungs),
        notes=(
            "The global clock is the K-th fastest learner's: under K = M the fast ones wait for the"
            " slowest at the end, under K = 1 the run ends with the fastest. Steps are chosen so"
            " that the tokens are nearly equal; the column says how many were merged."
            f" {EQUAL_STEPS}"
        ),
    )


def failures() -> Experiment:
    """Compare failing fleets, cold and warm, with one that does not fail."""
    islands = fleet(SLOW_STEP_S)
    names = tuple(island.name for island in islands)
    half_down_s, all_down_s = 10.0, 60.0 * 0.27 / 0.73
    regimes = {
        "half of them": (names[M // 2 :], half_down_s, 1 - 0.5 * half_down_s / (60 + half_down_s)),
        "27 % down": (names, all_down_s, 0.73),
    }
    rungs = ladder("none", SLOW_STEP_S)
    cells: list[Cell] = []
    for rung in rungs:
        (_, fleet_of), *_ = rung.labels
        name = "none" if rung is rungs[0] else f"none, {fleet_of}"
        labels = (("failing", name), ("inner", "-"))
        against = "" if rung is rungs[0] else rungs[0].key
        cells.append(replace(rung, labels=labels, against=against))
    for regime, (failing, down_s, share) in regimes.items():
        for warm in (True, False):
            inner = "warm" if warm else "cold"
            cells.append(
                Cell(
                    key=f"{regime.replace(' ', '-').replace('%', 'percent')}-{inner}",
                    labels=(("failing", regime), ("inner", inner)),
                    sets=(),
                    learners=M,
                    tokens=LESS,
                    seeds=THREE,
                    against="none",
                    share=share,
                    islands=islands,
                    failures=Failures(islands=failing, every_s=60, down_s=down_s, warm=warm),
                )
            )
    return Experiment(
        name="failures",
        title="Failures",
        question=(
            "What do failures cost? M = 4, steps of 0.5 s; learners are killed once a minute in the"
            " mean: two of them, each away for 10 s, or all, each away for 22 s, so that 27 % of"
            " the fleet is down at any time. `warm`: the inner optimizer's state, saved every"
            f" {Failures().save_every_s:g} s as by default, outlives the kill."
        ),
        cells=tuple(cells),
        columns=("tokens", "time", "kills", "steps", "equal steps", "staleness"),
        x="failing",
        series="inner",
        ladder=tuple(rung.key for rung in rungs),
        notes=(
            "Steps are chosen so that the tokens trained are equal to those without failures."
            f" {EQUAL_STEPS}"
        ),
    )


MUON = ("train.inner=muon", "train.lr=1.2e-2", "sync.delta_scheme=auto")
LENGTHS = {
    "": ("AdamW, by steps", (), (0, 1, 2, 4, 12)),
    "-muon": ("Muon, by steps", MUON, (0, 4)),
    "-muon-tokens": ("Muon, by tokens", (*MUON, f"train.tokens={LESS}"), (0, 4)),
}
"""The inner optimizer, and what ends a run and leads its learning rate; with how many helpers."""


def _helped(more: int) -> tuple[IslandSettings, ...]:
    """Return M equal learners, and so many that help them for the middle half of a run."""
    helpers = (IslandSettings(name=f"helper-{n}", joins=0.25, leaves=0.75) for n in range(more))
    return *fleet(STEP_S), *helpers


def scavenging() -> Experiment:
    """Add learners for the middle half of the run."""
    cells = [
        Cell(
            key=f"plus{25 * more}{suffix}",
            labels=(("helpers", f"+{25 * more} %"), ("run", said)),
            sets=sets,
            learners=M,
            tokens=LESS,
            seeds=TWO,
            against=f"plus0{suffix}" if more else "",
            islands=_helped(more),
            points=32,
            extra=0.5 * more / M,
        )
        for suffix, (said, sets, counts) in LENGTHS.items()
        for more in counts
    ]
    alone = replace(
        muon(M, size=LARGEST, rate="3e-3"),
        key="plus0-largest",
        labels=(("helpers", "+0 %"), ("run", "Muon, 1.03 M parameters, by tokens")),
        against="",
    )
    helped = replace(
        alone,
        key="plus100-largest",
        labels=(("helpers", "+100 %"), *alone.labels[1:]),
        sets=(*alone.sets, f"train.tokens={alone.tokens}"),
        against=alone.key,
        islands=_helped(M),
        points=32,
        extra=0.5,
    )
    cells += (alone, helped)
    return Experiment(
        name="scavenging",
        title="Scavenging",
        question=(
            "What are borrowed learners worth? M = 4, and more of them between a quarter and three"
            " quarters of the run. The time to the target is until the loss that the fleet without"
            " helpers has at three quarters of its run, of the same seed."
        ),
        cells=tuple(cells),
        columns=("tokens", "time to target", "speed-up"),
        x="helpers",
        curves=True,
        series="run",
        notes=(
            "By steps the learning rate follows the global clock, which helpers do not hasten: they"
            " add tokens per step, not steps. By tokens (`train.tokens`) it follows what is merged,"
            " and the run ends as soon as that is as much as without helpers. The model of 1.03 M"
            " parameters has 20 tokens for each, 1,024 a learner and step, and the rate 3e-3, as in"
            " [the size of the model](#the-size-of-the-model); the others have 256 a step."
        ),
    )


def partition() -> Experiment:
    """Compare learners that read samples of one text with learners that read parts of it."""
    cells: list[Cell] = []
    for mode, m in (("decoupled", 4), ("diloco", 4), ("decoupled", 8)):
        same, parts = f"{mode}-M{m}-interleaved", f"{mode}-M{m}-contiguous"
        for key, how in ((same, "interleaved"), (parts, "contiguous")):
            sets = mode_sets(mode)
            if how == "contiguous":
                sets = (*sets, "data.partition=contiguous", f"data.streams={m}")
            cells.append(
                Cell(
                    key=key,
                    labels=(("mode", mode), ("M", str(m)), ("data", how)),
                    sets=sets,
                    learners=m,
                    tokens=M_TOKENS,
                    seeds=THREE,
                    against=same if key == parts else "",
                )
            )
    return Experiment(
        name="partition",
        title="Non-identical data",
        question=(
            "What if every learner reads a part of the text of its own (`data.partition ="
            ' "contiguous"`: its share of the modules, by name) instead of a sample of all of it?'
        ),
        cells=tuple(cells),
        columns=("staleness",),
        x="M",
        series="data",
    )
