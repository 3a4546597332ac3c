"""What holds up the end of a run, and for how long."""

from __future__ import annotations

import pytest

from skerry.errors import BrokerUnavailable
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.streams import specs
from skerry.protocol.coordinator import OTHERS_PATIENCE, may_end
from skerry.protocol.subjects import Subjects
from skerry_syncer.serving import ContributionTail


@pytest.mark.parametrize(
    ("waited_s", "unread", "late", "said"),
    [
        (0.0, False, False, (True, "resolved")),
        (1e6, True, True, (False, "unread")),
        (0.0, False, True, (False, "late")),
        (OTHERS_PATIENCE * 60.0 - 0.1, False, True, (False, "late")),
        (OTHERS_PATIENCE * 60.0, False, True, (True, "left")),
    ],
)
def test_own_contributions_are_waited_for_and_others_for_a_while(
    waited_s: float, said: tuple[bool, str], *, unread: bool, late: bool
) -> None:
    assert may_end(waited_s, 60.0, unread=unread, late=late) == said


async def test_what_lies_beyond_is_read_once_as_long_as_nothing_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = MemoryBroker().connect()
    await bus.declare(specs("t"))
    for fragment in (0, 1, 0):
        await bus.publish(Subjects("t").contribution(fragment, "a"), b"x")
    asked: list[str] = []
    read = MemoryBus.last

    async def counted(self: MemoryBus, pattern: str) -> object:
        asked.append(pattern)
        return await read(self, pattern)

    monkeypatch.setattr(MemoryBus, "last", counted)
    tail = ContributionTail(bus, "t")
    assert await tail.beyond({0: 3, 1: 3, 2: 3}) == frozenset()
    assert asked == [], "the stream ends there"
    assert await tail.beyond({0: 2, 1: 2, 2: 0}) == {0}
    assert await tail.beyond({0: 3, 1: 1, 2: 0}) == {1}
    assert len(asked) == 3
    await bus.publish(Subjects("t").contribution(2, "a"), b"x")
    assert await tail.beyond({0: 3, 1: 2, 2: 0}) == {2}


async def test_what_the_broker_does_not_tell_of_is_not_taken_for_nothing() -> None:
    """A cluster leaves out streams that are without a leader."""
    with pytest.raises(BrokerUnavailable, match=r"does not say how far stream .*CONTRIB"):
        await ContributionTail(MemoryBroker().connect(), "t").beyond({0: 3})
