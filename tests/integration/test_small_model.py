"""docs/how-to/small-model.md as a reader runs it: one model, one JAX and one PyTorch learner."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skerry.algorithm.fragments import gather
from skerry.log import ledger
from skerry.log.global_fragments import GlobalReader
from skerry.log.nats.bus import NatsBus
from skerry.log.state import read_manifest
from skerry.protocol.messages import Commit
from skerry.protocol.records import plan_of
from tests.support.cluster import Cluster, until_commit
from tests.support.history import settle
from tests.support.nats_server import NatsServer
from tests.support.processes import skerry

pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

pytestmark = [pytest.mark.nats, pytest.mark.drill, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "small-model.md"
SHORT = {
    "layers = 12": "layers = 2\nd_model = 32\nheads = 4\nkv_heads = 2\nd_ff = 48",
    "vocab = 4096": "vocab = 300",
    "seq_len = 256": "seq_len = 32",
    "steps = 1000": "steps = 10000000\nduration_s = 60.0\n[sync]\nh_steps = 20",
}
"""What makes the page's run short."""


def merged(*learners: tuple[str, int]) -> Callable[[Commit], bool]:
    """Return what has seen commits of trained steps from each of these incarnations."""
    missing = set(learners)

    def seen(commit: Commit) -> bool:
        missing.difference_update((r.learner, r.incarnation) for r in commit.consumed if r.tokens)
        return not missing

    return seen


async def test_two_frameworks_train_the_model_of_the_page_to_one_global_state(
    nats_server: NatsServer, tmp_path: Path, jax_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKERRY_HEALTH__PORT", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "notes").mkdir()
    for n in range(60):
        lines = [f"Once, on day {n}, it rained {k * n % 97} drops.\n" for k in range(60)]
        (tmp_path / "notes" / f"{n}.txt").write_text("".join(lines))
    text = PAGE.read_text()
    (settings,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    short = reduce(lambda text, pair: text.replace(*pair), SHORT.items(), settings)
    (tmp_path / "small.toml").write_text(short)
    first, up, loop, elsewhere, after = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    allowed, loop = loop.split(maxsplit=1)
    assert elsewhere.endswith(loop)
    monkeypatch.setenv(*allowed.split("="))

    def done(line: str) -> str:
        line = line.replace("~/notes", "notes").replace("4096", "300")
        line = line.replace(".skerry/checkpoints", "checkpoints")  # where a Cluster has them
        said = skerry(tmp_path, *shlex.split(line)[1:])
        assert said.returncode == 0, said.stderr + said.stdout
        return said.stdout

    for line in first.splitlines():
        done(line)
    script, *arguments = shlex.split(loop)[1:]
    config, run = tmp_path / "small.toml", "small"
    async with (
        NatsBus(nats_server.url, name="test") as bus,
        Cluster(nats_server.url, run, tmp_path, config, jax_cache) as cluster,
    ):
        command = ("-m", "skerry.cli.main", *shlex.split(up)[1:], "--nats", nats_server.url)
        ours = await cluster.start_script("b", ROOT / script, *arguments)  # waits for the run
        under_way = await cluster.start_script("up", *command)
        await until_commit(bus, run, merged(("site-b", 1)))
        ours.kill9()
        await ours.ended()
        again = await cluster.start_script("b", ROOT / script, *arguments)
        await until_commit(bus, run, merged(("site-b", 2)))
        assert await again.ended(150) == 0, again.said
        assert await under_way.ended(90) == 0, under_way.said
        await until_commit(bus, run, merged(("learner-1", 1), ("site-b", 1)), timeout_s=5.0)
        history = await settle(bus, run)
        assert history.violations == ()
        plan = plan_of(await ledger.read_run(bus, run))
        held = transformers.AutoModelForCausalLM.from_pretrained(f"{run}-site-b").state_dict()
        leaves = [held[spec.name].numpy() for spec in plan.leaves]
        reader = GlobalReader(bus, run, plan)
        for fragment in plan.fragments:
            newest = await read_manifest(bus, run, plan, fragment.index)
            assert newest is not None
            mine, theirs = gather(fragment, leaves), await reader.read(newest)
            np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))
    assert "goes on from sequence 0" in ours.said
    assert "goes on from sequence 0" not in again.said
    sample, export = after.splitlines()
    assert done(sample).startswith("Once")
    done(export)
    assert transformers.AutoModelForCausalLM.from_pretrained("out/small").dtype is not None
