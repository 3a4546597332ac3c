"""A view as rows that viewers show, or print as JSON: who is alive, how far, how fast, how well."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from skerry.algorithm import liveness, schedule
from skerry.algorithm.goodput import TRAIN, allocated_s, ratios, split
from skerry.algorithm.liveness import Liveness, LivenessReason
from skerry.protocol.messages import LearnerPhase, RefusalCause, activity, why
from skerry.status.format import finite
from skerry.status.view import ENDED, RECENT_EVALUATIONS, held_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.protocol.messages import Evaluation, QuarantineReason
    from skerry.status.view import LearnerView, RunView

MOST_CLAIM = 64
"""Characters of a digest, mesh or device that a learner claims."""
STILL = 5.0
"""A learner stands still once its steps stay away for this many usual intervals."""


@dataclass(frozen=True, slots=True)
class LearnerRow:
    """One learner; ``tokens`` and bytes over all incarnations, ``seen_s_ago`` since its pulse.

    ``f32_bytes_...`` are the same vectors in float32. ``time`` is each use's share of the time
    given to it (``algorithm.goodput.USES``), all incarnations and the pauses between them.
    ``waited_s`` is how long it has been catching up, 0 if it is not; ``worked_s`` how much of this
    incarnation's time was neither that nor starting. ``joined_s_ago`` is since the first start of
    that name, None before it was read. ``data`` is the digest of what it reads, ``quarantine`` why
    nothing of it is merged.
    """

    name: str
    incarnation: int
    liveness: Liveness
    reason: LivenessReason
    phase: LearnerPhase
    step: int
    tokens: int
    loss: float | None
    step_time_s: float
    tokens_per_s: float
    goodput: float
    bytes_up: int
    bytes_down: int
    f32_bytes_up: int
    f32_bytes_down: int
    time: dict[str, float]
    contributions: int
    staleness: int
    syncs_skipped: int
    seen_s_ago: float
    heard: bool
    waited_s: float = 0.0
    worked_s: float = 0.0
    joined_s_ago: float | None = None
    data: str = ""
    digest_mismatches: int = 0
    quarantine: QuarantineReason | None = None
    region: str = ""
    cached_bytes: int = 0
    """How much of ``bytes_down`` came out of the cache of its region."""
    mesh: str = ""
    device: str = ""
    """What it computes on, as ``models.machine.Machine`` has it."""
    mfu: float | None = None
    """Model FLOPs utilisation: its tokens a second over those of its devices' dense bf16 peak."""

    @property
    def state(self) -> str:
        """Its liveness where that is in doubt, else its phase."""
        sure = self.liveness is Liveness.ALIVE or self.phase in ENDED
        return self.phase.value if sure else self.liveness.value

    @property
    def at_work(self) -> bool:
        """Whether it is not gone and says that it trains, though it may stand still."""
        return self.phase is LearnerPhase.TRAINING and self.liveness is not Liveness.GONE

    @property
    def takes_steps(self) -> bool:
        """Whether it is at work, and a step of it has been timed."""
        return self.at_work and self.step_time_s > 0


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """The global model on held-out text at one moment; ``text`` is the digest of that text.

    ``loss`` in nats per token, ``average_loss`` that of the moving average; None, as with the
    others, where there is no finite number.
    """

    step: int
    tokens: int
    loss: float | None
    perplexity: float | None
    bits_per_byte: float | None
    average_loss: float | None
    evaluated_tokens: int
    text: str
    evaluator: str
    s_ago: float


