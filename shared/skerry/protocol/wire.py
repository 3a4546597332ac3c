"""Bytes and back: dataclasses as protobuf, in a frame that is checked before anything parses it.

A frame is little-endian, 24 bytes, then ``header_bytes`` of protobuf, then ``payload_bytes`` raw:

====== ===== =======================================================
offset bytes field
====== ===== =======================================================
0      4     magic ``SKRY``
4      1     wire version; these five bytes stay where they are for ever
5      1     kind of message
6      2     reserved, zero
8      4     header_bytes
12     4     payload_bytes
16     8     xxh3-64 of bytes 0 to 16, header and payload
====== ===== =======================================================

Dataclasses and protobuf messages come from one schema and have the same fields in the same order,
so one pair of functions serves them all. How each field is converted is looked up once, when the
module is imported.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

import xxhash
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from skerry.errors import Corrupt, Oversized, Truncated, WrongVersion
from skerry.protocol.messages import FrameKind
from skerry.protocol.v1 import messages

Convert = Callable[[Any], Any]

T = TypeVar("T")

MAGIC = b"SKRY"
WIRE_VERSION = 2
FIRST_VERSION = 1
"""What Skerry 0.1 wrote."""
MAX_HEADER_BYTES = 1 << 20
"""Also the largest record: a NATS server takes messages up to 1 MiB by default."""
MAX_PAYLOAD_BYTES = 32 << 20
"""JetStream stores no larger record, whatever ``max_payload`` says."""

_START = struct.Struct("<4sBBHII")
_CHECKSUM = struct.Struct("<Q")
PREFIX_BYTES = _START.size + _CHECKSUM.size


class Frame(NamedTuple):
    """A whole, undamaged frame; both views point into the received bytes."""

    header: memoryview
    payload: memoryview


def write(kind: FrameKind, header: bytes, payload: bytes = b"") -> bytes:
    """Return the framed message; Oversized if header or payload is above its cap."""
    _refuse_oversized(len(header), len(payload))
    start = _START.pack(MAGIC, WIRE_VERSION, kind, 0, len(header), len(payload))
    checksum = _CHECKSUM.pack(_checksum(start, header, payload))
    return b"".join((start, checksum, header, payload))


def read(kind: FrameKind, data: bytes | memoryview, *, checked: bool = False) -> Frame:
    """Return the parts of a framed message of this kind, without copying them.

    Checks, in this order, magic, wire version (a later version may lay out the rest differently),
    sizes, checksum and kind. Raises Corrupt, WrongVersion, Truncated or Oversized. With ``checked``
    the checksum is skipped, because the caller has compared one over all of ``data``.
    """
    view = memoryview(data)
    _check_version(view)
    if len(view) < PREFIX_BYTES:
        msg = f"{len(view)} bytes are less than the {PREFIX_BYTES} that every message starts with."
        raise Truncated(msg)
    _, _, found, reserved, header_bytes, payload_bytes = _START.unpack_from(view)
    _refuse_oversized(header_bytes, payload_bytes)
    promised = PREFIX_BYTES + header_bytes + payload_bytes
    if len(view) != promised:
        msg = f"The message has {len(view)} bytes, and its frame promises {promised}."
        raise Truncated(msg) if len(view) < promised else Corrupt(msg)
    header = view[PREFIX_BYTES : PREFIX_BYTES + header_bytes]
    payload = view[PREFIX_BYTES + header_bytes :]
    (want,) = _CHECKSUM.unpack_from(view, _START.size)
    if not checked and _checksum(view[: _START.size], header, payload) != want:
        msg = "The checksum does not match: the message was damaged in transit or in the store."
        raise Corrupt(msg)
    if found != kind or reserved:
        msg = f"The message is of kind {found}, and a {kind.name} ({kind.value}) was expected."
        raise Corrupt(msg)
    return Frame(header, payload)


def checksum(data: bytes | memoryview) -> int:
    """Return the checksum that a frame carries, which ``read`` has compared."""
    return int(_CHECKSUM.unpack_from(data, _START.size)[0])


def _checksum(start: bytes | memoryview, *parts: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(start)
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def _check_version(view: memoryview) -> None:
    if len(view) <= len(MAGIC):
        msg = f"{len(view)} bytes are no message."
        raise Truncated(msg)
    head, version = bytes(view[: len(MAGIC)]), view[len(MAGIC)]
    if head != MAGIC:
        msg = f"The message starts with {head!r} and not with {MAGIC!r}: not one of ours."
        raise Corrupt(msg)
    if version == FIRST_VERSION:
        msg = (
            f"The message was written by Skerry 0.1 (wire version {version}), this release reads"
            f" version {WIRE_VERSION}: run the same release everywhere, and end a run of 0.1 with"
            " 0.1."
        )
        raise WrongVersion(msg)
    if version != WIRE_VERSION:
        msg = (
            f"The message has wire version {version}, and this release reads {WIRE_VERSION}: "
            "run the same Skerry release everywhere."
        )
        raise WrongVersion(msg)


def _refuse_oversized(header_bytes: int, payload_bytes: int) -> None:
    if header_bytes > MAX_HEADER_BYTES:
        msg = f"A header or record of {header_bytes} bytes is above the cap of {MAX_HEADER_BYTES}."
        raise Oversized(msg)
    if payload_bytes > MAX_PAYLOAD_BYTES:
        msg = f"A payload of {payload_bytes} bytes is above the cap of {MAX_PAYLOAD_BYTES}."
        raise Oversized(msg)


def _message_classes() -> Iterator[tuple[type[Any], type[Message]]]:
    """Yield each dataclass with its protobuf class."""
    pool, package = DescriptorPool(), messages.__name__.rpartition(".")[0]
    schema = FileDescriptorSet.FromString((files(package) / "schema.bin").read_bytes())
    for file in schema.file:
        pool.Add(file)
    for name in (message.name for file in schema.file for message in file.message_type):
        if (kind := getattr(messages, name, None)) is not None:
            yield kind, GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))


MESSAGES: dict[type[Any], type[Message]] = dict(_message_classes())
"""The protobuf class of each dataclass."""


@dataclass(frozen=True, slots=True)
class _Field:
    """One field; ``put`` and ``take`` convert its value, None where protobuf takes it as it is.

    ``optional`` fields may be absent, and then are ``default``; a ``required`` message must be
    there.
    """

    name: str
    optional: bool
    required: bool
    put: Convert | None
    take: Convert | None
    default: Any = None


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
    return cast("T", _READERS[kind](message))


def to_message(value: Any) -> Message:
    """Return the protobuf message with the fields of ``value``."""
    values: dict[str, Any] = {}
    for field in _FIELDS[type(value)]:
        item = getattr(value, field.name)
        if not field.optional or item != field.default:
            values[field.name] = field.put(item) if field.put else item
    return MESSAGES[type(value)](**values)


def _field(field: FieldDescriptor, default: Any) -> _Field:
    put, take = _conversions(field)
    if field.is_repeated:
        return _Field(
            field.name, optional=False, required=False, put=_each(put), take=_each(take) or tuple
        )
    optional = field.containing_oneof is not None  # the schema's ``optional`` is a oneof of its own
    required = bool(field.message_type) and not optional
    return _Field(field.name, optional, required, put, take, default)


def _each(convert: Convert | None) -> Convert | None:
    return None if convert is None else lambda items: tuple(map(convert, items))


def _conversions(field: FieldDescriptor) -> tuple[Convert | None, Convert | None]:
    if field.message_type is not None:
        nested = getattr(messages, field.message_type.name)
        return to_message, lambda message: _READERS[nested](message)  # noqa: PLW0108 - made later
    if field.enum_type is None:
        return None, None
    kind: type[StrEnum] = getattr(messages, field.enum_type.name)
    prefix = field.enum_type.values_by_number[0].name.removesuffix("UNSPECIFIED")
    numbers = {m: field.enum_type.values_by_name[prefix + m.name].number for m in kind}
    members = {number: member for member, number in numbers.items()}

    def member(number: int) -> StrEnum:
        if number in members:
            return members[number]
        if number == 0:
            msg = f"A {kind.__name__} is missing."
            raise Corrupt(msg)
        msg = f"{kind.__name__} {number} is of a later release: run the same Skerry everywhere."
        raise WrongVersion(msg)

    return numbers.__getitem__, member


def _as_it_is(value: Any) -> Any:
    return value


def _reader_of(kind: type[Any], fields: tuple[_Field, ...]) -> Convert:
    """Return a function that turns a message of this kind into its dataclass.

    A commit of a run of 200 learners holds 400 messages: one call gets all fields of each.
    """
    get = attrgetter(*(field.name for field in fields))
    required = [field.name for field in fields if field.required]
    takes = [(i, f.take) for i, f in enumerate(fields) if f.take and not f.optional]
    absent = [
        (i, f.name, f.take or _as_it_is, f.default)
        for i, f in enumerate(fields)
        if f.optional and (f.take or f.default)
    ]

    def read(message: Message) -> Any:
        for name in required:
            if not message.HasField(name):
                msg = f"The {kind.__name__} has no {name}."
                raise Corrupt(msg)
        values = list(get(message))
        for index, take in takes:
            values[index] = take(values[index])
        for index, name, take, default in absent:
            values[index] = take(values[index]) if message.HasField(name) else default
        return kind(*values)

    return read


_FIELDS: dict[type[Any], tuple[_Field, ...]] = {
    kind: tuple(
        _field(field, kind.__dataclass_fields__[field.name].default)
        for field in cast("list[FieldDescriptor]", message.DESCRIPTOR.fields)
    )
    for kind, message in MESSAGES.items()
}
_READERS = {kind: _reader_of(kind, fields) for kind, fields in _FIELDS.items()}
