"""Proving a run's log: walk it once, and say everything that is wrong with it."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.log import ledger
from skerry.protocol.messages import Commit, MemberRecord
from skerry_tools.audit.chain import Chain
from skerry_tools.audit.checks import Checks, Rules
from skerry_tools.audit.global_state import Ends, check_parts
from skerry_tools.audit.log import RunLog, newest, read
from skerry_tools.audit.moment import Survey
from skerry_tools.audit.offers import Collector
from skerry_tools.audit.violations import Violation, What
from skerry_tools.audit.window import Reach, Window, read_window

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.log.base import Bus
    from skerry_tools.audit.log import LedgerEntry
    from skerry_tools.audit.replay import Replayed

    OnProgress = Callable[[str, int, int], None]

MOST_KEPT = 1000
"""Violations that a report names; the rest is counted."""
STRIDE = 256


@dataclass(frozen=True, slots=True)
class LearnerReport:
    """One learner over all its incarnations.

    ``tokens`` are those of the fragment that is furthest along, as in ``skerry status``;
    ``discarded`` are tokens it trained on and never offered, of the fragment with most of them.
    ``cursor`` is how far its data is counted. ``starts`` counts what became of the inner
    optimizer's state: new, warm or cold. ``refused`` counts by cause, over all fragments.
    """

    learner: str
    incarnation: int
    tokens: int
    cursor: int
    contributions: int
    discarded: int
    refused: dict[str, int]
    starts: dict[str, int]


@dataclass(frozen=True, slots=True)
class FragmentReport:
    """One fragment: its newest version, and the version from which on it can be replayed."""

    fragment: int
    version: int
    replayable_from: int
    replayable_since_ns: int


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What a verification found; ``violations`` in ledger order, at most ``MOST_KEPT`` of them.

    ``notes`` are what the next start of a service repairs by itself, and unreadable records where
    any learner may write. ``raise_window_to`` are the
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

    checks: Checks
    ends: Ends
    survey: Survey
    chain: Chain = field(default_factory=Chain)
    refused: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    found: list[Violation] = field(default_factory=list[Violation])
    notes: list[str] = field(default_factory=list[str])
    broken: int = 0
    sequence: int = 0
    records: int = 0
    commits: int = 0

    def report(self, violations: list[Violation]) -> None:
        self.broken += len(violations)
        self.found += violations[: max(0, MOST_KEPT - len(self.found))]

    def take(self, entry: LedgerEntry) -> None:
        raw = entry.raw
        self.records += 1
        self.missing(raw.sequence)
        self.sequence = raw.sequence
        match entry.value:
            case None:
                text = f"Ledger record {raw.sequence} ({raw.subject}) is none: {entry.problem}"
                if entry.kind is MemberRecord:
                    self.notes.append(f"{text}. Any learner may write there; nothing reads it.")
                else:
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
                f"Ledger record {where} is missing: deleted, purged,"
                " or lost when the store was cut short."
            )
            self.report([Violation(What.MISSING, text, sequence=self.sequence + 1)])

    def _commit(self, commit: Commit, entry: LedgerEntry) -> None:
        raw = entry.raw
        self.commits += 1
        self.report(self.checks.commit(commit, raw.sequence, raw.time_ns))
        self.report(self.chain.commit(commit, raw.payload, raw.sequence))
        for item in commit.refused:
            self.refused.setdefault(item.learner, Counter())[item.cause.value] += 1
        self.ends.commit(commit.fragment, commit.version, raw.payload)
        self.survey.commit(commit, raw)

    def fragments(self) -> tuple[FragmentReport, ...]:
        return tuple(
            FragmentReport(index, self.survey.versions[index], reach.base, reach.since_ns)
            for index, reach in sorted(self.survey.reach.items())
        )

    def learners(self) -> tuple[LearnerReport, ...]:
        """Return a row for each learner that the ledger knows, by name."""
        names = {*self.checks.starts, *self.refused}
        return tuple(self._learner(name) for name in sorted(names))

    def _learner(self, name: str) -> LearnerReport:
        starts = self.checks.starts.get(name)
        accounts = self.checks.accounts(name)
        discarded = max((account.discarded for account in accounts), default=0)
        return LearnerReport(
            learner=name,
            incarnation=max(0, starts.incarnation) if starts else 0,
            tokens=max((account.tokens for account in accounts), default=0),
            cursor=max((account.cursor for account in accounts), default=0),
            contributions=sum(account.contributions for account in accounts),
            discarded=discarded * (self.checks.rules.sequence_tokens or 1),
            refused=dict(self.refused.get(name, {})),
            starts=dict(starts.inner) if starts else {},
        )


async def verify(
    bus: Bus,
    run: str,
    *,
    replay: bool = False,
    rules: Rules | None = None,
    on_progress: OnProgress | None = None,
) -> AuditReport:
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
    log = RunLog.of(bus, await ledger.read_run(bus, run))
    report = on_progress or _silent
    walk = await _walk(log, rules or Rules.of(log.config), report)
    versions = walk.survey.versions
    walk.report(walk.checks.finish())
    wrong, notes = walk.ends.compare(versions)
    walk.report(wrong)
    read_bytes = 0

    def on_bytes(size: int) -> None:
        nonlocal read_bytes
        read_bytes += size
        report("state bytes", read_bytes, 0)

    walk.report(await check_parts(log, versions, on_bytes))
    replayed = await _replayed(log, walk, report) if replay else None
    return AuditReport(
        run=run,
        records=walk.records,
        commits=walk.commits,
        elapsed_s=time.monotonic() - began,
        violations=tuple(walk.found),
        broken=walk.broken,
        notes=(*walk.notes[:MOST_KEPT], *notes),
        learners=walk.learners(),
        fragments=walk.fragments(),
        window=walk.survey.window,
        reach=walk.survey.reach,
        raise_window_to=walk.survey.raise_window_to,
        replayed=replayed,
    )


def _silent(_what: str, _done: int, _of: int) -> None:
    """Show nothing."""


async def _walk(log: RunLog, rules: Rules, report: OnProgress) -> _Walk:
    """Read manifests, then the window, then the ledger: in this order nothing can seem ahead."""
    walk = _Walk(Checks(rules), await Ends.read(log), Survey(await read_window(log)))
    await _offers(log, walk, report)
    info = await log.stream("LEDGER")
    through = await newest(log.bus, log.subjects.of_stream("LEDGER")[0])
    entries = log.ledger(through)
    async with aclosing(entries):
        async for entry in entries:
            walk.take(entry)
            if walk.records % STRIDE == 0:
                report("ledger records", entry.raw.sequence, through)
    walk.missing(max(info.last_seq, through) + 1)
    return walk


async def _offers(log: RunLog, walk: _Walk, report: OnProgress) -> None:
    collector = Collector(log.run, log.plan)
    through = await newest(log.bus, log.subjects.contribution())
    records = read(log.bus, log.subjects.contribution(), through)
    done = 0
    async with aclosing(records):
        async for record in records:
            offer = collector.feed(record)
            if offer is not None:
                walk.checks.offer(offer)
            done += 1
            if done % STRIDE == 0:
                report("window messages", done, walk.survey.window.messages)


async def _replayed(log: RunLog, walk: _Walk, report: OnProgress) -> Replayed:
    from skerry_tools.audit.replay import replay

    known = walk.survey if walk.survey.versions else None
    replayed = await replay(log, known=known, on_progress=report)
    walk.report([Violation(What.REPLAY, d.sentence, d.fragment, d.version) for d in replayed.wrong])
    return replayed
