"""Chat templates, rendered as transformers does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skerry.data.chat import ChatTemplate
from skerry.errors import ConfigError

TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what's <b>1 + 1</b>?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "grüße"},
]
RANGE = "range(99999)"
CHATML = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "{{ '<|im_start|>' + m.role + '\\n' + (m.content | trim) + '<|im_end|>' }}\n"
    "{% endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def folder_with(path: Path, **settings: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("turns", [TURNS[:2], TURNS])
def test_a_conversation_is_what_transformers_makes_of_it(
    tmp_path: Path, turns: list[dict[str, str]], *, answer: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))  # noqa: S106
    marks = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, chat_template=CHATML, **marks
    )
    theirs.save_pretrained(tmp_path)
    ours = ChatTemplate.of(tmp_path)
    wanted = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=answer)
    assert ours.render(turns, answer=answer) == wanted
    assert ours.end == "</s>"


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    assert ChatTemplate.of(folder_with(tmp_path, chat_template=several)).render(TURNS) == "yes"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for %}", "fails"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "fails"),
        (f"{{% for i in {RANGE} %}}{{% for j in {RANGE} %}}{{% endfor %}}{{% endfor %}}", "1.5 s"),
        ("{{ 9 ** (9 ** 9) }}", "1.5 s"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'x' * 10 ** 10 }}", "memory"),
        (f"{{% for i in {RANGE} %}}{{{{ 'x' * 1000 }}}}{{% endfor %}}", "more than"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_template_that_fails_is_one_sentence(tmp_path: Path, template: str, said: str) -> None:
    chat = replace(ChatTemplate.of(folder_with(tmp_path, chat_template=template)), limit_s=1.5)
    for _ in range(2):
        with pytest.raises(ConfigError, match=said):
            chat.render(TURNS)


def test_marks_of_what_an_assistant_says_are_read_over(tmp_path: Path) -> None:
    marked = "a{% generation %}b{% endgeneration %}c"
    assert ChatTemplate.of(folder_with(tmp_path, chat_template=marked)).render(TURNS) == "abc"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"chat_template": 3}'])
def test_a_folder_without_a_template_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ConfigError, match="tokenizer"):
        ChatTemplate.of(tmp_path)


def test_what_ends_an_answer_is_what_the_template_writes_after_it(tmp_path: Path) -> None:
    template = ChatTemplate(tmp_path, "{% for m in messages %}{{ m.content }}<end>\n{% endfor %}")
    assert template.after_answer([{"role": "user", "content": "an answer"}]) == "<end>\n"
