"""The experiments and all their cells: the plan that one command runs.

What a cell does not vary is the default. Every learner trains ``BATCH`` sequences of ``SEQ_LEN``
tokens a step.
"""

from __future__ import annotations

from dataclasses import replace

from .batches import batch
from .cells import BATCH, LARGE, M_TOKENS, SMALL, Cell, Experiment, Size, mode_sets
from .distances import lateness
from .fleets import failures, partition, scavenging, speeds
from .lengths import inner, length
from .optimizers import growth, optimizer
from .rhythms import average, muon_fleet, rhythm
from .with_muon import muon_formats, muon_merge

LESS = 3 * M_TOKENS // 4
SHORT = M_TOKENS // 2
SIX = (0, 1, 2, 3, 4, 5)
THREE = (0, 1, 2)
TWO = (0, 1)
ONE = (0,)


def all_experiments() -> tuple[Experiment, ...]:
    """Return every experiment, in the order of the report."""
    return (
        learning_rate(),
        batch(),
        length(),
        inner(),
        optimizer(),
        growth(),
        rhythm(),
        average(),
        muon_fleet(),
        muon_formats(),
        muon_merge(),
        modes(),
        outer(),
        adoption(),
        quantisation(),
        deltas(),
        speeds(),
        lateness(),
        failures(),
        scavenging(),
        partition(),
    )


def learning_rate() -> Experiment:
    """Find each size's learning rate where learners do not matter: one learner, batch 4 b."""
    cells = [
        _rate(size, "single, batch 4 b", rate)
        for size, rates in (
            (SMALL, ("1e-3", "2e-3", "3e-3", "6e-3", "1e-2")),
            (LARGE, ("2e-3", "3e-3", "6e-3")),
        )
        for rate in rates
    ]
    cells += [_rate(SMALL, "decoupled, M = 4", rate) for rate in ("1.5e-3", "3e-3", "6e-3", "1e-2")]
    return Experiment(
        name="learning-rate",
        title="The learning rate",
        question=(
            "Every other experiment uses one peak learning rate, 3e-3, for both model sizes. Is it"
            " near the best one of a single learner with batch 4 b, which is what data-parallel"
            " with M = 4 computes, and is it near that of decoupled learners with batch b each?"
        ),
        cells=tuple(cells),
        x="lr",
        series="mode",
        notes=(
            "A single learner with batch b takes four times as many steps and may like another"
            " rate."
        ),
    )


def _rate(size: Size, mode: str, rate: str) -> Cell:
    decoupled = mode.startswith("decoupled")
    name = f"{size.name}-{'decoupled' if decoupled else 'single'}"
    key, reference = f"{name}-{rate}", f"{name}-3e-3"
    return Cell(
        key=key,
        labels=(("model", size.name), ("mode", mode), ("lr", rate)),
        sets=("mode=decoupled" if decoupled else "mode=single", f"train.lr={rate}"),
        learners=4 if decoupled else 1,
        tokens=M_TOKENS,
        seeds=(0,),
        against="" if key == reference else reference,
        size=size,
        batch=BATCH if decoupled else 4 * BATCH,
    )


def _mode(size: Size, mode: str, m: int, against: str, seeds: tuple[int, ...] = THREE) -> Cell:
    return Cell(
        key=f"{size.name}-{mode}-M{m}",
        labels=(("model", size.name), ("mode", mode), ("M", str(m))),
        sets=mode_sets(mode),
        learners=m,
        tokens=M_TOKENS if size is SMALL else LESS,
        seeds=seeds,
        against=against,
        size=size,
        plotted=mode not in {"data-parallel", "single"},
    )


def modes() -> Experiment:
    """Compare the modes at equal tokens, against data-parallel with the same global batch."""
    cells: list[Cell] = []
    for size in (SMALL, LARGE):
        single = _mode(size, "single", 1, "")
        cells.append(single)
        for m in (1, 2, 4, 8):
            baseline = f"{size.name}-data-parallel-M{m}" if m > 1 else single.key
            for name in ("data-parallel", "diloco", "streaming", "decoupled"):
                if m == 1 and name in {"data-parallel", "streaming"}:
                    continue  # it is the single learner, or decoupled
                against = single.key if name == "data-parallel" else baseline
                cells.append(_mode(size, name, m, against))
    large_batch = replace(
        _mode(SMALL, "single", 1, "small-data-parallel-M4", seeds=(0,)),
        key="small-single-batch-4b",
        labels=(("model", "small"), ("mode", "single, batch 4 b"), ("M", "1")),
        batch=4 * BATCH,
    )
    return Experiment(
        name="modes",
        title="Loss at equal tokens",
        question=(
            "What does it cost to synchronise seldom? Each mode with the H, merge, outer step and"
            " formats of decoupled learners, against"
            " data-parallel with the same global batch M b; and that, as the single learner with"
            " batch 4 b, against the single learner with batch b and M times the steps."
        ),
        cells=(*cells, large_batch),
        columns=("steps", "commits"),
        x="M",
        series="mode",
        curves=True,
        notes=(
            "With one learner data-parallel is the single learner, and streaming is decoupled."
            " At M = 8 a run has 512 steps, 21 rounds per fragment, which is short: an outer"
            " optimizer with momentum has little time to gain speed. Runs of the large model have"
            " three quarters of the tokens."
        ),
    )


