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
from skerry.cli.status import log_of
from skerry.errors import ConfigError, HistoryBroken, StateLost
from skerry.log import ledger
from skerry.service.connect import bus_from
from skerry.settings import loading
from skerry.store.opening import root_of
from skerry_tools.audit.bases import CheckpointBases, usable
from skerry_tools.audit.branch import Policy, overall
from skerry_tools.audit.command_verify import newest_run, progress, window_sentences
from skerry_tools.audit.log import Log
from skerry_tools.audit.parameters import file_of, parameters
from skerry_tools.audit.replay import replay
from skerry_tools.audit.replayed import Replayed, from_genesis, lost_sentence, require_whole
from skerry_tools.audit.survey import survey
from skerry_tools.audit.target import Target, parse
from skerry_tools.audit.window import read_window

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from skerry.log.base import Bus
    from skerry.settings.models import Settings
    from skerry_tools.audit.branch import Curve
    from skerry_tools.audit.replayed import Bases
    from skerry_tools.audit.survey import Survey

ASSUMED = (
    "What if: the same contributions, rounds and base versions; learners that had seen another"
    " global state would have sent others, so a real run would have gone further apart."
)
ASSUMED_QUORUM = (
    "Quorum: rounds close at the arrival of the K-th answer by the broker's clock plus the grace on"
    " record, before the round's timeout and before the fragment's next round was opened."
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for; ``policy`` is None where it asks for no what-if."""

    to: str | None
    origin: Path | None
    out: Path | None
    policy: Policy | None


def policy_of(
    *,
    merge: str | None,
    outer: str | None,
    outer_lr: float | None,
    outer_momentum: float | None,
    quorum: int | None,
    max_staleness: int | None,
    staleness_discount: float | None,
) -> Policy | None:
    """Return the policy that is asked about; None where nothing is."""
    if merge not in {None, *MERGES}:
        if not (module := code.module_of(str(merge))):
            msg = f"--merge {merge!r} is not known: use {' or '.join(MERGES)}, or module:function."
            raise ConfigError(msg, path="merge")
        code.allow([module])
    if staleness_discount is not None and not 0 < staleness_discount <= 1:
        msg = f"--staleness-discount is {staleness_discount}: give a number above 0, at most 1."
        raise ConfigError(msg, path="staleness_discount")
    policy = Policy(
        merge=merge,
        outer=outer,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        quorum=quorum,
        max_staleness=max_staleness,
        staleness_discount=staleness_discount,
    )
    return None if policy == Policy() else policy


def run_replay(
    *,
    config: Path | None,
    sets: Sequence[str],
    run: str | None,
    nats: str | None,
    asked: Asked,
    as_json: bool,
) -> None:
    """Replay a run; HistoryBroken for a version that does not, StateLost where the window ends."""
    given = loading.load(config, [*sets, *([f"nats.url={nats}"] if nats else [])])
    replayed = asyncio.run(_replayed(given, run, named=nats is not None, asked=asked))
    if as_json:
        print(json.dumps(replayed_to_json(replayed), indent=2))
    else:
        _show(replayed, asked)
    if replayed.wrong:
        raise HistoryBroken(replayed.wrong[0].sentence)
    require_whole(replayed)


async def _replayed(given: Settings, run: str | None, *, named: bool, asked: Asked) -> Replayed:
    async with log_of(given, run, named=named) as at, bus_from(at.nats, "replay") as bus:
        log = await _log(bus, at.run)
        target = parse(asked.to, time.time_ns()) if asked.to else Target()
        if asked.policy is not None:
            # Says what is wrong with it before anything is read.
            asked.policy.make_outer(log.config, log.plan)
        found = await survey(log, target, await read_window(log))
        bases = await asyncio.to_thread(_bases, given, log, found, asked)
        with ExitStack() as stack:
            told, sink = stack.enter_context(progress()), None
            if asked.out is not None:
                metadata = {"run": log.run, "ledger_sequence": str(found.sequence)}
                written = stack.enter_context(parameters(asked.out, log.plan, metadata))
                sink = written.add
            replayed = await replay(
                log,
                bases=bases,
                known=found,
                policy=asked.policy,
                sink=sink,
                on_progress=told,
            )
            if asked.out is not None and not replayed.wrong:
                require_whole(replayed)
            if asked.out is not None and replayed.wrong:
                raise HistoryBroken(replayed.wrong[0].sentence)
            return replayed


async def _log(bus: Bus, run: str | None) -> Log:
    return Log.of(bus, await ledger.read_run(bus, run or await newest_run(bus)))


def _bases(given: Settings, log: Log, found: Survey, asked: Asked) -> Bases:
    """Return where to begin: the checkpoint that was named, genesis, or one that is found."""
    access = given.local.store
    if asked.origin is not None:
        return CheckpointBases(asked.origin, log, access)
    if not any(found.base.values()):
        return from_genesis
    path = usable(f"{root_of(access)}/{log.run}", log, found, access)
    if path is not None:
        return CheckpointBases(path, log, access)
    if all(found.base.values()):
        first = next(index for index, base in found.base.items() if base)
        raise StateLost(lost_sentence(first, found))
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


def _curves(replayed: Replayed) -> list[Curve]:
    return [f.curve for f in replayed.fragments if f.curve is not None]


def show_fragments(console: Console, replayed: Replayed) -> None:
    """Print a row per fragment."""
    drifts = bool(_curves(replayed))
    heads = ("fragment", "from", "to", "digest", *(("drift", "cosine") if drifts else ()))
    table = Table(*heads, box=None)
    for f in replayed.fragments:
        last = f.curve.points[-1] if f.curve and f.curve.points else None
        cosine = "" if last is None or last.cosine is None else f"{last.cosine:.4f}"
        drift = ("" if last is None else f"{last.distance:.3e}", cosine) if drifts else ()
        base = f"v{f.base}" if f.base else "genesis"
        digest = f"{f.digest:016x}" if f.digest else ""
        table.add_row(f"f{f.fragment}", base, f"v{f.reached}", digest, *drift)
    console.print(table)
    for f in replayed.fragments:
        if f.stopped:
            console.print(f"stopped {f.stopped}", markup=False)


def _show(replayed: Replayed, asked: Asked) -> None:
    console = Console(highlight=False, soft_wrap=True)
    found = replayed.survey
    if asked.policy is not None:
        console.print(ASSUMED)
        if asked.policy.quorum is not None:
            console.print(ASSUMED_QUORUM)
    show_fragments(console, replayed)
    if curves := _curves(replayed):
        drift = overall(curves)
        cosine = "" if drift.cosine is None else f", cosine of the movements {drift.cosine:.4f}"
        console.print(f"Drift over all fragments: {drift.distance:.3e} of the norm{cosine}.")
        if any(curve.cold for curve in curves):
            console.print("The other outer optimizer began without the state of the run's own.")
    raise_to = max((r.raise_to() for r in found.reach.values()), default=0)
    for sentence in window_sentences(found.window, found.reach, raise_to):
        console.print(sentence)
    steps = sum(f.reached - f.base for f in replayed.fragments)
    if replayed.whole and not replayed.wrong:
        console.print(
            f"Run {replayed.run} rebuilt as of ledger sequence {replayed.sequence}:"
            f" {steps:,} versions, each with the digest that was committed."
        )
    if asked.out is not None:
        console.print(f"Parameters are in {file_of(asked.out)}.")
