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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from skerry.cli.cluster.folder import RunFolder, running
from skerry.cli.follow import Feed
from skerry.cli.live import Lines, Screen, keep_showing, screen
from skerry.cli.programs import ROOT
from skerry.cli.status import CONNECT_S, newest_run
from skerry.errors import ConfigError, HistoryBroken, RunNotFound, StoreError
from skerry.log import ledger
from skerry.service.connect import bus_from
from skerry.settings import loading
from skerry.settings.models import NatsSettings
from skerry.store.checkpoint import verify
from skerry.store.listing import locate
from skerry_tools.chaos import plan as plans
from skerry_tools.chaos.convergence import Check
from skerry_tools.chaos.drill import Drill, Result
from skerry_tools.chaos.ground import able, refuse, refuse_kinds, refuse_targets
from skerry_tools.chaos.heal import heal_first, run_heal
from skerry_tools.chaos.lease import leased
from skerry_tools.chaos.local import LocalGround
from skerry_tools.chaos.plan import FaultPlan, Kind
from skerry_tools.chaos.remote import remote

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
    from pathlib import Path

    from skerry.cli.cluster.folder import RunningCluster
    from skerry.log.base import Bus
    from skerry.protocol.messages import RunRecord
    from skerry.settings.models import LocalSettings, StoreSettings
    from skerry_tools.chaos.engine import Firing
    from skerry_tools.chaos.ground import Ground

CREATED_S = 60.0
KINDS = ("learner", "syncer", "checkpointer", "health-monitor", "broker")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for; ``kinds`` and ``targets`` empty: all that there are."""

    config: Path | None = None
    sets: tuple[str, ...] = ()
    nats: str | None = None
    run: str | None = None
    seed: int | None = None
    every_s: float = 5.0
    duration_s: float = 120.0
    kinds: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    plan: Path | None = None
    save_plan: Path | None = None
    report: Path | None = None
    quiet_s: float = 10.0
    heal_s: float = 300.0
    goodput: float = 0.0
    as_json: bool = False
    dry_run: bool = False
    heal: bool = False


def run_chaos(wanted: Wanted) -> None:
    """Run a drill and print its verdict; HistoryBroken if a check failed.

    Once faults may have begun the report is written and the verdict printed however it ended.
    """
    _refuse_numbers(wanted)
    named = [f"nats.url={wanted.nats}"] if wanted.nats else []
    given = loading.load(wanted.config, [*wanted.sets, *named])
    elsewhere = given.local.nats.url != NatsSettings().url
    far = wanted.nats or (elsewhere and not wanted.heal)  # healing asks no broker
    cluster = None if far else _cluster(wanted.run)
    if wanted.heal:
        if cluster is None:
            msg = (
                "There is nothing to heal over a broker's address, where no fault outlasts its "
                "drill: give --heal in the folder of `skerry up`, without --nats."
            )
            raise ConfigError(msg, path="heal")
        run_heal(cluster, as_json=wanted.as_json)
        return
    results: list[Result] = []
    try:
        asyncio.run(_stoppable(wanted, given.local, cluster, results.append))
    finally:
        told = [_tell(wanted, result) for result in results]
    for result in told:
        if not result.ok:
            failed = next(check for check in result.checks if not check.ok)
            msg = f"Chaos found something: {failed.name}: {failed.detail} (seed {result.seed})."
            raise HistoryBroken(msg)


def _refuse_numbers(wanted: Wanted) -> None:
    """Raise ConfigError for a number that no plan holds and that means nothing."""
    for name, value in (("quiet_s", wanted.quiet_s), ("goodput", wanted.goodput)):
        if not 0 <= value <= plans.MOST_S:  # which is false for nan, too
            msg = f"{name} is {value}: give a number from 0 to {plans.MOST_S:.0f}."
            raise ConfigError(msg, path=name)


def _tell(wanted: Wanted, result: Result) -> Result:
    """Write and print the result, and return it; a report that cannot be written is a failure."""
    if wanted.report is not None:
        try:
            _write_report(wanted.report, result)
        except ConfigError as error:
            failed = Check("the report is written", ok=False, detail=str(error))
            result = replace(result, checks=(*result.checks, failed))
    if wanted.as_json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        Console(highlight=False).print(verdict(result))
    return result


def _write_report(path: Path, result: Result) -> None:
    _write(path, json.dumps(result.to_json(), indent=2) + "\n")


def make_plan(wanted: Wanted, ground: Ground) -> FaultPlan:
    """Return the plan that was asked for; ConfigError for one that cannot be run here."""
    if wanted.plan is not None:
        plan = plans.load(wanted.plan)
        refuse(plan, ground)
        return plan
    seed = random.SystemRandom().randrange(2**31) if wanted.seed is None else wanted.seed
    present = set(ground.kinds().values())
    targets = wanted.targets or tuple(kind for kind in KINDS if kind in present)
    refuse_targets(targets, ground)
    kinds = tuple(_kind(name) for name in wanted.kinds) or able(ground)
    refuse_kinds(kinds, ground)
    plan = plans.random_plan(
        seed, wanted.every_s, wanted.duration_s, kinds, targets, heal_s=wanted.heal_s
    )
    if not plan.faults:
        msg = "This draws no fault at all: give more --duration-s, or targets the kinds can strike."
        raise ConfigError(msg, path="duration_s")
    return plan


def verdict(result: Result) -> Table:
    """Return the checks as a table."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for check in result.checks:
        table.add_row("ok" if check.ok else "[red]FAILED[/]", check.name, check.detail)
    return table


