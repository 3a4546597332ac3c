"""The order in which an audit reads a log."""

from __future__ import annotations

from itertools import count

from skerry.log import ledger
from skerry.log.memory import MemoryBroker
from skerry.log.reading import newest_sequence
from skerry.protocol.messages import Commit, MemberRecord
from skerry_tools.audit.log import RunLog
from tests.support.scripted_run import ScriptedRun


async def test_starts_come_among_the_commits_as_the_broker_stored_them() -> None:
    bus = MemoryBroker(clock_ns=count(1).__next__).connect()
    run = await ScriptedRun.begin(bus)
    for fragment, learner in enumerate("bc"):
        await run.commit(fragment)
        await ledger.join(bus, "run", learner, "host", 1)
    log = RunLog.of(bus, run.record)
    through = await newest_sequence(bus, log.subjects.of_stream("LEDGER")[0])
    found = list[str | int]()
    async for entry in log.history(through, await log.members()):
        if isinstance(entry.value, MemberRecord):
            found.append(entry.value.learner)
        elif isinstance(entry.value, Commit):
            found.append(entry.value.fragment)
    assert found == ["a", "a", 0, "b", 1, "c"]
