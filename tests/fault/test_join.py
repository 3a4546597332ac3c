"""The loops of the examples, run as their docstrings say: JAX and torch, one of them killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skerry.log.nats.bus import NatsBus
from skerry.protocol.messages import Commit
from tests.support.cluster import Cluster, until_commit
from tests.support.history import read_history
from tests.support.nats_server import NatsServer

pytest.importorskip("torch")

pytestmark = [pytest.mark.nats, pytest.mark.fault, pytest.mark.drill, pytest.mark.timeout(180)]

EXAMPLES = Path(__file__).parents[2] / "examples"


async def test_loop_that_is_killed_goes_on_where_the_ledger_says(
    shared_nats: NatsServer,
    run_id: str,
    tmp_path: Path,
    jax_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SKERRY_TRAIN__STEPS", "10000000")
    monkeypatch.setenv("SKERRY_TRAIN__DURATION_S", "60.0")
    config = tmp_path / "empty.toml"
    config.touch()

    def learnt_from_a(incarnation: int, commit: Commit) -> bool:
        return any(
            (row.learner, row.incarnation) == ("a", incarnation) and row.steps
            for row in commit.consumed
        )

    async with (
        NatsBus(shared_nats.url, name="test") as bus,
        Cluster(shared_nats.url, run_id, tmp_path, config, jax_cache) as cluster,
    ):

        def again(commit: Commit) -> bool:
            return learnt_from_a(2, commit)

        syncer = await cluster.start("syncer", "s")
        a, b = [
            await cluster.start_script(name, EXAMPLES / script, shared_nats.url, name, run_id)
            for name, script in {"a": "jax_loop.py", "b": "torch_loop.py"}.items()
        ]
        await until_commit(
            bus, run_id, lambda commit: commit.version > 2 and learnt_from_a(1, commit)
        )
        a.kill9()
        await a.ended()
        returned = await cluster.start_script(
            *("a", EXAMPLES / "jax_loop.py", shared_nats.url, "a", run_id)
        )
        await until_commit(bus, run_id, again)
        codes = [await service.ended(120) for service in (returned, b, syncer)]
        assert codes == [0, 0, 0], returned.said[-2000:]
        history = await read_history(bus, run_id)
    assert history.violations == ()
    goes_on = [re.search(r"goes on from sequence (\d+)", one.said) for one in (a, returned)]
    assert [int(found[1]) > 0 for found in goes_on if found] == [False, True]
    last = re.search(r"loss ([\d.]+) after", returned.said)
    assert last is not None
    assert float(last[1]) < 0.1
