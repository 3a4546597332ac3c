"""Answer commands on a cluster's control socket: inject faults, and end them.

- ``{"op": "show"}``: the pids of the services, and the counters of their routes to the broker.
- ``{"op": "kill", "name": NAME, "back_after_s": S}``: SIGKILL; started again after that time.
- ``{"op": "fault", "name": LEARNER, "fault": FAULT, "duration_s": S}``: a fault that this process
  ends by itself, whatever becomes of the one that asked.
- ``{"op": "heal", "name": LEARNER}``: end what is wrong with a learner, whatever began it.
- ``set`` and ``open`` as ``proxy`` has them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from signal import Signals
from typing import Any

from skerry.cli.cluster.processes import BROKER
from skerry.cli.cluster.proxy import OPEN, LinkCut, LinkShape, Proxy, shape_from
from skerry.cli.cluster.supervisor import Supervisor
from skerry.errors import ConfigError, SkerryError
from skerry.service.control import ControlError

LEARNER = "learner"
LONGEST_S, MOST_AWAY_S = 300.0, 1e9


class LearnerFault(StrEnum):
    """What can be done to a learner for a while."""

    KILL = "kill"
    PAUSE = "pause"
    PARTITION = "partition"


@dataclass(slots=True)
class FaultControl:
    """Carries out commands on one cluster; ``broker`` is None for one that is not ours."""

    services: Supervisor
    broker: Supervisor | None = None
    proxy: Proxy | None = None
    say: Callable[[str], None] = lambda _sentence: None
    _active: dict[tuple[str, LearnerFault], asyncio.Task[None]] = field(
        default_factory=dict[tuple[str, LearnerFault], "asyncio.Task[None]"], init=False
    )

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command; SkerryError says why it cannot be."""
        match request.get("op"):
            case "show":
                routes = {} if self.proxy is None else self.proxy.show()
                return {"pids": self.services.pids(), "routes": routes}
            case "kill":
                at_once = not request.get("back_after_s")
                back_after_s = 0.0 if at_once else _seconds(request, "back_after_s", MOST_AWAY_S)
                return {"pid": self._kill(str(request["name"]), back_after_s)}
            case "fault":
                return {"said": self._begin(self._learner(request), request)}
            case "heal":
                return {"said": self._heal(self._learner(request))}
            case "set":
                return self._proxy().set(request.get("route"), shape_from(request))
            case "open":
                return {"opened": [] if self.proxy is None else self.proxy.open_all()}
            case op:
                msg = f"There is no order {op!r}: use show, kill, fault, heal, set or open."
                raise ConfigError(msg, path="op")

    def _kill(self, name: str, back_after_s: float) -> int:
        """SIGKILL a process; one that is asked for is no crash, however often."""
        for kept in filter(None, (self.broker, self.services)):
            if name in kept.kinds():
                return kept.kill(name, back_after_s=back_after_s)
        if name == BROKER:
            msg = "The broker was not started by this cluster: kill it where it runs."
            raise ControlError(msg)
        msg = f"There is no process {name!r} in this cluster."
        raise ConfigError(msg, path="name")

    def _begin(self, name: str, request: Mapping[str, Any]) -> str:
        try:
            fault = LearnerFault(str(request.get("fault")))
        except ValueError as error:
            msg = f"There is no fault {request.get('fault')!r}: use {', '.join(LearnerFault)}."
            raise ConfigError(msg, path="fault") from error
        duration_s = _seconds(request, "duration_s", LONGEST_S)
        if (name, fault) in self._active:
            msg = f"A {fault} of {name} is under way: wait for its end, or heal it."
            raise ControlError(msg)
        match fault:
            case LearnerFault.KILL:
                self._kill(name, duration_s)
            case LearnerFault.PAUSE:
                self.services.signal(name, Signals.SIGSTOP)
            case LearnerFault.PARTITION:
                self._proxy().set(name, LinkShape(cut=LinkCut.BLACKHOLE))
        ending = asyncio.create_task(self._end_later(name, fault, duration_s), name=fault)
        self._active[name, fault] = ending
        self.say(f"Asked for on the page: a {fault} of {name} for {duration_s:g} s.")
        return f"A {fault} of {name} has begun and ends after {duration_s:g} s."

    async def _end_later(self, name: str, fault: LearnerFault, duration_s: float) -> None:
        await asyncio.sleep(duration_s)
        try:
            self._end(name, fault)
        except SkerryError as error:
            self.say(f"The {fault} of {name} could not be ended: {error}")
        del self._active[name, fault]

    def _end(self, name: str, fault: LearnerFault) -> None:
        """Undo a fault, also where there is none; a kill ends when its learner is back."""
        if fault is LearnerFault.PAUSE and name in self.services.pids():
            self.services.signal(name, Signals.SIGCONT)
        if fault is LearnerFault.PARTITION and self.proxy is not None:
            self.proxy.set(name, OPEN)

    def _heal(self, name: str) -> str:
        for fault in LearnerFault:
            if (ending := self._active.pop((name, fault), None)) is not None:
                ending.cancel()
            self._end(name, fault)
        return f"{name} is left alone again."

    def _proxy(self) -> Proxy:
        if self.proxy is None:
            msg = (
                "The services reach their broker without a proxy, so no network fault is possible."
            )
            raise ControlError(msg)
        return self.proxy

    def _learner(self, request: Mapping[str, Any]) -> str:
        name = str(request["name"])
        if self.services.kinds().get(name) != LEARNER:
            msg = f"There is no learner {name!r} in this cluster."
            raise ConfigError(msg, path="name")
        return name


def _seconds(request: Mapping[str, Any], name: str, most: float) -> float:
    """Return a time that a command gives; ConfigError for none, or one out of bounds."""
    try:
        value = float(request.get(name, math.nan))
    except (ValueError, TypeError):
        value = math.nan
    if not 0 < value <= most:
        msg = f"{name} must be above 0 and at most {most:g}."
        raise ConfigError(msg, path=name)
    return value
