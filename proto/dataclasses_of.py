"""Turn the schema into Python source: a StrEnum for each enum, a frozen dataclass for each message.

The comments of the schema become the docstrings. The file that explains who must give which field
and how the wire may change is proto/skerry/protocol/v1/frame.proto.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

Path = tuple[int, ...]
Comments = Mapping[Path, str]

CONTENT = "FrameContent"
"""The message that becomes the enum of frame kinds, and no dataclass."""
ELSEWHERE = {"LeafSpec": "skerry.algorithm.fragments"}
"""Messages whose class the algorithm has, and where."""
SCALARS = {
    Field.TYPE_UINT64: ("int", "0"),
    Field.TYPE_FIXED64: ("int", "0"),
    Field.TYPE_DOUBLE: ("float", "0.0"),
    Field.TYPE_BOOL: ("bool", "False"),
    Field.TYPE_STRING: ("str", '""'),
}
"""The Python type of a scalar, and its zero."""
WIDTH = 100
HEAD = '''"""Generated from proto/skerry/protocol/v1 by proto/generate.py: do not edit.

proto/skerry/protocol/v1/frame.proto explains units, defaults and how the schema may change.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

'''


def module_of(schema: FileDescriptorSet) -> str:
    """Return the source of the module with the classes of all files of a schema.

    Raises ValueError for what the classes cannot express, such as a map or a required field after
    one that may be left out.
    """
    enums = [
        _enum(enum, _comments(file), (5, number))
        for file in schema.file
        for number, enum in enumerate(file.enum_type)
    ]
    messages = [
        (message, _comments(file), (4, number))
        for file in schema.file
        for number, message in enumerate(file.message_type)
    ]
    classes = [_message(*found) for found in messages if _is_made(found[0].name)]
    kinds = [_kinds(*found) for found in messages if found[0].name == CONTENT]
    imports = [f"from {module} import {name}\n" for name, module in sorted(ELSEWHERE.items())]
    names = sorted(
        [
            *(enum.name for file in schema.file for enum in file.enum_type),
            *(message.name for message, _, _ in messages if _is_made(message.name)),
            *("FRAME_KINDS", "FrameKind", "Record"),
        ]
    )
    exported = "__all__ = [\n" + "".join(f'    "{name}",\n' for name in names) + "]\n"
    return "\n\n".join([HEAD + "".join(imports) + "\n" + exported, *enums, *classes, *kinds])


def _is_made(name: str) -> bool:
    return name != CONTENT and name not in ELSEWHERE


def _comments(file: FileDescriptorProto) -> Comments:
    """Return the comment before each element of a file, by the element's path in the descriptor."""
    return {
        tuple(place.path): place.leading_comments
        for place in file.source_code_info.location
        if place.leading_comments
    }


def _doc(comment: str | None, indent: str) -> str:
    """Return a comment as a docstring, its paragraphs wrapped; empty where there is none."""
    if comment is None:
        return ""
    lines = (line.removeprefix(" ").rstrip() for line in comment.strip("\n").splitlines())
    paragraphs = "\n".join(lines).replace("`", "``").split("\n\n")
    width = WIDTH - len(indent)
    filled = [textwrap.fill(f'"""{paragraphs[0]}', width - 3)[3:]]
    filled += [textwrap.fill(paragraph, width) for paragraph in paragraphs[1:]]
    text = "\n\n".join(filled)
    end = '"""' if "\n" not in text else '\n"""'
    return textwrap.indent(f'"""{text}{end}\n', indent)


def _enum(enum: EnumDescriptorProto, comments: Comments, path: Path) -> str:
    """Return a StrEnum; its values are the members' names in lower case, without the prefix."""
    first, *rest = enum.value
    prefix = first.name.removesuffix("UNSPECIFIED")
    if first.number or prefix == first.name:
        msg = f"Enum {enum.name} does not begin with an unspecified 0."
        raise ValueError(msg)
    members = ""
    for number, value in enumerate(rest, start=1):
        name = value.name.removeprefix(prefix)
        members += f'    {name} = "{name.lower()}"\n'
        members += _doc(comments.get((*path, 2, number)), "    ")
    return f"class {enum.name}(StrEnum):\n{_doc(comments.get(path), '    ')}\n{members}"


def _message(message: DescriptorProto, comments: Comments, path: Path) -> str:
    """Return a dataclass; from the first ``optional`` field on, fields have defaults."""
    body, has_default = "", False
    for number, field in enumerate(message.field):
        has_default = has_default or field.proto3_optional
        hint, zero = _type(field)
        body += f"    {field.name}: {hint}{f' = {zero}' if has_default else ''}\n"
        if has_default and zero == "":
            msg = f"{message.name}.{field.name} comes after an optional field and is required."
            raise ValueError(msg)
        body += _doc(comments.get((*path, 2, number)), "    ")
    doc = _doc(comments.get(path), "    ")
    return f"@dataclass(frozen=True, slots=True)\nclass {message.name}:\n{doc}\n{body}"


def _type(field: Field) -> tuple[str, str]:
    """Return a field's Python type and its default, empty where it cannot have one."""
    if field.type in SCALARS:
        name, zero = SCALARS[field.type]
    elif field.type in {Field.TYPE_MESSAGE, Field.TYPE_ENUM}:
        name, zero = field.type_name.rpartition(".")[2], ""
    else:
        msg = f"Field {field.name} has a type that no dataclass field has here."
        raise ValueError(msg)
    if field.label == Field.LABEL_REPEATED:
        return f"tuple[{name}, ...]", "()"
    if field.proto3_optional and not zero:
        return f"{name} | None", "None"
    return name, zero


def _kinds(message: DescriptorProto, comments: Comments, path: Path) -> str:
    """Return the enum of frame kinds, its table, and the union of what has no payload."""
    doc = _doc(comments[path].partition("\n\n")[0], "    ")
    members = "".join(f"    {field.name.upper()} = {field.number}\n" for field in message.field)
    rows = "".join(
        f"    {_type(field)[0]}: FrameKind.{field.name.upper()},\n" for field in message.field
    )
    records = "\n".join(_union(message))
    return (
        f"class FrameKind(IntEnum):\n{doc}\n{members}\n\n"
        f"FRAME_KINDS: dict[type[Any], FrameKind] = {{\n{rows}}}\n"
        '"""The kind of the frame that holds each message."""\n\n'
        f"Record = (\n{records}\n)\n"
        '"""A message in a frame of its own, without payload."""\n'
    )


def _union(message: DescriptorProto) -> Iterator[str]:
    inside = [_type(field)[0] for field in message.field if field.HasField("oneof_index")]
    for number, name in enumerate(inside):
        yield f"    {'| ' if number else ''}{name}"
