"""Proving a run's log: walk it once, and say everything that is wrong with it."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field

import xxhash

from skerry.algorithm.fragments import shard_of
from skerry.log import ledger
from skerry.log.base import Bus, Record
from skerry.log.reading import newest_sequence, read_up_to
from skerry.protocol.contribution import Contribution, ContributionAssembler, id_of
from skerry.protocol.messages import Commit, MemberRecord, begins_history, is_round
from skerry.protocol.subjects import contributor
from skerry_tools.audit import replay as replaying
from skerry_tools.audit.accounts import Violation, What, named
from skerry_tools.audit.checks import Checks, Rules
from skerry_tools.audit.global_state import Ends, check_parts
from skerry_tools.audit.log import LedgerEntry, OnProgress, RunLog
from skerry_tools.audit.survey import Survey, Window

MOST_KEPT = 1000
"""Violations of a kind that a report names; the rest is counted, and hides none of another."""
STRIDE = 256


@dataclass(frozen=True, slots=True)
class LearnerReport:
    """One learner over all its incarnations.

    ``tokens`` are those of the fragment that is furthest along, as in ``skerry status``; ``cursor``
    is how far its data is counted. ``starts`` counts what became of the inner optimizer's state:
    new, warm or cold. ``data`` is the digest of what it reads.
    ``refused`` counts by cause, over all fragments, as ``contributions`` does.
    """

    learner: str
    incarnation: int
    tokens: int
    cursor: int
    contributions: int
    refused: dict[str, int]
    starts: dict[str, int]
    data: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What a verification found; ``violations`` in ledger order, ``MOST_KEPT`` of a kind at most.

    ``notes`` are what the next start or commit of a service repairs by itself, and unreadable
    records where any learner may write. ``survey`` says where each fragment is and from where it
    can be replayed.
    """

    run: str
    records: int
    commits: int
    elapsed_s: float
    violations: tuple[Violation, ...]
    broken: int
    notes: tuple[str, ...]
    learners: tuple[LearnerReport, ...]
    survey: Survey
    replayed: replaying.Replayed | None = None


@dataclass(slots=True)
class _Walk:
    """One pass over ledger and starts.

    ``newest`` are each fragment's newest version and its digest, ``read_to`` how far the window of
    each shard has been read: what came later may be merged by now.
    """

    checks: Checks
    ends: Ends
    survey: Survey
    newest: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    read_to: list[int] = field(default_factory=list[int])
    merged: Counter[str] = field(default_factory=Counter[str])
    refused: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    found: list[Violation] = field(default_factory=list[Violation])
    kinds: Counter[What] = field(default_factory=Counter[What])
    notes: list[str] = field(default_factory=list[str])
    broken: int = 0
    sequence: int = 0
    records: int = 0
    commits: int = 0

    def report(self, violations: list[Violation]) -> None:
        self.broken += len(violations)
        for one in violations:
            self.kinds[one.what] += 1
            self.found += [one] * (self.kinds[one.what] <= MOST_KEPT)

    def take(self, entry: LedgerEntry) -> None:
        raw, value = entry.raw, entry.value
        self.records += 1
        if entry.kind is not MemberRecord:
            self.missing(raw.sequence)
            self.sequence = raw.sequence
        if value is None:
            text = f"Record {raw.sequence} ({raw.subject}) is none: {entry.problem.rstrip('.')}"
            if entry.kind is MemberRecord:
                self.notes.append(f"{text}. Its learner may write there; nothing reads it.")
            else:
                self.report([Violation(What.UNREADABLE, text, sequence=raw.sequence)])
        elif isinstance(value, MemberRecord):
            read = self.checks.starts_of(value.learner).data
            self.report(self.checks.member(value, raw.sequence))
            if read and value.data not in {"", read}:
                text = (
                    f"{value.learner} reads other text since incarnation {value.incarnation}:"
                    " cursors before are of another one."
                )
                self.notes.append(text)
        elif isinstance(value, Commit):
            self._commit(value, raw)

    def missing(self, upto: int) -> None:
        """Report ledger sequences between the last record and this one: none may be gone."""
        if upto > self.sequence + 1:
            first = self.sequence + 1
            where = f"{first}" if upto == first + 1 else f"{first} to {upto - 1}"
            text = (
                f"Ledger record {where} is missing: deleted, purged,"
                " or lost when the store was cut short."
            )
            self.report([Violation(What.MISSING, text, sequence=first)])

    def _commit(self, commit: Commit, raw: Record) -> None:
        self.commits += 1
        lost = self._lost(commit)
        wrong = self.checks.commit(commit, raw.sequence, raw.time_ns)
        self.report(wrong)
        self.notes += lost if not wrong else []  # it may name what another commit has merged
        self.report(self._chained(commit, raw))
        self.merged.update(item.learner for item in commit.consumed if is_round(commit))
        for item in commit.refused:
            self.refused.setdefault(item.learner, Counter())[item.cause.value] += 1
        self.ends.commit(commit.fragment, commit.version, raw.payload)
        self.survey.commit(commit, raw.sequence, is_whole=not lost)

    def _lost(self, commit: Commit) -> list[str]:
        """Return a note for each contribution that a round merged and the window should hold."""
        first = self.survey.window.first_sequence(commit.fragment)
        last = self.read_to[shard_of(commit.fragment, len(self.read_to))]
        return [
            f"Fragment {commit.fragment}, version {commit.version}, learner {item.learner}:"
            f" {named(id_of(item))} was merged and is gone from the window, which begins before"
            " it: nothing can merge it again."
            for item in (commit.consumed if is_round(commit) else ())
            if item.identity and first <= item.sequence_first <= item.sequence_last <= last
            if not self.checks.offered(commit.fragment, item)
        ]

    def _chained(self, commit: Commit, raw: Record) -> list[Violation]:
        """Check that a record names the digest of the one before it of its fragment.

        One that is changed after the next was written no longer has the digest that the next one
        names. The newest has none after it: it is compared with its manifest, byte for byte. Where
        a version is missing, that alone is a violation.
        """
        before = self.newest.get(commit.fragment)
        self.newest[commit.fragment] = commit.version, xxhash.xxh3_64_intdigest(raw.payload)
        if before is None:
            first = commit.version == 1 or begins_history(commit)
            broken = commit.previous != 0 and first
            what = "the first of its fragment, names a record before it"
        else:
            version, digest = before
            broken = commit.previous != digest and commit.version == version + 1
            what = f"does not follow the record of version {version} that the ledger holds"
        text = (
            f"Fragment {commit.fragment}, version {commit.version}: its record {what}"
            f" ({commit.previous:016x}): one of the two was changed after it was written."
        )
        place = commit.fragment, commit.version
        return [Violation(What.CHAIN, text, *place, sequence=raw.sequence)] * broken

    def learners(self) -> tuple[LearnerReport, ...]:
        """Return a row for each learner that the ledger knows, by name."""
        rows: list[LearnerReport] = []
        for name in sorted({*self.checks.starts, *self.refused}):
            starts, progress = self.checks.starts_of(name), self.checks.progress(name)
            row = LearnerReport(
                learner=name,
                incarnation=max(0, starts.incarnation),
                tokens=max((row.tokens for row in progress), default=0),
                cursor=max((row.cursor for row in progress), default=0),
                contributions=self.merged[name],
                refused=dict(self.refused.get(name, {})),
                starts=dict(starts.inner),
                data=starts.data,
            )
            rows.append(row)
        return tuple(rows)


