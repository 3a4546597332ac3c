"""What traces and metrics cost: ``python tests/bench/bench_telemetry.py``.

First by itself: CPU time of everything that is reported of a round, sending it included: without a
collector, with one that takes it, one that refuses and one that hangs. Then in place: learners in
real runs take turns on one core, each stopped (SIGSTOP) while another has it, and the CPU time of a
step with telemetry is compared with that of one without.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import structlog
from harness import Goal, parser, write

from skerry.algorithm.planes import Planes
from skerry.client.telemetry import LearnerIdentity, LearnerTelemetry
from skerry.log.nats.bus import NatsBus
from skerry.protocol.contribution import Contribution
from skerry.protocol.messages import (
    Commit,
    ContributionHeader,
    Round,
)
from skerry.service.reporting import STOP_S
from skerry.settings.local import TelemetrySettings
from skerry.telemetry import export, instruments, metrics, tracing
from skerry.telemetry.spans import Interval
from skerry_syncer.telemetry import CommitTimes
from skerry_syncer.telemetry import RoundTelemetry as SyncerTelemetry
from tests.support.builders import commit, consumed, header, run_record
from tests.support.cluster import Cluster, Service, until_commit
from tests.support.nats_server import NatsServer

SINK = Path(__file__).parent / "otlp_sink.py"
ROUND_GOAL_MS = 2.0
STEP_GOAL = 1.005
ROUNDS, REPEATS = 200, 4
FLEETS = (2, 8, 64)
STEPS = 3
"""Steps from one round to the next, of whichever fragment: H = 24 over P = 8."""
RECORD = run_record("bench", created_ns=1)
ME = LearnerIdentity("bench", "a", 1, 1)


WATCHED = Path(__file__).parent / "watched_learner.py"
CONFIG = """
[model]
preset = "{preset}"
[train]
steps = 1000000
[sync]
learners = 1
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one learner did while it had the core; seconds."""

    steps: int
    median_s: float
    cpu_s: float


Window = tuple[float, float]
Times = Sequence[tuple[float, float, float]]


def within(times: Times, windows: Sequence[Window]) -> list[float]:
    """Return the durations that lie in one of the windows from beginning to end."""
    return [took for end, took, _ in times if any(a <= end - took and end <= b for a, b in windows)]


def turn(times: Times, window: Window) -> Turn:
    """Return what one learner did in a turn; CPU time goes from one step's end to another's."""
    durations = within(times, [window])
    used = [cpu for end, _, cpu in times if window[0] <= end <= window[1]]
    return Turn(
        len(durations), statistics.median(durations), (used[-1] - used[0]) / (len(used) - 1)
    )


async def until_training(service: Service) -> None:
    """Return once a learner says that it trains."""
    async with asyncio.timeout(600):
        while '"phase": "training"' not in service.said:
            if service.process.returncode is not None:
                raise RuntimeError(service.said[-2000:])
            await asyncio.sleep(0.1)


async def take_turns(
    learners: Sequence[Service], turns: int, seconds: float
) -> dict[int, list[Window]]:
    """Let the learners have the core one after the other; return when each had it."""
    windows: dict[int, list[Window]] = {i: [] for i in range(len(learners))}
    for _ in range(turns):
        for i, service in enumerate(learners):
            service.resume()
            await asyncio.sleep(0.5)  # pages and caches of the other are still there
            began = time.monotonic()
            await asyncio.sleep(seconds)
            windows[i].append((began, time.monotonic()))
            service.pause()
    return windows


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time per round: of the reporting thread, and of the whole process until all is sent."""

    collector: str
    reporter: str
    spans: int
    caller_ms: float
    whole_ms: float


@dataclass(frozen=True, slots=True)
class InPlace:
    """CPU and wall time of a step over that of one without telemetry."""

    collector: str
    ratio_cpu: float
    ratio_wall: float
    steps: int


def offered(version: int, learner: str = "a") -> ContributionHeader:
    place = replace(ME, name=learner).publishing(0, version, version)
    return header(
        version,
        learner,
        base_version=version - 1,
        steps=24,
        tokens=24_576,
        cursor_to=192,
        trace_parent=tracing.trace_parent(place),
    )


def merged(version: int, learners: Sequence[str]) -> Commit:
    rows = [
        consumed(name, version, steps=24, tokens=24_576, weight=1 / len(learners))
        for name in learners
    ]
    trace = ME.trace(0, version)
    return commit(version, run="bench", consumed=tuple(rows), trace_id=trace)


