"""Faults on purpose from the page: only in a run that allows them, only by who has the token.

They are those of ``skerry chaos``, one learner at a time, and end by themselves: also when this
service is stopped.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import structlog
from starlette.responses import JSONResponse
from starlette.routing import Route

from skerry.errors import ConfigError, SkerryError
from skerry.service.control import ControlError
from skerry.tasks import TaskGroup
from skerry_tools.chaos.actions import Kill, Pause, silence
from skerry_tools.chaos.ground import NotFired
from skerry_tools.chaos.local import LocalGround

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from starlette.requests import Request

    from skerry_tools.chaos.ground import Action

log = structlog.get_logger()

LONGEST_S = 300.0
LEARNER = "learner"
LEAST_TOKEN = 16
MOST_BODY = 1024

Made = dict[str, "Callable[[LocalGround, str, float], Action]"]
ACTIONS: Made = {
    "kill": Kill,
    "pause": lambda ground, name, _: Pause(ground, name),
    "partition": lambda ground, name, _: silence(ground, name),
}
HEAL = "heal"


class Striker(Protocol):
    """Who carries out what the page asks for."""

    async def strike(self, name: str, action: str, duration_s: float) -> str:
        """Do it, and return a sentence that says so; SkerryError says why not."""
        ...


@dataclass(frozen=True, slots=True)
class Begun:
    """A fault that has begun, and for how long it is to last at most."""

    name: str
    action: str
    fault: Action
    duration_s: float
    healed: asyncio.Event


@dataclass(slots=True)
class Strikes:
    """Strikes learners of the local cluster; ``run`` ends each fault in its time."""

    ground: LocalGround
    _begun: asyncio.Queue[Begun] = field(default_factory=asyncio.Queue["Begun"])
    _held: dict[tuple[str, str], asyncio.Event] = field(
        default_factory=dict[tuple[str, str], asyncio.Event]
    )
    """Each is set once its learner is healed."""

    async def run(self) -> None:
        """End what was begun after its time, for ever; cancelled, at once."""
        try:
            async with TaskGroup() as group:
                while True:
                    begun = await self._begun.get()
                    group.create_task(self._hold(begun), name=begun.action)
        finally:
            while not self._begun.empty():
                await self._begun.get_nowait().fault.end()

    async def strike(self, name: str, action: str, duration_s: float) -> str:
        """Do it to a learner; NotFired or ControlError if there is nothing to strike."""
        if self.ground.kinds().get(name) != LEARNER:
            msg = f"There is no learner process {name!r} in this cluster."
            raise ConfigError(msg, path="name")
        if action == HEAL:
            await self._heal(name)
            return f"{name} is left alone again."
        if (name, action) in self._held:
            msg = f"{name} suffers this already: wait, or heal it."
            raise NotFired(msg)
        fault = ACTIONS[action](self.ground, name, duration_s)
        self._held[name, action] = healed = asyncio.Event()  # it may be asked for again meanwhile
        try:
            await fault.begin()
        except BaseException:
            del self._held[name, action]
            raise
        self._begun.put_nowait(Begun(name, action, fault, duration_s, healed))
        log.warning("strike", learner=name, action=action, duration_s=duration_s)
        return f"{action} of {name} has begun and is over in {duration_s:g} s."

    async def _hold(self, begun: Begun) -> None:
        name, action = begun.name, begun.action
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(begun.duration_s):
                    await begun.healed.wait()
        finally:
            try:
                await asyncio.shield(begun.fault.end())
            except ControlError:
                pass  # a cluster that is gone needs no healing
            except SkerryError as error:
                log.warning("strike_not_ended", learner=name, action=action, error=str(error))
            finally:  # not before: the end of this one must not undo the next
                self._held.pop((name, action), None)

    async def _heal(self, name: str) -> None:
        """Undo whatever was done, by whomever: a monitor that died left its faults behind."""
        for (struck, _), healed in self._held.items():
            if struck == name:
                healed.set()
        entry = self.ground.entries().get(name)
        if entry is not None and entry.alive:
            with suppress(ProcessLookupError):
                os.kill(entry.pid, signal.SIGCONT)
        with suppress(ControlError):
            await self.ground.open_route(name)


def read_token(path: Path) -> str:
    """Return the token that a file holds; ConfigError for one that cannot be used."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"health.token_file is {path}, which cannot be read: name a file that you may read."
        raise ConfigError(msg, path="health.token_file") from error
    if len(token) < LEAST_TOKEN:
        msg = f"The token in {path} is shorter than {LEAST_TOKEN} characters: make a longer one."
        raise ConfigError(msg, path="health.token_file")
    return token


def strike_route(striker: Striker, token: str, allowed: Callable[[], bool]) -> Route:
    """Return the route on which the page asks for faults; ``allowed``: this run permits them."""

    async def answer(request: Request) -> JSONResponse:
        if not allowed():
            return _no(403, "This run was not created with --set chaos.allow=true.")
        if not _knows(request.headers.get("authorization", ""), token):
            return _no(401, "This needs the token that `skerry up` printed with the address.")
        name, action = request.path_params["name"], request.path_params["action"]
        if action not in {*ACTIONS, HEAL}:
            return _no(404, f"There is no such action: use {', '.join([*ACTIONS, HEAL])}.")
        try:
            duration_s = await _duration_s(request)
            said = await striker.strike(name, action, duration_s)
        except SkerryError as error:
            return _no(409, str(error))
        return JSONResponse({"said": said})

    return Route("/api/learners/{name}/{action}", answer, methods=["POST"])


def _no(status: int, why: str) -> JSONResponse:
    return JSONResponse({"error": why}, status)


def _knows(header: str, token: str) -> bool:
    kind, _, given = header.partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(given.encode(), token.encode())


async def _duration_s(request: Request) -> float:
    """Return how long it is to last; ConfigError for what is no such time."""
    wrong = ConfigError(f"duration_s must be above 0 and at most {LONGEST_S:g}.", path="duration_s")
    if int(request.headers.get("content-length", "0") or 0) > MOST_BODY:
        raise wrong
    try:
        duration_s = float((await request.json())["duration_s"])
    except (ValueError, KeyError, TypeError) as error:
        raise wrong from error
    if not (math.isfinite(duration_s) and 0 < duration_s <= LONGEST_S):
        raise wrong
    return duration_s
