"""What a region notices of a lost link, broker or cache: ``python tests/bench/bench_regions.py``.

Two regions with two learners each, with keys that expire, a broker and a cache of their own, and
two syncers at the hub. One after another the link of region eu is cut, in silence and with a reset;
its broker, then the hub's, get SIGKILL; and its broker once more, whose disk and so whose cache is
lost. Healed is a link that passes bytes again, or a broker that greets. From there on the clock
runs until the log has acknowledged a whole contribution of a learner of eu, and until a commit has
merged one.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness import Goal, parser, write
from noted_service import digest_of

from skerry.cli.cluster import cluster
from skerry.cli.cluster.folder import RunFolder
from skerry.cli.cluster.proxy import HOST, OPEN, LinkCut, LinkShape
from skerry.cli.programs import argv
from skerry.errors import StateLost
from skerry.log import ledger
from skerry.log.base import Bus
from skerry.tasks import TaskGroup
from skerry_tools.audit.verify import verify
from tests.support.several_regions import Regions, several_regions
from tests.support.tiny import tiny

RUN = "apart"
HOMES = {"learner-1": "eu", "learner-2": "eu", "learner-3": "us", "learner-4": "us"}
STRUCK = "eu"
STEPS = 100_000_000
STEP_S = 0.1
SYNC = "fragments = 2", "h_steps = 10", "learners = 4"
WORDS = "the fragment travels and the learner goes on and none of them waits\n"
QUIET_S, SETTLE_S, DOWN_S = 60.0, 10.0, 5.0
PATIENCE_S = 180.0
LOOK_S = 0.05
GOAL_S = 3.0
SLACK = 2.0
"""A step in a fault may take so many times the longest without one, on a machine with others."""
LOST = re.compile(r"StateLost|fragment_lost|has lost ")
NOTED = {"learner", "syncer"}
HEADS = "longest step", "contributes", "both do", "both merged", "lost", "StateLost"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: a link ``cut``, or the broker ``killed``, perhaps with its disk."""

    name: str
    cut: LinkCut = LinkCut.NONE
    killed: str = ""
    disk: bool = False


FAULTS = (
    Fault("link cut, silent", LinkCut.BLACKHOLE),
    Fault("link cut, reset", LinkCut.RESET),
    Fault("leaf killed", killed=STRUCK),
    Fault("hub killed", killed="broker"),
    Fault("leaf and its cache lost", killed=STRUCK, disk=True),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one fault, in seconds; ``each_s`` and ``merged_s`` are of the slower learner of eu."""

    name: str
    longest_step_s: float
    first_s: float
    each_s: float
    merged_s: float
    acknowledged: int
    lost: int
    state_lost: int


@dataclass(slots=True)
class Observed:
    """What a run's processes have noted, and its commits; ``ends`` says what ended unasked."""

    folder: Path
    usual_s: float = math.nan
    longest_usual_s: float = math.nan
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    merged: list[tuple[float, frozenset[str]]] = field(
        default_factory=list[tuple[float, frozenset[str]]]
    )
    violations: int = -1
    commits: int = 0
    ends: list[str] = field(default_factory=list[str])
    _missing: set[tuple[str, int, str]] = field(default_factory=set[tuple[str, int, str]])

    def notes(self, name: str, what: str) -> list[list[Any]]:
        """Return the notes of a process of one kind, each without its kind."""
        path, head = self.folder / f"{name}.notes", f'["{what}"'.encode()
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line)[1:] for line in lines if line.startswith(head)]

    def gaps(self, began_s: float, ended_s: float) -> list[float]:
        """Return the seconds between each two steps of a learner that lie in an interval."""
        return [
            after - before
            for name in HOMES
            for before, after in pairwise(at for (at,) in self.notes(name, "step"))
            if after >= began_s and before <= ended_s
        ]

    def contributed_s(self, learner: str, healed_s: float) -> float:
        """Return how long after healing the log had a contribution; infinite: it has none yet."""
        times = (at - healed_s for (at,) in self.notes(learner, "contribution"))
        return min((after for after in times if after > 0), default=math.inf)

    def merged_s(self, learner: str, healed_s: float) -> float:
        times = (at - healed_s for at, names in self.merged if learner in names)
        return min((after for after in times if after > 0), default=math.inf)

    async def newly_lost(self, bus: Bus) -> tuple[int, int]:
        """Return how much was acknowledged so far, and what is not there any more since last."""
        names = [path.stem for path in self.folder.glob("*.notes")]
        acks = {(s, n, d) for name in names for _, s, n, d in self.notes(name, "ack")}
        missing: set[tuple[str, int, str]] = set()
        for stream, sequence, digest in acks:
            record = await bus.get(stream, sequence)
            if record is None or digest_of(record.payload) != digest:
                missing.add((stream, sequence, digest))
        new, self._missing = missing - self._missing, self._missing | missing
        return len(acks), len(new)


