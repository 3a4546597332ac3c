"""A run of which no more than the log is known, wherever its services run: faults of messages.

Learners and syncers say themselves that they take part. Which process that is, nobody can tell from
there for certain, for a host's name and a pid may be those of a container: none is struck. No clock
of two machines is compared: what counts is what is heard while one listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skerry.errors import ConfigError
from skerry.log import ledger, presence
from skerry.protocol.messages import LearnerPhase, is_leaving
from skerry.tasks import TaskGroup
from skerry_tools.chaos.ground import Absent
from skerry_tools.chaos.messages import Messages
from skerry_tools.chaos.plan import SHARES, SIMULATED, Kind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from skerry.log.base import Bus
    from skerry.settings.models import RunConfig
    from skerry_tools.chaos.ground import Action
    from skerry_tools.chaos.plan import Fault

OFFERED = tuple(kind for kind in Kind if kind in SHARES - SIMULATED)
SILENT_S = 10.0
"""Who says nothing for so long, and for some of its usual intervals, is down."""
PULSES = 3
"""Usual intervals that one listens for before somebody counts as silent."""
LOOK_S = 0.05
LONGEST_S = 60.0
"""Nobody listens longer than this for a first word, however slow a learner's steps are."""
ENDED = frozenset({LearnerPhase.FINISHED, LearnerPhase.STOPPED})


@dataclass(frozen=True, slots=True)
class Heard:
    """A service as it is heard of; one that was stopped is only silent from here."""

    name: str
    kind: str
    which: str
    alive: bool
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    """The newest word of a service, at ``at_s`` of this machine's monotonic clock.

    That is minus infinity for what was said before we listened. ``silent_s``: longer means down.
    """

    kind: str
    which: str
    at_s: float
    silent_s: float


@dataclass(slots=True)
class RemoteGround:
    """One run by its log. ``entries`` are all that were heard of, ``kinds`` those of the start.

    ``unheard`` are learners that were not heard then, though none of them has said goodbye.
    """

    run: str
    bus: Bus
    config: RunConfig
    unheard: list[str] = field(default_factory=list[str], init=False)
    _words: dict[str, Word] = field(default_factory=dict[str, Word], init=False)
    _kinds: dict[str, str] = field(default_factory=dict[str, str], init=False)

    @property
    def logs(self) -> str:
        return "see its log where it runs"

    def entries(self) -> dict[str, Heard]:
        now = time.monotonic()
        return {
            name: Heard(name, word.kind, word.which, alive=now - word.at_s <= word.silent_s)
            for name, word in self._words.items()
        }

    async def settle(self) -> None:
        """Wait until who takes part has said something from now on, or been silent for too long."""
        since_s = time.monotonic()
        while self._resting(since_s):  # noqa: ASYNC110 - silence is no event
            await asyncio.sleep(LOOK_S)

    def entry(self, name: str) -> Heard:
        held = self.entries().get(name)
        if held is None or not held.alive:
            msg = f"nothing is heard of {name}"
            raise Absent(msg)
        return held

    def kinds(self) -> dict[str, str]:
        return dict(self._kinds)

    def unable(self) -> dict[Kind, str]:
        why = (
            f"over a broker's address there are {', '.join(OFFERED)} only, for a log tells of "
            "services and not of their processes: for others give this command in the folder of "
            "their `skerry up`, without --nats"
        )
        reasons = dict.fromkeys(set(Kind) - set(OFFERED), why)
        return reasons | dict.fromkeys(SIMULATED, "it exists in the simulation only: leave it out")

    def action(self, fault: Fault, target: str, seed: str) -> Action:
        chance = random.Random(seed)  # noqa: S311 - faults, no secrets
        return Messages(self, target, fault.kind, fault.amount, chance)

    async def undo(self) -> list[str]:
        """Nothing lasts: what has been published is read, refused and counted."""
        return []

    async def routes(self) -> dict[str, dict[str, Any]]:
        return {}

    async def listen(self) -> None:
        """Find out who takes part, and who may without being heard; ConfigError if no learner does.

        Where anybody works, learners that have not said goodbye have time for a first step.
        """
        began_s = time.monotonic()
        steps_s = await self._learning()
        sync, pulse_s = self.config.sync, self.config.liveness.pulse_s
        interval_s = max([pulse_s, *steps_s.values()])
        await asyncio.sleep(min(LONGEST_S, max(2 * sync.lease_s, PULSES * interval_s)))
        while (up := self._up()) and steps_s.keys() - up:
            if time.monotonic() > began_s + LONGEST_S:
                break
            await asyncio.sleep(LOOK_S)
        self._kinds = up
        self.unheard = sorted((await self._learning()).keys() - up)
        if "learner" not in self._kinds.values():
            who = "No learner" if self._kinds else "Nobody"
            listened_s = time.monotonic() - began_s
            msg = (
                f"{who} works on run {self.run!r}, as far as can be heard in {listened_s:.0f} s:"
                " it is finished, or its services do not run."
            )
            raise ConfigError(msg, path="run")

    async def _learning(self) -> dict[str, float]:
        """Return how long a step takes of who has joined and not said goodbye, 0 if not known."""
        joined = await ledger.members(self.bus, self.run)
        steps_s = dict.fromkeys(joined, 0.0)
        for name, pulse in (await presence.last_pulses(self.bus, self.run)).items():
            if pulse.phase not in ENDED:
                steps_s[name] = pulse.step_time_s
            elif name in joined and pulse.incarnation >= joined[name].incarnation:
                del steps_s[name]
        return steps_s

    async def learners(self) -> None:
        """Hear the learners, for ever."""
        async for pulse in presence.follow_pulses(self.bus, self.run):
            which, interval_s = f"incarnation {pulse.incarnation}", self.config.liveness.pulse_s
            interval_s = max(interval_s, pulse.step_time_s)
            self._hear(pulse.learner, "learner", which, interval_s, ended=pulse.phase in ENDED)

    async def syncers(self) -> None:
        """Hear the syncers, for ever."""
        async for pulse in presence.follow_syncer_pulses(self.bus, self.run):
            interval_s = self.config.sync.lease_s
            self._hear(pulse.syncer, "syncer", pulse.instance, interval_s, ended=is_leaving(pulse))

    def _resting(self, since_s: float) -> set[str]:
        """Return who is told of as alive for a word that is no newer than this."""
        up = self._up().keys() & self._kinds
        return {name for name in up if self._words[name].at_s <= since_s}

    def _up(self) -> dict[str, str]:
        return {name: heard.kind for name, heard in self.entries().items() if heard.alive}

    def _hear(
        self, name: str, kind: str, which: str, interval_s: float, *, ended: bool = False
    ) -> None:
        """Note a word; the first one of everybody may be an old one that the broker has kept."""
        now = name in self._words and not ended
        at_s = time.monotonic() if now else float("-inf")
        self._words[name] = Word(kind, which, at_s, max(SILENT_S, PULSES * interval_s))


@contextlib.asynccontextmanager
async def remote(bus: Bus, run: str, config: RunConfig) -> AsyncGenerator[RemoteGround]:
    """Yield what a run is known by; ConfigError if nobody takes part in it."""
    ground = RemoteGround(run, bus, config)
    async with TaskGroup() as group:
        tasks = [group.create_task(work) for work in (ground.learners(), ground.syncers())]
        try:
            await ground.listen()
            yield ground
        finally:
            for task in tasks:
                task.cancel()
