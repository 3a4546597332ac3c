"""What was settled with AdamW, with Muon: formats of messages, and what follows a merge."""

from __future__ import annotations

from dataclasses import replace

from .cells import Cell, Experiment
from .fleets import THREE, M
from .optimizers import BEST, SIZES, muon
from .optimizers import OUTER as PAPERS
from .rhythms import SIX

FORMATS = {
    "f32": ("sync.global_scheme=f32", "sync.delta_scheme=none"),
    "deltas": ("sync.global_scheme=bf16", "sync.delta_scheme=auto"),
}
"""What learners read: each version whole, or what changed in it, as the default is."""
OUTER = {
    "direct": (),
    "0.7 / 0.5": ("outer.preset=nesterov", "outer.lr=0.7", "outer.momentum=0.5"),
    "0.7 / 0.6": PAPERS["0.7 / 0.6"],
}


def muon_formats() -> Experiment:
    """Compare what learners with Muon send and read with f32 both ways, seed by seed."""
    best = BEST["muon", "direct"][SIZES.index(M)]
    cells = [
        _formats(up, down, rate, seeds)
        for rate, seeds in ((f"{float(best) / 10:g}", SIX), (best, THREE))
        for up, down in (("f32", "f32"), ("int4", "f32"), ("int4", "deltas"))
    ]
    return Experiment(
        name="muon-formats",
        title="Formats with Muon",
        question=(
            f"What do fewer bits cost learners with Muon? M = {M}, H = 24, batches as in"
            " [the inner optimizer](#the-inner-optimizer), at its best rate and at a tenth of it;"
            " every difference is between runs of one seed, against f32 both ways."
        ),
        cells=tuple(cells),
        x="contribution",
        series="global",
        notes=(
            "`deltas`: what changed since the version before, in 4 to 8 bits (`auto`), the default;"
            " `f32`: each version whole. Why a tenth of the rate says more:"
            " [quantisation](#quantisation)."
        ),
    )


def _formats(up: str, down: str, rate: str, seeds: tuple[int, ...]) -> Cell:
    key, baseline = f"lr{rate}-{up}-{down}", f"lr{rate}-f32-f32"
    equal = muon(M, *FORMATS[down], f"sync.contribution_scheme={up}", f"train.lr={rate}")
    return replace(
        equal,
        key=key,
        labels=(("lr", rate), ("contribution", up), ("global", down)),
        seeds=seeds,
        against="" if key == baseline else baseline,
    )


def muon_merge() -> Experiment:
    """Compare outer optimizers, merges and adoption of learners with Muon with the defaults'."""
    ways = (
        (24, "direct", "rda", "rebase"),
        (24, "direct", "average", "rebase"),
        (24, "direct", "rda", "overwrite"),
        (24, "0.7 / 0.5", "rda", "rebase"),
        (24, "0.7 / 0.6", "rda", "rebase"),
        (64, "direct", "rda", "rebase"),
        (64, "0.7 / 0.5", "rda", "rebase"),
    )
    return Experiment(
        name="muon-merge",
        title="The merge with Muon",
        question=(
            f"What should follow a merge of learners with Muon? M = {M}, rate and batches as in"
            " [the inner optimizer](#the-inner-optimizer); against `direct`, `rda` and `rebase` of"
            " the same H. `0.7 / 0.5` is Nesterov with that rate and momentum, which the default"
            " takes from H = 64 on."
        ),
        cells=tuple(_merge(*way) for way in ways),
        columns=("rounds",),
        x="H",
        series="outer",
    )


def _merge(h: int, outer: str, merge: str, adoption: str) -> Cell:
    rest = (f"sync.merge={merge}",) * (merge != "rda")
    rest += (f"sync.adoption={adoption}",) * (adoption != "rebase")
    key, base = f"H{h}-{outer.replace(' ', '')}-{merge}-{adoption}", f"H{h}-direct-rda-rebase"
    return replace(
        muon(M, *OUTER[outer], f"sync.h_steps={h}", *rest),
        key=key,
        labels=(("H", str(h)), ("outer", outer), ("merge", merge), ("adoption", adoption)),
        seeds=THREE,
        against="" if key == base else base,
    )
