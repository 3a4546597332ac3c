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
from dataclasses import dataclass, field
from enum import StrEnum
from signal import Signals
from typing import TYPE_CHECKING, Any

from skerry.cli.cluster.processes import BROKER
from skerry.cli.cluster.proxy import OPEN, LinkCut, LinkShape, shape_from
from skerry.errors import ConfigError, SkerryError
from skerry.service.control import ControlError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.cli.cluster.proxy import Proxy
    from skerry.cli.cluster.supervisor import Supervisor

LEARNER = "learner"
LONGEST_S = 300.0


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
                return {"pid": self._kill(str(request["name"]), _back_after_s(request))}
            case "fault":
                return {"said": await self._begin(str(request["name"]), request)}
            case "heal":
                return {"said": await self._heal(str(request["name"]))}
            case "set":
                return self._proxy().set(request.get("route"), shape_from(request))
            case "open":
                return {"opened": [] if self.proxy is None else self.proxy.open_all()}
            case op:
                msg = f"There is no order {op!r}: use show, kill, fault, heal, set or open."
                raise ConfigError(msg, path="op")

    def _kill(self, name: str, back_after_s: float) -> int:
        """SIGKILL a process; one that is asked for is no crash, however often."""
        kept = self.broker if name == BROKER else self.services
        if kept is None:
            msg = "The broker was not started by this cluster: kill it where it runs."
            raise ControlError(msg)
        try:
            return kept.kill(name, back_after_s=back_after_s)
        except ProcessLookupError as error:
            raise ControlError(str(error)) from error
        except KeyError as error:
            msg = f"There is no process {name!r} in this cluster."
            raise ConfigError(msg, path="name") from error

    async def _begin(self, name: str, request: Mapping[str, Any]) -> str:
        self._require_learner(name)
        fault, duration_s = _fault(request), _duration_s(request)
        if (name, fault) in self._active:
            msg = f"A {fault} of {name} is under way: wait for its end, or heal it."
            raise ControlError(msg)
        # Noted first: it may be asked for again meanwhile.
        ending = asyncio.create_task(self._end_later(name, fault, duration_s), name=fault)
        self._active[name, fault] = ending
        try:
            await self._inflict(name, fault, duration_s)
        except BaseException:
            del self._active[name, fault]
            ending.cancel()
            raise
        self.say(f"Asked for on the page: a {fault} of {name} for {duration_s:g} s.")
        return f"A {fault} of {name} has begun and ends after {duration_s:g} s."

    async def _inflict(self, name: str, fault: LearnerFault, duration_s: float) -> None:
        match fault:
            case LearnerFault.KILL:
                self._kill(name, duration_s)
            case LearnerFault.PAUSE:
                self._signal(name, Signals.SIGSTOP)
            case LearnerFault.PARTITION:
                self._proxy().set(name, LinkShape(cut=LinkCut.BLACKHOLE))

    async def _end_later(self, name: str, fault: LearnerFault, duration_s: float) -> None:
        await asyncio.sleep(duration_s)
        try:
            await self._end(name, fault)
        except SkerryError as error:
            self.say(f"The {fault} of {name} could not be ended: {error}")
        del self._active[name, fault]  # not before: the end of this one must not undo the next

    async def _end(self, name: str, fault: LearnerFault) -> None:
        """Undo a fault, also where there is none; a kill ends when its learner is back."""
        if fault is LearnerFault.PAUSE and name in self.services.pids():
            self._signal(name, Signals.SIGCONT)
        if fault is LearnerFault.PARTITION and self.proxy is not None:
            self.proxy.set(name, OPEN)

    async def _heal(self, name: str) -> str:
        self._require_learner(name)
        for fault in LearnerFault:
            if (ending := self._active.pop((name, fault), None)) is not None:
                ending.cancel()
            await self._end(name, fault)
        return f"{name} is left alone again."

    def _signal(self, name: str, number: Signals) -> None:
        try:
            self.services.signal(name, number)
        except ProcessLookupError as error:
            raise ControlError(str(error)) from error

    def _proxy(self) -> Proxy:
        if self.proxy is None:
            msg = (
                "The services reach their broker without a proxy, so no network fault is possible."
            )
            raise ControlError(msg)
        return self.proxy

    def _require_learner(self, name: str) -> None:
        if self.services.kinds().get(name) != LEARNER:
            msg = f"There is no learner {name!r} in this cluster."
            raise ConfigError(msg, path="name")


def _fault(request: Mapping[str, Any]) -> LearnerFault:
    try:
        return LearnerFault(str(request.get("fault")))
    except ValueError as error:
        msg = f"There is no fault {request.get('fault')!r}: use {', '.join(LearnerFault)}."
        raise ConfigError(msg, path="fault") from error


def _back_after_s(request: Mapping[str, Any]) -> float:
    back_after_s = float(request.get("back_after_s", 0.0))
    if not 0 <= back_after_s < math.inf:
        msg = f"back_after_s is {back_after_s}: give a finite number, 0 or more."
        raise ConfigError(msg, path="back_after_s")
    return back_after_s


def _duration_s(request: Mapping[str, Any]) -> float:
    try:
        duration_s = float(request["duration_s"])
    except (ValueError, KeyError, TypeError):
        duration_s = math.nan
    if not 0 < duration_s <= LONGEST_S:
        msg = f"duration_s must be above 0 and at most {LONGEST_S:g}."
        raise ConfigError(msg, path="duration_s")
    return duration_s
