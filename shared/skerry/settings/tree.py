"""Trees of raw settings: the source of each value, and one error sentence for a wrong one.

This module knows no particular setting.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args, get_origin

from pydantic import BaseModel

from skerry.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Keys: TypeAlias = tuple[str, ...]
Known: TypeAlias = Mapping[Keys, object]
"""The type of every setting by its path; a ``dict`` is a table whose keys the user chooses."""


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
        """Set every leaf of a nested mapping; numbers may be scalars of numpy or JAX."""
        for key, value in values.items():
            keys, found = (*prefix, str(key)), cast("Any", value)
            if isinstance(value, Mapping) and value:
                self.merge(cast("Mapping[str, object]", value), origin, keys)
            else:
                is_number = getattr(found, "shape", None) == ()
                self.put(keys, found.item() if is_number else found, origin)

    def is_table(self, keys: Keys) -> bool:
        """Return True if this path leads to a table."""
        found: object = self.values
        for key in keys:
            if isinstance(found, Mapping):
                found = cast("Mapping[str, object]", found).get(key)
        return isinstance(found, Mapping)

    def origin(self, keys: Keys) -> str:
        """Return the source of this path, or of the nearest table above it; empty for a default."""
        for stop in range(len(keys), 0, -1):
            if keys[:stop] in self.origins:
                return self.origins[keys[:stop]]
        return ""


def leaves(*models: type[BaseModel], prefix: Keys = ()) -> dict[Keys, object]:
    """Return every setting of these tables, and of the tables in them."""
    found: dict[Keys, object] = {}
    for name, info in (item for model in models for item in model.model_fields.items()):
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= leaves(kind, prefix=(*prefix, name))
        else:
            found[(*prefix, name)] = kind
    return found


def find(known: Known, keys: Keys) -> object:
    """Return the type of the setting at this path, or None."""
    if keys in known:
        return known[keys]
    table = known.get(keys[:-1])
    return table if get_origin(table) is dict else None


def refuse_unknown(tree: Tree, known: Known) -> None:
    """Raise ConfigError for the first path that is neither a setting nor a table of settings."""
    tables = {keys[:stop] for keys in known for stop in range(1, len(keys))}
    tables |= {keys for keys, kind in known.items() if get_origin(kind) is dict}
    for keys, origin in tree.origins.items():
        path = ".".join(keys)
        if keys in tables:
            if not tree.is_table(keys):
                msg = f"{_said(keys, origin)} is a table of settings: give it as [{path}]."
                raise ConfigError(msg, path=path)
        elif find(known, keys) is None:
            near = _nearest(keys, known)
            beside = [".".join(other) for other in known if other[:-1] == keys[:-1]]
            hint = f"the tables are {', '.join(sorted({k[0] for k in known if len(k) > 1}))}."
            if near:
                hint = f"did you mean {near}?"
            elif beside:
                hint = f"there are {', '.join(beside)}."
            msg = f"{_said(keys, origin)} is not a setting: {hint}"
            raise ConfigError(msg, path=path, nearest=near)


def _nearest(keys: Keys, known: Iterable[Keys]) -> str:
    """Return the setting that was probably meant, or an empty string."""
    beside = [".".join(other) for other in known if other[:-1] == keys[:-1]]
    tries = [(beside, 0.75)]
    if len(keys) == 1 or not beside:
        same_name = [".".join(other) for other in known if other[-1:] == keys[-1:]]
        tries += [(same_name, 0.0), ([".".join(other) for other in known], 0.7)]
    for candidates, cutoff in tries:
        for near in difflib.get_close_matches(".".join(keys), candidates, n=1, cutoff=cutoff):
            return near
    in_no_table = [other[0] for other in known if len(other) == 1]
    return next(iter(difflib.get_close_matches(keys[-1], in_no_table, n=1, cutoff=0.75)), "")


def parse_value(text: str, annotation: object) -> object:
    """Read the text of ``--set`` or the environment as a TOML value, or else as plain text.

    Settings that hold text or a path take it without quotes; an empty text unsets an optional
    setting.
    """
    if not text and type(None) in get_args(annotation):
        return None
    origin, kinds = get_origin(annotation), set(get_args(annotation) or (annotation,))
    holds_text = origin is Literal or kinds - {type(None)} <= {str, Path}
    if holds_text and origin not in {dict, tuple} and text[:1] not in {'"', "'"}:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def split_assignment(text: str) -> tuple[Keys, str]:
    """Split ``a.b=c`` into path and value; ConfigError if the text has another form."""
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
    given = json.dumps(error["input"], default=str, ensure_ascii=False)
    if len(given) > LONGEST_SHOWN:
        given = f"{given[: LONGEST_SHOWN - 3]}..."
    return ConfigError(f"{_said(keys, origin)} is {given}, but it {_wants(error)}.", path=path)


LONGEST_SHOWN = 60
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
KINDS = {
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


def _wants(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return "is not a setting: leave it out"
    context = error.get("ctx", {})
    for key, words in BOUNDS.items():
        if key in context:
            return f"must be {words} {context[key]}"
    if error["type"] == "literal_error":
        return f"must be one of {context['expected']}"
    return KINDS.get(error["type"].partition("_")[0], f"is refused: {error['msg']}")


def _said(keys: Keys, origin: str) -> str:
    return f"{'.'.join(keys)} (from {origin})" if origin else ".".join(keys)


def toml_text(values: Mapping[str, object]) -> str:
    """Return two levels of tables as TOML; None, a default wherever it is legal, is left out."""
    tables = {
        k: cast("Mapping[str, object]", v) for k, v in values.items() if isinstance(v, Mapping)
    }
    plain = {key: value for key, value in values.items() if key not in tables}
    lines: list[str] = []
    for name, table in {"": plain, **tables}.items():
        lines += ["", f"[{name}]"] if name else []
        lines += [f"{key} = {toml_value(v)}" for key, v in table.items() if v is not None]
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """Return a value as TOML: strings, numbers and booleans as in JSON, tables inline."""
    if isinstance(value, Mapping):
        inner = cast("Mapping[str, object]", value).items()
        return f"{{ {', '.join(f'{toml_value(k)} = {toml_value(v)}' for k, v in inner)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, cast('Iterable[object]', value)))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