def sentence(firing: Firing, *, over: bool) -> str:
    """Return what a person is told when a fault begins and when it is over."""
    at, what = f"{firing.began_s:6.1f} s", f"{firing.kind} {firing.target}"
    if not over:
        return f"{at}  {what} begins"
    if not firing.fired:
        return f"{at}  {what} did not fire: {firing.proof}"
    return f"{firing.ended_s:6.1f} s  {what} ends: {firing.proof}"


def _kind(name: str) -> Kind:
    try:
        return Kind(name)
    except ValueError as error:
        known = ", ".join(kind for kind in Kind if kind not in plans.SIMULATED)
        msg = f"There is no fault {name!r}: use any of {known}."
        raise ConfigError(msg, path="kinds") from error


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


async def _stoppable(
    wanted: Wanted,
    local: LocalSettings,
    cluster: RunningCluster | None,
    on_result: Callable[[Result], None],
) -> None:
    """Run it; SIGINT, SIGTERM and SIGHUP heal first, and then end it with KeyboardInterrupt."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        loop.add_signal_handler(signal.SIGHUP, _hung_up, task)
    try:
        await _chaos(wanted, local, cluster, on_result)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _hung_up(task: asyncio.Task[None]) -> None:
    """End the drill although nobody listens any more: whatever is still said must not fail.

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
    wanted: Wanted,
    local: LocalSettings,
    cluster: RunningCluster | None,
    on_result: Callable[[Result], None],
) -> None:
    """Run it; ``on_result`` gets what came of it once it has begun, however it ends."""
    nats = local.nats
    if cluster is None:
        patience_s = min(CONNECT_S, nats.connect_timeout_s)
        nats = nats.model_copy(update={"connect_timeout_s": patience_s})
        await _drilled(wanted, local.model_copy(update={"nats": nats}), None, (), on_result)
        return
    folder = RunFolder(cluster.run)
    local = local.model_copy(update={"nats": cluster.reached_with(nats)})
    with contextlib.nullcontext() if wanted.dry_run else folder.drilled():
        left = [] if wanted.dry_run else await heal_first(cluster.run)
        await _drilled(wanted, local, cluster, left, on_result)


