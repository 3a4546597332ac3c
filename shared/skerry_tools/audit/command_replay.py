"""``skerry replay``: rebuild the parameters of any moment from the log, or ask what if."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from skerry import code
from skerry.algorithm.presets import MERGES
from skerry.cli.local_log import log_of, newest_run
from skerry.errors import ConfigError, HistoryBroken, StateLost
from skerry.log import ledger
from skerry.service.connect import bus_from
from skerry.settings import loading
from skerry.store.finding import root_of
from skerry_tools.audit.bases import CheckpointBases, usable
from skerry_tools.audit.command_verify import progress, window_sentences
from skerry_tools.audit.log import RunLog
from skerry_tools.audit.moment import ReplayMoment, parse, survey
from skerry_tools.audit.parameters import file_of, parameters
from skerry_tools.audit.replay import from_genesis, replay
from skerry_tools.audit.whatif import WhatIfPolicy, overall

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from skerry.settings.models import Settings
    from skerry_tools.audit.moment import Survey
    from skerry_tools.audit.replay import Bases, Replayed
    from skerry_tools.audit.whatif import DriftCurve

ASSUMED = (
    "What if: the same contributions, rounds and base versions; learners that had seen another"
    " global state would have sent others, so a real run would have gone further apart."
)
ASSUMED_QUORUM = (
    "Quorum: rounds close at the arrival of the K-th answer by the broker's clock plus the grace on"
    " record, before the round's timeout and before the fragment's next round was opened."
)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The command's options; ``policy`` is None where it asks for no what-if."""

    to: str | None
    origin: Path | None
    out: Path | None
    policy: WhatIfPolicy | None


def policy_of(
    *,
    merge: str | None,
    outer: str | None,
    outer_lr: float | None,
    outer_momentum: float | None,
    quorum: int | None,
    max_staleness: int | None,
    staleness_discount: float | None,
) -> WhatIfPolicy | None:
    """Return the policy that is asked about; None where none is."""
    if merge not in {None, *MERGES}:
        if not (module := code.module_of(str(merge))):
            msg = f"--merge {merge!r} is not known: use {' or '.join(MERGES)}, or module:function."
            raise ConfigError(msg, path="merge")
        code.allow([module])
    if staleness_discount is not None and not 0 < staleness_discount <= 1:
        msg = f"--staleness-discount is {staleness_discount}: give a number above 0, at most 1."
        raise ConfigError(msg, path="staleness_discount")
    policy = WhatIfPolicy(
        merge=merge,
        outer=outer,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        quorum=quorum,
        max_staleness=max_staleness,
        staleness_discount=staleness_discount,
    )
    return None if policy == WhatIfPolicy() else policy


def run_replay(
    *,
    config: Path | None,
    sets: Sequence[str],
    run: str | None,
    nats: str | None,
    options: ReplayOptions,
    as_json: bool,
) -> None:
    """Replay a run; HistoryBroken for a version that does not, StateLost where the window ends."""
    given = loading.load(config, [*sets, *([f"nats.url={nats}"] if nats else [])])
    replayed = asyncio.run(_replayed(given, run, named=nats is not None, options=options))
    if as_json:
        print(json.dumps(replayed_to_json(replayed), indent=2))
    else:
        _show(replayed, options)
    _refuse_wrong(replayed)
    replayed.require_whole()


def _refuse_wrong(replayed: Replayed) -> None:
    if replayed.wrong:
        raise HistoryBroken(replayed.wrong[0].sentence)


