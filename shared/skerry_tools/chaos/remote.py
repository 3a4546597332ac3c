"""A run of which no more than the log is known, wherever its services run: faults of messages.

Learners and syncers say themselves that they take part. Which process that is cannot be known for
certain from there, for a host's name and a pid may be those of a container: none is struck. No
clocks of two machines are compared: what counts is what is heard while one listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from skerry.errors import ConfigError
from skerry.log import ledger, run_records
from skerry.log.base import Bus
from skerry.protocol.messages import LearnerPhase, Pulse, SyncerPulse, is_leaving
from skerry.settings.models import RunConfig
from skerry_tools.chaos.drilled import (
    SIMULATION_ONLY,
    HeardService,
    Injected,
    Injection,
    beside,
    holds,
)
from skerry_tools.chaos.messages import MESSAGES
from skerry_tools.chaos.plan import LEARNER, SIMULATED, Kind

SILENT_S = 10.0
"""A service that says nothing for so long, and for some of its usual intervals, is down."""
PULSES = 3
"""Usual intervals without a word before a service counts as silent."""
LONGEST_S = 60.0
"""The longest wait for a first word, however slow a learner's steps are."""
ENDED = frozenset({LearnerPhase.FINISHED, LearnerPhase.STOPPED})


@dataclass(slots=True)
class RemoteRun:
    """One run by its log. ``heard`` are all that were heard of, ``present`` those of the start.

    ``unheard`` are learners that were not heard then, though none of them has said goodbye.
    """

    run: str
    bus: Bus
    config: RunConfig
    logs: str = "see its log where it runs"
    unheard: list[str] = field(default_factory=list[str])
    heard: dict[str, HeardService] = field(default_factory=dict[str, HeardService])
    present: dict[str, str] = field(default_factory=dict[str, str])

    def entries(self) -> dict[str, HeardService]:
        return self.heard

    async def settle(self) -> None:
        """Wait until each service has said something from now on, or been silent for too long."""
        since_s = time.monotonic()
        present = self.present.keys()
        await holds(lambda: all(self.heard[n].at_s > since_s for n in self._alive() & present))

    def kinds(self) -> dict[str, str]:
        return dict(self.present)

    def unable(self) -> dict[Kind, str]:
        why = (
            f"over a broker's address there are only messages ({', '.join(MESSAGES)}), for a log"
            " tells of services and not of their processes: for others give this command in the"
            " folder of their `skerry up`, without --nats"
        )
        reasons = dict.fromkeys(set(Kind) - MESSAGES.keys(), why)
        return reasons | dict.fromkeys(SIMULATED, SIMULATION_ONLY)

    def inject(self, injection: Injection) -> Injected:
        return MESSAGES[injection.fault.kind](self, injection)

    async def undo(self) -> list[str]:
        """Nothing lasts: what has been published is read, refused and counted."""
        return []

    async def routes(self) -> dict[str, dict[str, Any]]:
        return {}

    async def listen(self) -> None:
        """Find out which services take part; ConfigError if no learner does.

        Where any is at work, learners that have not said goodbye have time for a first step.
        """
        began_s = time.monotonic()
        steps_s = await self._learning()
        sync, pulse_s = self.config.sync, self.config.liveness.pulse_s
        interval_s = max([pulse_s, *steps_s.values()])
        await asyncio.sleep(min(LONGEST_S, max(2 * sync.lease_s, PULSES * interval_s)))
        left_s = began_s + LONGEST_S - time.monotonic()
        await holds(lambda: not self._alive() or steps_s.keys() <= self._alive(), left_s)
        up = self._alive()
        self.present = {name: self.heard[name].kind for name in sorted(up)}
        self.unheard = sorted((await self._learning()).keys() - up)
        if LEARNER not in self.present.values():
            subject = "No learner" if self.present else "Nothing"
            listened_s = time.monotonic() - began_s
            msg = (
                f"{subject} works on run {self.run!r}, as far as can be heard in {listened_s:.0f}"
                " s: it is finished, or its services do not run."
            )
            raise ConfigError(msg, path="run")

    async def _learning(self) -> dict[str, float]:
        """Return the step time of learners that have joined and not said goodbye, 0 if unknown."""
        joined = await ledger.members(self.bus, self.run)
        steps_s = dict.fromkeys(joined, 0.0)
        for pulse in await run_records.newest_each(self.bus, self.run, Pulse):
            if pulse.phase not in ENDED:
                steps_s[pulse.learner] = pulse.step_time_s
            elif (member := joined.get(pulse.learner)) and pulse.incarnation >= member.incarnation:
                del steps_s[pulse.learner]
        return steps_s

    async def hear_learners(self) -> None:
        """Note the learners' pulses, for ever."""
        async for pulse in run_records.follow(self.bus, self.run, Pulse):
            interval_s = max(self.config.liveness.pulse_s, pulse.step_time_s)
            which, ended = f"incarnation {pulse.incarnation}", pulse.phase in ENDED
            self._hear(pulse.learner, LEARNER, which, interval_s, ended=ended)

    async def hear_syncers(self) -> None:
        """Note the syncers' pulses, for ever."""
        async for pulse in run_records.follow(self.bus, self.run, SyncerPulse):
            interval_s, ended = self.config.sync.lease_s, is_leaving(pulse)
            self._hear(pulse.syncer, "syncer", pulse.instance, interval_s, ended=ended)

    def _alive(self) -> set[str]:
        return {name for name, service in self.heard.items() if service.alive}

    def _hear(self, name: str, kind: str, which: str, interval_s: float, *, ended: bool) -> None:
        """Note a word; the first one of each service may be one that the broker has kept."""
        now = name in self.heard and not ended
        at_s = time.monotonic() if now else float("-inf")
        silent_s = max(SILENT_S, PULSES * interval_s)
        self.heard[name] = HeardService(name, kind, which, at_s, silent_s)


@contextlib.asynccontextmanager
async def remote(bus: Bus, run: str, config: RunConfig) -> AsyncGenerator[RemoteRun]:
    """Yield what a run is known by; ConfigError if no learner takes part in it."""
    drilled = RemoteRun(run, bus, config)
    async with beside(drilled.hear_learners(), drilled.hear_syncers()):
        await drilled.listen()
        yield drilled