def learner_round() -> Callable[[int], None]:
    telemetry, took = LearnerTelemetry(ME), Interval(1_000, 2_000)

    def report(version: int) -> None:
        sent, of = offered(version), {metrics.RUN: "bench", metrics.LEARNER_NAME: "a"}
        telemetry.captured(sent, took)
        telemetry.begins(0, 1_000)
        telemetry.quantised(sent, "int4", took)
        telemetry.published(sent, 1000, 2_000)
        telemetry.received(merged(version, ["a"]), 1000, took)
        telemetry.adopted(merged(version, ["a"]), version - 1, "rebase", took)
        for operation in ("encode", "decode"):
            coded = {metrics.RUN: "bench", metrics.OPERATION: operation}
            instruments.record(metrics.CODEC_DURATION, 0.1, coded)
        for _ in range(STEPS):
            instruments.record(metrics.STEP_DURATION, 0.1, of)

    return report


def syncer_round(size: int) -> Callable[[int], None]:
    telemetry, names = SyncerTelemetry(RECORD, "rda"), [f"learner-{n}" for n in range(size)]
    times, planes = CommitTimes(1_000, 2_000, 3_000), Planes(None, None)  # type: ignore[arg-type] # nobody reads them

    def report(version: int) -> None:
        opened = Round(
            run="bench",
            plan_digest=0,
            fragment=0,
            version=version,
            due_step=version,
            opened_ns=1_000,
            syncer="s",
            trace_id=telemetry.trace(0, version),
        )
        tracing.headers_for(opened.trace_id)  # what it is sent with
        origins = {}
        for name in names:
            sent = offered(version, name)
            subject = f"skerry.bench.contrib.0.0.{name}"
            telemetry.chunk_arrived(subject, 1_000)
            whole = Contribution(sent, "int4", planes, 1, 2, 0, sent.trace_parent)
            telemetry.received(whole, subject, 2_000)
            telemetry.settled(subject)
            origins[whole.id] = whole.trace_parent
        coded = {metrics.RUN: "bench", metrics.OPERATION: "encode"}
        instruments.record(metrics.CODEC_DURATION, 0.1, coded)
        telemetry.committed(merged(version, names), opened, origins, times)

    return report


def measured(
    collector: str, url: str, reporter: str, spans: int, report: Callable[[int], None]
) -> Cost:
    """Return the least of some tries: what a busy machine adds to CPU time is not ours."""
    tries = [_measured(collector, url, reporter, spans, report) for _ in range(REPEATS)]
    caller, whole = min(t.caller_ms for t in tries), min(t.whole_ms for t in tries)
    return Cost(collector, reporter, spans, caller, whole)


def _measured(
    collector: str, url: str, reporter: str, spans: int, report: Callable[[int], None]
) -> Cost:
    """Report many rounds and send all of it."""
    settings = TelemetrySettings(endpoint=url)
    exporters = export.Telemetry(
        export.Identity("bench", "bench", reporter, "0"), settings, lambda *_: None
    )
    report(1)
    caller, whole = time.thread_time(), time.process_time()
    for version in range(2, ROUNDS + 2):
        report(version)
    caller = time.thread_time() - caller
    exporters.stop(STOP_S)
    whole = time.process_time() - whole
    return Cost(collector, reporter, spans, 1e3 * caller / ROUNDS, 1e3 * whole / ROUNDS)


@contextmanager
def collectors() -> Generator[dict[str, str]]:
    """Yield the address of each kind of collector: none, one that works, two that do not."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        refusing = free.getsockname()[1]
    sinks = [
        subprocess.Popen([sys.executable, str(SINK)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ports = [int(sink.stdout.readline()) for sink in sinks if sink.stdout is not None]
    sinks[1].send_signal(signal.SIGSTOP)
    try:
        yield {
            "off": "",
            "live": f"http://127.0.0.1:{ports[0]}",
            "refuses": f"http://127.0.0.1:{refusing}",
            "hangs": f"http://127.0.0.1:{ports[1]}",
        }
    finally:
        for sink in sinks:
            sink.kill()
            sink.wait()


def alone(urls: dict[str, str]) -> list[Cost]:
    """Measure what is reported of a round, by itself."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    found: list[Cost] = []
    for collector, url in urls.items():
        found.append(measured(collector, url, "learner", 5, learner_round()))
        for size in FLEETS:
            sent = syncer_round(size)
            found.append(measured(collector, url, f"syncer of {size}", 4 + size, sent))
    return found


