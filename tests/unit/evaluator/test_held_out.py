"""What the held-out loss of documents with weights counts, and what a byte of them costs."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest

from skerry.data.corpus import split
from skerry.data.source import Document
from skerry.errors import ConfigError
from skerry.models.base import build_model, judged_loss
from skerry.settings.models import DataConfig, ModelConfig, TrainConfig
from skerry_evaluator.global_model import HeldOutText

SMALL = ModelConfig(layers=1, d_model=16, heads=2, kv_heads=1, d_ff=24, vocab=64)
LENGTH, BYTES = 17, 40


def documents(weights: bool) -> Document:
    """Documents of 17 tokens and 40 bytes; the last five tokens are learnt, one by half."""
    rng = np.random.default_rng(0)
    count = 60
    each = np.zeros(LENGTH, np.float32)
    each[-5:] = 1.0, 1.0, 0.5, 1.0, 1.0
    return Document(
        rng.integers(0, 64, count * LENGTH).astype(np.uint16),
        np.arange(1, count + 1) * LENGTH,
        rng.integers(0, 2**64 - 1, count, dtype=np.uint64),
        np.full(count, BYTES),
        np.tile(each, count) if weights else None,
    )


def held_out(weights: bool, model: Any) -> HeldOutText:
    config = DataConfig(seq_len=16, batch=2, streams=1, held_out=0.3)
    return HeldOutText.of(split([documents(weights)], config), 100, model)


def test_only_targets_count_and_by_their_weight() -> None:
    model: Any = build_model(SMALL, TrainConfig())
    params = jax.jit(model.init)(jax.random.key(0))
    text, loss, logits = held_out(True, model), jax.jit(judged_loss(model)), jax.jit(model.logits)
    total, weight = 0.0, 0.0
    for batch in text.batches:
        scores = jax.nn.log_softmax(logits(params, batch["tokens"][:, :-1]))
        wanted = batch["tokens"][:, 1:, None]
        lost = -np.take_along_axis(np.asarray(scores), wanted, axis=-1)[..., 0]
        total += float((lost * batch["weights"]).sum())
        weight += float(batch["weights"].sum())
    score = text.score([loss(params, batch) for batch in text.batches])
    assert score.loss == pytest.approx(total / weight, rel=1e-5)
    assert text.tokens == sum(int((batch["weights"] > 0).sum()) for batch in text.batches)
    assert score.bits_per_byte == pytest.approx(score.loss / math.log(2) / (BYTES / 5))


def test_a_target_of_a_text_writes_its_share_of_the_texts_bytes() -> None:
    model: Any = build_model(SMALL, TrainConfig())
    score = held_out(False, model).score([(2.0, 30.0), (4.0, 10.0)])
    assert score.loss == pytest.approx(2.5)
    assert score.bits_per_byte == pytest.approx(2.5 / math.log(2) / (BYTES / LENGTH))


def test_a_model_that_takes_tokens_alone_is_not_given_weights() -> None:
    with pytest.raises(ConfigError, match="takes tokens alone"):
        held_out(True, object())
