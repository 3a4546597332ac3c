"""``skerry chaos``: faults on purpose against a run, and the verdict on it.

Either against a cluster that ``skerry up`` keeps in this folder, with every fault there is, or over
a broker's address against a run wherever its services are, with those of messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from skerry.cli.cluster.folder import RunFolder
from skerry.cli.local_log import CONNECT_S, newest_run
from skerry.cli.programs import SERVICES
from skerry.errors import ConfigError, HistoryBroken, RunNotFound, SkerryError, StoreError
from skerry.log import ledger
from skerry.log.base import Bus
from skerry.protocol.messages import RunRecord
from skerry.service.clusters import ROOT, RunningCluster, running
from skerry.service.entry import bus_from, settings_from
from skerry.service.interrupts import Interrupted
from skerry.settings import loading
from skerry.settings.local import LocalSettings, NatsSettings, StoreSettings
from skerry.status.format import printable
from skerry.store.checkpoint import verify
from skerry.store.finding import locate
from skerry_tools.chaos import plan as plans
from skerry_tools.chaos.drill import DrillResult, FaultDrill
from skerry_tools.chaos.drilled import DrilledRun, able, refuse, refuse_kinds, refuse_targets
from skerry_tools.chaos.healing import Healing, run_heal, undo_first
from skerry_tools.chaos.lease import leased
from skerry_tools.chaos.local import LocalRun
from skerry_tools.chaos.once import run_once
from skerry_tools.chaos.plan import BROKER, DRAWN, FaultPlan, Kind
from skerry_tools.chaos.remote import remote

CREATED_S = 60.0
DRILL_S, PAUSE_S = 120.0, 5.0
TARGETS = (*(service for service in SERVICES if service != "evaluator"), BROKER)
"""The services that are struck where no targets are named."""


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """The command's options; ``kinds`` and ``targets`` empty: all that there are."""

    config: Path | None = None
    sets: tuple[str, ...] = ()
    nats: str | None = None
    run: str | None = None
    seed: int | None = None
    every_s: float = 5.0
    duration_s: float | None = None
    """Of all faults together, DRILL_S unless given; of a pause by ``once`` PAUSE_S."""
    kinds: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    plan: Path | None = None
    quiet_s: float = 10.0
    heal_s: float = 300.0
    goodput: float = 0.0
    as_json: bool = False
    dry_run: bool = False
    heal: bool = False
    once: tuple[str, str] | None = None


def run_chaos(options: ChaosOptions) -> None:
    """Run a drill and print its verdict; HistoryBroken if a check failed.

    Once faults may have begun the verdict is printed however it ended.
    """
    if options.once is not None:
        _once(*options.once, options)
        return
    plans.check_number("quiet_s", options.quiet_s)
    plans.check_number("goodput", options.goodput)
    local = settings_from(options.nats, options.config, options.sets).local
    elsewhere = local.nats.url != NatsSettings().url
    far = options.nats or (elsewhere and not options.heal)  # healing asks no broker
    cluster = None if far else _cluster(options.run)
    if options.heal:
        if cluster is None:
            msg = (
                "There is nothing to heal over a broker's address, where no fault outlasts its "
                "drill: give --heal in the folder of `skerry up`, without --nats."
            )
            raise ConfigError(msg, path="heal")
        run_heal(cluster.run, as_json=options.as_json)
        return
    result = asyncio.run(_stoppable(options, local, cluster))
    if result is not None and not result.ok:
        failed = next(check for check in result.checks if not check.ok)
        msg = f"Chaos found something: {failed.name}: {failed.detail} (seed {result.seed})."
        raise HistoryBroken(msg)


def _once(fault: str, name: str, options: ChaosOptions) -> None:
    if options.nats is not None or options.plan is not None or options.heal:
        msg = "--once strikes one process of this machine: leave out --nats, --plan and --heal."
        raise ConfigError(msg, path="once")
    for_s = PAUSE_S if options.duration_s is None else options.duration_s
    plans.check_number("duration_s", for_s, above=True)
    run_once(_cluster(options.run), fault, name, for_s)


