"""What a publisher says of a message that the broker did not acknowledge."""

from __future__ import annotations

import pytest

from skerry.errors import BrokerUnavailable, BusError
from skerry.log.base import Receipt, StreamSpec
from skerry.log.client import Message, NoAnswer, Publisher
from skerry.log.memory import MemoryBroker
from skerry.protocol.subjects import Subjects
from skerry.tasks import now_s

PATIENCE_S = 1e6


class Closes:
    """A broker that closes the connection on every message, and keeps how long that took."""

    seconds = PATIENCE_S

    async def store(self, message: Message, deadline: float) -> Receipt:
        del message, deadline
        raise NoAnswer

    async def exists(self, stream: str, deadline: float) -> bool:
        raise NotImplementedError

    async def create(self, spec: StreamSpec) -> tuple[str, ...]:
        raise NotImplementedError

    def failure(self, seconds: float, subject: str = "") -> BusError:
        self.seconds = seconds
        return BusError(subject)


async def test_a_message_without_an_id_that_is_lost_at_once_was_not_waited_for() -> None:
    broker = Closes()
    publisher = Publisher(broker, MemoryBroker().connect(), b"", 1.0)
    with pytest.raises(BusError):
        await publisher.publish(Message("a.b", b"", None, None, {}), now_s() + PATIENCE_S)
    assert broker.seconds < PATIENCE_S


class Elects(Closes):
    """A cluster whose stream has no leader for a moment: nothing answers."""

    def __init__(self) -> None:
        self.looks = 0

    async def store(self, message: Message, deadline: float) -> Receipt:
        del message, deadline
        if self.looks < 2:
            raise NoAnswer(sent=False)
        return Receipt(7, duplicate=False)

    async def exists(self, stream: str, deadline: float) -> bool:
        del stream, deadline
        self.looks += 1
        msg = "no answer in time"
        raise BrokerUnavailable(msg)


async def test_a_message_waits_for_the_election_of_its_streams_leader() -> None:
    publisher = Publisher(Elects(), MemoryBroker().connect(), b"", 1.0)
    receipt = await publisher.publish(
        Message(Subjects("r").ledger("run"), b"", None, None, {}), now_s() + 20.0
    )
    assert receipt.sequence == 7