def _outer(h: int, m: int, name: str, merge: str, seeds: tuple[int, ...], tokens: int) -> Cell:
    preset, *numbers = name.split()
    sets = [f"sync.h_steps={h}", f"sync.merge={merge}", f"outer.preset={preset}"]
    if numbers:
        lr, _, momentum = numbers[0].partition("/")
        sets += [f"outer.lr={lr}", *([f"outer.momentum={momentum}"] if momentum else [])]
    key = f"H{h}-M{m}-{name.replace(' ', '-').replace('/', '-')}-{merge}"
    baseline = f"H{h}-M{m}-direct-average"
    return Cell(
        key=key,
        labels=(("H", str(h)), ("M", str(m)), ("outer", name), ("merge", merge)),
        sets=tuple(sets),
        learners=m,
        tokens=tokens,
        seeds=seeds,
        against="" if key == baseline else baseline,
        rho=True,
    )


def outer() -> Experiment:
    """Compare outer optimizers and merges, at five H with M = 4, and at H = 24 with other M."""
    several = [
        ("direct", "average"),
        ("direct", "rda"),
        ("nesterov 0.7/0.9", "average"),
        ("nesterov 0.7/0.9", "rda"),
        ("nesterov 0.4/0.9", "average"),
        ("nesterov 0.4/0.9", "rda"),
        ("direct 1.4", "average"),
        ("direct 1.4", "rda"),
        ("direct 0.7", "rda"),
        ("direct 0.7", "average"),
        ("nesterov 0.7/0.5", "rda"),
    ]
    fewer, fewest, longer, long = (
        [several[n] for n in picked]
        for picked in ((0, 1, 2, 4, 10), (0, 1, 4), (0, 1, 3, 4, 10), (0, 1, 3, 5, 10))
    )
    closest = {several[n] for n in (0, 1, 10)}  # the default is one of them: a seed more each
    cells = list[Cell]()
    for h, ways, tokens, seeds, more in (
        (8, fewer, LESS, TWO, TWO),
        (24, several, LESS, TWO, THREE),
        (64, fewer, LESS, TWO, THREE),
        (128, long, 4 * M_TOKENS, ONE, ONE),
        (256, longer, 2 * LESS, ONE, TWO),
    ):
        cells += [_outer(h, 4, *way, more if way in closest else seeds, tokens) for way in ways]
    for m in (2, 8):
        cells += [_outer(24, m, name, merge, ONE, LESS) for name, merge in fewest]
    return Experiment(
        name="outer",
        title="Outer optimizer and merge",
        question=(
            "Which outer optimizer and which merge, at which H and M? `nesterov a/b` has learning"
            " rate a and momentum b, `direct` learning rate 1 (or the one given) and no momentum;"
            " embeddings are always averaged. All against `direct, average` of the same H and M."
        ),
        cells=tuple(cells),
        columns=("rounds", "rho", "effective step"),
        x="H",
        series="outer",
        notes=(
            "rho is the mean cosine between successive merged outer gradients of a fragment; the"
            " effective step is lr (1 + mu / (1 - mu rho))."
            " H = 256 was given twice the tokens and H = 128 five times, so that there are rounds"
            " enough, at H = 128 for momentum 0.9, which remembers ten, too: compare within one H."
        ),
    )


