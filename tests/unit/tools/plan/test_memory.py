"""What a plan says that a chip must hold is what a learner holds; on fake devices of its own."""

from __future__ import annotations

import json

import pytest

from tests.support.devices import ran_on


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_planned_memory_is_within_a_tenth_of_what_eight_devices_hold() -> None:
    said = ran_on(8, "-m", "tests.unit.tools.plan.memory_on_eight")
    found: dict[str, dict[str, list[float]]] = json.loads(said.splitlines()[-1])
    assert len(found) == 6
    for name, parts in found.items():
        for part in ("all", "state"):
            planned, held = parts[part]
            assert planned == pytest.approx(held, rel=0.1), (name, part, parts)
