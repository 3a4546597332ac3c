"""Conversations as text: a tokenizer's own chat template, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

from skerry.errors import ConfigError

Message: TypeAlias = Mapping[str, str]
"""``role`` (``system``, ``user`` or ``assistant``) and ``content``."""
TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
MOST_BYTES = 4 << 20
"""Of each of the files."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """How a model was taught to read a conversation; ``end`` is the token that ends an answer."""

    folder: Path
    template: str
    begin: str = ""
    end: str = ""

    @classmethod
    def of(cls, folder: Path) -> ChatTemplate:
        """Return the template in a tokenizer's folder; ConfigError where there is none."""
        settings = _settings(folder)
        template = _read(folder / TEMPLATE) or _default(settings.get("chat_template"))
        if not template:
            msg = f"{folder} has no chat template: a chat needs {TEMPLATE}, or one in {SETTINGS}."
            raise ConfigError(msg, path="tokenizer")
        begin, end = (_token(settings.get(f"{name}_token")) for name in ("bos", "eos"))
        return cls(folder, template, begin, end)

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """Return the text of a conversation, and where ``answer``, the beginning of the next turn.

        Raises ConfigError for a template that fails, or that refuses these messages.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        around = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        around.filters["tojson"] = _to_json
        known: dict[str, object] = {"raise_exception": _refuse}
        known |= {"bos_token": self.begin, "eos_token": self.end, "add_generation_prompt": answer}
        try:
            return around.from_string(self.template).render(messages=list(messages), **known)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            msg = f"The chat template of {self.folder} fails: {error}."
            raise ConfigError(msg, path="tokenizer") from error


def _settings(folder: Path) -> Mapping[str, Any]:
    try:
        found: object = json.loads(_read(folder / SETTINGS) or "{}")
    except (ValueError, RecursionError) as error:
        msg = f"{folder / SETTINGS} is no JSON ({error}): name a tokenizer's folder."
        raise ConfigError(msg, path="tokenizer") from error
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _read(path: Path) -> str:
    """Return a small file's text; empty where there is none."""
    try:
        if path.stat().st_size > MOST_BYTES:
            msg = f"{path} has more than {MOST_BYTES} bytes: name a tokenizer's folder."
            raise ConfigError(msg, path="tokenizer")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _default(found: object) -> str:
    """Return the template among those that a tokenizer's settings hold, by name or alone."""
    if isinstance(found, list):
        named = [t for t in cast("list[object]", found) if isinstance(t, dict)]
        table = {str(t.get("name")): t.get("template") for t in cast("list[dict[str, Any]]", named)}
        found = table.get("default")
    return found if isinstance(found, str) else ""


def _token(found: object) -> str:
    """Return the text of a special token, which is stored as it is or with how to match it."""
    if isinstance(found, dict):
        found = cast("dict[str, Any]", found).get("content")
    return found if isinstance(found, str) else ""


def _to_json(value: object, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=options.get("indent"))


def _refuse(text: object) -> NoReturn:
    raise ValueError(text)
