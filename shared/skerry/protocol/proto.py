"""Dataclasses to protobuf and back, by field name.

Every message in ``proto/`` has exactly the fields of its dataclass under the same names (a test
pins that), so one pair of functions serves all. How a field is turned is found out at import.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError

from skerry.algorithm.fragments import LeafSpec
from skerry.errors import Corrupt, WrongVersion
from skerry.protocol import messages
from skerry.protocol.v1 import chunk_pb2, plan_pb2, presence_pb2, run_pb2, state_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

T = TypeVar("T")

MESSAGES: dict[type[Any], type[Message]] = {
    LeafSpec: plan_pb2.LeafSpec,
    messages.RunRecord: run_pb2.RunRecord,
    messages.MemberRecord: run_pb2.MemberRecord,
    messages.CheckpointRecord: run_pb2.CheckpointRecord,
    messages.Evaluation: run_pb2.Evaluation,
    messages.Round: presence_pb2.Round,
    messages.SyncerPulse: presence_pb2.SyncerPulse,
    messages.Pulse: presence_pb2.Pulse,
    messages.Drill: presence_pb2.Drill,
    messages.ChunkRef: state_pb2.ChunkRef,
    messages.Part: state_pb2.Part,
    messages.Consumed: state_pb2.Consumed,
    messages.Refused: state_pb2.Refused,
    messages.LearnerProgress: state_pb2.LearnerProgress,
    messages.Commit: state_pb2.Commit,
    messages.Manifest: state_pb2.Manifest,
    messages.Fence: state_pb2.Fence,
    messages.Start: chunk_pb2.Start,
    messages.ContributionHeader: chunk_pb2.ContributionHeader,
    messages.ChunkHeader: chunk_pb2.ChunkHeader,
}
"""Which generated message stands for which dataclass."""


@dataclass(frozen=True, slots=True)
class _Field:
    """One field; ``put`` and ``take`` turn its value, None where protobuf takes it as it is."""

    name: str
    nested: bool
    optional: bool
    put: Callable[[Any], Any] | None
    take: Callable[[Any], Any] | None


def encode(value: Any) -> bytes:
    """Return the protobuf bytes of a dataclass, equal bytes for equal values.

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
    """Return the generated message with the fields of ``value``."""
    values: dict[str, Any] = {}
    for field in _FIELDS[type(value)]:
        item = getattr(value, field.name)
        if item is not None:
            values[field.name] = field.put(item) if field.put else item
    return MESSAGES[type(value)](**values)


def _from_message(kind: type[T], message: Message) -> T:
    reader = _READERS[kind]
    for name in reader.required:
        if not message.HasField(name):
            msg = f"The {kind.__name__} has no {name}."
            raise Corrupt(msg)
    values = list(reader.get(message))
    for index, take in reader.turns:
        values[index] = take(values[index])
    for index, name, take in reader.optional:
        values[index] = take(values[index]) if message.HasField(name) else None
    return kind(*values)


@dataclass(frozen=True, slots=True)
class _Reader:
    """How a message becomes its dataclass; indices are those of its fields.

    A commit of a run of 200 learners holds 400 messages: each takes one call for all its fields.
    """

    get: Callable[[Any], Any]
    turns: tuple[tuple[int, Callable[[Any], Any]], ...]
    required: tuple[str, ...]
    optional: tuple[tuple[int, str, Callable[[Any], Any]], ...]


def _reader_of(told: tuple[_Field, ...]) -> _Reader:
    turned = [(index, field, field.take) for index, field in enumerate(told)]
    return _Reader(
        get=attrgetter(*(field.name for field in told)),
        turns=tuple((i, take) for i, field, take in turned if take and not field.optional),
        required=tuple(field.name for field in told if field.nested and not field.optional),
        optional=tuple((i, f.name, take) for i, f, take in turned if take and f.optional),
    )


def _fields_of(kind: type[Any]) -> tuple[_Field, ...]:
    hints = get_type_hints(kind)
    return tuple(_field(field.name, hints[field.name]) for field in fields(kind))


def _field(name: str, hint: Any) -> _Field:
    options = [option for option in get_args(hint) if option is not NoneType]
    optional = NoneType in get_args(hint)
    if optional:
        (hint,) = options
    if get_origin(hint) is dict:
        return _Field(name, nested=False, optional=False, put=None, take=dict)
    if get_origin(hint) is tuple:
        put, take = _turn(get_args(hint)[0])
        return _Field(name, False, False, _each(put), _each(take) or tuple)  # noqa: FBT003
    put, take = _turn(hint)
    return _Field(name, hint in MESSAGES, optional, put, take)


def _each(turn: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    return None if turn is None else lambda items: tuple(map(turn, items))


def _turn(hint: type[Any]) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    if hint in MESSAGES:
        return to_message, partial(_from_message, hint)
    if issubclass(hint, StrEnum):
        members = tuple(hint)
        numbers = {member: number for number, member in enumerate(members, start=1)}
        return numbers.__getitem__, lambda number: _member(members, number)
    return None, None


def _member(members: tuple[StrEnum, ...], number: int) -> StrEnum:
    """Return the enum member; numbers follow the order of the members (a test pins the names)."""
    if 0 < number <= len(members):
        return members[number - 1]
    name = type(members[0]).__name__
    if number == 0:
        msg = f"A {name} is missing."
        raise Corrupt(msg)
    msg = f"{name} {number} is of a later release: run the same Skerry everywhere."
    raise WrongVersion(msg)


_FIELDS: dict[type[Any], tuple[_Field, ...]] = {kind: _fields_of(kind) for kind in MESSAGES}
_READERS: dict[type[Any], _Reader] = {kind: _reader_of(told) for kind, told in _FIELDS.items()}
