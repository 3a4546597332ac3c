"""Renders a chat template in a process of its own, which ends if a template takes too much.

A template comes with a tokenizer from anywhere. Jinja's sandbox keeps it from running code, and
this process from running for ever: the system ends it once it has used its CPU time. It reads a
line of JSON with the template and its limit, then one for each conversation, and answers each.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_MEMORY = 1 << 30
MOST_TEXT = 16 << 20
"""Most characters of a rendered conversation."""


class Generation(Extension):
    """Reads ``{% generation %}``, with which templates mark what an assistant says, as nothing."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what is inside the mark."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> Environment:
    around = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    around.filters["tojson"] = _to_json
    return around


def _to_json(value: object, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=options.get("indent"))


def _refuse(text: object) -> NoReturn:
    raise TemplateError(str(text))


def _render(template: Template, known: dict[str, Any]) -> dict[str, str]:
    """Return the text of a conversation, or why there is none."""
    parts: list[str] = []
    size = 0
    try:
        for part in template.generate(known | {"raise_exception": _refuse}):
            size += len(part)
            if size > MOST_TEXT:
                return {"error": f"it writes more than {MOST_TEXT} characters"}
            parts.append(part)
    except MemoryError:
        return {"error": f"it takes more than {MOST_MEMORY} bytes of memory"}
    except Exception as error:  # noqa: BLE001 - whatever a stranger's template raises
        return {"error": str(error) or type(error).__name__}
    return {"text": "".join(parts)}


def _bound_memory() -> None:
    with suppress(ImportError, OSError, ValueError):  # not every system bounds memory
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))


def main() -> None:
    """Answer conversations until standard input ends."""
    _bound_memory()
    lines = iter(sys.stdin.buffer)
    given = json.loads(next(lines))
    template, why = None, ""
    signal.setitimer(signal.ITIMER_PROF, given["limit_s"])
    try:
        template = _environment().from_string(given["template"])
    except (TemplateError, RecursionError, MemoryError, ValueError) as error:
        why = str(error) or type(error).__name__
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, given["limit_s"])
        found = {"error": why} if template is None else _render(template, json.loads(line))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
