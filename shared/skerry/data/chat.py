"""Conversations as text: a tokenizer's own chat template, rendered in a sandbox (``rendering``)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

from skerry.errors import ConfigError

Message: TypeAlias = Mapping[str, str]
"""``role`` (``system``, ``user`` or ``assistant``) and ``content``."""
TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
MOST_BYTES = 4 << 20
"""Most bytes of each of the files."""
LIMIT_S = 10.0
ANSWER = "an-answer-0c1d"


class _Renderer:
    """The process that renders a template (``rendering``), begun when it is first asked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def ask(self, setup: Mapping[str, object], known: Mapping[str, object]) -> Mapping[str, str]:
        """Return what the process answers about a conversation: ``text``, or an ``error``."""
        fresh = self._process is None
        process = self._process or self._begin()
        assert process.stdin is not None  # both are pipes
        assert process.stdout is not None
        lines = [json.dumps(one).encode() + b"\n" for one in ([setup] if fresh else []) + [known]]
        with suppress(BrokenPipeError):  # a dead process answers nothing
            process.stdin.write(b"".join(lines))
            process.stdin.flush()
        if answered := process.stdout.readline():
            return cast("dict[str, str]", json.loads(answered))
        code = process.wait()
        self._end()
        self._process = None
        if code == -signal.SIGPROF:
            return {"error": f"it takes more than {setup['limit_s']} s"}
        return {"error": f"its process ended with {code}"}

    def _begin(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", str(Path(__file__).with_name("rendering.py"))]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._process, self._end = process, weakref.finalize(self, _close, process)
        return process


def _close(process: subprocess.Popen[bytes]) -> None:
    """End a process that waits for conversations."""
    process.kill()
    process.communicate()


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The text format in which a model reads conversations; ``end`` is the token after an answer.

    ``limit_s`` is the CPU time that the template has for one conversation.
    """

    folder: Path
    template: str
    begin: str = ""
    end: str = ""
    limit_s: float = LIMIT_S
    _renderer: _Renderer = field(default_factory=_Renderer, init=False, compare=False)

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
        """Return the text of a conversation, and if ``answer``, the beginning of the next turn.

        Raises ConfigError for a template that fails, takes too long or refuses these messages.
        """
        known: dict[str, object] = {"messages": list(messages), "add_generation_prompt": answer}
        known |= {"bos_token": self.begin, "eos_token": self.end}
        found = self._renderer.ask({"template": self.template, "limit_s": self.limit_s}, known)
        text = found.get("text")
        if text is None:
            why = str(found.get("error")).rstrip(".")
            msg = f"The chat template of {self.folder} fails: {why}."
            raise ConfigError(msg, path="tokenizer")
        return text

    def after_answer(self, messages: Sequence[Message]) -> str:
        """Return the text with which the template ends an answer to these messages.

        Raises ConfigError as ``render``.
        """
        answered = [*messages, {"role": "assistant", "content": ANSWER}]
        return self.render(answered, answer=False).partition(ANSWER)[2]


def end_of(folder: Path) -> str:
    """Return the token that ends a text or an answer, by a tokenizer's settings; empty: none."""
    return _token(_settings(folder).get("eos_token"))


def _settings(folder: Path) -> Mapping[str, Any]:
    try:
        found: object = json.loads(_read(folder / SETTINGS) or "{}")
    except (ValueError, RecursionError) as error:
        msg = f"{folder / SETTINGS} is not JSON ({error}): name a tokenizer's folder."
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
    """Return the default template in a tokenizer's settings, which hold one, or several by name."""
    if isinstance(found, list):
        named = [t for t in cast("list[object]", found) if isinstance(t, dict)]
        table = {str(t.get("name")): t.get("template") for t in cast("list[dict[str, Any]]", named)}
        found = table.get("default")
    return found if isinstance(found, str) else ""


def _token(found: object) -> str:
    """Return the text of a special token, which is stored bare or in a table with options."""
    if isinstance(found, dict):
        found = cast("dict[str, Any]", found).get("content")
    return found if isinstance(found, str) else ""
