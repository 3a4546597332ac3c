"""``skerry ledger verify`` and ``skerry replay``: prove a run's log, rebuild a moment of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import Generator
from dataclasses import asdict
from datetime import UTC, datetime
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from skerry import code
from skerry.algorithm.fragments import Plan, scatter
from skerry.algorithm.outer import outer_of
from skerry.algorithm.presets import MERGES
from skerry.cli.local_log import RunChoice
from skerry.errors import ConfigError, HistoryBroken, SkerryError, StoreError
from skerry.log import ledger
from skerry.store import tensorfile
from skerry.store.checkpoint import PARAMS_FILE
from skerry_tools.audit import verify as verifying
from skerry_tools.audit.log import OnProgress, RunLog
from skerry_tools.audit.replay import Replayed, Sink, bases_of, replay
from skerry_tools.audit.survey import NANOSECONDS, ReplayMoment, Survey, parse, survey
from skerry_tools.audit.verify import AuditReport
from skerry_tools.audit.whatif import Drift, WhatIfPolicy

MEGABYTE = 1e6
MOST_SHOWN = 20
ASSUMED = (
    "What if: the same contributions, rounds and base versions; learners that had seen another"
    " global state would have sent others, so a real run would have gone further apart."
)
SUFFIX = ".safetensors"


def run_verify(choice: RunChoice, *, rebuilds: bool, as_json: bool) -> None:
    """Verify a run's log; HistoryBroken with the first violation where there is one."""
    report = asyncio.run(_verified(choice, rebuilds=rebuilds))
    if as_json:
        replayed = _to_json(report.replayed) if report.replayed else None
        plain = {**asdict(report), "ok": not report.violations, "replayed": replayed}
        print(json.dumps(plain, indent=2))
    else:
        _show(report)
    if report.violations:
        raise HistoryBroken(report.violations[0].sentence)


async def _verified(choice: RunChoice, *, rebuilds: bool) -> AuditReport:
    async with choice.reached(choice.load(), "verify") as (bus, run):
        with progress() as on_progress:
            return await verifying.verify(bus, run, replay=rebuilds, on_progress=on_progress)


