"""What the network posts wakes a trainer that waits, whenever it was posted."""

from __future__ import annotations

import threading

from skerry_learner.sync.mailbox import Mailbox
from tests.support.builders import round_

NEVER_S = 600.0


def mailbox() -> Mailbox:
    return Mailbox(2, lambda: None)


class Counting(threading.Condition):
    """A condition that knows whether anybody has had to wait."""

    waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        return super().wait(timeout)


def test_what_came_between_a_look_and_the_wait_ends_the_wait() -> None:
    box = mailbox()
    assert box.rounds == ()
    box.post_rounds((round_(2),))
    box.wait(NEVER_S)
    assert [r.version for r in box.rounds] == [2]


def test_a_wait_that_was_ended_does_not_end_the_next() -> None:
    changed = Counting()
    box = Mailbox(2, lambda: None, changed)
    box.post_rounds((round_(2),))
    box.wait(NEVER_S)
    assert changed.waits == 0
    box.wait(0.0)
    assert changed.waits == 1


def test_a_post_wakes_whoever_waits() -> None:
    box = mailbox()
    poster = threading.Timer(0.01, box.post_rounds, ((round_(2),),))
    poster.start()
    box.wait(NEVER_S)
    poster.join()
    assert len(box.rounds) == 1


def test_nobody_waits_who_has_been_asked_to_end() -> None:
    box = mailbox()
    box.stop()
    box.wait(NEVER_S)
    box.wait(NEVER_S)
    assert box.stopping