async def verify(
    bus: Bus,
    run: str,
    *,
    replay: bool = False,
    on_progress: OnProgress = lambda _what, _done, _of: None,
) -> AuditReport:
    """Walk the log of a run and return everything that is wrong with it.

    The run may go on meanwhile. ``audit.checks`` lists what must be true; beside it the
    ledger has no hole, its ends are the manifests' byte for byte, and the global state can be
    read with the digests that they name.

    Args:
        bus: a connected bus.
        run: the run's id; RunNotFound if there is none.
        replay: also rebuild every version that the window still holds, and compare digests.
        on_progress: hears of what is read and replayed.

    """
    began, read_bytes = time.monotonic(), 0
    log = RunLog.of(bus, await ledger.read_run(bus, run))
    walk = await _walk(log, on_progress)
    walk.report(walk.checks.finish())
    wrong, notes = walk.ends.compare(walk.survey.versions)
    walk.report(wrong)

    def on_bytes(size: int) -> None:
        nonlocal read_bytes
        read_bytes += size
        on_progress("state bytes", read_bytes, 0)

    wrong, uncovered = await check_parts(log, walk.survey, on_bytes)
    walk.report(wrong)
    replayed = None
    if replay:
        known = walk.survey if walk.survey.versions else None
        replayed = await replaying.replay(log, known=known, on_progress=on_progress)
        walk.report(list(replayed.wrong))
    return AuditReport(
        run=run,
        records=walk.records,
        commits=walk.commits,
        elapsed_s=time.monotonic() - began,
        violations=tuple(walk.found),
        broken=walk.broken,
        notes=(*walk.notes[:MOST_KEPT], *notes, *uncovered),
        learners=walk.learners(),
        survey=walk.survey,
        replayed=replayed,
    )


async def _walk(log: RunLog, report: OnProgress) -> _Walk:
    """Read manifests, then the window, then the ledger: in this order nothing can seem ahead.

    A contribution that a newer incarnation has superseded counts, too: a commit has to refuse it by
    name.
    """
    walk = _Walk(Checks(Rules.of(log.config)), await Ends.read(log), Survey(await Window.read(log)))
    done = 0
    for shard in log.shards:
        assembler = ContributionAssembler(log.run, log.plan, keeps_payload=False)
        pattern = shard.contribution()
        walk.read_to.append(await newest_sequence(log.bus, pattern))
        records = read_up_to(log.bus, pattern, walk.read_to[-1])
        async with aclosing(records):
            async for record in records:
                fragment, _ = contributor(record.subject)
                got = assembler.feed(record) if fragment >= 0 else None  # else a learner's start
                if isinstance(got, Contribution):
                    walk.checks.offer(got)
                done += 1
                if done % STRIDE == 0:
                    report("window messages", done, walk.survey.window.messages)
    walk.survey.window = await Window.read(log)  # what it has dropped by now is no hole
    info = await log.stream(log.subjects.stream("LEDGER"))
    through = await newest_sequence(log.bus, log.subjects.of_stream("LEDGER")[0])
    members = await log.members()  # after the ledger's end: who is named there has joined
    for entry in members:
        if isinstance(entry.value, MemberRecord):
            walk.checks.joined(entry.value)
        else:
            walk.checks.spoiled(entry.raw.subject.rpartition(".")[2])
    entries = log.history(through, members)
    async with aclosing(entries):
        async for entry in entries:
            walk.take(entry)
            if walk.records % STRIDE == 0:
                report("ledger records", entry.raw.sequence, through)
    walk.missing(max(info.last_seq, through) + 1)
    return walk
