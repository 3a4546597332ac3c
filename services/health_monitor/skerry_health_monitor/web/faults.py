"""Faults on purpose from the page: only in a run that allows them, only with the token.

The monitor passes on what is asked to the command that keeps the cluster (``skerry up``), over its
control socket. That command ends each fault in time, whatever becomes of the monitor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from skerry.errors import ConfigError, SkerryError
from skerry.service.control import CONTROL, ask
from skerry_health_monitor.web.gate import has_token, refusal

log = structlog.get_logger()

FAULTS = ("kill", "pause", "partition")
HEAL = "heal"
LONGEST_S = 300.0
MOST_BODY = 1024


Inject = Callable[[str, str, float], Awaitable[str]]
"""Does an action to a learner for so many seconds, and returns a sentence that says so."""


async def inject(folder: Path, name: str, action: str, duration_s: float) -> str:
    """Have the command that keeps the cluster of a run folder inject a fault, or end it.

    Raises ControlError if it is refused, or if no cluster answers.
    """
    order: dict[str, object] = {"op": HEAL, "name": name}
    if action != HEAL:
        order = {"op": "fault", "name": name, "fault": action, "duration_s": duration_s}
    sentence = str((await ask(folder / CONTROL, order))["said"])
    log.warning("fault_injected", learner=name, action=action, duration_s=duration_s)
    return sentence


def fault_route(inject: Inject, token: str, allowed: Callable[[], bool]) -> Route:
    """Return the route on which the page asks for faults; ``allowed``: this run permits them."""

    async def answer(request: Request) -> JSONResponse:
        if not allowed():
            return refusal(403, "This run was not created with --set chaos.allow=true.")
        if not has_token(request.headers, token):
            return refusal(401, "This needs the token that `skerry up` printed with the address.")
        name, action = request.path_params["name"], request.path_params["action"]
        if action not in {*FAULTS, HEAL}:
            return refusal(404, f"There is no such action: use {', '.join([*FAULTS, HEAL])}.")
        try:
            said = await inject(name, action, await _duration_s(request))
        except SkerryError as error:
            return refusal(409, str(error))
        return JSONResponse({"said": said})

    return Route("/api/learners/{name}/{action}", answer, methods=["POST"])


async def _duration_s(request: Request) -> float:
    """Return how long it is to last; ConfigError for what is no such time."""
    wrong = ConfigError(f"duration_s must be above 0 and at most {LONGEST_S:g}.", path="duration_s")
    body = b""
    async for chunk in request.stream():  # the header of a chunked body says no length
        body += chunk
        if len(body) > MOST_BODY:
            raise wrong
    try:
        duration_s = float(json.loads(body)["duration_s"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise wrong from error
    if not (math.isfinite(duration_s) and 0 < duration_s <= LONGEST_S):
        raise wrong
    return duration_s