@dataclass(slots=True)
class Bench:
    """The regions, and what is known of them."""

    regions: Regions
    bus: Bus
    seen: Observed
    cut_s: float

    async def run(self, times: int) -> None:
        """Measure a quiet time, then every fault so many times."""
        await self.until_all_merged(time.time())
        await asyncio.sleep(SETTLE_S)
        began_s = time.time()
        await asyncio.sleep(QUIET_S)
        quiet = self.seen.gaps(began_s, time.time())
        self.seen.usual_s, self.seen.longest_usual_s = statistics.median(quiet), max(quiet)
        for fault in FAULTS * times:
            self.seen.outcomes.append(await self.strike(fault))
            print(f"  {self.seen.outcomes[-1]}", file=sys.stderr, flush=True)
            if fault.disk:
                await self.regions.make_cache(STRUCK)
            await asyncio.sleep(SETTLE_S)
        report = await verify(self.bus, RUN)
        self.seen.violations, self.seen.commits = len(report.violations), report.commits
        self.seen.ends = self.regions.unasked
        self.regions.stop.on_signal()

    async def strike(self, fault: Fault) -> Outcome:
        """Inject one fault, heal it, and wait until both learners of the region are merged."""
        began_s, known = time.time(), self.state_lost()
        healed_s = await (self.kill(fault) if fault.killed else self.cut(fault.cut))
        learners, seen = self.regions.learners(STRUCK), self.seen
        passed = [seen.contributed_s(name, began_s + SETTLE_S) + SETTLE_S for name in learners]
        assert fault.killed or min(passed) > self.cut_s, f"{fault.name}: the cut did not hold"
        await self.until_all_merged(healed_s, learners)
        ended_s = time.time()
        contributed = [seen.contributed_s(name, healed_s) for name in learners]
        return Outcome(
            fault.name,
            max(seen.gaps(began_s, ended_s)),
            min(contributed),
            max(contributed),
            max(seen.merged_s(name, healed_s) for name in learners),
            *await seen.newly_lost(self.bus),
            self.state_lost() - known,
        )

    async def cut(self, how: LinkCut) -> float:
        """Cut the region's link for a while; return when it was open again."""
        self.regions.proxy.set(STRUCK, LinkShape(cut=how))
        await asyncio.sleep(self.cut_s)
        self.regions.proxy.set(STRUCK, OPEN)
        return time.time()

    async def kill(self, fault: Fault) -> float:
        """Kill a broker, which its supervisor starts again; return when it greeted again."""
        kept, name = self.regions.brokers.kept, fault.killed
        assert kept is not None
        if fault.disk:
            self.regions.losing.add(name)
        pid = kept.kill(name, back_after_s=DOWN_S)
        while kept.pids().get(name) in {None, pid}:  # noqa: ASYNC110 - the supervisor sends no event
            await asyncio.sleep(LOOK_S)
        leaf = self.regions.leaves.get(name)
        port = self.regions.hub.port if leaf is None else leaf.port
        while not await greets(port):  # noqa: ASYNC110 - nor does the broker
            await asyncio.sleep(LOOK_S)
        return time.time()

    async def until_all_merged(self, since_s: float, names: Iterable[str] = HOMES) -> None:
        """Return once each of these learners has contributed, and was merged, after that time."""

        def missing() -> bool:
            seen = self.seen
            times = ((seen.merged_s(n, since_s), seen.contributed_s(n, since_s)) for n in names)
            return any(math.isinf(max(pair)) for pair in times)

        async with asyncio.timeout(PATIENCE_S):
            while missing():  # noqa: ASYNC110 - other processes' files send no event
                await asyncio.sleep(LOOK_S)

    async def watch(self) -> None:
        """Note whom each commit has merged, for ever."""
        async with aclosing(ledger.follow_commits(self.bus, RUN)) as commits:
            async for _, commit in commits:
                names = frozenset(row.learner for row in commit.consumed)
                self.seen.merged.append((commit.closed_ns / 1e9, names))

    def state_lost(self) -> int:
        """Return how often a service has said that state is lost, or ended of it."""
        logs = self.regions.folder.logs.glob("*.log")
        said = sum(len(LOST.findall(log.read_text(errors="replace"))) for log in logs)
        return said + sum(event.code == StateLost.exit_code for event in self.regions.events)


