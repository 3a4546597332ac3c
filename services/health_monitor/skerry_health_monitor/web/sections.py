"""What the page shows, as sections of keyed plain values: what has changed is easy to tell.

A section maps keys to rows; a row is a list whose columns ``COLUMNS`` names, so that a second of
two hundred learners is 20 kB. Texts that others chose are bounded here and escaped by the page.
Times are seconds since the epoch: ages grow in the browser without a word from us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.status.format import clip, rounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.log.base import StreamInfo
    from skerry.protocol.messages import Evaluation
    from skerry.settings.models import ModelConfig
    from skerry.status.commit_totals import BinnedCurve
    from skerry.status.model import RunModel, RunSnapshot
    from skerry.status.timeline import CommittedRound
    from skerry_health_monitor.alert_log import AlertLog

Section = dict[str, Any]
Sections = dict[str, Section]

MOST_ARRIVALS = 32
MOST_PATH = 200
MOST_SAMPLE = 600
TIMES_S = 1e6
"""A number of seconds above this is a moment, and keeps its milliseconds."""
SIZES = ("layers", "d_model", "heads", "kv_heads", "d_ff", "vocab")
"""Settings that stand in the place of a preset's."""
CURVE = ("at_s", "step", "total", "loss", "tokens", "rounds")

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "learners": (
        *("number", "name", "host", "incarnation", "liveness", "reason", "phase", "step", "tokens"),
        *("loss", "step_time_s", "tokens_per_s", "goodput", "bytes_up", "bytes_down"),
        *("contributions", "staleness", "syncs_skipped", "seen_s", "heard", "last", "time"),
        *("quarantine", "region", "cached_bytes", "mesh", "device", "mfu"),
    ),
    "rounds": (
        *("fragment", "version", "step", "reason", "opened_s", "quorum_s", "grace_s", "closed_s"),
        *("stored_s", "learners", "arrived_s", "refused", "staleness", "tokens", "loss"),
        *("trace_id", "adopted", "adopted_s", "final", "sequence"),
    ),
    "open": ("fragment", "version", "opened_s", "due_step", "attempt", "final", "trace_id"),
    "fragments": ("version", "closed_s", "parameters", "adopted"),
    "checkpoints": ("path", "step", "tokens", "written_s", "bytes", "digest", "sequence"),
    "evaluations": (
        *("at_s", "step", "tokens", "loss", "bits_per_byte", "perplexity", "average_loss"),
        "evaluator",
    ),
    "samples": ("at_s", "step", "loss", "text"),
    "alerts": ("severity", "text", "fix", "since_s", "until_s"),
    "streams": ("messages", "bytes", "max_bytes", "retention"),
    "curve_run": CURVE,
    "curve_day": CURVE,
    "curve_hour": CURVE,
}
"""The columns of each section's rows; ``run`` and ``facts`` are rows of their own."""
RUN = (
    *("finished", "step", "steps", "timed", "tokens", "loss", "tokens_per_s", "learners", "alive"),
    *("rounds", "goodput", "bytes_up", "bytes_down", "eta_s", "counting"),
)
"""What the page shows of the run's row."""


def sections(
    now: RunSnapshot,
    alert_log: AlertLog,
    streams: Sequence[StreamInfo] = (),
    away_since_s: float | None = None,
    more: Mapping[str, object] | None = None,
) -> Sections:
    """Return every section of the page; ``more`` are facts that only the process knows."""
    history, view = now.model.history, now.model.view
    return {
        "facts": {**_facts(now.model), **(more or {}), "columns": COLUMNS},
        "run": {**_run(now), "away_since_s": away_since_s},
        "learners": _learners(now),
        "lanes": {
            name: [[round(turn.at_s, 1), turn.state] for turn in lane.turns]
            for name, lane in history.lanes.items()
            if name in view.learners
        },
        "rounds": {f"{f}.{v}": _round(row) for (f, v), row in history.timeline.rounds.items()},
        "open": {
            str(fragment): _row("open", opened, opened_s=plain(opened.opened_ns / 1e9))
            for fragment, opened in history.timeline.open.items()
        },
        "fragments": _fragments(now.model),
        "checkpoints": {
            clip(path, MOST_PATH): _row(
                "checkpoints",
                c,
                path=clip(path, MOST_PATH),
                written_s=plain(c.written_ns / 1e9),
                bytes=c.size_bytes,
                sequence=c.ledger_sequence,
            )
            for path, c in history.checkpoints.items()
        },
        "evaluations": {str(e.evaluated_ns): _evaluation(e) for e in view.evaluations.kept},
        "samples": {
            str(e.evaluated_ns): _row(
                "samples", e, at_s=plain(e.evaluated_ns / 1e9), text=e.sample[:MOST_SAMPLE]
            )
            for e in history.samples
        },
        "alerts": {
            str(held.number): _row(
                "alerts", held, severity=alert.severity.value, text=alert.text, fix=alert.fix
            )
            for held in (*alert_log.past, *alert_log.active.values())
            for alert in (held.alert,)
        },
        "streams": {
            clip(s.name): _row(
                "streams", s, max_bytes=s.spec.max_bytes, retention=s.spec.retention.value
            )
            for s in streams
        },
        **{f"curve_{name}": _curve(curve) for name, curve in history.curves.by_name().items()},
    }


