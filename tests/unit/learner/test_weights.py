"""Initial parameters from a folder of Hugging Face weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from skerry.algorithm.fragments import gather, plan
from skerry.client.weights import FolderWeights
from skerry.errors import ModelError, RunMismatch
from skerry.models import hf
from skerry.models.adapters import digest_of
from skerry.models.base import build_model, specs_of
from skerry.models.presets import arch_of, written_out
from skerry.settings.models import ModelConfig, TrainConfig
from tests.support.hf_folder import random_folder


def recorded(folder: Path) -> ModelConfig:
    """Return the model's settings as a run that begins with the folder records them."""
    given = written_out(ModelConfig(path=str(folder)))
    return given.model_copy(update={"weights": digest_of(str(folder))})


def test_genesis_is_what_the_folder_holds_however_it_is_cut(tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "model")
    config = recorded(folder)
    cut = plan(specs_of(build_model(config, TrainConfig())), 7)
    weights = FolderWeights.of(str(folder), config, cut)
    tensors = hf.read_tensors(folder, arch_of(config))
    leaves = [np.asarray(tensors[leaf.name]) for leaf in cut.leaves]
    for fragment in cut.fragments:
        assert np.array_equal(-weights.genesis(fragment.index), gather(fragment, leaves))


def test_a_folder_may_be_named_by_its_place_in_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    random_folder(tmp_path / "model")
    config = recorded(Path("~/model"))
    cut = plan(specs_of(build_model(config, TrainConfig())), 2)
    assert FolderWeights.of("~/model", config, cut).genesis(0).any()


def test_a_folder_with_other_weights_than_the_run_began_with_is_refused(tmp_path: Path) -> None:
    config = recorded(random_folder(tmp_path / "model"))
    other = random_folder(tmp_path / "other", seed=1)
    cut = plan(specs_of(build_model(config, TrainConfig())), 2)
    with pytest.raises(RunMismatch, match="name a copy of that folder"):
        FolderWeights.of(str(other), config, cut)


def test_a_folder_that_is_no_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is it a model's folder"):
        digest_of(str(tmp_path))
