"""A question that cannot be asked is refused with the path and the reason."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import ConfigError
from skerry.models.tensors import active_parameters
from skerry.settings.tree import Tree
from skerry_tools.plan.measured import WIRE_BITS
from skerry_tools.plan.memory import learner_need
from skerry_tools.plan.question import question, read, shipped
from skerry_tools.plan.simulation_answer import setup_of
from skerry_tools.plan.trained import deployment, trained
from tests.support.plans import asked, site


@pytest.mark.parametrize(
    ("sites", "tables", "path", "reason"),
    [
        ({}, {}, "sites", "is empty"),
        ({"a": site(up="0 Gbit/s")}, {}, "sites.a.up", "more than 0"),
        ({"a": site(up="5 Gb/s")}, {}, "sites.a.up", "bits or bytes"),
        ({"a": site(down="400 MB/s")}, {}, "sites.a.down", "write all in one unit"),
        ({"a": site(), "b": site(up="1 GB/s")}, {}, "sites.b.up", "sites.a.up is 3 Gbit/s"),
        ({"a": site(flops_per_chip="1 TFLOP/s")}, {}, "sites.a.step_time", "give one of them"),
        ({f"s{n}": site() for n in range(4097)}, {}, "sites", "at most 4096"),
        ({"a": site(upp="1 Gbit/s")}, {}, "sites.a.upp", "did you mean sites.a.up?"),
        ({"a": {"up": "1 Gbit/s"}}, {}, "sites.a.step_time", "flops_per_chip"),
        (2, {"hub": {"site": "z"}}, "hub.site", "there are a, b"),
        (2, {"hub": {"write": "5 Gb/s"}}, "hub.write", "bits or bytes"),
        (2, {"sync": {"learners": 3}}, "sync.learners", "the sites have 2"),
        (2, {"sync": {"quorm": 1}}, "sync.quorm", "did you mean sync.quorum"),
        (2, {"sync": {"h_steps": 10**18}}, "sync.h_steps", "at most 1000000000"),
        ({"a": site(up="1e-300 bit/s")}, {}, "sites.a.up", "from 1 to 1e+18"),
        ({"a": site(step_time="1e300 s")}, {}, "sites.a.step_time", "from 1e-09"),
        (2, {"plan": {"tokens": "lots"}}, "plan.tokens", "write a number"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused_by_path(
    sites: dict[str, Any] | int, tables: dict[str, Any], path: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as refused:
        asked(sites, **tables)
    assert refused.value.path == path
    assert str(refused.value).startswith(path)


@pytest.mark.parametrize(
    ("setting", "path", "nearest"),
    [
        ("sync.quorum=9", "sync.quorum", ""),
        ("fleet.chips=3", "fleet.chips", ""),
        ("failures.chip_mtbf=5 d", "failures.chip_mtbf", "failures.chip_mtbi"),
        ("failure.chip_mtbi=5 d", "failure.chip_mtbi", "failures.chip_mtbi"),
        ("failures.chip_mtbi=1 s", "simulation.days", ""),
        ("sync.learner=3", "sync.learner", "sync.learners"),
        ("recovery.law=lazy", "recovery.law", ""),
        ('outages=[{"learners": [8], "lasts": "1 h"}]', "outages.0.learners", ""),
        ('outages=[{"learners": [1]}]', "outages.0.lasts", ""),
        ('outages=[{"last": "1 h", "lasts": "1 h"}]', "outages.0.last", ""),
        ('outages=[{"lasts": "1 h", "every": "1 h"}]', "outages.0.every", ""),
        ('outages=[{"lasts": "1us", "every": "2us"}]', "outages.0.every", ""),
        ("checkpoints.every=1us", "checkpoints.every", ""),
    ],
)
def test_a_simulation_that_cannot_be_is_refused_by_path(
    setting: str, path: str, nearest: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        setup_of("goodput-table", [setting])
    assert (caught.value.path, caught.value.nearest) == (path, nearest)
    assert path in str(caught.value)


def test_an_unknown_scenario_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are four-regions, goodput-table, llama-3"):
        setup_of("goodput-tabel", [])
    (tmp_path / "empty.toml").write_text("", "utf-8")
    with pytest.raises(ConfigError, match="is empty"):
        setup_of(str(tmp_path / "empty.toml"), [])
    with pytest.raises(ConfigError, match="cannot be read"):
        setup_of(str(tmp_path / "none.toml"), [])


def test_learners_are_those_of_the_sites_and_k_of_a_blocking_mode_follows() -> None:
    found = asked({"a": site(learners=2), "b": site()}, mode="streaming")
    assert (found.run.sync.learners, found.run.sync.quorum) == (3, 3)
    assert found.open == frozenset()
    assert asked(2, sync={"h_steps": 30}).open == {"fragments", "shards"}


def test_a_file_of_sites_and_set_win_over_the_config(tmp_path: Path) -> None:
    config, sites = tmp_path / "run.toml", tmp_path / "sites.toml"
    config.write_text('[sync]\nh_steps = 30\n[nats]\nurl = "nats://b:1"\n[plan]\ntokens = "1B"\n')
    sites.write_text('[plan]\ntokens = "2B"\n[sites.a]\nup = "1 Gbit/s"\nstep_time = "1 s"\n')
    found = question(read([config, sites], ["sites.a.rtt=10 ms", "sync.fragments=4"]))
    assert (found.run.sync.h_steps, found.run.sync.fragments) == (30, 4)
    assert found.tables.plan.tokens == 2e9
    assert found.tables.sites["a"].rtt == pytest.approx(0.01)
    with pytest.raises(ConfigError, match=r"did you mean a\?"):
        read([sites], ["sites.aa.up=1 Gbit/s"])


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"parameters": 4, "sync": {"fragments": 8}}, "sync.fragments is 8"),
        ({"parameters": None, "model": {"factory": "mine:model"}}, "plan.parameters is missing"),
        ({"parameters": None, "model": {"heads": 3}}, "model.heads"),
    ],
)
def test_a_model_that_cannot_be_sized_is_refused(tables: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        trained(asked(2, **tables))


def test_the_model_gives_its_parameters_and_a_bare_count_even_fragments() -> None:
    load = trained(asked(2, None, model={"preset": "small"}))
    assert (load.parameters, load.layers) == (75713280, 12)
    load = trained(asked(2, 1001, sync={"fragments": 10}))
    assert load.fragment == 101


def test_experts_move_whole_and_compute_with_those_that_a_token_sees() -> None:
    load = trained(asked(2, None, model={"preset": "moe-0.3b"}))
    assert load.arch is not None
    assert load.parameters == sum(leaf.size for leaf in load.leaves)
    stacks = sum(leaf.size for leaf in load.leaves if leaf.unit)
    tables = sum(leaf.size for leaf in load.leaves if "embed_tokens" in leaf.name)
    active = active_parameters(load.arch)
    assert active == pytest.approx(load.parameters - tables - stacks * 14 / 16, rel=1e-3)
    assert load.token_flops >= 6 * active


def test_adapters_are_all_that_moves_and_what_is_frozen_takes_part(tmp_path: Path) -> None:
    whole = trained(asked(2, None, model={"preset": "0.1b"}))
    assert whole.arch is not None
    (tmp_path / "config.json").write_text(whole.arch.config, "utf-8")
    load = trained(asked(2, None, model={"path": str(tmp_path), "lora_rank": 4}))
    assert load.parameters < whole.parameters / 50
    assert load.frozen == whole.parameters
    assert load.token_flops == pytest.approx(whole.token_flops * 4 / 6)


def test_deltas_take_more_bits_where_a_model_from_scratch_changes_more(tmp_path: Path) -> None:
    fast, usual = (
        trained(asked(2, None, model={"preset": "nano"}, train={"lr": lr})) for lr in (1e-2, 1e-3)
    )
    assert usual.down_bits < fast.down_bits
    assert fast.changed(h_steps=12).down_bits < fast.down_bits < fast.changed(h_steps=48).down_bits
    assert fast.changed(delta_scheme="int4").down_bits == WIRE_BITS["int4"]
    assert fast.arch is not None
    (tmp_path / "config.json").write_text(fast.arch.config, "utf-8")
    given = asked(2, None, model={"path": str(tmp_path)}, train={"lr": 1e-2})
    assert trained(given).down_bits == trained(asked(2, 771200)).down_bits == WIRE_BITS["auto"]


def test_a_mesh_says_how_many_chips_there_are() -> None:
    found = deployment(asked({"a": site(mesh="data=2,fsdp=4"), "b": site(chips=8)}))
    assert [one.table.chips for one in found.sites.values()] == [8, 8]
    need = [learner_need(found, one).state for one in found.sites.values()]
    assert need[0] > need[1], "data copies the state"


@pytest.mark.parametrize(
    ("chips", "mesh", "reason"),
    [
        (8, "fsdp=16", "needs 16 devices and this learner has 8"),
        (8, "rows=8", "is not a mesh"),
        (3, "auto", "splits a batch 3 ways"),
    ],
)
def test_a_mesh_that_a_learner_would_refuse_is_refused(chips: int, mesh: str, reason: str) -> None:
    one = {"up": "1 Gbit/s", "step_time": "1 s", "chips": chips, "mesh": mesh}
    tree = Tree({"model": {"preset": "nano"}, "sites": {"a": one}})
    with pytest.raises(ConfigError, match=reason) as refused:
        deployment(question(tree))
    assert refused.value.path == "sites.a.mesh"


@pytest.mark.parametrize(("name", "path"), shipped().items())
def test_every_scenario_gives_its_source_and_the_origin_of_its_values(
    name: str, path: Path
) -> None:
    values = tomllib.loads(path.read_text("utf-8"))
    assert "arXiv" in values["source"]
    words = {text.partition(":")[0].split(" ")[0] for text in values["status"].values()}
    assert words <= {"published", "fitted", "assumed", "derived"}
    if "sites" not in values:
        given = {
            f"{table}.{key}"
            for table, inner in values.items()
            if isinstance(inner, dict) and table != "status"
            for key in inner
        }
        assert given <= set(values["status"]), name
