"""``skerry export``: a checkpoint as a folder of Hugging Face weights."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from skerry.algorithm.fragments import LeafSpec
from skerry.errors import ConfigError, ModelError
from skerry.log.memory import MemoryBroker
from skerry.models import hf
from skerry.models.arch import read_arch
from skerry.models.export import FORMS, export_hf, export_peft, export_tensors
from skerry.models.tensors import tensors_of
from skerry.settings.local import StoreSettings
from skerry.settings.models import RunConfig
from skerry.store import checkpoint
from skerry.store.local import LocalStore
from tests.support.checkpoints import QUICK, save
from tests.support.hf_folder import MOE
from tests.support.scripted_run import ScriptedRun

ARCH = read_arch(json.dumps(MOE | {"dtype": "bfloat16"}))
LEAVES = tuple(LeafSpec(name, t.shape) for name, t in sorted(tensors_of(ARCH).items()))


async def checkpoint_of(store: LocalStore, model: dict[str, str], tokenizer: str = "") -> str:
    """Write a checkpoint of a scripted run with the parameters of ARCH, and return its folder."""
    config = RunConfig.model_validate({**QUICK, "model": model})
    data = config.data.model_copy(update={"tokenizer": tokenizer})
    config = config.model_copy(update={"data": data})
    bus = MemoryBroker().connect()
    scripted = await ScriptedRun.begin(bus, config=config, leaves=LEAVES)
    await scripted.commit_all(step=7, tokens=70)
    return str(store.root / await save(scripted, store))


async def test_an_export_holds_the_checkpoints_values_and_the_sources_tokenizer(
    store: LocalStore, tmp_path: Path
) -> None:
    where = await checkpoint_of(store, {"config": ARCH.config})
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    out = export_hf(where, tmp_path / "out", StoreSettings(), source=source, dtype="float32")
    _, saved = checkpoint.params(store, Path(where).name)
    found = hf.read_tensors(out, hf.read_config(out))
    assert found.keys() == saved.keys()
    assert all(np.array_equal(np.asarray(found[name]), saved[name]) for name in saved)
    assert (out / "tokenizer.json").read_text() == "{}"


async def test_an_export_has_the_type_that_the_models_config_names(
    store: LocalStore, tmp_path: Path
) -> None:
    where = await checkpoint_of(store, {"config": ARCH.config})
    out = export_hf(where, tmp_path / "out", StoreSettings())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


async def test_an_export_names_its_type_once(store: LocalStore, tmp_path: Path) -> None:
    config = json.dumps(json.loads(ARCH.config) | {"torch_dtype": "float16"})
    where = await checkpoint_of(store, {"config": config})
    out = export_hf(where, tmp_path / "out", StoreSettings(), dtype="float32")
    table = json.loads((out / "config.json").read_text())
    assert {name: table[name] for name in table if "dtype" in name} == {"dtype": "float32"}


async def test_whoever_may_read_an_exports_config_may_read_its_weights(
    store: LocalStore, tmp_path: Path
) -> None:
    where = await checkpoint_of(store, {"config": ARCH.config})
    out = export_hf(where, tmp_path / "out", StoreSettings())
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1


async def test_the_tensors_of_a_model_without_a_config_are_written_by_name(
    store: LocalStore, tmp_path: Path
) -> None:
    where = await checkpoint_of(store, {"preset": "own"})
    out = export_tensors(where, tmp_path / "out", StoreSettings())
    _, saved = checkpoint.params(store, Path(where).name)
    found = load_file(out / "model.safetensors")
    assert found.keys() == saved.keys()
    assert all(np.array_equal(found[name], saved[name]) for name in saved)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"factory": "mine:model"}, "a model of your own"),
        ({"preset": "nano"}, "other tensors"),
        ({"preset": "own"}, "--to tensors"),
    ],
)
async def test_what_cannot_be_exported_is_one_sentence(
    store: LocalStore, tmp_path: Path, model: dict[str, str], said: str
) -> None:
    where = await checkpoint_of(store, model)
    with pytest.raises(ModelError, match=said):
        export_hf(where, tmp_path / "out", StoreSettings())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["hf", "tensors"])
async def test_an_export_fills_the_folder_that_is_there_as_a_mounted_disk_needs(
    store: LocalStore, tmp_path: Path, form: str
) -> None:
    where = await checkpoint_of(store, {"config": ARCH.config})
    (tmp_path / "out").mkdir()
    there = (tmp_path / "out").stat().st_ino
    out = FORMS[form](where, tmp_path / "out", StoreSettings(), source=None, dtype=None)
    assert out.stat().st_ino == there
    assert all(path.is_file() for path in out.iterdir())


@pytest.mark.parametrize("form", ["hf", "tensors"])
async def test_an_export_that_does_not_fit_its_disk_leaves_one_sentence_and_no_folder(
    store: LocalStore, tmp_path: Path, form: str, short_of_disk: Callable[[], None]
) -> None:
    where = await checkpoint_of(store, {"config": ARCH.config})
    short_of_disk()
    with pytest.raises(ConfigError, match=r"Cannot write .*out \(.*File too large"):
        FORMS[form](where, tmp_path / "out", StoreSettings(), source=None, dtype=None)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def short_of_disk() -> Iterator[Callable[[], None]]:
    """Return what lets no file of this process grow beyond 4 kB, until the test ends."""
    own, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (own, most))


def test_adapters_are_exported_in_float32_alone(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="stored in float32, not in bfloat16"):
        export_peft("none", tmp_path / "out", StoreSettings(), dtype="bfloat16")


async def test_another_tokenizer_than_the_runs_is_not_copied_beside_its_weights(
    store: LocalStore, tmp_path: Path
) -> None:
    where = await checkpoint_of(store, {"config": ARCH.config}, tokenizer="another")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="this run's learners have another: name the folder"):
        export_hf(where, tmp_path / "out", StoreSettings(), source=tmp_path)


@pytest.mark.parametrize("source", ["nowhere", "."])
def test_a_folder_without_a_tokenizer_is_refused_before_anything_is_read(
    tmp_path: Path, source: str
) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        export_hf("none", tmp_path / "out", StoreSettings(), source=tmp_path / source)
