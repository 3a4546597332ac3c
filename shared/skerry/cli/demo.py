"""``skerry demo``: two learners train one model, one of them is killed and comes back.

Everything that is shown is read from the run's log, from the checkpoints, or timed here.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any, cast

from skerry.cli.cluster.cluster import (
    Cluster,
    StopSignal,
    call,
    prepared,
    run_stoppable,
    served,
)
from skerry.cli.cluster.folder import RunFolder
from skerry.cli.cluster.logs import last_event, size_of
from skerry.cli.cluster.supervisor import Change
from skerry.cli.cluster.team import Team
from skerry.cli.outage import Outage
from skerry.cli.programs import argv_of
from skerry.cli.traffic import Downlink, measure_downlink, measure_uplink
from skerry.cli.up import conduct, existing, ignored
from skerry.cli.viewer import Screen
from skerry.errors import ConfigError, SkerryError
from skerry.log import ledger
from skerry.protocol.messages import Commit, CommitOrigin, Pulse
from skerry.service.entry import bus_from
from skerry.settings import loading
from skerry.status.feed import is_finished
from skerry.status.format import size
from skerry.store.finding import summaries
from skerry.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from skerry.cli.cluster.supervisor import ProcessEvent, Supervisor
    from skerry.settings.models import Settings
    from skerry.status.feed import RunFeed
    from skerry.status.format import size
    from skerry.status.model import RunSnapshot
    from skerry.status.sources import RunMessage
from skerry.store.finding import Summary

RUN = "demo"
VICTIM = "learner-2"
AWAY_S = 3.0
KILL_AT = 0.5
SAMPLE_TOKENS = 200


@dataclass(slots=True)
class Recorder:
    """Keeps what the summary needs and a view forgets."""

    on: Screen
    began_s: float
    victim_log: Path
    log_offset: int = 0
    outage: Outage | None = None
    downlink: Downlink = field(default_factory=Downlink)
    genesis: asyncio.Event = field(default_factory=asyncio.Event)
    victim_counted: asyncio.Event = field(default_factory=asyncio.Event)
    first_step_s: float | None = None

    def message(self, message: RunMessage, at_s: float) -> None:
        """Take in whatever the log says."""
        if isinstance(message, Pulse):
            self._pulse(message, at_s)
        elif isinstance(message, Commit) and message.origin is CommitOrigin.GENESIS:
            self.genesis.set()
        if self.outage is not None:
            was_back = self.outage.back
            self.outage.observe(message, at_s)
            if self.outage.back and not was_back:
                compiled = last_event(self.victim_log, self.log_offset, "compiled")
                self.outage.log_compile_s = compiled.get("seconds")
                self._say_back(self.outage)

    def event(self, event: ProcessEvent) -> None:
        """Take in what happens to processes."""
        outage = self.outage
        if outage is None or outage.started_s is not None or event.name != VICTIM:
            return
        if event.change is Change.STARTED:
            outage.started_s = time.time()
            self.on.say(f"{VICTIM} is started again as pid {event.pid}.")

    def _pulse(self, pulse: Pulse, at_s: float) -> None:
        if pulse.learner == VICTIM and pulse.steps and pulse.contributions:
            self.victim_counted.set()
        if pulse.steps and self.first_step_s is None:
            self.first_step_s = at_s - self.began_s
            self.on.say(f"First steps {self.first_step_s:.0f} s after the start.")

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


def run_demo(
    *, summary: Path | None, resume: bool, duration_s: float | None, sets: Sequence[str]
) -> None:
    """Run the demo and print, and write, what came of it; KeyboardInterrupt if stopped."""
    longer = [] if duration_s is None else [f"train.duration_s={duration_s}"]
    with as_file(files("skerry.cli") / "demo.toml") as path:
        wanted = loading.load(path, [*longer, *sets])
    folder = RunFolder(RUN)
    began_s = time.time()
    with folder.held(), Screen(began_s=began_s) as on:
        _begin(folder, wanted, on, resume=resume)

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


def _begin(folder: RunFolder, wanted: Settings, on: Screen, *, resume: bool) -> None:
    if resume and folder.has_log:
        on.say(f"Going on with the run in {folder.path}.")
        return
    before = ": the last demo there is discarded (--resume goes on)" if folder.has_log else ""
    on.say(f"Starting afresh in {folder.path}{before}.")
    folder.start_afresh(wanted.local.store.path / RUN)


async def _demo(cluster: Cluster, recorder: Recorder) -> dict[str, object] | None:
    on = recorder.on
    record = await existing(cluster)
    if record is not None and is_finished(record):
        on.say("The demo is finished already: without --resume it starts again.")
        return None
    for sentence in ignored(record, cluster.settings.run):
        on.say(sentence)
    on.say("Broker, syncer, checkpointer, evaluator, health monitor and two learners are starting.")
    on.say(f"Logs: {cluster.folder.logs}. The first start compiles: steps follow within a minute.")

    async def script(kept: Supervisor, feed: RunFeed) -> None:
        async with TaskGroup() as group:
            group.create_task(_downlink(cluster, recorder), name="downlink")
            group.create_task(_interfere(cluster, recorder, kept, feed), name="kill")

    feed = await conduct(
        cluster,
        on,
        team=Team(cluster.settings.run.sync.learners),
        script=script,
        on_message=recorder.message,
        on_event=recorder.event,
    )
    if cluster.stop.asked.is_set():
        on.say("Stopped; `skerry demo --resume` goes on from here.")
        return None
    now = feed.snapshot()
    if now is None or not now.report.run.finished:
        msg = f"The services ended before the run was finished: see {cluster.folder.logs}."
        raise SkerryError(msg)
    on.say("The run is finished. Evaluating the first and the last checkpoint.")
    return await _results(cluster, recorder, now)


async def _downlink(cluster: Cluster, recorder: Recorder) -> None:
    async with bus_from(cluster.nats, "downlink") as bus:
        record = await ledger.wait_run(bus, RUN)
        await measure_downlink(bus, record, recorder.downlink)


async def _interfere(cluster: Cluster, recorder: Recorder, kept: Supervisor, feed: RunFeed) -> None:
    """Kill a learner half way, once it has taken part; the supervisor brings it back."""
    await recorder.genesis.wait()
    await recorder.victim_counted.wait()
    duration_s = cluster.settings.run.train.duration_s or 0.0
    assert feed.view is not None  # the messages above came from it
    at_s = (feed.view.started_s or time.time()) + KILL_AT * duration_s
    await asyncio.sleep(max(0.0, at_s - time.time()))
    victim = feed.view.learners[VICTIM]
    recorder.outage = Outage(VICTIM, victim.incarnation, time.time())
    recorder.log_offset = size_of(recorder.victim_log)
    pid = kept.kill(VICTIM, back_after_s=AWAY_S)
    recorder.on.say(f"Half way: {VICTIM} (pid {pid}) gets SIGKILL, without a warning.")


async def _results(cluster: Cluster, recorder: Recorder, now: RunSnapshot) -> dict[str, object]:
    on, outage, run = recorder.on, recorder.outage, now.report.run
    async with bus_from(cluster.nats, "summary") as bus:
        uplink = await measure_uplink(bus, now.model.record, recorder.began_s)
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
        "tokens": run.tokens,
        "wall_s": round(time.time() - recorder.began_s, 1),
        "bytes_sent": uplink.bytes_sent + run.bytes_down,
        "bytes_data_parallel": parallel,
        "bits_per_param_up": uplink.bits_per_param,
        "bits_per_param_down": recorder.downlink.bits_per_param,
        "goodput_ratio": run.goodput,
        "learner_killed": outage is not None,
        "learner_rejoined": outage is not None and outage.back,
        "recovery_s": None if outage is None else outage.recovery_s,
        "rounds_committed": run.rounds,
        "checkpoint": last.path,
        "bytes_up": uplink.bytes_sent,
        "bytes_down": run.bytes_down,
        "bytes_state": recorder.downlink.state_bytes,
        "bytes_data_parallel_bf16": parallel // 2,
        "parameters": now.model.parameters,
        "steps": now.model.view.steps_by_learner(),
        "first_step_s": recorder.first_step_s,
        "recovery_with_compile_s": None if outage is None else outage.wall_s,
        "steps_during_outage": None if outage is None else outage.steps_of_others,
        "rounds_during_outage": None if outage is None else outage.rounds,
        "eval_step_start": first.step,
        "eval_step_end": last.step,
        "evaluations": [{"step": row.step, "loss": row.loss} for row in now.report.evaluations],
        "sample": text.strip(),
    }
    for sentence in summary_lines(results):
        on.say(sentence)
    return results


async def _evaluate(cluster: Cluster, checkpoint: Summary) -> float:
    command = argv_of("eval", checkpoint.path, "--json")
    verdict = json.loads(await call(cluster.folder, command, f"eval-{checkpoint.name}"))
    return float(cast("dict[str, Any]", verdict)["loss"])


def summary_lines(results: Mapping[str, Any]) -> list[str]:
    """Return the results as lines for people."""
    sent, parallel = results["bytes_sent"], results["bytes_data_parallel"]
    lines = [
        "",
        (
            f"Evaluation loss    {results['eval_loss_start']:.3f} at step "
            f"{results['eval_step_start']}, {results['eval_loss_end']:.3f} at step "
            f"{results['eval_step_end']} (nats per token, held-out text)"
        ),
        *_followed(results["evaluations"]),
        (
            f"Bytes sent         {size(sent)}; all-reducing the same steps would have "
            f"sent {size(parallel)} in f32 ({parallel / max(1, sent):.0f} times as much)"
        ),
    ]
    up, down = results["bits_per_param_up"], results["bits_per_param_down"]
    if up is not None and down is not None:
        lines.append(f"Bits per parameter {up:.2f} up, {down:.2f} down")
    rounds, goodput = results["rounds_committed"], results["goodput_ratio"]
    lines.append(f"Rounds             {rounds} committed; goodput {goodput:.0%}")
    if results["recovery_s"] is not None:
        lines.append(
            f"Recovery           {results['recovery_s']:.1f} s from process start to the first "
            f"accepted contribution, {results['recovery_with_compile_s']:.1f} s with compilation"
        )
    elif results["learner_killed"]:
        lines.append(f"Recovery           {VICTIM} did not come back before the end")
    lines += [f"Checkpoint         {results['checkpoint']}", "", results["sample"], ""]
    return lines


def _followed(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the line on what an evaluator has said meanwhile; none where it said nothing."""
    finite = [row for row in evaluations if row["loss"] is not None]
    if not finite:
        return []
    first, last = finite[0], finite[-1]
    line = (
        f"Followed meanwhile {first['loss']:.3f} at step {first['step']} to {last['loss']:.3f} at "
        f"step {last['step']}, in {len(finite)} evaluations by a process of its own"
    )
    return [line]
