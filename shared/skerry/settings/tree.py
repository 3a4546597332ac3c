"""Trees of raw settings: the source of each value, and one sentence for what is wrong with it.

This module knows no particular setting.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args, get_origin

from pydantic import BaseModel

from skerry.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Keys: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting that a tree may hold; ``open`` ones are tables with keys of the user's own."""

    keys: Keys
    annotation: object
    open: bool = False


@dataclass(slots=True)
class Tree:
    """Nested raw values, and for each path the source that set it last."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[Keys, str] = field(default_factory=dict[Keys, str])

    def put(self, keys: Keys, value: object, origin: str) -> None:
        """Set one value, making tables on the way; a scalar in the way is replaced."""
        table = self.values
        for key in keys[:-1]:
            inner = table.get(key)
            if not isinstance(inner, dict):
                inner = table[key] = {}
            table = cast("dict[str, Any]", inner)
        table[keys[-1]] = value
        self.origins[keys] = origin

    def merge(self, values: Mapping[str, object], origin: str, prefix: Keys = ()) -> None:
        """Set every leaf of a nested mapping."""
        for key, value in values.items():
            if isinstance(value, Mapping) and value:
                self.merge(cast("Mapping[str, object]", value), origin, (*prefix, key))
            else:
                self.put((*prefix, key), cast("object", value), origin)

    def origin(self, keys: Keys) -> str:
        """Return the source of this path, or of the nearest table above it; empty for a default."""
        for stop in range(len(keys), 0, -1):
            if keys[:stop] in self.origins:
                return self.origins[keys[:stop]]
        return ""


def leaves(fields: Mapping[str, object], prefix: Keys = ()) -> list[Leaf]:
    """Return every setting below a table whose fields have these annotations."""
    found: list[Leaf] = []
    for name, annotation in fields.items():
        keys = (*prefix, name)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found += leaves(annotations_of(annotation), keys)
        else:
            kind = cast("object", annotation)
            found.append(Leaf(keys, kind, open=get_origin(kind) is dict))
    return found


def annotations_of(model: type[BaseModel]) -> dict[str, object]:
    """Return a model's field annotations by name."""
    return {name: info.annotation for name, info in model.model_fields.items()}


def find(known: Iterable[Leaf], keys: Keys) -> Leaf | None:
    """Return the setting at this path, or None; keys below an open table belong to it."""
    for leaf in known:
        if leaf.keys == keys or (leaf.open and leaf.keys == keys[:-1]):
            return leaf
    return None


def refuse_unknown(tree: Tree, known: list[Leaf]) -> None:
    """Raise ConfigError for the first path that is neither a setting nor a table of settings."""
    tables = {leaf.keys[:stop] for leaf in known for stop in range(1, len(leaf.keys))}
    tables |= {leaf.keys for leaf in known if leaf.open}
    for keys, origin in tree.origins.items():
        if keys in tables:
            if not isinstance(_at(tree.values, keys), Mapping):
                msg = (
                    f"{_said(keys, origin)} is a table of settings: give it as [{'.'.join(keys)}]."
                )
                raise ConfigError(msg, path=".".join(keys))
        elif find(known, keys) is None:
            raise unknown(keys, origin, known)


def unknown(keys: Keys, origin: str, known: list[Leaf]) -> ConfigError:
    """Return the error for a path that is no setting, with the nearest one that is."""
    path = ".".join(keys)
    near = nearest(keys, known)
    if near:
        hint = f"did you mean {near}?"
    else:
        beside = [".".join(leaf.keys) for leaf in known if leaf.keys[:-1] == keys[:-1]]
        tables = sorted({leaf.keys[0] for leaf in known if len(leaf.keys) > 1})
        hint = (
            f"there are {', '.join(beside)}." if beside else f"the tables are {', '.join(tables)}."
        )
    return ConfigError(f"{_said(keys, origin)} is not a setting: {hint}", path=path, nearest=near)