async def _replayed(
    given: Settings, run: str | None, *, named: bool, options: ReplayOptions
) -> Replayed:
    async with log_of(given, run, named=named) as at, bus_from(at.nats, "replay") as bus:
        log = RunLog.of(bus, await ledger.read_run(bus, at.run or await newest_run(bus)))
        moment = parse(options.to, time.time_ns()) if options.to else ReplayMoment()
        if options.policy is not None:
            # Says what is wrong with it before anything is read.
            options.policy.make_outer(log.config, log.plan)
        found = await survey(log, moment)
        bases = await asyncio.to_thread(_bases, given, log, found, options)
        with ExitStack() as stack:
            on_progress, sink = stack.enter_context(progress()), None
            if options.out is not None:
                metadata = {"run": log.run, "ledger_sequence": str(found.sequence)}
                written = stack.enter_context(parameters(options.out, log.plan, metadata))
                sink = written.add
            replayed = await replay(
                log,
                bases=bases,
                known=found,
                policy=options.policy,
                sink=sink,
                on_progress=on_progress,
            )
            if options.out is not None:  # what is not right is not written
                _refuse_wrong(replayed)
                replayed.require_whole()
            return replayed


def _bases(given: Settings, log: RunLog, found: Survey, options: ReplayOptions) -> Bases:
    """Return where to begin: the checkpoint that was named, genesis, or one that is found."""
    access = given.local.store
    if options.origin is not None:
        return CheckpointBases(options.origin, log, access)
    if not any(found.base.values()):
        return from_genesis
    path = usable(f"{root_of(access)}/{log.run}", log, found, access)
    if path is not None:
        return CheckpointBases(path, log, access)
    if all(found.base.values()):
        raise StateLost(found.lost_sentence(next(iter(found.base))))
    return from_genesis


def replayed_to_json(replayed: Replayed) -> dict[str, Any]:
    """Return a replay as plain types; digests are hexadecimal."""
    curves = _curves(replayed)
    return {
        "ok": replayed.whole and not replayed.wrong,
        "run": replayed.run,
        "sequence": replayed.sequence,
        "window": asdict(replayed.survey.window),
        "replayable_from": replayed.survey.base,
        "fragments": [{**asdict(f), "digest": f"{f.digest:016x}"} for f in replayed.fragments],
        "wrong": [asdict(difference) for difference in replayed.wrong],
        "drift": asdict(overall(curves)) if curves else None,
    }


def _curves(replayed: Replayed) -> list[DriftCurve]:
    return [f.curve for f in replayed.fragments if f.curve is not None]


def show_fragments(console: Console, replayed: Replayed) -> None:
    """Print a row per fragment."""
    drifts = bool(_curves(replayed))
    table = Table("fragment", "from", "to", "digest", *["drift", "cosine"] * drifts, box=None)
    for f in replayed.fragments:
        last = f.curve.points[-1] if f.curve and f.curve.points else None
        cosine = "" if last is None or last.cosine is None else f"{last.cosine:.4f}"
        drift = ["" if last is None else f"{last.distance:.3e}", cosine] * drifts
        base = f"v{f.base}" if f.base else "genesis"
        digest = f"{f.digest:016x}" if f.digest else ""
        table.add_row(f"f{f.fragment}", base, f"v{f.reached}", digest, *drift)
    console.print(table)
    for f in replayed.fragments:
        if f.stopped:
            console.print(f"stopped {f.stopped}", markup=False)


def _show(replayed: Replayed, options: ReplayOptions) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if options.policy is not None:
        console.print(ASSUMED)
        if options.policy.quorum is not None:
            console.print(ASSUMED_QUORUM)
    show_fragments(console, replayed)
    if curves := _curves(replayed):
        drift = overall(curves)
        cosine = "" if drift.cosine is None else f", cosine of the movements {drift.cosine:.4f}"
        console.print(f"Drift over all fragments: {drift.distance:.3e} of the norm{cosine}.")
        if any(curve.cold for curve in curves):
            console.print("The other outer optimizer began without the state of the run's own.")
    for sentence in window_sentences(replayed.survey):
        console.print(sentence)
    steps = sum(f.reached - f.base for f in replayed.fragments)
    if replayed.whole and not replayed.wrong:
        console.print(
            f"Run {replayed.run} rebuilt as of ledger sequence {replayed.sequence}:"
            f" {steps:,} versions, each with the digest that was committed."
        )
    if options.out is not None:
        console.print(f"Parameters are in {file_of(options.out)}.")
