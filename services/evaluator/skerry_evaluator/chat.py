"""A conversation with a checkpoint's model: ``skerry sample --chat``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from skerry.data.chat import ChatTemplate, Message
from skerry.data.tokenizer import Words
from skerry.errors import ConfigError
from skerry_evaluator.checkpoints import restore
from skerry_evaluator.sampling import Sampler


@dataclass(slots=True)
class Conversation:
    """What was said so far.

    An answer ends as the template ends one, with the tokenizer's end token, or after ``most``.
    """

    template: ChatTemplate
    words: Words
    sampler: Sampler
    params: Any
    most: int
    seed: int
    turns: list[Message] = field(default_factory=list[Message])

    def answer(self, said: str) -> str:
        """Return the model's answer to a turn."""
        self.turns.append({"role": "user", "content": said})
        text = self.template.render(self.turns)
        start = self.words.encode(text, special=False)
        written = self.sampler.tokens(
            self.params, start or [0], self.most, self.seed + len(self.turns)
        )
        after = self.template.after_answer(self.turns)
        ends, mark = {*self.words.end, *self.words.special_in(after)}, after.strip()
        answer = self.words.decode(list(takewhile(lambda t: t not in ends, written)))
        answer = answer.partition(mark)[0] if mark else answer.removesuffix(after)
        self.turns.append({"role": "assistant", "content": answer})
        return answer


def talk(conversation: Conversation, lines: Iterable[str]) -> Iterator[str]:
    """Yield an answer to each line that is not empty."""
    for line in lines:
        if said := line.strip():
            yield conversation.answer(said)


def print_chat(
    path: str | Path,
    lines: Iterable[str],
    count: int,
    temperature: float,
    seed: int,
    tokenizer: Path | None,
    sets: Sequence[str] = (),
) -> None:
    """Print the answers of a checkpoint's model to lines, one turn each."""
    if tokenizer is None:
        msg = "--chat needs the model's tokenizer and its chat template: name it with --tokenizer."
        raise ConfigError(msg, path="tokenizer")
    template = ChatTemplate.of(tokenizer)
    restored = restore(path, sets)
    data, vocab = restored.config.data, getattr(restored.model, "vocab", None)
    words = Words.of(tokenizer, vocab, data.tokenizer)
    sampler = Sampler(restored.model, data.seq_len, temperature)
    conversation = Conversation(template, words, sampler, restored.params, count, seed)
    for answer in talk(conversation, lines):
        print(answer, flush=True)
