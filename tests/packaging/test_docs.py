"""What the pages say is so: paths exist, links lead somewhere, commands and settings parse."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import cast

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

from skerry.cli.programs import COMMANDS, PROGRAMS
from skerry.service.examples import EXAMPLES
from skerry.settings.loading import load
from skerry.settings.local import LocalSettings
from skerry.settings.models import RunConfig
from skerry.settings.tree import find, leaves
from skerry_tools.chaos import plan as plans
from skerry_tools.lab.scenario import load as load_scenario

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BENCHES = sorted(path.stem.removeprefix("bench_") for path in ROOT.glob("tests/bench/bench_*.py"))
TOPS = (".ci", "docs", "examples", "infra", "proto", "services", "shared", "tests")
OLD = re.compile(r"\bskerry[./](?:core|wire|bus|runtime|testing|planning|chaos|audit|lab)\b")
"""Packages of earlier trees."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
SETTINGS = leaves(RunConfig, LocalSettings)
TABLES = {keys[0] for keys in SETTINGS if len(keys) > 1}

pages = pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def inline(page: Path) -> list[str]:
    """Return what stands in backticks in a page's prose."""
    return INLINE.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    heads = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    return {head.strip().replace(" ", "-") for head in kept}


def commands(page: Path) -> Iterator[str]:
    """Yield each command line of ``skerry`` in a page's fenced blocks."""
    for kind, text in FENCE.findall(page.read_text()):
        if kind not in ("", "sh", "console"):
            continue
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            if command := re.match(r"(?:\$ )?skerry (.*)", line):
                yield command[1]


@pages
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    named = [word.rstrip("/") for word in inline(page) if word.startswith(tuple(TOPS))]
    paths = [word for word in named if re.fullmatch(r"[\w.-]+(/[\w.*-]+)+", word)]
    assert [path for path in paths if not any(ROOT.glob(path))] == []


@pages
def test_no_page_names_a_package_of_an_earlier_tree(page: Path) -> None:
    if page.name not in ("CHANGELOG.md", "metrics.md"):  # metrics have such names
        assert OLD.findall(page.read_text()) == []


