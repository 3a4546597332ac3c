"""Which moment of a run is meant: a version, a time, or a sequence of the ledger."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from skerry.errors import ConfigError

if TYPE_CHECKING:
    from skerry.protocol.messages import Commit

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
NANOSECONDS = 1_000_000_000
FORMS = (
    "v17 (every fragment at version 17, or its newest before that), f3@17 (the moment at which"
    " fragment 3 reached version 17), seq:1234 (the ledger up to that sequence), a time such as"
    " 2026-03-01T12:00:00Z (UTC where it names no zone), or -5m (s, m, h, d ago)"
)


@dataclass(frozen=True, slots=True)
class Target:
    """One moment; exactly one of ``version``, ``sequence`` and ``at_ns`` is set, or none: the end.

    ``version`` belongs to ``fragment``, or to each of them where that is None. ``at_ns`` is by the
    broker's clock.
    """

    version: int | None = None
    fragment: int | None = None
    sequence: int | None = None
    at_ns: int | None = None

    def takes(self, commit: Commit, sequence: int, at_ns: int) -> bool:
        """Tell whether a commit is part of the state at this moment, given its place in the log.

        ``f3@17`` has to be resolved to a sequence first.
        """
        if self.sequence is not None:
            return sequence <= self.sequence
        if self.at_ns is not None:
            return at_ns <= self.at_ns
        return self.version is None or commit.version <= self.version


def parse(text: str, now_ns: int) -> Target:
    """Return what a person means by ``--to``; ConfigError lists the forms."""
    if found := re.fullmatch(r"v(\d+)", text):
        return Target(version=int(found[1]))
    if found := re.fullmatch(r"f(\d+)@v?(\d+)", text):
        return Target(version=int(found[2]), fragment=int(found[1]))
    if found := re.fullmatch(r"seq:(\d+)", text):
        return Target(sequence=int(found[1]))
    if found := re.fullmatch(r"-(\d+(?:\.\d+)?)([smhd])", text):
        return Target(at_ns=now_ns - int(float(found[1]) * UNITS_S[found[2]] * NANOSECONDS))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        msg = f"--to {text!r} is no moment of a run: use {FORMS}."
        raise ConfigError(msg, path="to") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return Target(at_ns=int(moment.timestamp() * NANOSECONDS))
