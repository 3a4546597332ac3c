"""Talking with a model: turns, and where an answer ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from skerry.data.chat import ChatTemplate
from skerry.data.tokenizer import Words
from skerry.models.base import build_model
from skerry.settings.models import ModelConfig, TrainConfig
from skerry_evaluator.chat import Conversation, talk
from skerry_evaluator.sampling import Sampler
from tests.support.hf_folder import MOE

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def conversation() -> Conversation:
    tokenizers = pytest.importorskip("tokenizers")
    words: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator(["a"], trainer)
    model: Any = build_model(ModelConfig(config=json.dumps(MOE)), TrainConfig())
    template = ChatTemplate(Path("folder"), TEMPLATE)
    params = jax.jit(model.init)(jax.random.key(0))
    words = Words(Path("folder"), 257, 257, (), words)
    return Conversation(template, words, Sampler(model, 64, temperature=0.0), params, 6, seed=1)


def test_each_line_is_a_turn_that_the_next_answer_knows() -> None:
    chat = conversation()
    first, second = talk(chat, ["hello\n", "\n", "and you?\n"])
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"] * 2
    assert [turn["content"] for turn in chat.turns] == ["hello", first, "and you?", second]
    assert first
    assert second


def test_an_answer_ends_where_the_template_ends_one() -> None:
    """A tokenizer that was trained on text has no token of its own for that."""
    chat = conversation()
    (whole,) = talk(chat, ["hello"])
    mark = whole[-1]
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        f"{{% if m.role == 'assistant' %}}{mark}\n{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    marked = replace(chat, template=ChatTemplate(Path("folder"), template), turns=[])
    assert list(talk(marked, ["hello"])) == [whole.partition(mark)[0]]


def test_an_answer_ends_before_the_token_that_ends_answers() -> None:
    chat = conversation()
    (whole,) = talk(chat, ["hello"])
    text = chat.template.render(chat.turns[:1])
    start = chat.words.encode(text)
    (first, *_) = chat.sampler.tokens(chat.params, start, 1, 1)
    stopped = replace(chat, words=replace(chat.words, end=(first,)))
    stopped.turns = []
    assert whole != ""
    assert list(talk(stopped, ["hello"])) == [""]
