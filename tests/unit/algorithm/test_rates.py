"""Schedules of the learning rate."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm.rates import FIRST, learning_rate
from skerry.settings.models import TrainConfig

SCHEDULES = ("warmup-cosine", "warmup-stable-decay", "constant")
SHARE = st.floats(0, 1, width=32, allow_subnormal=False)


def config_of(schedule: str, **others: float) -> TrainConfig:
    return TrainConfig.model_validate({"schedule": schedule, "lr": 1.0, **others})


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("warmup-cosine", [0.01, 0.5, 1.0, 0.6, 0.2]),
        ("warmup-stable-decay", [0.01, 0.5, 1.0, 1.0, 0.2]),
        ("constant", [0.01, 0.5, 1.0, 1.0, 1.0]),
    ],
)
def test_every_schedule_warms_up_and_ends_where_it_says(
    schedule: str, expected: list[float]
) -> None:
    config = config_of(schedule, warmup=0.1, lr_final=0.2, decay=0.4)
    rates = [float(learning_rate(config, at)) for at in (0, 0.05, 0.1, 0.55, 1)]
    assert rates == pytest.approx(expected, abs=1e-5)


def test_a_stable_rate_falls_in_a_line_over_the_last_share_of_the_run() -> None:
    config = config_of("warmup-stable-decay", lr_final=0.2, decay=0.4)
    rates = [float(learning_rate(config, at)) for at in (0.6, 0.7, 0.8, 0.9)]
    assert rates == pytest.approx([1.0, 0.8, 0.6, 0.4], abs=1e-5)


@settings(max_examples=40)
@given(
    schedule=st.sampled_from(SCHEDULES),
    done=SHARE,
    warmup=st.floats(0, 0.875, width=32, allow_subnormal=False),
    final=SHARE,
    decay=st.floats(0.0625, 1, width=32),
)
def test_the_rate_of_a_syncer_is_that_of_a_step(
    schedule: str, done: float, warmup: float, final: float, decay: float
) -> None:
    config = config_of(schedule, warmup=warmup, lr_final=final, decay=decay)
    there = float(learning_rate(config, jnp.float32(done), jnp))
    here = float(learning_rate(config, done))
    assert here == pytest.approx(there, rel=2e-5, abs=1e-6)
    assert min(FIRST, final) - 1e-6 <= here <= 1.0 + 1e-6
