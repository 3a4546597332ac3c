"""``skerry demo``: two learners train one model, one of them is killed and comes back.

Everything that is shown is read from the run's log, from the checkpoints, or timed here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal, cast

from skerry.cli.cluster.cluster import (
    Cluster,
    StopSignal,
    Team,
    call,
    prepared,
    run_stoppable,
    served,
)
from skerry.cli.cluster.folder import RunFolder, last_event, size_of
from skerry.cli.cluster.supervisor import Change, ProcessEvent, Supervisor
from skerry.cli.programs import argv_of
from skerry.cli.up import conduct
from skerry.cli.viewer import Screen
from skerry.errors import ConfigError, SkerryError
from skerry.protocol.messages import Commit, CommitOrigin, Pulse
from skerry.service.private import write_private
from skerry.settings import loading
from skerry.status.feed import RunFeed
from skerry.status.format import size
from skerry.status.model import RunSnapshot
from skerry.status.report import RunRow
from skerry.status.sources import RunMessage
from skerry.store.finding import Summary, summaries
from skerry.tasks import TaskGroup

RUN = "demo"
MARK = "demo"
"""Lies beside the log of a demo: that of a run which somebody named so is not discarded."""
VICTIM = "learner-2"
AWAY_S = 3.0
KILL_AT = 0.5
SAMPLE_TOKENS = 200


@dataclass(slots=True)
class Outage:
    """What happens from the moment a learner is killed; times in seconds since the epoch.

    ``started_s`` is when its new process was started, ``accepted_s`` when a commit first named a
    contribution of that process; ``compile_s`` is what its log says that compiling took.
    """

    learner: str
    incarnation: int
    killed_s: float
    steps_before: dict[str, int] = field(default_factory=dict[str, int])
    steps_after: dict[str, int] = field(default_factory=dict[str, int])
    started_s: float | None = None
    accepted_s: float | None = None
    compile_s: float = 0.0
    rounds: int = 0
    versions: tuple[int, ...] = ()

    @property
    def back(self) -> bool:
        return self.accepted_s is not None

    @property
    def steps_of_others(self) -> int:
        """Return the steps of the others between the kill and the first accepted contribution."""
        return sum(self.steps_after[name] - before for name, before in self.steps_before.items())

    @property
    def wall_s(self) -> float | None:
        """Return the seconds from the new process to its first accepted contribution."""
        if self.accepted_s is None or self.started_s is None:
            return None
        return self.accepted_s - self.started_s

    @property
    def recovery_s(self) -> float | None:
        """Return ``wall_s`` without compilation."""
        return None if self.wall_s is None else max(0.0, self.wall_s - self.compile_s)

    def observe(self, message: RunMessage, at_s: float) -> None:
        """Take in a pulse or a commit that came at ``at_s``; other messages change nothing."""
        if self.back or at_s < self.killed_s:
            return
        if isinstance(message, Pulse) and message.learner != self.learner:
            self.steps_before.setdefault(message.learner, message.steps)
            self.steps_after[message.learner] = message.steps
        elif isinstance(message, Pulse):
            if message.incarnation > self.incarnation and min(message.versions, default=0):
                self.versions = self.versions or message.versions
        elif isinstance(message, Commit) and message.origin is not CommitOrigin.GENESIS:
            self.rounds += 1
            merged = {(c.learner, c.incarnation > self.incarnation) for c in message.consumed}
            if (self.learner, True) in merged:
                self.accepted_s = at_s


@dataclass(slots=True)
class Recorder:
    """Keeps what the summary needs and a view forgets.

    ``untrained`` are the last pulses before a first step. Until then learners transfer whole
    parameters, which ``bits_per_param`` leaves out.
    """

    on: Screen
    began_s: float
    victim_log: Path
    log_offset: int = 0
    outage: Outage | None = None
    genesis: asyncio.Event = field(default_factory=asyncio.Event)
    victim_counted: asyncio.Event = field(default_factory=asyncio.Event)
    first_step_s: float | None = None
    untrained: dict[str, Pulse] = field(default_factory=dict[str, Pulse])

    def bits_per_param(self, run: RunRow, way: Literal["up", "down"]) -> float:
        """Return the bits that training sent, up or down, per parameter transferred."""
        moved, f32 = (
            getattr(run, name) - sum(getattr(pulse, name) for pulse in self.untrained.values())
            for name in (f"bytes_{way}", f"f32_bytes_{way}")
        )
        return float(32 * moved / max(1, f32))

    def message(self, message: RunMessage, at_s: float) -> None:
        """Take in whatever the log says."""
        if isinstance(message, Pulse) and not message.steps and self.outage is None:
            self.untrained[message.learner] = message
        elif isinstance(message, Pulse) and message.steps:
            if message.learner == VICTIM and message.contributions:
                self.victim_counted.set()
            if self.first_step_s is None:
                self.first_step_s = at_s - self.began_s
                self.on.say(f"First steps {self.first_step_s:.0f} s after the start.")
        elif isinstance(message, Commit) and message.origin is CommitOrigin.GENESIS:
            self.genesis.set()
        outage = self.outage
        if outage is None:
            return
        was_back = outage.back
        outage.observe(message, at_s)
        if outage.back and not was_back:
            compiled = last_event(self.victim_log, self.log_offset, "compiled")
            outage.compile_s = float(compiled.get("seconds", 0.0))
            self._say_back(outage)

    def event(self, event: ProcessEvent) -> None:
        """Take in what happens to processes."""
        outage = self.outage
        if outage is None or outage.started_s is not None or event.name != VICTIM:
            return
        if event.change is Change.STARTED:
            outage.started_s = time.time()
            self.on.say(f"{VICTIM} is started again as pid {event.pid}.")

    def _say_back(self, outage: Outage) -> None:
        versions = f"{min(outage.versions)} to {max(outage.versions)}" if outage.versions else "?"
        self.on.say(
            f"{VICTIM} is back: it read the global fragments (versions {versions}) from the log, "
            f"and its first contribution counted {outage.wall_s or 0:.1f} s after its process "
            f"started, {outage.recovery_s or 0:.1f} s without compiling."
        )
        self.on.say(
            f"Training never paused: meanwhile the other learner took {outage.steps_of_others} "
            f"steps, and {outage.rounds} rounds were committed."
        )


def run_demo(*, summary: Path | None, sets: Sequence[str]) -> None:
    """Run the demo, print its results and write them; KeyboardInterrupt if stopped."""
    with as_file(files("skerry.cli") / "demo.toml") as path:
        wanted = loading.load(path, sets)
    folder = RunFolder(RUN)
    began_s = time.time()
    with folder.held(), Screen(began_s=began_s) as on:
        mark = folder.broker / MARK
        if folder.has_log and not mark.exists():
            msg = (
                f"{folder.path} holds a run that is no demo, which the demo would discard: start it"
                " in another folder."
            )
            raise ConfigError(msg, path="run")
        before = ": the last demo there is discarded" if folder.has_log else ""
        on.say(f"Starting in {folder.path}{before}.")
        folder.start_afresh(wanted.local.store.path / RUN)
        write_private(mark, "")

        async def main(stop: StopSignal) -> None:
            async with served(folder, wanted, None, on.say) as broker:
                cluster = Cluster(folder, prepared(wanted, broker, folder), broker, stop)
                recorder = Recorder(on, began_s, folder.logs / f"{VICTIM}.log")
                with folder.announced(cluster.nats):
                    results = await _demo(cluster, recorder)
            if results is not None and summary is not None:
                _write(summary, results)
                on.say(f"Summary: {summary}")

        run_stoppable(main, on.say)


def _write(summary: Path, results: Mapping[str, object]) -> None:
    try:
        summary.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        msg = f"The summary cannot be written to {summary}: {error.strerror}."
        raise ConfigError(msg, path="summary") from error


async def _demo(cluster: Cluster, recorder: Recorder) -> dict[str, object] | None:
    """Run the cluster to its end and return what came of it; None if it was stopped."""
    on = recorder.on
    on.say("Broker, syncer, checkpointer, evaluator, health monitor and two learners are starting.")
    on.say(f"Logs: {cluster.folder.logs}. The first start compiles: steps follow within a minute.")

    async def kill(kept: Supervisor, feed: RunFeed) -> None:
        """Kill a learner half way, once it has taken part; the supervisor brings it back."""
        await recorder.genesis.wait()
        await recorder.victim_counted.wait()
        assert feed.view is not None  # the messages above came from it
        duration_s = cluster.settings.run.train.duration_s or 0.0
        at_s = (feed.view.started_s or time.time()) + KILL_AT * duration_s
        await asyncio.sleep(max(0.0, at_s - time.time()))
        recorder.outage = Outage(VICTIM, feed.view.learners[VICTIM].incarnation, time.time())
        recorder.log_offset = size_of(recorder.victim_log)
        pid = kept.kill(VICTIM, back_after_s=AWAY_S)
        on.say(f"Half way: {VICTIM} (pid {pid}) gets SIGKILL, without a warning.")

    sync = cluster.settings.run.sync
    feed = await conduct(
        cluster,
        on,
        team=Team(sync.learners, shards=sync.shards),
        script=kill,
        on_message=recorder.message,
        on_event=recorder.event,
    )
    if cluster.stop.asked.is_set():
        on.say("Stopped.")
        return None
    now = feed.snapshot()
    if now is None or not now.report.run.finished:
        msg = f"The services ended before the run was finished: see {cluster.folder.logs}."
        raise SkerryError(msg)
    on.say("The run is finished. Evaluating the first and the last checkpoint.")
    return await _results(cluster, recorder, now)


async def _results(cluster: Cluster, recorder: Recorder, now: RunSnapshot) -> dict[str, object]:
    run, outage = now.report.run, recorder.outage
    kept = [s for s in summaries(cluster.settings.local.store.path / RUN) if not s.error]
    if not kept:
        msg = f"The checkpointer wrote nothing: see {cluster.folder.logs}/checkpointer.log."
        raise SkerryError(msg)
    first, last = kept[0], kept[-1]
    async with TaskGroup() as group:
        start = group.create_task(_evaluate(cluster, first), name="eval-start")
        end = group.create_task(_evaluate(cluster, last), name="eval-end")
    parallel = now.model.bytes_data_parallel()
    sampling = argv_of("sample", last.path, "--tokens", str(SAMPLE_TOKENS))
    text = await call(cluster.folder, sampling, "sample")
    results: dict[str, object] = {
        "eval_loss_start": start.result(),
        "eval_loss_end": end.result(),
        "eval_step_start": first.step,
        "eval_step_end": last.step,
        "evaluations": [{"step": row.step, "loss": row.loss} for row in now.report.evaluations],
        "tokens": run.tokens,
        "steps": now.model.view.steps_by_learner(),
        "parameters": now.model.parameters,
        "wall_s": round(time.time() - recorder.began_s, 1),
        "first_step_s": recorder.first_step_s,
        "bytes_sent": run.bytes_up + run.bytes_down,
        "bytes_up": run.bytes_up,
        "bytes_down": run.bytes_down,
        "bytes_data_parallel": parallel,
        "bytes_data_parallel_bf16": parallel // 2,
        "bits_per_param_up": recorder.bits_per_param(run, "up"),
        "bits_per_param_down": recorder.bits_per_param(run, "down"),
        "goodput_ratio": run.goodput,
        "rounds_committed": run.rounds,
        "learner_killed": outage is not None,
        "learner_rejoined": outage is not None and outage.back,
        "recovery_s": outage and outage.recovery_s,
        "recovery_with_compile_s": outage and outage.wall_s,
        "steps_during_outage": outage and outage.steps_of_others,
        "rounds_during_outage": outage and outage.rounds,
        "checkpoint": last.path,
        "sample": text.strip(),
    }
    for sentence in summary_lines(results):
        recorder.on.say(sentence)
    return results


async def _evaluate(cluster: Cluster, checkpoint: Summary) -> float:
    command = argv_of("eval", checkpoint.path, "--json")
    verdict = json.loads(await call(cluster.folder, command, f"eval-{checkpoint.name}"))
    return float(cast("dict[str, Any]", verdict)["loss"])


def summary_lines(results: Mapping[str, Any]) -> list[str]:
    r, sent = results, results["bytes_sent"]
    parallel = r["bytes_data_parallel"]
    rows = {
        "Evaluation loss": f"{r['eval_loss_start']:.3f} at step {r['eval_step_start']}, "
        f"{r['eval_loss_end']:.3f} at step {r['eval_step_end']} (nats per token, held-out text)",
        "Bytes sent": f"{size(sent)}; all-reducing the same steps would have sent "
        f"{size(parallel)} in f32 ({parallel / max(1, sent):.0f} times as much)",
        "Bits per parameter": f"{r['bits_per_param_up']:.2f} up, {r['bits_per_param_down']:.2f} "
        "down",
        "Rounds": f"{r['rounds_committed']} committed; goodput {r['goodput_ratio']:.0%}",
        "Recovery": f"{VICTIM} did not come back before the end",
        "Checkpoint": r["checkpoint"],
    }
    if r["recovery_s"] is not None:
        rows["Recovery"] = (
            f"{r['recovery_s']:.1f} s from process start to the first accepted contribution, "
            f"{r['recovery_with_compile_s']:.1f} s with compilation"
        )
    elif not r["learner_killed"]:
        del rows["Recovery"]
    return ["", *(f"{name:<18} {text}" for name, text in rows.items()), "", r["sample"], ""]
