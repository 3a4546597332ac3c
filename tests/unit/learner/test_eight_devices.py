"""A learner on eight fake devices: the same fragments, a share of the memory on each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.devices import ran_on

QUICK = (
    "explicit_axes_stay_as_they_are",
    "each_device_holds_an_eighth",
    "moments_of_a_loop_of_ones_own_are_copied",
    "no_leaf_is_gathered",
    "quantised_where_it_lies",
)
LONG = (
    "frozen_weights_are_spread",
    "the_formula_is_what_a_step_takes",
    "like_one_device_bit_by_bit",
    "trains_as_on_one_device",
    "muon_gathers_one_matrix_at_a_time",
    "each_device_sends_its_own_rows_to_experts",
    "layers_share_their_programs",
    "a_return_goes_on",
    "one_program_at_a_time_is_in_flight",
)


def failures(checks: tuple[str, ...]) -> dict[str, str]:
    """Run checks in one process that has eight devices; returns the traceback of each failure."""
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=300"  # XLA ends after 40 s
    # Some of the long ones are about bits and memory.
    plain = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"} if checks is LONG else {}
    script = str(Path(__file__).with_name("on_eight_devices.py"))
    said = ran_on(8, script, *checks, flags=patience, **plain)
    found: dict[str, str] = json.loads(said.splitlines()[-1])
    return found


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_each_of_eight_devices_holds_and_sends_its_share() -> None:
    failed = failures(QUICK)
    assert not failed, "\n".join(failed.values())


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_eight_devices_train_and_meet_others_as_one_does() -> None:
    failed = failures(LONG)
    assert not failed, "\n".join(failed.values())
