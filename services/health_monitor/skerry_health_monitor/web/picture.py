"""What the page shows, as sections of keyed plain values: what has changed is easy to tell.

A section maps keys to rows; a row is a list whose columns ``COLUMNS`` names, so that a second of
two hundred learners is 20 kB. Texts that others chose are bounded here and escaped by the page.
Times are seconds since the epoch: ages grow in the browser without a word from us.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skerry.status.format import clip, rounded
from skerry.status.timeline import interval_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.log.base import StreamInfo
    from skerry.status.curves import BinnedCurve
    from skerry.status.history import History
    from skerry.status.model import RunModel
    from skerry.status.report import LearnerRow, RunReport, RunRow
    from skerry.status.timeline import CommittedRound, Key
    from skerry_health_monitor.alert_log import AlertLog

Section = dict[str, Any]
Sections = dict[str, Section]

MOST_ARRIVALS = 32
MOST_PATH = 200
MOST_SAMPLE = 600
MARK = ("number", "learner", "at_s", "late")

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "learners": (
        *("number", "name", "host", "incarnation", "liveness", "reason", "phase", "step", "tokens"),
        *("loss", "step_time_s", "tokens_per_s", "goodput", "bytes_up", "bytes_down"),
        *("contributions", "staleness", "skipped", "seen_s", "heard", "last", "time"),
    ),
    "rounds": (
        *("fragment", "version", "step", "reason", "opened_s", "quorum_s", "grace_s", "closed_s"),
        *("stored_s", "learners", "arrived_s", "refused", "staleness", "tokens", "loss"),
        *("trace_id", "adopted", "adopted_s", "final", "sequence"),
    ),
    "open": ("fragment", "version", "opened_s", "due_step", "attempt", "final", "trace_id"),
    "fragments": ("version", "step", "closed_s", "reason", "parameters", "adopted", "staleness"),
    "checkpoints": ("path", "step", "tokens", "written_s", "bytes", "digest", "sequence"),
    "evaluations": ("at_s", "step", "tokens", "loss", "bits_per_byte", "perplexity", "evaluator"),
    "samples": ("at_s", "step", "loss", "text"),
    "alerts": ("severity", "text", "fix", "since_s", "until_s"),
    "streams": ("messages", "bytes", "max_bytes", "retention"),
    "lanes": ("at_s", "state"),
    "curve_run": ("at_s", "step", "total", "loss", "tokens", "rounds"),
    "curve_day": ("at_s", "step", "total", "loss", "tokens", "rounds"),
    "curve_hour": ("at_s", "step", "total", "loss", "tokens", "rounds"),
    "marks": MARK,
}
"""The columns of each section's rows; ``run`` and ``facts`` are rows of their own."""


@dataclass(frozen=True, slots=True)
class Page:
    """All that the page is made from; ``more`` are facts that only the process knows."""

    model: RunModel
    report: RunReport
    alert_log: AlertLog
    streams: Sequence[StreamInfo]
    away_since_s: float | None
    more: Mapping[str, object]
    now_s: float


Drawn = dict["Key", tuple["CommittedRound", int, list[object]]]
"""Rounds, by how many they were adopted, and what was made of them: most stay the same."""


def sections(page: Page, drawn: Drawn) -> Sections:
    """Return every section of the page as of now; ``drawn`` is kept from one to the next."""
    history, view = page.model.history, page.model.view
    numbers = {name: number for number, name in enumerate(view.learners)}
    curves = history.curves.by_name()
    return {
        "facts": {**_facts(page.model), **page.more, "columns": COLUMNS},
        "run": _run(page),
        "learners": {
            row.name: _learner(row, numbers[row.name], history, page.now_s)
            for row in page.report.learners
        },
        "lanes": {
            name: [[round(turn.at_s, 1), turn.state] for turn in lane.turns]
            for name, lane in history.lanes.items()
            if name in numbers
        },
        "rounds": _rounds(history, drawn),
        "open": _open(history),
        "fragments": _fragments(page.model),
        "checkpoints": _checkpoints(history),
        "evaluations": _evaluations(page.model),
        "samples": _samples(history),
        "alerts": _alerts(page.alert_log),
        "streams": {
            clip(s.name): [s.messages, s.bytes, s.spec.max_bytes, s.spec.retention.value]
            for s in page.streams
        },
        **{f"curve_{name}": _curve(curve) for name, curve in curves.items()},
    }