def _print_verdict(result: DrillResult, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for check in result.checks:
        table.add_row("ok" if check.ok else "[red]FAILED[/]", check.name, check.detail)
    Console(highlight=False).print(table)


def _cluster(run: str | None) -> RunningCluster:
    """Return the cluster to strike; RunNotFound if there is none in this folder."""
    found = [cluster for cluster in running() if run is None or cluster.run == run]
    if not found:
        named = "" if run is None else f" of run {run!r}"
        msg = (
            f"No cluster{named} runs in {ROOT.absolute()}: start one with `skerry up --set "
            "chaos.allow=true`, and give this command in the same folder, or name the broker of a "
            "run elsewhere with --nats."
        )
        raise RunNotFound(msg)
    return found[0]


def make_plan(options: ChaosOptions, drilled: DrilledRun) -> FaultPlan:
    """Return the plan that was asked for; ConfigError for one that cannot be run here."""
    if options.plan is not None:
        plan = plans.load(options.plan)
        refuse(plan, drilled)
        return plan
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    present = set(drilled.kinds().values())
    targets = options.targets or tuple(kind for kind in TARGETS if kind in present)
    refuse_targets(targets, drilled)
    if unknown := [name for name in options.kinds if name not in set(Kind)]:
        known = ", ".join(kind for kind in Kind if kind not in plans.SIMULATED)
        msg = f"There is no fault {unknown[0]!r}: use any of {known}."
        raise ConfigError(msg, path="kinds")
    kinds = tuple(map(Kind, options.kinds)) or tuple(
        kind for kind in able(drilled) if kind in DRAWN
    )
    refuse_kinds(kinds, drilled)
    duration_s = DRILL_S if options.duration_s is None else options.duration_s
    plan = plans.random_plan(
        seed, options.every_s, duration_s, kinds, targets, heal_s=options.heal_s
    )
    if not plan.faults:
        msg = "This draws no fault at all: give more --duration-s, or targets the kinds can strike."
        raise ConfigError(msg, path="duration_s")
    refuse(plan, drilled)
    return plan


async def _stoppable(
    options: ChaosOptions, local: LocalSettings, cluster: RunningCluster | None
) -> DrillResult | None:
    """Run it; SIGINT, SIGTERM and SIGHUP heal first, and then end it with Interrupted."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    number = signal.SIGHUP  # unless it is another one

    def end(by: signal.Signals) -> None:
        nonlocal number
        number = by
        task.cancel()

    for other in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(other, end, other)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        loop.add_signal_handler(signal.SIGHUP, _hung_up, task)
    try:
        return await _chaos(options, local, cluster)
    except asyncio.CancelledError:
        raise Interrupted(number) from None


def _hung_up(task: asyncio.Task[object]) -> None:
    """End the drill although its terminal is gone: whatever is still said must not fail.

    A shell sends it again after the kernel did; a third signal would interrupt the healing.
    """
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: None)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode):
                os.dup2(nowhere, number)
    os.close(nowhere)
    task.cancel()


async def _chaos(
    options: ChaosOptions, local: LocalSettings, cluster: RunningCluster | None
) -> DrillResult | None:
    """Run the plan, or print it for a dry run, which has no result.

    ``cluster`` is the one to inject faults into, None for a run that is kept elsewhere.
    """
    async with contextlib.AsyncExitStack() as stack:
        notes: list[str] = []
        if cluster is not None and not options.dry_run:
            stack.enter_context(RunFolder(cluster.run).drilled())
            healed = await undo_first(cluster.run) or Healing()
            if healed.wrong:
                raise SkerryError(" ".join(healed.wrong))
            notes += [f"Left by an earlier drill: {undone}" for undone in healed.undone]
        patience_s = min(CONNECT_S, local.nats.connect_timeout_s)
        nats = local.nats.model_copy(update={"connect_timeout_s": patience_s})
        if cluster is not None:
            nats = cluster.reached_with(local.nats)
        bus = await stack.enter_async_context(bus_from(nats, "chaos"))
        record = await _record(bus, options.run, cluster)
        config = loading.run_config_from_json(record.config_json)
        if not config.chaos.allow:
            msg = (
                f"Run {record.run!r} does not allow faults, and nothing was touched: only a run "
                "that was created with --set chaos.allow=true does."
            )
            raise ConfigError(msg, path="chaos.allow")
        drilled: DrilledRun
        if cluster is None:
            drilled = far = await stack.enter_async_context(remote(bus, record.run, config))
            if far.unheard:
                names = ", ".join(far.unheard)
                notes.append(
                    f"Nothing is heard of {names}: struck and judged are the others alone."
                )
        else:
            folder = RunFolder(cluster.run)
            drilled = LocalRun(record.run, folder.path, bus, cluster.proxied)
            local = loading.load(folder.settings).local
        plan = make_plan(options, drilled)
        if options.dry_run:
            print(plans.dumps(plan), end="")
            return None
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        lease = leased(bus, record.run, holder, config.log.replicas)
        await stack.enter_async_context(lease)
        return await _drill(options, drilled, plan, local.store, notes)


async def _drill(
    options: ChaosOptions,
    drilled: DrilledRun,
    plan: FaultPlan,
    store: StoreSettings,
    notes: Sequence[str],
) -> DrillResult:
    """Run the plan, say what happens, and print what came of it, however it ends."""

    def say(text: str) -> None:
        print(printable(text), file=sys.stderr if options.as_json else None, flush=True)

    for note in notes:
        say(note)
    drill = FaultDrill(
        drilled,
        plan,
        quiet_s=options.quiet_s,
        least=options.goodput,
        damage=partial(damage, store),
        say=say,
    )
    try:
        return await drill.run()
    finally:
        _print_verdict(drill.result(), as_json=options.as_json)


async def _record(bus: Bus, run: str | None, cluster: RunningCluster | None) -> RunRecord:
    """Return the run's record; RunNotFound if there is none.

    The first learner of a cluster that is kept here may still be on its way to create it.
    """
    if cluster is None:
        return await ledger.read_run(bus, run or await newest_run(bus))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CREATED_S):
            return await ledger.wait_run(bus, cluster.run)
    return await ledger.read_run(bus, cluster.run)


async def damage(access: StoreSettings, path: str) -> str:
    """Return what is wrong with the checkpoint at an address, or nothing."""
    try:
        await asyncio.to_thread(lambda: verify(*locate(path, access)))
    except StoreError as error:
        return str(error)
    return ""