def nearest(keys: Keys, known: Iterable[Leaf]) -> str:
    """Return the setting that was probably meant, or an empty string."""
    paths = {".".join(leaf.keys): leaf.keys for leaf in known}
    beside = [path for path, other in paths.items() if other[:-1] == keys[:-1]]
    if len(keys) > 1 and beside:
        tries = [(beside, 0.75)]
    else:
        same_name = [path for path, other in paths.items() if other[-1:] == keys[-1:]]
        tries = [(beside, 0.75), (same_name, 0.0), (list(paths), 0.7)]
    for candidates, cutoff in tries:
        near = difflib.get_close_matches(".".join(keys), candidates, n=1, cutoff=cutoff)
        if near:
            return near[0]
    return ""


def parse_value(text: str, annotation: object) -> object:
    """Read the text of ``--set`` or the environment as a TOML value, or else as plain text.

    Settings that hold text or a path take it without quotes; an empty text unsets an optional
    setting.
    """
    if not text and type(None) in get_args(annotation):
        return None
    if _holds_text(annotation) and text[:1] not in {'"', "'"}:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def split_assignment(text: str) -> tuple[Keys, str]:
    """Cut ``a.b=c`` into path and value; ConfigError if it has no such form."""
    path, equals, value = text.partition("=")
    keys = tuple(key.strip() for key in path.split("."))
    if not equals or not all(keys):
        msg = f"--set {text!r} cannot be read: write it as --set table.key=value."
        raise ConfigError(msg, path=path)
    return keys, value.strip()


def explain(error: ErrorDetails, origin: str) -> ConfigError:
    """Return pydantic's complaint about one value as a sentence with path, value and bound."""
    keys = tuple(str(part) for part in error["loc"])
    path = ".".join(keys)
    if error["type"] == "missing":
        return ConfigError(f"{path} is missing: give it a value.", path=path)
    given = _shown(error["input"])
    return ConfigError(f"{_said(keys, origin)} is {given}, but it {_wants(error)}.", path=path)


def flat(values: Mapping[str, Any], prefix: Keys = ()) -> Iterator[tuple[Keys, object]]:
    """Yield path and value of every leaf; an empty table is a leaf."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(cast("Mapping[str, Any]", value), (*prefix, key))
        else:
            yield (*prefix, key), value


def toml_text(values: Mapping[str, object]) -> str:
    """Return two levels of tables as TOML; None, a default wherever it is legal, is left out."""
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    lines = _toml_lines(plain)
    for name, table in values.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *_toml_lines(cast("Mapping[str, object]", table))]
    return "\n".join(lines) + "\n"


def _toml_lines(table: Mapping[str, object]) -> list[str]:
    return [f"{key} = {_toml_value(value)}" for key, value in table.items() if value is not None]


def _toml_value(value: object) -> str:
    """JSON's strings, numbers and booleans are TOML's; an inline table is not."""
    if isinstance(value, Mapping):
        inner = cast("Mapping[str, object]", value).items()
        return f"{{ {', '.join(f'{_toml_value(k)} = {_toml_value(v)}' for k, v in inner)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, cast('Iterable[object]', value)))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _wants(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return "is not a setting: leave it out"
    context = error.get("ctx", {})
    bounds = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    for key, words in bounds.items():
        if key in context:
            return f"must be {words} {context[key]}"
    if error["type"] == "literal_error":
        return f"must be one of {context['expected']}"
    kinds = {
        "int": "must be a whole number",
        "float": "must be a number",
        "finite": "must be a finite number",
        "string": "must be text",
        "bool": "must be true or false",
        "tuple": 'must be a list such as ["a", "b"]',
        "path": "must be a path",
        "dict": "must be a table",
        "model": "must be a table",
    }
    return kinds.get(error["type"].partition("_")[0], f"is refused: {error['msg']}")


def _holds_text(annotation: object) -> bool:
    if annotation is str or annotation is Path:
        return True
    inner = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) is Literal:
        return True
    return (
        bool(inner)
        and get_origin(annotation) not in {dict, tuple}
        and all(kind in {str, Path} for kind in inner)
    )


def _said(keys: Keys, origin: str) -> str:
    return f"{'.'.join(keys)} (from {origin})" if origin else ".".join(keys)


def _shown(value: object, most: int = 60) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _at(values: Mapping[str, Any], keys: Keys) -> object:
    found: object = values
    for key in keys:
        if not isinstance(found, Mapping):
            return None
        found = cast("Mapping[str, object]", found).get(key)
    return found
