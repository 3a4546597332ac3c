"""A model of transformers' and ours are one to a run: one plan, the same bits, the same loss."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan, gather, plan
from skerry.client.jax_fragments import JaxFragments
from skerry.models.base import batch_loss, build_model, leaves_by_name, specs_of
from skerry.settings.models import ModelConfig, RunConfig, SyncConfig, TrainConfig
from tests.support.examples import example
from tests.support.hf_folder import MOE

torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers")
torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore:::(transformers|torch)", "ignore:.*LeafSpec")

QWEN = {key: value for key, value in MOE.items() if "expert" not in key} | {"model_type": "qwen3"}
GEMMA4 = QWEN | {
    "model_type": "gemma4_text",
    "layer_types": ["full_attention"] * int(MOE["num_hidden_layers"]),
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
}
SHAPES = {
    "gemma, tied": ModelConfig(preset="nano", layers=1, d_model=32, d_ff=48, vocab=260),
    "qwen3": ModelConfig(config=json.dumps(QWEN)),
    "qwen3, experts": ModelConfig(config=json.dumps(MOE)),
    "gemma 4, with a constant in each block": ModelConfig(config=json.dumps(GEMMA4)),
}


def global_state(cut: Plan) -> list[NDArray[np.float32]]:
    """Draw fragments as the wire decodes them: values that bf16 holds, zeros in the padding."""
    draw = np.random.default_rng(0)
    leaves = [draw.normal(scale=0.1, size=spec.shape).astype(np.float32) for spec in cut.leaves]
    found = [gather(fragment, leaves) for fragment in cut.fragments]
    return [(v.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for v in found]


def test_a_model_that_was_published_in_16_bits_has_weights_of_32() -> None:
    from skerry.torch import model_of

    published = ModelConfig(config=json.dumps(QWEN | {"dtype": "bfloat16"}))
    model = model_of(RunConfig(model=published))
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}


@pytest.mark.drill
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_both_models_are_cut_alike_adopt_the_same_bits_and_have_one_loss(
    shape: ModelConfig,
) -> None:
    from skerry.client.torch_fragments import TorchFragments, leaves_of, parameters_of
    from skerry.torch import model_of

    ours, theirs = build_model(shape, TrainConfig()), model_of(RunConfig(model=shape))
    specs = specs_of(ours)
    cut = plan(specs, 3)
    assert plan(leaves_of(theirs), 3).digest == cut.digest
    in_jax = JaxFragments(cut, SyncConfig(), ours.init(jax.random.key(0)))
    in_torch = TorchFragments(cut, SyncConfig(), theirs)
    for fragment, vector in enumerate(global_state(cut)):
        for held in (in_jax, in_torch):
            held.adopt(fragment, vector.copy())
    params, theirs_too = in_jax.params, parameters_of(theirs)
    for spec, leaf in zip(specs, leaves_by_name(params), strict=True):
        mine = theirs_too[spec.name].detach().numpy()
        np.testing.assert_array_equal(mine.view(np.uint32), np.array(leaf).view(np.uint32))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 17)).astype(np.int32)
    segments = np.array([[1] * 7 + [2] * 10, [1] * 12 + [0] * 5], np.int32)
    positions = np.array([[*range(7), *range(10)], [*range(12), *range(5)]], np.int32)
    packed = {"tokens": tokens, "segments": segments, "positions": positions}
    for batch in ({"tokens": tokens}, packed):
        loss, aux = jax.jit(batch_loss(ours))(params, batch)
        found = example("hf_loop").loss_of(theirs, batch)
        assert found.item() == pytest.approx(float(loss - aux.balance), abs=2e-5)