async def in_place(urls: dict[str, str], turns: int, seconds: float) -> list[InPlace]:
    """Let learners with and without telemetry take turns on one core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})  # this process, the broker, the syncers
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    with tempfile.TemporaryDirectory() as name:
        folder, server = Path(name), NatsServer(Path(name) / "nats")
        server.start()
        try:
            async with NatsBus(server.url, name="bench") as bus:
                return await _turns(urls, turns, seconds, folder, server.url, bus, cores[0])
        finally:
            server.kill()


async def _turns(
    urls: dict[str, str],
    turns: int,
    seconds: float,
    folder: Path,
    broker: str,
    bus: NatsBus,
    core: int,
) -> list[InPlace]:
    config = folder / "run.toml"
    config.write_text(CONFIG.format(preset="nano"))
    clusters = [Cluster(broker, kind, folder, config, folder / "jax") for kind in urls]
    try:
        learners = []
        for cluster, url in zip(clusters, urls.values(), strict=True):
            os.environ["SKERRY_TELEMETRY__ENDPOINT"] = url
            await cluster.start("syncer", f"s-{cluster.run}")
            place = (str(folder / f"{cluster.run}.json"), str(core), str(config))
            learner = await cluster.start_script(
                f"l-{cluster.run}", WATCHED, *place, broker, cluster.run
            )
            learners.append(learner)
            await until_training(learner)
            await until_commit(bus, cluster.run, lambda c: c.version == 2)
            learner.pause()
        windows = await take_turns(learners, turns, seconds)
        for learner in learners:
            learner.resume()
            learner.terminate()
            await learner.ended()
    finally:
        for cluster in clusters:
            await cluster.__aexit__(None, None, None)
    sent = {kind: json.loads((folder / f"{kind}.json").read_text())["steps"] for kind in urls}
    by_kind = {
        kind: [_turn(sent[kind], window) for window in windows[i]] for i, kind in enumerate(urls)
    }
    return [_compared(kind, by_kind[kind], by_kind["off"]) for kind in urls if kind != "off"]


def _turn(times: Times, window: Window) -> Turn | None:
    """Return what a learner did in a turn; None where the machine gave it no time for two steps."""
    return turn(times, window) if len(within(times, [window])) > 1 else None


def _compared(kind: str, with_it: Sequence[Turn | None], without: Sequence[Turn | None]) -> InPlace:
    pairs = [(a, b) for a, b in zip(with_it, without, strict=True) if a and b]
    return InPlace(
        kind,
        statistics.median(a.cpu_s / b.cpu_s for a, b in pairs),
        statistics.median(a.median_s / b.median_s for a, b in pairs),
        sum(a.steps for a, _ in pairs),
    )


def main() -> None:
    options = parser("What traces and metrics cost.")
    options.add_argument("--turns", type=int, default=12, help="turns of each learner (default 12)")
    options.add_argument("--seconds", type=float, default=3.0, help="length of a turn (default 3)")
    options.add_argument("--alone", action="store_true", help="leave the real runs out")
    chosen = options.parse_args()
    with collectors() as urls:
        costs = alone(urls)
        print(f"telemetry: CPU ms per round, best of {REPEATS} times {ROUNDS} rounds")
        print(f"  {'':<28} spans  caller   whole")
        for cost in costs:
            name = f"{cost.reporter}, collector {cost.collector}"
            print(f"  {name:<28} {cost.spans:>5} {cost.caller_ms:>7.3f} {cost.whole_ms:>7.3f}")
        steps = [] if chosen.alone else asyncio.run(in_place(urls, chosen.turns, chosen.seconds))
    for step in steps:
        print(
            f"  step, collector {step.collector:<8}: CPU {step.ratio_cpu:.4f} of without,"
            f" wall {step.ratio_wall:.4f} ({step.steps} steps)"
        )
    goals = [
        Goal(
            f"{c.reporter}, {c.collector}",
            ROUND_GOAL_MS,
            c.whole_ms,
            "ms a round",
            at_most=True,
        )
        for c in costs
        if c.collector != "off"
    ]
    goals += [
        Goal(f"step, collector {s.collector}", STEP_GOAL, s.ratio_cpu, "of without", at_most=True)
        for s in steps
    ]
    rows = [asdict(row) for row in (*costs, *steps)]
    write("telemetry", rows, goals, chosen.json)


if __name__ == "__main__":
    main()