@pages
def test_every_link_leads_somewhere(page: Path) -> None:
    broken: list[str] = []
    for target in LINK.findall(prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        at = (page.parent / path).resolve() if path else page
        if not at.exists() or (anchor and anchor not in anchors(at)):
            broken.append(target)
    assert broken == []


def parse(command: TyperGroup | TyperCommand, words: list[str], name: str) -> None:
    """Parse a command line as its program would, without running anything."""
    context = command.make_context(name, list(words))
    if isinstance(command, TyperGroup):
        rest = [*context._protected_args, *context.args]
        if not rest and command.invoke_without_command:
            return
        sub, found, left = command.resolve_command(context, rest)
        parse(cast("TyperCommand", found), left, str(sub))


def answered_by(module: str) -> TyperGroup | TyperCommand:
    """Return the command line of a module."""
    app = importlib.import_module(module).app
    return cast("TyperGroup | TyperCommand", typer.main.get_command(app))


def parser_of(name: str) -> tuple[TyperGroup | TyperCommand, bool]:
    """Return what parses a ``skerry`` command, and whether it wants the command's own name too."""
    if name not in COMMANDS:
        return answered_by("skerry.cli.main"), True
    program = COMMANDS[name]
    return answered_by(f"{PROGRAMS[program].module}.__main__"), name != program


SHOWN = chain.from_iterable(map(commands, PAGES))
IN_HELP = (line.removeprefix("skerry ") for line in EXAMPLES.values())
LINES = dict.fromkeys(" ".join(line.split()) for line in chain(SHOWN, IN_HELP))


@pytest.mark.parametrize("line", LINES)
def test_every_command_line_parses(line: str) -> None:
    words = shlex.split(line, comments=True)
    command, named = parser_of(words[0])
    parse(command, words if named else words[1:], words[0])
    for option, value in pairwise(words):
        if option == "--set":
            key = value.partition("=")[0]
            ours = find(SETTINGS, tuple(key.split(".")))
            assert ours or key.startswith(("sites.", "simulation.")), key


@pages
def test_every_setting_that_a_page_names_exists(page: Path) -> None:
    """A table of settings and a dot, as in ``train.steps``; metrics have names of their own."""
    words = [re.sub(r"[ =].*", "", word) for word in inline(page)]
    named = [word for word in words if re.fullmatch(r"[a-z]+(\.[a-z0-9_]+)+", word)]
    ours = [word.split(".") for word in named if word.split(".")[0] in TABLES]
    assert [".".join(keys) for keys in ours if not find(SETTINGS, tuple(keys))] == []


@pages
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = page.read_text()
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= known


def paths_below(command: TyperGroup | TyperCommand, path: str) -> Iterator[str]:
    """Yield the words of a command and of all below it that its help lists."""
    yield path
    for name, one in getattr(command, "commands", {}).items():
        if not one.hidden:
            yield from paths_below(one, f"{path} {name}".strip())


def test_every_command_has_an_example() -> None:
    root = cast("TyperGroup", answered_by("skerry.cli.main"))
    paths = {*paths_below(root, "")}
    for name in ("ledger", "checkpoints", "hub", "data"):
        parser, named = parser_of(name)
        group = cast("TyperGroup", parser).commands[name] if named else parser
        paths |= {*paths_below(cast("TyperGroup", group), name)}
    assert paths == {*EXAMPLES}


def fences(kind: str, first: str) -> list[str]:
    """Return the blocks of this kind whose first line begins so."""
    found = [FENCE.findall(page.read_text()) for page in PAGES]
    return [text for page in found for k, text in page if k == kind and text.startswith(first)]


@pytest.mark.parametrize("text", fences("toml", "# run.toml"))
def test_the_settings_of_a_page_are_accepted(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert tomllib.loads(text)
    load(path, ["allow_code=my_package"], environ={})


def test_the_labs_scenario_and_the_fault_plan_are_accepted(tmp_path: Path) -> None:
    (scenario,), (plan,) = fences("toml", "# half.toml"), fences("json", '{"format"')
    (tmp_path / "half.toml").write_text(scenario)
    (tmp_path / "plan.json").write_text(plan)
    load_scenario(tmp_path / "half.toml", [], environ={})
    assert len(plans.load(tmp_path / "plan.json").faults) == len(json.loads(plan)["faults"])


@pytest.mark.parametrize("bench", BENCHES)
def test_every_bench_has_a_page_with_its_command_and_limits(bench: str) -> None:
    text = (ROOT / "docs" / "results" / f"{bench}.md").read_text()
    assert f"`make bench ARGS={bench}`" in text
    assert "Limits" in text or "no goal" in text
    assert f"[{bench}]({bench}.md)" in (ROOT / "docs" / "results" / "README.md").read_text()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_definition_that_a_page_names_by_file_is_there() -> None:
    """Written as `path.py`: `name`, as the page for contributors does."""
    pairs = {
        (path, name)
        for page in PAGES
        for path, names in re.findall(r"`([\w./]+\.py)`: ((?:`\w+`(?:, )?)+)", page.read_text())
        for name in re.findall(r"`(\w+)`", names)
    }
    assert pairs
    for path, name in sorted(pairs):
        defined = rf"^\s*(?:async def|def|class) {name}\b|^{name}\b"
        assert re.search(defined, (ROOT / path).read_text(), re.MULTILINE), f"{path}: {name}"


def test_a_path_that_is_gone_would_be_found(tmp_path: Path) -> None:
    """Guards the patterns above."""
    page = tmp_path / "page.md"
    page.write_text(
        "See `shared/skerry/core/` and [that](gone.md).\n```sh\n$ skerry up --nope\n```\n"
    )
    with pytest.raises(AssertionError):
        test_every_path_that_a_page_names_exists(page)
    with pytest.raises(AssertionError):
        test_every_link_leads_somewhere(page)
    with pytest.raises(Exception, match="No such option: --nope"):
        test_every_command_line_parses(*commands(page))
