"""Which learner offers a run's initial parameters."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from skerry.log import ledger, place, run_records
from skerry.log.memory import MemoryBroker
from skerry.log.streams import specs
from skerry.protocol.genesis import STALE_PULSES, Candidate, first_to_offer
from tests.support.builders import pulse

PULSE_S = 0.5
NOW_NS = 100 * 10**9
FRESH_NS = NOW_NS - int(STALE_PULSES * PULSE_S * 1e9)

candidates = st.lists(
    st.builds(
        Candidate,
        learner=st.text("abc", min_size=1, max_size=4),
        shard=st.integers(0, 50),
        heard_ns=st.integers(0, NOW_NS),
        sent=st.booleans(),
    ),
    unique_by=(lambda c: c.learner, lambda c: c.shard),
    max_size=8,
)


@given(candidates, st.randoms())
def test_it_lives_has_begun_if_any_has_and_all_agree(found: list[Candidate], draw: object) -> None:
    first = first_to_offer(found, NOW_NS, PULSE_S)
    living = {c.learner: c for c in found if c.heard_ns >= FRESH_NS}
    assert (first is None) == (not living)
    if first is not None:
        chosen = living[first]
        assert chosen.sent == any(c.sent for c in living.values())
        rivals = [c for c in living.values() if c.sent == chosen.sent]
        assert chosen.shard == min(c.shard for c in rivals)
    getattr(draw, "shuffle")(found)  # noqa: B009 - Hypothesis says nothing of its type
    assert first_to_offer(found, NOW_NS, PULSE_S) == first


async def test_members_that_have_the_parameters_take_turns_by_their_pulses() -> None:
    clock = [NOW_NS]
    bus = MemoryBroker(clock_ns=lambda: clock[0]).connect()
    await bus.declare(specs("run"))
    for name, offers in (("reads", False), ("a", True), ("b", True)):
        await ledger.join(bus, "run", name, "host", 1, offers=offers)
    told = pulse(step=0, contributions=0)

    async def first(*alive: str, **changes: int) -> str | None:
        clock[0] += 6 * 10**9
        for name in alive:
            await run_records.publish(bus, replace(told, learner=name, **changes))
        return await place.first_to_offer(bus, "run", PULSE_S)

    assert await place.first_to_offer(bus, "run", PULSE_S) == "a", "none has pulsed yet"
    assert await first("reads", "a", "b") == "a"
    assert await first("reads", "b") == "b", "the first is silent"
    assert await first("reads") is None
    await run_records.publish(bus, replace(told, learner="b", contributions=1))
    assert await place.first_to_offer(bus, "run", PULSE_S) == "b", "it has begun"
