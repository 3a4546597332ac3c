"""Records come back as they were sent, or are refused with the error that says why."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm.fragments import LeafSpec
from skerry.errors import (
    Corrupt,
    Implausible,
    Oversized,
    WireError,
    WrongPlan,
    WrongRun,
    WrongVersion,
)
from skerry.protocol import door, records, wire
from skerry.protocol.messages import (
    FRAME_KINDS,
    ChunkHeader,
    Commit,
    Fence,
    FrameKind,
    Manifest,
    MemberRecord,
    Part,
    Pulse,
    Round,
    RunRecord,
    Start,
    cause_of,
)
from skerry.protocol.records import Record, StoredMessage
from skerry.protocol.subjects import Subjects
from tests.support.builders import commit, member, pulse, round_, run_record, syncer_pulse

ALL = [(kind, number) for kind, number in FRAME_KINDS.items() if kind is not ChunkHeader]


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for anything a message field may hold."""
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=3).map(tuple)
    if get_origin(hint) is dict:
        return st.dictionaries(st.text(), st.text(), max_size=3)
    if type(None) in get_args(hint):
        return st.none() | values(next(a for a in get_args(hint) if a is not type(None)))
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{f.name: values(hints[f.name]) for f in fields(hint)})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    simple: dict[Hashable, st.SearchStrategy[Any]] = {
        int: st.integers(0, 2**64 - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: st.text(),
    }
    return simple[hint]


def decoded(record: Record) -> Record:
    return records.decode(type(record), records.encode(record), run=origin(record).run)


def origin(record: Any) -> Any:
    return record.commit if isinstance(record, Manifest) else record


PULSE = pulse(run="r")
COMMIT = commit(run="r")
ROUND = round_(run="r", plan_digest=77)
RUN = run_record("r", plan_digest=77)


@settings(max_examples=150)
@given(st.sampled_from([kind for kind, _ in ALL]).flatmap(values))
def test_a_record_comes_back_as_it_was_or_is_implausible(record: Record) -> None:
    data = records.encode(record)

    assert records.encode(replace(record)) == data
    try:
        door.check(origin(record))
    except Implausible:
        with pytest.raises(Implausible):
            records.decode(type(record), data, run=origin(record).run)
    else:
        assert records.decode(type(record), data, run=origin(record).run) == record


@settings(max_examples=100)
@given(st.sampled_from(list(wire.MESSAGES)).flatmap(values))
def test_every_message_comes_back_as_it_was(value: object) -> None:
    assert wire.decode(type(value), wire.encode(value)) == value


def test_infinite_and_missing_losses_survive() -> None:
    for loss in (math.inf, -0.0):
        again = records.decode(Pulse, records.encode(replace(PULSE, loss=loss)), run="r")
        assert math.copysign(1, again.loss) == math.copysign(1, loss)
        assert again.loss == loss
    again = records.decode(Pulse, records.encode(replace(PULSE, loss=math.nan)), run="r")
    assert math.isnan(again.loss)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, -0.5, 1e12])
@pytest.mark.parametrize("record", [PULSE, COMMIT], ids=["pulse", "commit"])
def test_a_time_that_cannot_be_is_implausible_and_any_loss_is_not(
    record: Pulse | Commit, odd: float
) -> None:
    times = {n for n, hint in get_type_hints(type(record)).items() if hint is float} - {"loss"}
    assert {name[-2:] for name in times} == {"_s"}
    for name in times:
        with pytest.raises(Implausible, match=name):
            decoded(replace(record, **{name: odd}))
    decoded(replace(PULSE, loss=odd))


@pytest.mark.parametrize(
    "record",
    [
        replace(PULSE, step_time_s=1e-320),
        replace(PULSE, step_time_s=1e-7),
        replace(PULSE, step=2**53 + 1),
        replace(PULSE, sent_ns=2**63),
        replace(PULSE, learner="a.b"),
        replace(PULSE, learner="a" * 65),
        member("a", 2**64 - 1, run="r"),
        replace(ROUND, due_step=2**60),
        syncer_pulse("s" * 65, run="r"),
        Start("r", "", 1, 1),
        replace(RUN, leaves=()),
        replace(RUN, leaves=(LeafSpec("w", (9,), unit=4),)),
        replace(RUN, leaves=(LeafSpec("w", (2**40,), unit=1),)),
        replace(RUN, leaves=(LeafSpec("w", (4,)), LeafSpec("w", (4,)))),
        replace(RUN, leaves=(LeafSpec("w", (2**60,)),)),
        replace(RUN, leaves=(LeafSpec("w", (1,) * 33),)),
        replace(RUN, fragments=2**54),
    ],
)
def test_what_no_honest_service_writes_is_implausible(record: Record) -> None:
    with pytest.raises(Implausible):
        decoded(record)