def _evaluation(row: Evaluation) -> list[object]:
    at_s, average = plain(row.evaluated_ns / 1e9), plain(row.average_loss) or None
    return _row("evaluations", row, at_s=at_s, average_loss=average)


def marks(model: RunModel, after: int = 0) -> list[list[Any]]:
    """Return the recent contributions with a number above ``after``, oldest first.

    Each is its number, that of its learner, when it was merged, and whether it was late.
    """
    numbers = {name: number for number, name in enumerate(model.view.learners)}
    found: list[list[Any]] = []
    for mark in reversed(model.history.marks):
        if mark.number <= after:
            break
        if mark.learner in numbers:
            found.append([mark.number, numbers[mark.learner], round(mark.at_s, 1), mark.late])
    return found[::-1]


def _row(section: str, source: object, **given: object) -> list[object]:
    """Return a row: the attributes that its columns name, but for what is ``given``."""
    return [
        given[name] if name in given else plain(getattr(source, name)) for name in COLUMNS[section]
    ]


def plain(value: object) -> object:
    """Return a value for JSON: bounded text, six digits, milliseconds of moments; None for NaN."""
    if isinstance(value, str):
        return clip(value)
    if isinstance(value, float):
        return round(value, 3) if TIMES_S < abs(value) < float("inf") else rounded(value)
    return value


def _facts(model: RunModel) -> Section:
    config, record = model.config, model.record
    return {
        "run": clip(record.run),
        "mode": config.mode,
        "model": clip(_model(config.model)),
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
    }


def _model(model: ModelConfig) -> str:
    """Return what a run trains: its factory or size, and what the settings make otherwise."""
    if model.factory:
        return model.factory
    own = {name: getattr(model, name) for name in SIZES}
    given = [f"{name} {value}" for name, value in own.items() if value is not None]
    base = "a config.json" if model.config else model.preset
    lora = [f"adapters of rank {model.lora_rank}"] if model.lora_rank else []
    return " with ".join([base, *([", ".join(given + lora)] if given or lora else [])])


def _run(now: RunSnapshot) -> Section:
    run, model, judged = now.report.run, now.model, now.report.run.held_out
    return {
        **{name: plain(getattr(run, name)) for name in RUN},
        "time": _time(run.time),
        "bytes_data_parallel": model.bytes_data_parallel(),
        "last_round_s": plain(model.view.last_commit_s),
        "held_out": None if judged is None else plain(judged.loss),
        "held_out_step": None if judged is None else judged.step,
        "bits_per_byte": None if judged is None else plain(judged.bits_per_byte),
        "held_out_average": None if judged is None else plain(judged.average_loss),
        "wall_s": round(run.wall_s) if run.finished else None,
        "eta_s": None if run.eta_s is None else round(run.eta_s),
        "round_gap_s": plain(model.history.timeline.interval_s()),
        "widths_s": {name: c.width_s for name, c in model.history.curves.by_name().items()},
    }


def _learners(now: RunSnapshot) -> Section:
    numbers = {name: number for number, name in enumerate(now.model.view.learners)}
    shown: Section = {}
    for row in now.report.learners:
        lane = now.model.history.lanes.get(row.name)
        last = None if lane is None else lane.last
        shown[row.name] = _row(
            "learners",
            row,
            number=numbers[row.name],
            host="" if lane is None else clip(lane.host),
            seen_s=round(now.now_s - row.seen_s_ago, 1),
            last=None if last is None else [*last[:2], round(last[2], 1)],
            time=_time(row.time),
        )
    return shown


def _time(uses: Mapping[str, float]) -> dict[str, float]:
    """Return each use's share; what nothing was lost to is left out."""
    return {use: round(share, 3) for use, share in uses.items() if share >= 0.0005}


def _round(row: CommittedRound) -> list[object]:
    """Return a round with at most MOST_ARRIVALS, the first and the last among them."""
    arrived_s, last = row.arrived_s, len(row.arrived_s) - 1
    if last >= MOST_ARRIVALS:
        arrived_s = tuple(arrived_s[i * last // (MOST_ARRIVALS - 1)] for i in range(MOST_ARRIVALS))
    shown = [round(s, 3) for s in arrived_s]
    return _row("rounds", row, learners=len(row.learners), arrived_s=shown)


def _fragments(model: RunModel) -> Section:
    """Return each fragment, without an age while the history of its newest version is unread."""
    newest, shown = model.history.timeline.newest, dict[str, Any]()
    for fragment, parameters in enumerate(model.sizes):
        row, version = newest.get(fragment), model.view.versions.get(fragment, 0)
        if row is None or row.version < version:
            shown[str(fragment)] = [version, None, parameters, 0]
        else:
            shown[str(fragment)] = _row("fragments", row, parameters=parameters)
    return shown


def _curve(curve: BinnedCurve) -> Section:
    return {
        f"{curve.width_s:g}:{number}": _row("curve_run", held, at_s=number * curve.width_s)
        for number, held in curve.bins.items()
    }
