"""JAX and PyTorch learners train in one run: everything real, and in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.protocol.messages import Commit
from tests.support.cluster import Cluster, Service, until_commit
from tests.support.history import settle
from tests.support.nats_server import NatsServer

pytest.importorskip("torch")

pytestmark = [pytest.mark.nats, pytest.mark.drill, pytest.mark.timeout(240)]

COPYING = Path(__file__).with_name("copying.py")


def merges(*learners: tuple[str, int]) -> Callable[[Commit], bool]:
    """Return what sees a commit of trained steps from each of these incarnations."""

    def seen(commit: Commit) -> bool:
        found = {(row.learner, row.incarnation) for row in commit.consumed if row.tokens}
        return commit.version > 1 and found >= set(learners)

    return seen


def ends(service: Service) -> list[str]:
    return [line for line in service.said.splitlines() if line.startswith("ends with")]


async def test_jax_and_torch_learners_share_one_global_state_to_the_last_bit(
    nats_server: NatsServer, run_id: str, tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text("")
    async with NatsBus(nats_server.url, name="test") as bus:
        async with Cluster(nats_server.url, run_id, tmp_path, config, tmp_path / "jax") as cluster:
            given = (nats_server.url,)

            async def start(example: str, name: str) -> Service:
                return await cluster.start_script(
                    name, COPYING, example, *given, name, run_id, "0.02"
                )

            await cluster.start("syncer", "s")
            with_jax = await start("jax_loop", "a")
            with_torch = await start("torch_loop", "b")
            await until_commit(bus, run_id, merges(("a", 1), ("b", 1)))
            with_torch.kill9()
            await with_torch.process.wait()
            with_torch = await start("torch_loop", "b")
            await until_commit(bus, run_id, merges(("a", 1), ("b", 2)))
            assert await with_jax.ended(120) == 0, with_jax.said
            assert await with_torch.ended(120) == 0, with_torch.said
            assert len(ends(with_jax)) == 3
            assert ends(with_jax) == ends(with_torch), "every parameter, bit by bit"
            assert "loaded torch\n" in with_torch.said, "a torch learner's machine needs no JAX"
            assert "goes on from sequence 0" not in with_torch.said, "its data goes on"
        history = await settle(bus, run_id)
        assert history.violations == ()
        assert (await ledger.read_run(bus, run_id)).fragments == 4
