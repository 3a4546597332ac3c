"""How much of the window a fragment's newest snapshot still needs."""

from __future__ import annotations

import pytest

from skerry.log.base import Retention, Storage, StreamInfo, StreamSpec
from skerry.log.window import Uncovered

S = 10**9


def stream(*, max_bytes: int = 1000, max_age_s: float = 100.0) -> StreamInfo:
    """Return a stream of 51 messages, from sequence 50 on, of 510 bytes."""
    spec = StreamSpec("C", (), Retention.WINDOW, Storage.FILE, max_bytes, max_age_s)
    return StreamInfo("C", 51, 510, 50, 100, spec)


@pytest.mark.parametrize(
    ("sequence", "age_s", "share"),
    [(100, 0, 0.01), (76, 0, 0.25), (50, 0, 0.51), (76, 30, 0.3), (76, -5, 0.25)],
)
def test_share_is_that_of_bytes_or_age_whichever_is_larger(
    sequence: int, age_s: int, share: float
) -> None:
    oldest = Uncovered(sequence, 1000 * S)
    assert oldest.share(stream(), (1000 + age_s) * S) == pytest.approx(share)


@pytest.mark.parametrize("sequence", [49, 101])
def test_what_the_window_does_not_hold_fills_it(sequence: int) -> None:
    assert Uncovered(sequence, 0).share(stream(), 0) == 1.0


def test_window_without_bounds_is_never_full() -> None:
    oldest = Uncovered(50, 0)
    assert oldest.share(stream(max_bytes=-1, max_age_s=0.0), 10**6 * S) == 0.0
