"""Proving a run's log: walk it once, and say everything that is wrong with it."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.log import ledger
from skerry.protocol.messages import Commit, MemberRecord
from skerry_tools.audit.chain import Chain
from skerry_tools.audit.checks import Checks, Rules
from skerry_tools.audit.global_state import Ends, check_parts
from skerry_tools.audit.log import Log, newest, read
from skerry_tools.audit.offers import Collector
from skerry_tools.audit.tally import LearnerReport, Tally
from skerry_tools.audit.violations import Violation, What
from skerry_tools.audit.window import Reach, Window, read_window

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.log.base import Bus
    from skerry_tools.audit.log import Entry
    from skerry_tools.audit.replayed import Replayed

    OnProgress = Callable[[str, int, int], None]

MOST_KEPT = 1000
"""Violations that a report names; the rest is counted."""
STRIDE = 256


@dataclass(frozen=True, slots=True)
class FragmentReport:
    """One fragment: its newest version, and the version from which on it can be replayed."""

    fragment: int
    version: int
    replayable_from: int
    replayable_since_ns: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a verification found; ``violations`` in ledger order, at most ``MOST_KEPT`` of them.

    ``notes`` are what the next start of a service mends by itself. ``raise_window_to`` are the
    bytes of window that would have kept every contribution, 0 where the window has dropped none.
    """

    run: str
    records: int
    commits: int
    elapsed_s: float
    violations: tuple[Violation, ...]
    broken: int
    notes: tuple[str, ...]
    learners: tuple[LearnerReport, ...]
    fragments: tuple[FragmentReport, ...]
    window: Window
    reach: dict[int, Reach]
    raise_window_to: int
    replayed: Replayed | None = None


@dataclass(slots=True)
class _Walk:
    """One pass over the ledger."""

    log: Log
    checks: Checks
    ends: Ends
    window: Window
    tally: Tally = field(default_factory=Tally)
    chain: Chain = field(default_factory=Chain)
    reach: dict[int, Reach] = field(default_factory=dict[int, Reach])
    found: list[Violation] = field(default_factory=list[Violation])
    broken: int = 0
    sequence: int = 0
    records: int = 0
    commits: int = 0

    def report(self, violations: list[Violation]) -> None:
        self.broken += len(violations)
        self.found += violations[: max(0, MOST_KEPT - len(self.found))]

    def take(self, entry: Entry) -> None:
        raw = entry.raw
        self.records += 1
        self.missing(raw.sequence)
        self.sequence = raw.sequence
        match entry.value:
            case None:
                text = f"Ledger record {raw.sequence} ({raw.subject}) is none: {entry.problem}"
                self.report([Violation(What.UNREADABLE, text, sequence=raw.sequence)])
            case MemberRecord():
                self.report(self.checks.member(entry.value, raw.sequence))
            case Commit():
                self._commit(entry.value, entry)
            case _:
                pass

    def missing(self, upto: int) -> None:
        """Report ledger sequences between the last record and this one: none may be gone."""
        if upto > self.sequence + 1:
            gone = upto - self.sequence - 1
            where = f"{self.sequence + 1}" if gone == 1 else f"{self.sequence + 1} to {upto - 1}"
            text = (
                f"Ledger record {where} is missing: somebody has deleted or purged"
                f" {'it' if gone == 1 else 'them'}, or the store was cut short."
            )
            self.report([Violation(What.MISSING, text, sequence=self.sequence + 1)])

    def _commit(self, commit: Commit, entry: Entry) -> None:
        raw, index = entry.raw, commit.fragment
        self.commits += 1
        self.report(self.checks.commit(commit, raw.sequence, raw.time_ns))
        self.report(self.chain.commit(commit, raw.payload, raw.sequence))
        self.tally.commit(commit)
        self.ends.commit(index, commit.version, raw.payload)
        self.reach.setdefault(index, Reach(self.window)).commit(commit, raw.time_ns)

    def fragments(self) -> tuple[FragmentReport, ...]:
        return tuple(
            FragmentReport(index, self.checks.books[index].version, reach.base, reach.since_ns)
            for index, reach in sorted(self.reach.items())
        )


async def verify(
    bus: Bus,
    run: str,
    *,
    replay: bool = False,
    rules: Rules | None = None,
    on_progress: OnProgress | None = None,
) -> Report:
    """Walk the log of a run and return everything that is wrong with it.

    The run may go on meanwhile. ``audit.checks`` lists what must be true; beside it the
    ledger has no hole, its ends are the manifests' byte for byte, and the global state can be
    read with the digests that they name.

    Args:
        bus: a connected bus.
        run: the run's id; RunNotFound if there is none.
        replay: also rebuild every version that the window still holds, and compare digests.
        rules: what to hold the log to; by default what the run's config says.
        on_progress: hears what is being done, how much is done, and of how much (0: unknown).

    """
    began = time.monotonic()
    log = Log.of(bus, await ledger.read_run(bus, run))
    told = on_progress or _silent
    walk = await _walk(log, rules or Rules.of(log.config), told)
    versions = {index: book.version for index, book in walk.checks.books.items() if book.version}
    walk.report(walk.checks.finish())
    wrong, notes = walk.ends.compare(versions)
    walk.report(wrong)
    read_bytes = 0

    def on_bytes(size: int) -> None:
        nonlocal read_bytes
        read_bytes += size
        told("state bytes", read_bytes, 0)

    walk.report(await check_parts(log, versions, on_bytes=on_bytes))
    replayed = await _replayed(log, walk, told) if replay else None
    return Report(
        run=run,
        records=walk.records,
        commits=walk.commits,
        elapsed_s=time.monotonic() - began,
        violations=tuple(walk.found),
        broken=walk.broken,
        notes=tuple(notes),
        learners=walk.tally.learners(walk.checks),
        fragments=walk.fragments(),
        window=walk.window,
        reach=walk.reach,
        raise_window_to=max((r.raise_to() for r in walk.reach.values()), default=0),
        replayed=replayed,
    )


async def _walk(log: Log, rules: Rules, told: OnProgress) -> _Walk:
    """Read manifests, then the window, then the ledger: in this order nothing can seem ahead."""
    ends = await Ends.read(log)
    window = await read_window(log)
    walk = _Walk(log, Checks(rules), ends, window)
    await _offers(log, walk.checks, window, told)
    info = await log.stream("LEDGER")
    through = await newest(log.bus, log.subjects.of_stream("LEDGER")[0])
    entries = log.ledger(through)
    async with aclosing(entries):
        async for entry in entries:
            walk.take(entry)
            if walk.records % STRIDE == 0:
                told("ledger records", entry.raw.sequence, through)
    walk.missing(max(info.last_seq, through) + 1)
    return walk


async def _offers(log: Log, checks: Checks, window: Window, told: OnProgress) -> None:
    collector = Collector(log.run, log.plan)
    through = await newest(log.bus, log.subjects.contributions())
    records = read(log.bus, log.subjects.contributions(), through)
    done = 0
    async with aclosing(records):
        async for record in records:
            offer = collector.feed(record)
            if offer is not None:
                checks.offer(offer)
            done += 1
            if done % STRIDE == 0:
                told("window messages", done, window.messages)


async def _replayed(log: Log, walk: _Walk, told: OnProgress) -> Replayed:
    from skerry_tools.audit.replay import replay

    replayed = await replay(log, on_progress=told)
    walk.report([Violation(What.REPLAY, d.sentence, d.fragment, d.version) for d in replayed.wrong])
    return replayed


def _silent(_what: str, _done: int, _of: int) -> None:
    """Tell nobody."""