def adoption() -> Experiment:
    """Compare what learners do with their own progress, at different overlaps."""
    cells = [
        Cell(
            key=f"{how}-tau{tau}",
            labels=(("adoption", how), ("tau", str(tau))),
            sets=(
                f"sync.adoption={how}",
                f"sync.overlap_steps={tau}",
                *(() if tau else ("sync.quorum=4",)),
            ),
            learners=4,
            tokens=LESS,
            seeds=TWO if tau == 2 else ONE,
            against="" if (how, tau) == ("rebase", 2) else "rebase-tau2",
        )
        for tau in (0, 1, 2, 5)
        for how in ("overwrite", "blend", "rebase")
        if (how, tau) != ("rebase", 0)
    ]
    return Experiment(
        name="adoption",
        title="Adoption and overlap",
        question=(
            "How should a learner adopt a new fragment, and how many steps (tau) may it go on after"
            " its contribution? M = 4, H = 24; against the default, `rebase` at tau = 2."
        ),
        cells=tuple(cells),
        columns=("staleness",),
        x="tau",
        series="adoption",
        notes=(
            "`blend` keeps half of the local value (sync.blend_alpha = 0.5). At tau = 0 learners"
            " stop for each round, which must therefore wait for all of them (K = M), and `rebase`"
            " has nothing to add: it is `overwrite`."
        ),
    )


LOW_LR = "3e-4"


def _formats(up: str, down: str, lr: str, seeds: tuple[int, ...]) -> Cell:
    key, baseline = f"lr{lr}-{up}-{down}", f"lr{lr}-f32-f32"
    return Cell(
        key=key,
        labels=(("lr", lr), ("contribution", up), ("global", down)),
        sets=(
            f"sync.contribution_scheme={up}",
            f"sync.global_scheme={down}",
            "sync.delta_scheme=none",
            f"train.lr={lr}",
        ),
        learners=4,
        tokens=SHORT,
        seeds=seeds,
        against="" if key == baseline else baseline,
    )


def quantisation() -> Experiment:
    """Compare formats of contributions and of global fragments, seed by seed, against f32."""
    few = [("f32", "f32"), ("int4", "f32"), ("int4", "bf16"), ("e3m0", "f32")]
    wide = [("bf16", "f32"), ("int8", "f32"), ("f32", "bf16")]
    cells = [_formats(up, down, LOW_LR, SIX) for up, down in few[:3]]
    cells += [_formats(up, down, LOW_LR, THREE) for up, down in (few[3], ("int2", "f32"))]
    cells += [_formats(up, down, LOW_LR, ONE) for up, down in wide]
    cells += [_formats(up, down, "3e-3", THREE) for up, down in few]
    return Experiment(
        name="quantisation",
        title="Quantisation",
        question=(
            "What do fewer bits cost? M = 4; every difference is between runs of one seed, against"
            " f32 both ways."
        ),
        cells=tuple(cells),
        x="contribution",
        series="global",
        notes=(
            "Runs that differ in the last bit drift apart, and at the usual learning rate so far"
            " that even formats that lose nothing differ from f32 by chance. At a tenth of it they"
            " stay together, and far smaller differences can be told: there the formats are"
            " compared, the usual rate is the check. There, too, every step is too short, so that a"
            " format that lengthens contributions seems better than f32: a difference of either"
            " sign is an error."
        ),
    )


def deltas() -> Experiment:
    """Compare what learners read of a global fragment: whole, or what changed in it."""
    cells = [
        _delta(kind, lr, THREE)
        for lr in ("3e-3", LOW_LR)
        for kind in ("none", "int8", "int4", "auto")
    ]
    return Experiment(
        name="deltas",
        title="Deltas down",
        question=(
            "What do closed-loop deltas cost? M = 4, contributions of int4; every difference is"
            " between runs of one seed, against global fragments whole in f32."
        ),
        cells=(*(_delta("f32", lr, THREE) for lr in ("3e-3", LOW_LR)), *cells),
        x="deltas",
        series="lr",
        notes=(
            "`f32` and `none`: each version whole, in f32 and in bf16; else: what changed since the"
            " version before, and G in bf16; `auto`: in 4 to 8 bits, by its size. A keyframe is"
            " never needed here: no learner is away."
        ),
    )


def _delta(kind: str, lr: str, seeds: tuple[int, ...]) -> Cell:
    whole = kind == "f32"
    return Cell(
        key=f"lr{lr}-deltas-{kind}",
        labels=(("lr", lr), ("deltas", kind)),
        sets=(
            f"sync.global_scheme={'f32' if whole else 'bf16'}",
            f"sync.delta_scheme={'none' if whole else kind}",
            f"train.lr={lr}",
        ),
        learners=4,
        tokens=SHORT,
        seeds=seeds,
        against="" if whole else f"lr{lr}-deltas-f32",
    )
