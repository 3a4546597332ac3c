"""Dataclasses to protobuf bytes and back.

Both sides come from one schema and have the same fields in the same order, so one pair of functions
serves all messages. How each field is converted is looked up once, when the module is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

from google.protobuf.message import DecodeError

from skerry.errors import Corrupt, WrongVersion
from skerry.protocol.v1 import chunk_pb2, messages, plan_pb2, presence_pb2, run_pb2, state_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from enum import StrEnum

    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.message import Message

    Convert = Callable[[Any], Any]

T = TypeVar("T")

MESSAGES: dict[type[Any], type[Message]] = {
    getattr(messages, name): getattr(module, name)
    for module in (plan_pb2, chunk_pb2, presence_pb2, run_pb2, state_pb2)
    for name in module.DESCRIPTOR.message_types_by_name
}
"""The protobuf class of each dataclass."""


@dataclass(frozen=True, slots=True)
class _Field:
    """One field; ``put`` and ``take`` convert its value, None where protobuf takes it as it is.

    ``optional`` fields may be absent, a ``nested`` message that is not optional must be there.
    """

    name: str
    optional: bool
    nested: bool
    put: Convert | None
    take: Convert | None


@dataclass(frozen=True, slots=True)
class _Reader:
    """How a message becomes its dataclass; indices are those of its fields.

    A commit of a run of 200 learners holds 400 messages: each takes one call for all its fields.
    """

    get: Convert
    conversions: tuple[tuple[int, Convert], ...]
    required: tuple[str, ...]
    absent: tuple[tuple[int, str, Convert], ...]


def encode(value: Any) -> bytes:
    """Return the protobuf bytes of a dataclass; equal values give equal bytes.

    Raises ValueError or TypeError for a value that its field cannot hold, such as a negative count.
    """
    return to_message(value).SerializeToString(deterministic=True)


def decode(kind: type[T], data: bytes | memoryview) -> T:
    """Return the dataclass that protobuf bytes hold.

    Raises Corrupt for bytes that do not parse, lack a part, or carry an enum's zero; WrongVersion
    for an enum value that only a later release knows.
    """
    message = MESSAGES[kind]()
    try:
        message.ParseFromString(bytes(data))
    except DecodeError as error:
        msg = f"The bytes are no {kind.__name__}: {error}."
        raise Corrupt(msg) from error
    return _from_message(kind, message)


def to_message(value: Any) -> Message:
    """Return the protobuf message with the fields of ``value``."""
    values: dict[str, Any] = {}
    for field in _FIELDS[type(value)]:
        item = getattr(value, field.name)
        if item or not field.optional:
            values[field.name] = field.put(item) if field.put else item
    return MESSAGES[type(value)](**values)


def _from_message(kind: type[T], message: Message) -> T:
    reader = _READERS[kind]
    for name in reader.required:
        if not message.HasField(name):
            msg = f"The {kind.__name__} has no {name}."
            raise Corrupt(msg)
    values = list(reader.get(message))
    for index, take in reader.conversions:
        values[index] = take(values[index])
    for index, name, take in reader.absent:
        values[index] = take(values[index]) if message.HasField(name) else None
    return kind(*values)


def _reader_of(kind: type[Any]) -> _Reader:
    fields = _FIELDS[kind]
    converted = [(i, field, field.take) for i, field in enumerate(fields)]
    return _Reader(
        get=attrgetter(*(field.name for field in fields)),
        conversions=tuple((i, take) for i, f, take in converted if take and not f.optional),
        required=tuple(field.name for field in fields if field.nested and not field.optional),
        absent=tuple((i, f.name, take) for i, f, take in converted if take and f.optional),
    )


def _field(field: FieldDescriptor) -> _Field:
    put, take = _conversions(field)
    if field.is_repeated:
        return _Field(field.name, False, False, _each(put), _each(take) or tuple)  # noqa: FBT003
    nested = field.message_type is not None
    return _Field(field.name, _is_optional(field), nested, put, take)


def _is_optional(field: FieldDescriptor) -> bool:
    """Return True for a field that the schema declares ``optional``: a oneof of its own."""
    return field.containing_oneof is not None


def _each(convert: Convert | None) -> Convert | None:
    return None if convert is None else lambda items: tuple(map(convert, items))


def _conversions(field: FieldDescriptor) -> tuple[Convert | None, Convert | None]:
    if field.message_type is not None:
        return to_message, partial(_from_message, getattr(messages, field.message_type.name))
    if field.enum_type is not None:
        kind: type[StrEnum] = getattr(messages, field.enum_type.name)
        prefix = field.enum_type.values_by_number[0].name.removesuffix("UNSPECIFIED")
        numbers = {m: field.enum_type.values_by_name[prefix + m.name].number for m in kind}
        members = {number: member for member, number in numbers.items()}
        return numbers.__getitem__, lambda number: _member(kind, members, number)
    return None, None


def _member(kind: type[StrEnum], members: Mapping[int, StrEnum], number: int) -> StrEnum:
    if (member := members.get(number)) is not None:
        return member
    if number == 0:
        msg = f"A {kind.__name__} is missing."
        raise Corrupt(msg)
    msg = f"{kind.__name__} {number} is of a later release: run the same Skerry everywhere."
    raise WrongVersion(msg)


_FIELDS: dict[type[Any], tuple[_Field, ...]] = {
    kind: tuple(_field(field) for field in cast("list[FieldDescriptor]", message.DESCRIPTOR.fields))
    for kind, message in MESSAGES.items()
}
_READERS: dict[type[Any], _Reader] = {kind: _reader_of(kind) for kind in _FIELDS}
