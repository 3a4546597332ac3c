"""What the network posts wakes a trainer that waits, whenever it was posted."""

from __future__ import annotations

import threading
import time

from skerry.client.mailbox import Mailbox
from tests.support.builders import round_

NEVER_S = 600.0


def mailbox() -> Mailbox:
    return Mailbox(2, lambda: None)


def test_what_came_between_a_look_and_the_wait_ends_the_wait_and_not_the_next() -> None:
    box = mailbox()
    assert box.rounds == ()
    box.post_rounds((round_(2),))
    box.wait(NEVER_S)
    assert [r.version for r in box.rounds] == [2]
    began_s = time.monotonic()
    box.wait(0.05)
    assert time.monotonic() - began_s >= 0.05


def test_a_post_wakes_a_trainer_that_waits() -> None:
    box = mailbox()
    poster = threading.Timer(0.01, box.post_rounds, ((round_(2),),))
    poster.start()
    box.wait(NEVER_S)
    poster.join()
    assert len(box.rounds) == 1


def test_a_trainer_that_has_been_asked_to_end_does_not_wait() -> None:
    box = mailbox()
    box.stop()
    box.wait(NEVER_S)
    box.wait(NEVER_S)
    assert box.stopping