def marks(page: Page, after: int = 0) -> list[list[Any]]:
    """Return the recent contributions with a number above ``after``, oldest first."""
    numbers = {name: number for number, name in enumerate(page.model.view.learners)}
    found: list[list[Any]] = []
    for mark in reversed(page.model.history.marks):
        if mark.number <= after:
            break
        if mark.learner in numbers:
            found.append([mark.number, numbers[mark.learner], round(mark.at_s, 1), mark.late])
    return found[::-1]


def _facts(model: RunModel) -> Section:
    config, record = model.config, model.record
    return {
        "run": clip(record.run),
        "mode": config.mode,
        "model": clip(config.model.factory or config.model.preset),
        "parameters": model.parameters,
        "fragments": record.fragments,
        "h_steps": config.sync.h_steps,
        "overlap_steps": config.sync.overlap_steps,
        "quorum": config.sync.quorum,
        "learners": config.sync.learners,
        "merge": config.sync.merge,
        "contribution_scheme": config.sync.contribution_scheme,
        "global_scheme": config.sync.global_scheme,
        "batch_tokens": config.data.batch * config.data.seq_len,
        "created_s": record.created_ns / 1e9,
        "version": clip(record.skerry_version),
        "restored_from": clip(record.restored_from, MOST_PATH),
        "checkpoint_every_s": config.checkpoint.every_s,
        "chaos": config.chaos.allow,
    }


def _run(page: Page) -> Section:
    run, history = page.report.run, page.model.history
    gap_s = interval_s(history.timeline.rounds)
    last_s = page.model.view.last_commit_s
    return {
        "finished": run.finished,
        "step": run.step,
        "steps": run.steps,
        "timed": run.timed,
        "tokens": run.tokens,
        "loss": rounded(run.loss),
        "tokens_per_s": round(run.tokens_per_s, 1),
        "learners": run.learners,
        "alive": run.alive,
        "rounds": run.rounds,
        "contributions": run.contributions,
        "goodput": round(run.goodput, 4),
        "time": _time(run.time),
        "staleness_mean": round(run.staleness_mean, 3),
        "staleness_max": run.staleness_max,
        "refused": {cause.value: count for cause, count in run.refused.items()},
        "bytes_up": run.bytes_up,
        "bytes_down": run.bytes_down,
        "bytes_data_parallel": page.model.bytes_data_parallel(),
        "last_round": clip(run.last_round),
        "last_round_s": None if last_s is None else round(last_s, 2),
        "checkpoint_step": run.checkpoint_step,
        "held_out_texts": run.held_out_texts,
        **_held_out(run),
        "wall_s": round(run.wall_s) if run.finished else None,
        "eta_s": None if run.eta_s is None else round(run.eta_s),
        "counting": run.counting,
        "round_gap_s": rounded(gap_s),
        "away_since_s": page.away_since_s,
        "widths_s": {name: c.width_s for name, c in history.curves.by_name().items()},
    }


def _held_out(run: RunRow) -> Section:
    judged = run.held_out
    return {
        "held_out": None if judged is None else rounded(judged.loss),
        "held_out_step": None if judged is None else judged.step,
        "bits_per_byte": None if judged is None else rounded(judged.bits_per_byte),
    }


def _learner(row: LearnerRow, number: int, history: History, now_s: float) -> list[object]:
    lane = history.lanes.get(row.name)
    return [
        *(number, clip(row.name), "" if lane is None else clip(lane.host), row.incarnation),
        *(row.liveness.value, row.reason.value, row.phase.value, row.step, row.tokens),
        *(rounded(row.loss), rounded(row.step_time_s), round(row.tokens_per_s, 1)),
        *(round(row.goodput, 3), row.bytes_up, row.bytes_down, row.contributions),
        *(row.staleness, row.syncs_skipped, round(now_s - row.seen_s_ago, 1), row.heard),
        None if lane is None or lane.last is None else [*lane.last[:2], round(lane.last[2], 1)],
        _time(row.time),
    ]


