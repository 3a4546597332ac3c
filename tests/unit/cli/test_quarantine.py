"""``skerry quarantine``: which record it writes, and what it says of a name that nobody has."""

from __future__ import annotations

import pytest

from skerry.cli.quarantine import decide
from skerry.errors import ConfigError
from skerry.log import ledger, run_records
from skerry.log.memory import MemoryBroker
from skerry.log.streams import specs
from skerry.protocol.messages import Quarantine, QuarantineReason
from tests.support.builders import run_record


async def test_the_newest_decision_about_a_learner_counts_and_unknown_names_are_refused() -> None:
    async with MemoryBroker().connect() as bus:
        await bus.declare(specs("r"))
        await ledger.create_run(bus, run_record("r"))
        with pytest.raises(ConfigError, match="there are none yet"):
            await decide(bus, "r", "a", release=False)
        await ledger.join(bus, "r", "a", "host", 1)
        for release in (False, True):
            await decide(bus, "r", "a", release=release)
            (found,) = await run_records.newest_each(bus, "r", Quarantine)
            assert (found.learner, found.released) == ("a", release)
            assert found.reason is QuarantineReason.BY_HAND
        with pytest.raises(ConfigError, match="no learner 'b': there are a"):
            await decide(bus, "r", "b", release=True)
