"""What a model writes: as its logits say, bounded, the same for one seed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skerry.protocol.messages import MOST_SAMPLE_BYTES
from skerry.settings.models import DataConfig, RunConfig
from skerry_evaluator.sampling import SampleWriter, clipped, to_text

pytestmark = pytest.mark.usefixtures("compile_once")

VOCAB = 256


def counting(params: Any, tokens: jax.Array) -> jax.Array:
    """Logits of a model that always writes the byte after the last one."""
    return params * jax.nn.one_hot((tokens + 1) % VOCAB, VOCAB)


def even(params: Any, tokens: jax.Array) -> jax.Array:
    """Logits of a model that finds every lower-case letter equally likely."""
    letters = (jnp.arange(VOCAB) >= ord("a")) & (jnp.arange(VOCAB) <= ord("z"))
    scores = jnp.where(letters, params, -1e9)
    return jnp.broadcast_to(scores, (*tokens.shape, VOCAB))


def config(source: str = "text", tokens: int = 8, seq_len: int = 32) -> RunConfig:
    data = {"source": source, "paths": ["x"], "seq_len": seq_len}
    return RunConfig.model_validate({"data": data, "eval": {"sample_tokens": tokens}})


STRONG = np.float32(1000)


def test_it_writes_what_the_logits_say_after_a_line_break() -> None:
    writer = SampleWriter(counting, config(), STRONG)
    assert writer.write(STRONG, 1) == "".join(map(chr, range(11, 19)))


def test_one_seed_writes_one_text_and_another_one_another() -> None:
    writer = SampleWriter(even, config(tokens=24), STRONG)
    assert writer.write(STRONG, 5) == writer.write(STRONG, 5)
    assert writer.write(STRONG, 5) != writer.write(STRONG, 6)


def test_it_writes_no_more_than_a_training_sequence_holds() -> None:
    assert len(SampleWriter(even, config(tokens=500, seq_len=16), STRONG).write(STRONG, 0)) == 15


def test_tokens_that_are_no_bytes_are_written_as_numbers() -> None:
    writer = SampleWriter(counting, config(source="tokens", tokens=4), STRONG)
    assert writer.write(STRONG, 0) == "1 2 3 4"


def test_text_that_is_no_utf8_still_is_text() -> None:
    wrong = to_text(DataConfig(), [104, 105, 255, 300])
    assert wrong == "hi\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


def test_a_sample_is_cut_between_characters() -> None:
    cut = clipped("x" + "é" * MOST_SAMPLE_BYTES)
    assert cut == "x" + "é" * ((MOST_SAMPLE_BYTES - 1) // 2)
