"""What another command may ask of ``skerry up`` while it runs: to kill, and when to start again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.cli.cluster.processes import BROKER
from skerry.errors import ConfigError
from skerry.service.control import ControlError

if TYPE_CHECKING:
    from skerry.cli.cluster.keeper import Keeper
    from skerry.cli.cluster.supervise import Supervisor
    from skerry.service.control import Answer


def orders(kept: Supervisor, keeper: Keeper | None) -> Answer:
    """Return what carries out ``{"op": "kill", "name": ..., "back_after_s": ...}``.

    A kill that was asked for is no crash: it is started again after that time, however often.
    ``{"op": "show"}`` is answered with the services that run, and changes nothing.
    """

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request.get("op") == "show":
            return {"pids": kept.pids()}
        if request.get("op") != "kill":
            msg = f"There is no order {request.get('op')!r}: use kill or show."
            raise ConfigError(msg, path="op")
        name, back_after_s = str(request["name"]), float(request.get("back_after_s", 0.0))
        try:
            if name != BROKER:
                return {"pid": kept.kill(name, back_after_s=back_after_s)}
            if keeper is not None:
                return {"pid": keeper.kill(back_after_s=back_after_s)}
        except ProcessLookupError as error:
            raise ControlError(str(error)) from error
        except KeyError as error:
            msg = f"There is no process {name!r} in this cluster."
            raise ConfigError(msg, path="name") from error
        msg = "The broker was not started by this cluster: kill it where it runs."
        raise ControlError(msg)

    return answer