@dataclass(frozen=True, slots=True)
class RunRow:
    """The run: ``step`` is the global clock, ``versions`` one per fragment, 0 before genesis.

    ``loss`` in nats per token, weighted by tokens/s. ``wall_s`` since the run was created.
    ``eta_s`` is None while it is unknown; ``timed``: time or tokens end it before its steps do.
    ``counting``: contributions, staleness and refusals are not those of all commits. Either earlier
    ones are still being read, which ``rounds`` lacks, too, or a single look has left some out.
    ``held_out`` is of the newest state that was evaluated; ``held_out_texts`` counts the different
    texts that recent evaluators read: more than one is wrong. ``time`` is each use's share of the
    time given to all learners together: that of ``train`` is the goodput, the rest is badput.
    ``checkpoint_lacks`` counts the commits that are not in the newest checkpoint, and
    ``checkpoint_lacks_s`` is for how long there have been such.
    """

    run: str
    finished: bool
    step: int
    steps: int
    tokens: int
    loss: float | None
    tokens_per_s: float
    learners: int
    alive: int
    rounds: int
    contributions: int
    versions: tuple[int, ...]
    goodput: float
    staleness_mean: float
    staleness_max: int
    refused: dict[RefusalCause, int]
    bytes_up: int
    bytes_down: int
    last_round: str
    last_round_s_ago: float | None
    checkpoint: str | None
    checkpoint_step: int | None
    checkpoint_s_ago: float | None
    checkpoint_lacks: int
    checkpoint_lacks_s: float
    held_out: EvaluationRow | None
    held_out_texts: int
    wall_s: float
    eta_s: float | None
    timed: bool
    counting: bool
    f32_bytes_up: int
    f32_bytes_down: int
    time: dict[str, float]

    @property
    def commit_age_s(self) -> float:
        """Time since the newest commit; since the run was created before there is one."""
        return self.wall_s if self.last_round_s_ago is None else self.last_round_s_ago

    @property
    def checkpoint_age_s(self) -> float:
        """Time since the newest checkpoint; since the run was created before there is one."""
        return self.wall_s if self.checkpoint_s_ago is None else self.checkpoint_s_ago


@dataclass(frozen=True, slots=True)
class RunReport:
    """The run, its learners by name and its evaluations, oldest first, at one moment."""

    run: RunRow
    learners: tuple[LearnerRow, ...]
    evaluations: tuple[EvaluationRow, ...] = ()

    @property
    def unheard(self) -> bool:
        """Whether no learner has a pulse: a broker keeps them in memory, while it runs."""
        return bool(self.learners) and not any(row.heard for row in self.learners)


def report(view: RunView, now_s: float) -> RunReport:
    """Return the rows of a view at ``now_s``, by the clock that gave ``take`` its arrival times."""
    held = [view.learners[name] for name in sorted(view.learners, key=_natural)]
    reported = [_learner_row(view, learner, now_s) for learner in held]
    rows, time = tuple(row for row, _ in reported), ratios(split for _, split in reported)
    evaluations = tuple(_evaluation_row(evaluation, now_s) for evaluation in view.evaluations.kept)
    return RunReport(_run_row(view, rows, evaluations, time, now_s), rows, evaluations)


