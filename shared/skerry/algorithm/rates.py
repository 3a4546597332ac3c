"""Learning rate schedules: pure functions of the progress of a run.

Written once for numpy (a syncer's AdamW) and for JAX (a learner's step).
"""

from __future__ import annotations

from typing import Any

import numpy as np

FIRST = 0.01
"""Share of the peak with which a warm-up starts: the rate is never zero at the first step."""


def learning_rate(training: Any, done: Any, xp: Any = np) -> Any:
    """Return the rate by settings ``train`` once ``done``, 0 to 1, of the run is over, in ``xp``.

    A linear warm-up comes first. Then ``warmup-cosine`` falls to ``lr_final`` until the end,
    ``warmup-stable-decay`` (arXiv 2405.18392) stays and falls linearly in the last ``decay`` of
    the run, and ``constant`` stays.
    """
    warmup, final = training.warmup, training.lr_final
    if training.schedule == "constant":
        left: Any = 1.0
    elif training.schedule == "warmup-stable-decay":
        left = xp.clip((1.0 - done) / training.decay, 0.0, 1.0)
    else:
        falling = xp.clip((done - warmup) / (1.0 - warmup), 0.0, 1.0)
        left = 0.5 * (1.0 + xp.cos(xp.pi * falling))
    share = final + (1.0 - final) * left
    if warmup:
        share = xp.where(done < warmup, xp.maximum(done / warmup, FIRST), share)
    return training.lr * share
