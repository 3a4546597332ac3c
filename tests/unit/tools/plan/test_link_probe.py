"""A link is measured with messages like a learner's."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

import pytest

from skerry.errors import ConfigError
from skerry.log.memory import MemoryBroker
from skerry.log.nats.bus import NatsBus
from skerry.settings.tree import Tree
from skerry_tools.plan.link_probe import (
    CHUNK_BYTES,
    KEEP_BYTES,
    PINGS,
    WARM_UP,
    MeasuredLink,
    answer,
    measure,
    use,
)
from skerry_tools.plan.question import question
from tests.support.nats_server import NatsServer
from tests.support.plans import asked

MEASURED = MeasuredLink(up_bits_s=2e9, down_bits_s=4e9, rtt_s=0.02, payload_bytes=64)


def ticks() -> Iterator[float]:
    """Yield the times of a clock: pings of 10 ms, then 1.01 s of sending and 0.51 s of reading."""
    now = 0.0
    for _ in range(WARM_UP + PINGS):
        yield now
        now += 0.01
        yield now
    yield from (now, now + 1.01, now + 1.01, now + 1.52)


async def test_rates_are_payload_bits_over_time_less_one_round_trip() -> None:
    clock = ticks()
    async with MemoryBroker().connect() as bus:
        found = await measure(bus, 16 * CHUNK_BYTES, clock=lambda: next(clock))
    assert found.payload_bytes == 16 * CHUNK_BYTES
    assert found.rtt_s == pytest.approx(0.01)
    assert found.up_bits_s == pytest.approx(8 * 16 * CHUNK_BYTES)
    assert found.down_bits_s == pytest.approx(2 * 8 * 16 * CHUNK_BYTES)


@pytest.mark.nats
async def test_a_real_broker_is_measured_twice_and_keeps_next_to_nothing(
    shared_nats: NatsServer,
) -> None:
    async with NatsBus(shared_nats.url) as bus:
        found = [await measure(bus, 16 * CHUNK_BYTES) for _ in range(2)]
        kept = next(s for s in await bus.streams() if s.name == "SKERRY_link-probe_CONTRIB")
    assert all(one.up_bits_s > 0 and one.down_bits_s > 0 and one.rtt_s > 0 for one in found)
    assert kept.spec.max_bytes == KEEP_BYTES
    assert 0 < kept.spec.max_age_s <= 60


def test_a_measured_link_can_be_pasted_as_a_site() -> None:
    text = answer(MEASURED, "b").text
    values = tomllib.loads("\n".join(text[text.index("[sites.b]") :]))["sites"]["b"]
    site = asked({"b": {**values, "step_time": 1}}).tables.sites["b"]
    assert (site.up, site.down, site.rtt, site.measured) == (2e9, 4e9, 0.02, True)


def test_a_measured_link_replaces_the_guess_for_the_only_site() -> None:
    tree = Tree()
    guessed = {"up": "1 GB/s", "down": "1 GB/s", "derating": 0.5, "step_time": 1}
    tree.merge({"plan": {"parameters": "1B"}, "sites": {"a": guessed}}, "file")
    use(tree, MEASURED, None)
    site = question(tree).tables.sites["a"]
    assert (site.up, site.down, site.derating) == (2e9, 4e9, 1.0)


@pytest.mark.parametrize("name", [None, "c"])
def test_of_several_sites_the_measured_one_must_be_named(name: str | None) -> None:
    tree = Tree()
    tree.merge({"sites": {"a": {}, "b": {}}}, "file")
    with pytest.raises(ConfigError, match="there are a, b"):
        use(tree, MEASURED, name)