def run_replay(
    choice: RunChoice,
    policy: WhatIfPolicy,
    *,
    to: str | None,
    origin: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Replay a run; HistoryBroken for a version that does not, StateLost where the window ends.

    A ``policy`` without any value asks for no what-if.
    """
    refuse_policy(policy)
    replayed = asyncio.run(_replayed(choice, policy, to, origin, out))
    if as_json:
        print(json.dumps(_to_json(replayed), indent=2))
    else:
        _show_replayed(replayed, out)
    replayed.require_whole()


def refuse_policy(policy: WhatIfPolicy) -> None:
    """Raise ConfigError for a policy that cannot be; allow the code that it names."""
    merge, discount = policy.merge, policy.staleness_discount
    if merge not in {None, *MERGES}:
        if not (module := code.module_of(str(merge))):
            known = " or ".join(MERGES)
            msg = f"--merge {merge!r} is not known: use {known}, or module:function."
            raise ConfigError(msg, path="merge")
        code.allow([module])
    if discount is not None and not 0 < discount <= 1:
        msg = f"--staleness-discount is {discount}: give a number above 0, at most 1."
        raise ConfigError(msg, path="staleness_discount")


async def _replayed(
    choice: RunChoice, policy: WhatIfPolicy, to: str | None, origin: str | None, out: Path | None
) -> Replayed:
    given = choice.load()
    async with choice.reached(given, "replay") as (bus, run):
        log = RunLog.of(bus, await ledger.read_run(bus, run))
        moment = parse(to) if to else ReplayMoment()
        outer_of(policy.applied(log.config), log.plan)  # says what is wrong with it at once
        found = await survey(log, moment)
        bases = await asyncio.to_thread(bases_of, origin, log, given.local.store)
        writing: contextlib.AbstractContextManager[Sink | None] = contextlib.nullcontext()
        if out is not None:
            metadata = {"run": log.run, "ledger_sequence": str(found.sequence)}
            writing = parameters(out, log.plan, metadata)
        with progress() as on_progress, writing as sink:
            replayed = await replay(
                log,
                known=found,
                bases=bases,
                policy=None if policy == WhatIfPolicy() else policy,
                sink=sink,
                on_progress=on_progress,
            )
            if out is not None:
                replayed.require_whole()  # what is not right is not written
            return replayed


@contextlib.contextmanager
def parameters(out: Path, plan: Plan, metadata: dict[str, str]) -> Generator[Sink]:
    """Yield what writes a fragment's f32 parameters into a file that appears whole, or not at all.

    The file is mapped into memory. Raises StoreError where it cannot be written.
    """
    final = _file_of(out)
    draft = final.with_name(f".{final.name}.{os.getpid()}")
    shapes = {leaf.name: leaf.shape for leaf in plan.leaves}
    head = tensorfile.header(shapes, metadata)
    ends = itertools.accumulate(map(prod, shapes.values()), initial=0)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + tensorfile.ITEMS["F32"] * plan.parameters)
        flat = np.memmap(draft, np.dtype("<f4"), "r+", len(head), (plan.parameters,))
        leaves = [flat[start:end] for start, end in itertools.pairwise(ends)]
        yield lambda fold, _: scatter(fold.fragment, fold.master, leaves)
        flat.flush()
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(final)
    except SkerryError:  # a broker that is away is an OSError, too
        raise
    except OSError as error:
        msg = f"{final} cannot be written ({error.strerror}): name another place with --out."
        raise StoreError(msg) from error
    finally:
        draft.unlink(missing_ok=True)


def _file_of(out: Path) -> Path:
    """Return where the parameters go: ``out`` itself if it names a file, or a file inside it."""
    return out if out.suffix == SUFFIX else out / PARAMS_FILE


@contextlib.contextmanager
def progress() -> Generator[OnProgress]:
    """Show on a terminal's stderr what is being read, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading the log", total=None)

        def on_progress(what: str, done: int, of: int) -> None:
            bar.update(task, description=f"{what}: {done:,}" + (f" of {of:,}" if of else ""))

        yield on_progress


def _to_json(replayed: Replayed) -> dict[str, Any]:
    """Return a replay as plain types; digests are hexadecimal."""
    return {
        "ok": replayed.whole and not replayed.wrong,
        "run": replayed.run,
        "survey": asdict(replayed.survey),
        "fragments": [
            {**asdict(f), "digest": f"{f.digest:016x}", "drift": _drift_to_json(f.drift)}
            for f in replayed.fragments
        ],
        "wrong": [asdict(violation) for violation in replayed.wrong],
        "drift": _drift_to_json(_overall(replayed)),
    }


def _overall(replayed: Replayed) -> Drift | None:
    drifts = [f.drift for f in replayed.fragments if f.drift is not None]
    return reduce(Drift.and_of, drifts) if drifts else None


def _drift_to_json(drift: Drift | None) -> dict[str, float | None] | None:
    return {"distance": drift.distance, "cosine": drift.cosine} if drift is not None else None


def _show_survey(console: Console, found: Survey) -> None:
    """Print what the window of contributions holds, and what can be replayed for it."""
    window = found.window
    since = datetime.fromtimestamp(window.since_ns / NANOSECONDS, UTC)
    oldest = f" since {since:%Y-%m-%d %H:%M:%SZ}" if window.since_ns else ""
    bound = f" of {window.window_bytes / MEGABYTE:,.1f}" if window.window_bytes > 0 else ""
    held = f"{window.bytes / MEGABYTE:,.1f}{bound} MB of contributions"
    bases = sorted(found.base.items())
    shown = ", ".join(f"f{index} from v{base}" for index, base in bases[:MOST_SHOWN])
    more = f" and {len(bases) - MOST_SHOWN} more" if len(bases) > MOST_SHOWN else ""
    reach = "every version, from genesis"
    if any(found.base.values()):
        reach = f"from a checkpoint ({shown}{more})"
    console.print(f"Window: {held} ({window.messages:,} messages){oldest}.")
    console.print(f"Replay: {reach}.")


def _show(report: AuditReport) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for violation in report.violations[:MOST_SHOWN]:
        console.print(f"BROKEN  {violation.sentence}", markup=False)
    if report.broken > MOST_SHOWN:
        console.print(f"… and {report.broken - MOST_SHOWN} more violations (--json names them).")
    for note in report.notes:
        console.print(f"note    {note}", markup=False)
    verdict = "does NOT hold" if report.violations else "holds"
    console.print(
        f"The log of run {report.run} {verdict}: {report.commits:,} commits in"
        f" {report.records:,} records, {report.elapsed_s:.1f} s."
    )
    table = Table("learner", "tokens", "cursor", "merged", "refused", "starts", "data", box=None)
    for row in report.learners:
        refused = ", ".join(f"{n} {cause}" for cause, n in sorted(row.refused.items()))
        starts = ", ".join(f"{n} {inner}" for inner, n in sorted(row.starts.items()))
        counts = (f"{n:,}" for n in (row.tokens, row.cursor, row.contributions))
        starts = f"{row.incarnation}" + (f" ({starts})" if starts else "")
        table.add_row(row.learner, *counts, refused or "0", starts, row.data[:16])
    console.print(table)
    _show_survey(console, report.survey)
    if report.replayed is not None:
        _show_fragments(console, report.replayed)
        for f in report.replayed.fragments:
            if f.stopped:
                console.print(f"stopped {f.stopped}", markup=False)


def _show_fragments(console: Console, replayed: Replayed) -> None:
    """Print a row per fragment."""
    drifts = _overall(replayed) is not None
    table = Table("fragment", "from", "to", "digest", *["drift", "cosine"] * drifts, box=None)
    for f in replayed.fragments:
        drift = ["", ""] * drifts if f.drift is None else list(_drift_words(f.drift))
        base = f"v{f.base}" if f.base else "genesis"
        digest = f"{f.digest:016x}" if f.digest else ""
        table.add_row(f"f{f.fragment}", base, f"v{f.reached}", digest, *drift)
    console.print(table)


def _drift_words(drift: Drift) -> tuple[str, str]:
    return f"{drift.distance:.3e}", "" if drift.cosine is None else f"{drift.cosine:.4f}"


def _show_replayed(replayed: Replayed, out: Path | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    _show_fragments(console, replayed)
    if (drift := _overall(replayed)) is not None:
        distance, cosine = _drift_words(drift)
        console.print(ASSUMED)
        console.print(f"Drift over all fragments: {distance} of the norm, cosine {cosine or '-'}.")
        if any(f.cold for f in replayed.fragments):
            console.print("The other outer optimizer began without the state of the run's own.")
    _show_survey(console, replayed.survey)
    if replayed.whole and not replayed.wrong:
        steps = sum(f.reached - f.base for f in replayed.fragments)
        console.print(
            f"Run {replayed.run} rebuilt as of ledger sequence {replayed.survey.sequence}:"
            f" {steps:,} versions, each with the digest that was committed."
        )
    if out is not None:
        console.print(f"Parameters are in {_file_of(out)}.")
