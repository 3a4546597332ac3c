"""What another command may ask of a cluster that runs."""

from __future__ import annotations

import pytest

from skerry.cli.cluster.orders import orders
from skerry.cli.cluster.supervise import Supervisor
from skerry.errors import ConfigError
from skerry.service.control import ControlError


async def test_what_runs_is_told_and_nothing_is_touched() -> None:
    answer = orders(Supervisor([], lambda _event: None), None)
    assert await answer({"op": "show"}) == {"pids": {}}


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        ({"op": "dance"}, ConfigError, "no order 'dance'"),
        ({"op": "kill", "name": "nobody"}, ConfigError, "no process 'nobody'"),
        ({"op": "kill", "name": "broker"}, ControlError, "not started by this cluster"),
    ],
)
async def test_an_order_that_cannot_be_obeyed_says_why(
    request_: dict[str, object], error: type[Exception], words: str
) -> None:
    answer = orders(Supervisor([], lambda _event: None), None)
    with pytest.raises(error, match=words):
        await answer(request_)