async def greets(port: int) -> bool:
    """Return True if a broker says its first word at a port."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                return bool(await reader.read(1))
            finally:
                writer.close()
    return False


async def measure(folder: Path, times: int, cut_s: float) -> Observed:
    """Run the regions, and every fault so many times."""
    text, config, seen = folder / "text.txt", folder / "run.toml", Observed(folder)
    text.write_text("".join(f"{n} {WORDS}" for n in range(10_000)))
    config.write_text(tiny(text, STEPS, *SYNC))

    def noted(service: str, *given: str) -> tuple[str, ...]:
        if service not in NOTED:
            return argv(service, *given)
        out = folder / f"{given[given.index('--name') + 1]}.notes"
        script = Path(__file__).with_name("noted_service.py")
        return (sys.executable, str(script), service, str(out), str(STEP_S), *given)

    with patch.object(cluster, "argv", noted):
        async with several_regions(RunFolder(RUN), config, HOMES, days=7) as regions:

            async def script() -> None:
                async with regions.admin() as bus, TaskGroup() as group:
                    bench = Bench(regions, bus, seen, cut_s)
                    watching = group.create_task(bench.watch())
                    await bench.run(times)
                    watching.cancel()

            await regions.train(script())
    return seen


def median_of(outcomes: Sequence[Outcome], name: str, what: str) -> float:
    return statistics.median(getattr(one, what) for one in outcomes if one.name == name)


def table(seen: Observed) -> str:
    """Return what came of each fault: medians, the longest step, sums of losses."""
    lines = [
        f"regions: a step every {seen.usual_s:.2f} s, at most {seen.longest_usual_s:.2f} s",
        " " * 25 + "".join(f"{head:>13}" for head in HEADS),
    ]
    for name in (fault.name for fault in FAULTS):
        alike = [one for one in seen.outcomes if one.name == name]
        longest = max(one.longest_step_s for one in alike)
        seconds = (
            longest,
            *(median_of(alike, name, what) for what in ("first_s", "each_s", "merged_s")),
        )
        counts = sum(one.lost for one in alike), sum(one.state_lost for one in alike)
        cells = *(f"{value:.2f} s" for value in seconds), *map(str, counts)
        lines.append(f"  {name:<23}" + "".join(f"{cell:>13}" for cell in cells))
    lines.append(
        f"  {seen.outcomes[-1].acknowledged} messages acknowledged, {seen.commits} commits,"
        f" {seen.violations} violations; ended unasked: {', '.join(seen.ends) or 'none'}"
    )
    return "\n".join(lines)


def goals_of(seen: Observed) -> list[Goal]:
    """Return the goals: of each fault its contribution, of all of them steps and losses."""
    longest = max(one.longest_step_s for one in seen.outcomes)
    lost = sum(one.lost for one in seen.outcomes) + seen.violations
    false = sum(one.state_lost for one in seen.outcomes)
    return [
        *(
            Goal(f"contributes after: {t.name}", GOAL_S, first, "s", at_most=True)
            for t in FAULTS
            for first in [median_of(seen.outcomes, t.name, "first_s")]
        ),
        Goal("longest step", SLACK * seen.longest_usual_s, longest, "s", at_most=True),
        Goal("acknowledged, and kept", 1.0, 1.0 - lost / seen.outcomes[-1].acknowledged, "of 1"),
        Goal("nothing false of lost state", 1.0, float(not false), "of 1"),
    ]


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--times", type=int, default=2, help="of each fault (default 2)")
    made.add_argument("--cut-s", type=float, default=60.0, help="seconds of a cut (default 60)")
    chosen = made.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        os.chdir(name)
        seen = asyncio.run(measure(Path(name), chosen.times, chosen.cut_s))
        os.chdir("/")
    print(table(seen))
    found = goals_of(seen)
    for goal in found:
        print(f"  {goal.name}: {goal.measured:.2f} {goal.unit}, goal {goal.goal:.2f}")
    write("regions", [asdict(one) for one in seen.outcomes], found, chosen.json)


if __name__ == "__main__":
    main()