async def _drilled(
    wanted: Wanted,
    local: LocalSettings,
    cluster: RunningCluster | None,
    left: Sequence[str],
    on_result: Callable[[Result], None],
) -> None:
    """Run the plan, or print it for a dry run; ``left`` is what an earlier drill had left.

    ``cluster`` is the one to inject faults into, None for a run that is kept elsewhere.
    """
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(bus_from(local.nats, "chaos"))
        record = await _record(bus, wanted.run, cluster)
        config = loading.run_config_from_json(record.config_json)
        if not config.chaos.allow:
            msg = (
                f"Run {record.run!r} does not allow faults, and nothing was touched: only a run "
                "that was created with --set chaos.allow=true does."
            )
            raise ConfigError(msg, path="chaos.allow")
        ground: Ground
        folder = None if cluster is None else RunFolder(cluster.run)
        if cluster is None or folder is None:
            ground = far = await stack.enter_async_context(remote(bus, record.run, config))
            left = [_unheard(far.unheard)] if far.unheard else []
        else:
            ground = LocalGround(record.run, folder.path, bus, cluster.proxied)
        plan = make_plan(wanted, ground)
        if wanted.save_plan is not None:
            _write(wanted.save_plan, plans.dumps(plan))
        if wanted.dry_run:
            print(plans.dumps(plan), end="")
            return
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        lease = leased(bus, record.run, holder, config.log.replicas)
        await stack.enter_async_context(lease)
        feed = Feed(bus, record.run)
        on = await stack.enter_async_context(_shown(feed, quiet=wanted.as_json))
        for what in left:
            on.say(what)
        store = local.store if folder is None else loading.load(folder.settings).local.store
        drill = _drill(wanted, ground, plan, on, store)
        if wanted.report is not None:
            _write_report(wanted.report, drill.result())  # refused now, not after the faults
        try:
            await drill.run()
        finally:
            on_result(drill.result())


def _unheard(names: Sequence[str]) -> str:
    return f"Nothing is heard of {', '.join(names)}: struck and judged are the others alone."


async def _record(bus: Bus, run: str | None, cluster: RunningCluster | None) -> RunRecord:
    """Return the run's record; RunNotFound if there is none.

    The first learner of a cluster that is kept here may still be on its way to create it.
    """
    if cluster is not None:
        return await _created(bus, cluster.run)
    return await ledger.read_run(bus, run or await newest_run(bus))


async def _created(bus: Bus, run: str) -> RunRecord:
    """Return the run's record; its first learner may still be on its way to create it."""
    try:
        async with asyncio.timeout(CREATED_S):
            return await ledger.wait_run(bus, run)
    except TimeoutError:
        return await ledger.read_run(bus, run)


def _drill(
    wanted: Wanted, ground: Ground, plan: FaultPlan, on: Screen, access: StoreSettings
) -> Drill:
    return Drill(
        ground,
        plan,
        quiet_s=wanted.quiet_s,
        least=wanted.goodput,
        damage=judge(access),
        say=on.say,
        on_firing=lambda firing, over: on.say(sentence(firing, over=over)),
    )


def judge(access: StoreSettings) -> Callable[[str], Awaitable[str]]:
    """Return what says what is wrong with the checkpoint at an address, or nothing."""

    async def damage(path: str) -> str:
        try:
            await asyncio.to_thread(lambda: verify(*locate(path, access)))
        except StoreError as error:
            return str(error)
        return ""

    return damage


class _Silent(Lines):
    """Nothing but the verdict: for machines."""

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


@contextlib.asynccontextmanager
async def _shown(feed: Feed, *, quiet: bool) -> AsyncGenerator[Screen]:
    """Show the run while the context lasts; ``quiet``: only sentences, on stderr."""
    with _Silent() if quiet else screen() as on:
        tasks: Sequence[asyncio.Task[None]] = ()
        if not quiet:
            tasks = [
                asyncio.create_task(feed.run(), name="feed"),
                asyncio.create_task(keep_showing(feed, on), name="screen"),
            ]
        try:
            yield on
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        msg = f"{path} cannot be written ({error.strerror}): name another file."
        raise ConfigError(msg, path=str(path)) from error