def _natural(name: str) -> list[str | int]:
    """Sort learner-2 before learner-10."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if at % 2 else part for at, part in enumerate(parts)]


def unconfirmed(view: RunView, now_s: float) -> list[str]:
    """Return learners that are gone if their connection is closed, which a broker can say."""
    return [
        held.name
        for held in view.learners.values()
        if now_s - held.heartbeat.last_s > view.liveness.pulse_s  # spares the rest, mostly
        and held.pulse is not None
        and held.ended_s is None
        and _judged(view, held, now_s)[0] is not Liveness.GONE
        and _judged(view, held, now_s, closed=True)[0] is Liveness.GONE
    ]


def _judged(
    view: RunView, learner: LearnerView, now_s: float, *, closed: bool = False
) -> tuple[Liveness, LivenessReason]:
    phase = LearnerPhase.STARTING if learner.pulse is None else learner.pulse.phase
    return liveness.judge(
        learner.heartbeat,
        now_s,
        view.liveness,
        activity=activity(phase),
        progress=learner.progress,
        closed=closed or learner.closed_s is not None,
    )


def _learner_row(
    view: RunView, learner: LearnerView, now_s: float
) -> tuple[LearnerRow, dict[str, float]]:
    """Return a learner's row, and its time in seconds by use.

    While a learner is alive its time is as of its last pulse, so that the time since does not look
    idle; once it is not, the time since counts as lost, until the run is finished.
    """
    pulse, sums = learner.pulse, learner.counts
    phase = LearnerPhase.STARTING if pulse is None else pulse.phase
    state, reason = _judged(view, learner, now_s)
    until_s = learner.heartbeat.last_s if state is Liveness.ALIVE else now_s
    if view.finished and view.last_commit_s is not None:
        until_s = min(until_s, view.last_commit_s)
    seconds = split(learner.spent, allocated_s(learner.joined_s, until_s, learner.ended_s))
    time = ratios([seconds])
    speed = 0.0 if state is Liveness.GONE else _speed(learner, now_s)
    member = learner.member
    peak = 0.0 if member is None else member.peak_tokens_per_s
    ready_s = 0.0 if pulse is None else pulse.alive_s - pulse.compile_s - pulse.recover_s
    row = LearnerRow(
        name=learner.name,
        incarnation=learner.incarnation,
        liveness=state,
        reason=reason,
        phase=phase,
        step=0 if pulse is None else pulse.step,
        tokens=max(sums["tokens"], view.accepted.get(learner.name, 0)),
        loss=None if pulse is None or not pulse.steps else finite(pulse.loss),
        step_time_s=0.0 if pulse is None else pulse.step_time_s,
        tokens_per_s=speed,
        goodput=time[TRAIN],
        bytes_up=sums["bytes_up"],
        bytes_down=sums["bytes_down"],
        f32_bytes_up=sums["f32_bytes_up"],
        f32_bytes_down=sums["f32_bytes_down"],
        region="" if pulse is None else pulse.region,
        cached_bytes=sums["cached_bytes"],
        time=time,
        contributions=sums["contributions"],
        staleness=view.staleness.get(learner.name, 0),
        syncs_skipped=0 if pulse is None else pulse.syncs_skipped,
        seen_s_ago=max(0.0, now_s - learner.heartbeat.last_s),
        heard=pulse is not None,
        waited_s=pulse.recover_s if pulse and phase is LearnerPhase.CATCHING_UP else 0.0,
        worked_s=max(0.0, finite(ready_s) or 0.0),
        joined_s_ago=None if learner.first_s is None else max(0.0, now_s - learner.first_s),
        data="" if member is None else member.data[:MOST_CLAIM],
        mesh="" if member is None else member.mesh[:MOST_CLAIM],
        device="" if member is None else member.device[:MOST_CLAIM],
        mfu=finite(speed / peak) if speed and peak else None,
        digest_mismatches=0 if pulse is None else pulse.digest_mismatches,
        quarantine=view.quarantined.get(learner.name),
    )
    return row, seconds


def _speed(learner: LearnerView, now_s: float) -> float:
    """Return tokens per second while it trains: tokens per step over the time of a step.

    Nothing for one whose steps have stopped, as they do where a blocking mode waits for a round.
    """
    pulse, progress = learner.pulse, learner.progress
    if pulse is None or pulse.phase is not LearnerPhase.TRAINING:
        return 0.0
    if pulse.steps <= 0 or pulse.step_time_s <= 0:
        return 0.0
    usual_s = max(pulse.step_time_s, learner.heartbeat.mean_s)
    if progress is not None and now_s - progress.advanced_s > STILL * usual_s:
        return 0.0
    return finite(pulse.tokens / pulse.steps / pulse.step_time_s) or 0.0


def _evaluation_row(evaluation: Evaluation, now_s: float) -> EvaluationRow:
    return EvaluationRow(
        step=evaluation.step,
        tokens=evaluation.tokens,
        loss=finite(evaluation.loss),
        perplexity=finite(evaluation.perplexity),
        bits_per_byte=finite(evaluation.bits_per_byte),
        average_loss=finite(evaluation.average_loss) or None,
        evaluated_tokens=evaluation.evaluated_tokens,
        text=f"{evaluation.text_digest:016x}",
        evaluator=evaluation.evaluator,
        s_ago=max(0.0, now_s - evaluation.evaluated_ns / 1e9),
    )


def recent_texts(evaluations: Sequence[EvaluationRow]) -> dict[str, str]:
    """Return which text each recent evaluator reads now, by its name.

    One that was given the right text, or was replaced, is no trouble any more.
    """
    return {e.evaluator: e.text for e in evaluations[-RECENT_EVALUATIONS:]}


def _run_row(
    view: RunView,
    rows: Sequence[LearnerRow],
    evaluations: Sequence[EvaluationRow],
    time: dict[str, float],
    now_s: float,
) -> RunRow:
    checkpoint, last_s, judged = view.checkpoint, view.last_commit_s, view.evaluations.newest
    began_s = view.created_s if view.created_s is not None else view.started_s
    until_s = last_s if view.finished and last_s is not None else now_s
    at_work = {LearnerPhase.TRAINING, LearnerPhase.FINISHED}
    steps = [r.step for r in rows if r.phase in at_work and r.liveness is not Liveness.GONE]
    step = max(view.step, schedule.global_clock(steps, view.config.sync.quorum))
    eta_s, timed = _eta(view, rows, step, now_s)
    lacks = (max(0, v - held_in(checkpoint, f)) for f, v in view.versions.items())
    return RunRow(
        run=view.run,
        finished=view.finished,
        step=step,
        steps=view.config.train.steps,
        tokens=sum(row.tokens for row in rows),
        loss=_loss(rows),
        tokens_per_s=finite(sum(row.tokens_per_s for row in rows)) or 0.0,
        learners=len(rows),
        alive=sum(row.liveness is Liveness.ALIVE for row in rows),
        rounds=view.rounds,
        contributions=view.merged,
        versions=tuple(view.versions.get(f, 0) for f in range(view.fragments)),
        goodput=time[TRAIN],
        staleness_mean=view.staleness_sum / view.merged if view.merged else 0.0,
        staleness_max=view.staleness_max,
        refused=dict(view.refused),
        bytes_up=sum(row.bytes_up for row in rows),
        bytes_down=sum(row.bytes_down for row in rows),
        last_round="" if view.last_commit is None else why(view.last_commit),
        last_round_s_ago=None if last_s is None else max(0.0, now_s - last_s),
        checkpoint=None if checkpoint is None else checkpoint.path,
        checkpoint_step=None if checkpoint is None else checkpoint.step,
        checkpoint_s_ago=(
            None if checkpoint is None else max(0.0, now_s - checkpoint.written_ns / 1e9)
        ),
        checkpoint_lacks=sum(lacks),
        checkpoint_lacks_s=max([0.0, *(now_s - since_s for since_s in view.lacking.values())]),
        held_out=None if judged is None else _evaluation_row(judged, now_s),
        held_out_texts=len(set(recent_texts(evaluations).values())),
        wall_s=0.0 if began_s is None else max(0.0, until_s - began_s),
        eta_s=eta_s,
        timed=timed,
        counting=view.counting or view.skipped,
        f32_bytes_up=sum(row.f32_bytes_up for row in rows),
        f32_bytes_down=sum(row.f32_bytes_down for row in rows),
        time=time,
    )


def _loss(rows: Sequence[LearnerRow]) -> float | None:
    """Return the mean loss weighted by speed; unweighted where none is training."""
    reported = [(r.loss, r.tokens_per_s) for r in rows if r.loss is not None]
    speed = sum(weight for _, weight in reported)
    if speed > 0:
        return finite(sum(loss * weight for loss, weight in reported) / speed)
    return finite(sum(loss for loss, _ in reported) / len(reported)) if reported else None


def _eta(
    view: RunView, rows: Sequence[LearnerRow], step: int, now_s: float
) -> tuple[float | None, bool]:
    """Return seconds until the run ends, and True if that is by time or tokens, not by steps."""
    train, times = view.config.train, [row.step_time_s for row in rows if row.takes_steps]
    steps_s = (train.steps - step) * median(times) if times else math.inf
    elapsed_s = 0.0 if view.started_s is None else now_s - view.started_s
    time_s = math.inf if train.duration_s is None else train.duration_s - elapsed_s
    rate = finite(sum(row.tokens_per_s for row in rows))
    left = math.inf if train.tokens is None else train.tokens - sum(row.tokens for row in rows)
    tokens_s = left / rate if rate else math.inf
    sooner_s = min(time_s, tokens_s if left > 0 else 0.0)
    timed = sooner_s < steps_s
    phases = {row.phase for row in rows}
    over = phases <= ENDED and LearnerPhase.FINISHED in phases  # not where all were stopped
    if view.finished or over:
        return 0.0, timed
    ends_s = steps_s if view.started_s is None else min(steps_s, sooner_s)
    return (max(0.0, ends_s) if math.isfinite(ends_s) else None), timed
