"""What the book has besides its pages: the reference, made of the code, and the repository's pages.

MkDocs calls these functions by name. Links to files that the book does not have become their paths.
"""

# pyright: basic
from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import sys
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from typer.main import get_command

from skerry.cli.programs import COMMANDS, PROGRAMS
from skerry.service.entry import with_examples
from skerry.settings.local import LocalSettings
from skerry.settings.models import RunConfig, Table
from skerry.telemetry import metrics

File = importlib.import_module("mkdocs.structure.files").File  # only ``make docs`` installs it
ROOT = Path(__file__).parents[1]
OTHERS = {
    "README.md": "index.md",
    "GLOSSARY.md": "glossary.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
    "docs/tutorial.ipynb": "tutorial.md",
}
"""Files that are no pages of docs/, and what they are called in the book."""
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
API = {
    "skerry": ("skerry.client.jax_island.join", "skerry.client.asked.config_of"),
    "skerry.torch": (
        *("skerry.client.torch_island.join", "skerry.client.torch_hf.model_of"),
        *(
            "skerry.client.torch_hf.SkerryCallback",
            "skerry.client.torch_lightning.LightningCallback",
        ),
    ),
    "What join returns": (
        "skerry.client.jax_island.JaxIsland",
        "skerry.client.torch_island.TorchIsland",
    ),
    "A model of your own": ("skerry.models.base.Model", "skerry.models.base.Aux"),
    "Errors": ("skerry.errors",),
}
"""What users import or write, by where they meet it."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    made = {name: page_of(ROOT / source) for source, name in OTHERS.items()}
    made |= {
        "reference/settings.md": settings(),
        "reference/commands.md": commands(),
        "reference/metrics.md": names(),
        "reference/messages.md": messages(),
        "reference/api.md": "\n\n".join(["# Python", *map(documented, API)]) + "\n",
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Lead links to where the book has their pages."""
    here = PurePosixPath(page.file.src_uri)
    by_name = {name: source for source, name in OTHERS.items()}
    source = PurePosixPath(by_name.get(str(here), f"docs/{here}"))

    def led(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        full = os.path.normpath(source.parent / path)
        name = OTHERS.get(full) or full.removeprefix("docs/")
        if full not in OTHERS and not full.startswith("docs/"):
            return f"{text} (`{full}`)" if full not in text else text
        if files.get_file_from_path(name) is None:
            return f"{text} (`{full}`)"
        return f"[{text}]({os.path.relpath(name, here.parent)}{mark}{anchor})"

    if page.file.src_uri.startswith("reference/"):
        return markdown
    return LINK.sub(led, markdown)


def page_of(path: Path) -> str:
    """Return a page as it stands, or a notebook with what its cells printed."""
    if path.suffix == ".md":
        return path.read_text()
    parts: list[str] = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        outputs = (out.get("text") or out["data"]["text/plain"] for out in cell["outputs"])
        said = "".join("".join(out) for out in outputs).rstrip()
        parts += [f"```text\n{said}\n```"] if said else []
    title, *rest = parts
    link = f'The notebook itself: <a href="../{path.name}">{path.name}</a>.'
    return "\n\n".join([title, link, *rest]) + "\n"


def documented(heading: str) -> str:
    """Return what mkdocstrings renders as one part of the reference of Python."""
    names = [
        f"::: {name}\n    options: {{heading_level: 3, inherited_members: true}}"
        for name in API[heading]
    ]
    return "\n\n".join([f"## {heading}", *names])


def settings() -> str:
    """Return a table of each table of settings: name, type, default, meaning."""
    lines = ["# Settings", "", "`skerry config show` says which count, and what set them.", ""]
    for top in (RunConfig, LocalSettings):
        lines += [f"## {'Of the run' if top is RunConfig else 'Of a machine'}", ""]
        lines += rows("", {k: f for k, f in top.model_fields.items() if not is_table(f)}, top)
        for name, field in top.model_fields.items():
            if is_table(field):
                kind: Any = field.annotation
                lines += [f"### [{name}]", "", inspect.getdoc(kind) or "", ""]
                lines += rows(f"{name}.", kind.model_fields, kind)
    return "\n".join(lines)


def is_table(field: Any) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Table)


def rows(prefix: str, fields: dict[str, Any], of: type[Table]) -> list[str]:
    said = docstrings(of)
    lines = ["| setting | values | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        kind = field.annotation
        values = ", ".join(map(str, get_args(kind))) if get_args(kind) else kind.__name__
        cells = (f"`{prefix}{name}`", values, f"`{field.default}`", said.get(name, ""))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def docstrings(of: type[Table]) -> dict[str, str]:
    """Return the text under each field of a table."""
    (body,) = [
        node.body
        for node in ast.walk(ast.parse(inspect.getsource(sys.modules[of.__module__])))
        if isinstance(node, ast.ClassDef) and node.name == of.__name__
    ]
    found: dict[str, str] = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            words = getattr(text.value, "value", "")
            found[ast.unparse(field.target)] = " ".join(str(words).replace("``", "`").split())
    return found


def commands() -> str:
    """Return the help of every command."""
    lines = ["# Commands", ""]
    root = command_of("skerry.cli.main")
    for name, command in root.commands.items():
        shown = with_examples(command, name)
        if name in COMMANDS:
            program = COMMANDS[name]
            whole = command_of(f"{PROGRAMS[program].module}.__main__")
            shown = with_examples(whole if name == program else whole.commands[name], name)
        lines += helped(shown, f"skerry {name}", 2)
        for sub, below in getattr(shown, "commands", {}).items():
            if not below.hidden:
                lines += helped(below, f"skerry {name} {sub}", 3)
    return "\n".join(lines)


def command_of(module: str) -> Any:
    return get_command(importlib.import_module(module).app)


def helped(command: Any, path: str, level: int) -> list[str]:
    context = command.context_class(command, info_name=path, terminal_width=100)
    return [f"{'#' * level} {path}", "", "```text", command.get_help(context), "```", ""]


def names() -> str:
    """Return every metric with its kind, unit and meaning."""
    lines = ["# Metrics", "", "| metric | unit | meaning |", "|---|---|---|"]
    lines += [
        f"| `{metric.name}` | `{metric.unit}` | {metric.description} |"
        for metric in vars(metrics).values()
        if isinstance(metric, metrics.Metric)
    ]
    return "\n".join([*lines, ""])


def messages() -> str:
    """Return the messages of the wire as their files define them."""
    lines = ["# Messages", ""]
    for path in sorted((ROOT / "proto/skerry").rglob("*.proto")):
        lines += [f"## {path.name}", "", "```proto", path.read_text(), "```", ""]
    return "\n".join(lines)