def protobuf(kind: type[Any], **fields: Any) -> Any:
    """Return a message with these fields and no others."""
    return wire.MESSAGES[kind](**fields)


def test_leaves_of_the_first_release_are_trained_as_one_unit() -> None:
    then = protobuf(LeafSpec, name="w", shape=[4, 4], embedding=True).SerializeToString()
    leaf = LeafSpec("w", (4, 4), embedding=True)
    assert wire.decode(LeafSpec, then) == leaf
    assert wire.encode(leaf) == then, "and are written as they were"


def test_a_record_on_the_subject_of_another_is_refused() -> None:
    stored = StoredMessage(Subjects("r").pulse("b"), 1, 1, records.encode(PULSE))
    with pytest.raises(Corrupt, match=r"pulse\.a.*pulse\.b"):
        records.read(Pulse, stored, run="r")


@pytest.mark.parametrize("record", [ROUND, RUN], ids=["round", "run"])
def test_a_record_of_another_plan_is_refused(record: Round | RunRecord) -> None:
    data = records.encode(record)

    assert records.decode(type(record), data, run="r", plan_digest=77) == record
    with pytest.raises(WrongPlan):
        records.decode(type(record), data, run="r", plan_digest=78)


LATER = protobuf(Pulse, run="r")
LATER.MergeFromString(b"\x20\x63")  # phase = 99
NO_PHASE = protobuf(Pulse, run="r").SerializeToString()
NO_COMMIT = protobuf(Manifest, parts=[protobuf(Part)]).SerializeToString()


@pytest.mark.parametrize(
    ("kind", "data", "error", "said"),
    [
        (Pulse, wire.write(FrameKind.PULSE, wire.encode(PULSE), b"x"), Corrupt, "payload"),
        (Pulse, wire.write(FrameKind.PULSE, LATER.SerializeToString()), WrongVersion, "Phase 99"),
        (Pulse, wire.write(FrameKind.PULSE, NO_PHASE), Corrupt, "LearnerPhase"),
        (Manifest, wire.write(FrameKind.MANIFEST, NO_COMMIT), Corrupt, "no commit"),
        (Round, records.encode(PULSE), Corrupt, "ROUND"),
        (Pulse, records.encode(replace(PULSE, run="s")), WrongRun, "run 's' and not to 'r'"),
    ],
)
def test_what_is_no_such_record_is_named(
    kind: type[Any], data: bytes, error: type[WireError], said: str
) -> None:
    with pytest.raises(error, match=said):
        records.decode(kind, data, run="r")


def test_fields_of_a_later_release_are_skipped() -> None:
    body = wire.encode(Fence("r", 1, "me", 5)) + b"\xfa\x07\x03new"  # field 127
    data = wire.write(FrameKind.FENCE, body)

    assert records.decode(Fence, data, run="r") == Fence("r", 1, "me", 5)


@settings(max_examples=200)
@given(st.sampled_from(ALL), st.binary(max_size=80))
def test_any_bytes_in_a_good_frame_raise_nothing_but_wire_errors(
    entry: tuple[type[Any], FrameKind], body: bytes
) -> None:
    kind, number = entry
    try:
        record = records.decode(kind, wire.write(number, body), run="")
    except WireError:
        return
    assert isinstance(record, kind)


def test_a_record_above_one_mebibyte_is_not_written() -> None:
    with pytest.raises(Oversized):
        records.encode(replace(RUN, config_json="x" * wire.MAX_HEADER_BYTES))


@pytest.mark.parametrize("count", [-1, 2**64])
def test_a_count_that_the_field_cannot_hold_is_an_error_of_the_sender(count: int) -> None:
    with pytest.raises(ValueError, match="range"):
        records.encode(member("ann", count))


def test_a_field_that_is_left_out_and_a_zero_are_the_same_bytes() -> None:
    assert wire.encode(commit(final=False, trace_id="", previous=0)) == wire.encode(commit())
    assert wire.encode(commit(trace_id="0af7")) != wire.encode(commit())


def test_an_optional_enum_is_none_when_absent_and_corrupt_when_zero() -> None:
    body = wire.encode(member())

    assert wire.decode(MemberRecord, body).inner is None
    with pytest.raises(Corrupt, match="InnerState"):
        wire.decode(MemberRecord, body + b"\x48\x00")  # inner = 0


@pytest.mark.parametrize("error", WireError.__subclasses__())
def test_every_wire_error_has_a_cause(error: type[WireError]) -> None:
    assert cause_of(error("bad")).value == error.cause