def _time(uses: Mapping[str, float]) -> dict[str, float]:
    """Return each use's share; what nothing was lost to is left out."""
    return {use: round(share, 3) for use, share in uses.items() if share >= 0.0005}


def _rounds(history: History, drawn: Drawn) -> Section:
    for key, row in history.timeline.rounds.items():
        held = drawn.get(key)
        if held is None or held[0] is not row or held[1] != row.adopted:
            drawn[key] = (row, row.adopted, _round(row))
    for key in [key for key in drawn if key not in history.timeline.rounds]:
        del drawn[key]
    return {f"{f}.{v}": shown for (f, v), (*_, shown) in drawn.items()}


def _round(row: CommittedRound) -> list[object]:
    return [
        *(row.fragment, row.version, row.step, clip(row.reason), round(row.opened_s, 3)),
        *(round(row.quorum_s, 4), round(row.grace_s, 4), round(row.closed_s, 3)),
        *(round(row.stored_s, 3), len(row.learners), _thinned(row.arrived_s), row.refused),
        *(row.staleness, row.tokens, rounded(row.loss), clip(row.trace_id), row.adopted),
        *(None if row.adopted_s is None else round(row.adopted_s, 2), row.final, row.sequence),
    ]


def _thinned(arrived_s: tuple[float, ...]) -> list[float]:
    """Return at most MOST_ARRIVALS of them, the first and the last among them."""
    if len(arrived_s) <= MOST_ARRIVALS:
        return [round(s, 3) for s in arrived_s]
    last = len(arrived_s) - 1
    picked = (arrived_s[i * last // (MOST_ARRIVALS - 1)] for i in range(MOST_ARRIVALS))
    return [round(s, 3) for s in picked]


def _open(history: History) -> Section:
    return {
        str(fragment): [
            *(fragment, opened.version, round(opened.opened_ns / 1e9, 2), opened.due_step),
            *(opened.attempt, opened.final, clip(opened.trace_id)),
        ]
        for fragment, opened in history.timeline.open.items()
        if fragment < history.fragments
    }


def _fragments(model: RunModel) -> Section:
    newest = model.history.timeline.newest
    shown: Section = {}
    for fragment in range(model.record.fragments):
        row = newest.get(fragment)
        version = model.view.versions.get(fragment, 0)
        if row is None or row.version < version:  # its history is still being read
            shown[str(fragment)] = [version, 0, None, "", model.sizes[fragment], 0, 0]
            continue
        shown[str(fragment)] = [
            *(row.version, row.step, round(row.closed_s, 2), clip(row.reason)),
            model.sizes[fragment],
            *(row.adopted, row.staleness),
        ]
    return shown


def _checkpoints(history: History) -> Section:
    return {
        clip(path, MOST_PATH): [
            *(clip(c.path, MOST_PATH), c.step, c.tokens, round(c.written_ns / 1e9, 1)),
            *(c.size_bytes, clip(c.digest), c.ledger_sequence),
        ]
        for path, c in history.checkpoints.items()
    }


def _evaluations(model: RunModel) -> Section:
    return {
        str(e.evaluated_ns): [
            *(round(e.evaluated_ns / 1e9, 1), e.step, e.tokens, rounded(e.loss)),
            *(rounded(e.bits_per_byte), rounded(e.perplexity), clip(e.evaluator)),
        ]
        for e in model.view.evaluations
    }


def _samples(history: History) -> Section:
    return {
        str(e.evaluated_ns): [
            round(e.evaluated_ns / 1e9, 1),
            e.step,
            rounded(e.loss),
            e.sample[:MOST_SAMPLE],
        ]
        for e in history.samples
    }


def _alerts(alert_log: AlertLog) -> Section:
    return {
        str(held.number): [
            *(held.alert.severity.value, held.alert.text, held.alert.fix),
            *(round(held.since_s, 1), None if held.until_s is None else round(held.until_s, 1)),
        ]
        for held in (*alert_log.past, *alert_log.active.values())
    }


def _curve(curve: BinnedCurve) -> Section:
    return {
        f"{curve.width_s:g}:{number}": [
            *(number * curve.width_s, held.step, round(held.total), rounded(held.loss)),
            *(round(held.tokens, 1), held.rounds),
        ]
        for number, held in curve.bins.items()
    }
