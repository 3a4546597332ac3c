"""The streams of a run, and what can be changed when one is found different."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from skerry.errors import BrokerUnfit, StreamDrift
from skerry.log.base import Bus, Retention, Storage, StreamSpec
from skerry.protocol.subjects import PREFIX, RUN_HEADS, SHARD_HEADS, StreamKind, Subjects

STREAM_PREFIX = f"{PREFIX.upper()}_"
ENVELOPE_BYTES = 8192
"""Room for the header of a chunk; norms of a contribution are most of it."""
SLICE_BYTES = 18
"""What a contribution says of each slice: a norm of 8 bytes, and a count of tokens of up to 10."""
MEMBER_BYTES = 16 * 1024
"""The longest record of a learner's start: with a thousand shards it has 10 KiB."""
SEND_MOST, AHEAD_BYTES = 62, 32 * 1024**2
"""The most chunks of contributions that a learner has on their way at once, and the most bytes of
them, or of what it reads. The bus lets out more messages than that: pulses get past the chunks."""
KEPT: Mapping[StreamKind, tuple[Retention, Storage]] = {
    "LEDGER": (Retention.EVERYTHING, Storage.FILE),
    "MEMBERS": (Retention.FEW_PER_SUBJECT, Storage.FILE),
    "PULSE": (Retention.LAST_PER_SUBJECT, Storage.MEMORY),
    "STATE": (Retention.LAST_PER_SUBJECT, Storage.FILE),
    "CONTRIB": (Retention.WINDOW, Storage.FILE),
}
FIXED = ("retention", "storage")
"""Settings that cannot be changed in place: the broker refuses, or messages would be lost."""


def specs(
    run: str,
    *,
    shards: int = 1,
    replicas: int = 1,
    window_bytes: int = 4 * 1024**3,
    window_s: float = 24 * 3600.0,
) -> tuple[StreamSpec, ...]:
    """Return the streams of a run: LEDGER, MEMBERS, PULSE, then STATE and CONTRIB of each shard.

    STATE has no bound on its size: a bound that drops the oldest message of *any* subject would
    drop live fragments, and one that refuses new messages would stop the run. ``window_bytes``
    is what all shards' contributions have together; the broker reserves it when the streams are
    created, whether it is ever filled or not. In a cluster, JetStream spreads them over the nodes.
    Learners write into MEMBERS, which is bounded, and not into the ledger, which is kept for ever.
    """
    names = Subjects(run)
    of_shards = [names.shard(shard) for shard in range(shards)]

    def spec(kind: StreamKind, name: str, subjects: tuple[str, ...]) -> StreamSpec:
        window = kind == "CONTRIB"
        return StreamSpec(
            name,
            subjects,
            *KEPT[kind],
            max_bytes=window_bytes // shards if window else -1,
            max_age_s=window_s if window else 0.0,
            replicas=replicas,
            max_message_bytes=MEMBER_BYTES if kind == "MEMBERS" else -1,
        )

    return (
        *(spec(kind, names.stream(kind), names.of_stream(kind)) for kind in RUN_HEADS),
        *(spec(kind, s.stream(kind), s.of_stream(kind)) for s in of_shards for kind in SHARD_HEADS),
    )


def vectors_ahead(parameters: float) -> int:
    """Return how many f32 vectors (parameters,) fit into AHEAD_BYTES; 0 if not even one does."""
    return int(AHEAD_BYTES // (4 * parameters))


def message_bytes(chunk_bytes: int, slices: int) -> int:
    """Return the bytes of the longest message: a contribution's first chunk, with its header."""
    return chunk_bytes + max(ENVELOPE_BYTES, SLICE_BYTES * slices)


def check_payload(bus: Bus, chunk_bytes: int, slices: int = 0) -> None:
    """Raise BrokerUnfit if the broker's messages cannot hold a chunk, before anything compiles.

    ``slices`` are the most that a fragment has, once that is known.
    """
    needed = message_bytes(chunk_bytes, slices)
    if needed > bus.max_payload_bytes:
        msg = (
            f"The broker takes messages of {bus.max_payload_bytes} bytes, a chunk needs {needed}:"
            f" put `max_payload: {needed}` into its config file, or lower sync.chunk_bytes before"
            " the run is created."
        )
        raise BrokerUnfit(msg)


def normal(spec: StreamSpec) -> StreamSpec:
    """Return the spec as a broker would report it: subjects sorted, no bound written as -1."""
    return replace(
        spec,
        subjects=tuple(sorted(spec.subjects)),
        max_bytes=spec.max_bytes if spec.max_bytes > 0 else -1,
        max_message_bytes=spec.max_message_bytes if spec.max_message_bytes > 0 else -1,
        duplicate_window_s=min(spec.duplicate_window_s, spec.max_age_s or spec.duplicate_window_s),
    )


def changes(wanted: StreamSpec, found: StreamSpec) -> tuple[str, ...]:
    """Return the differences to change in place, none if the stream is as it should be.

    Raises StreamDrift when one of them cannot be changed in place.
    """
    wanted, found = normal(wanted), normal(found)
    in_place: list[str] = []
    fixed: list[str] = []
    for name in (field.name for field in fields(StreamSpec)):
        is_, should = getattr(found, name), getattr(wanted, name)
        if is_ != should:
            sentence = f"stream {wanted.name}: {name} is {is_}, should be {should}"
            (fixed if name in FIXED else in_place).append(sentence)
    if fixed:
        msg = (
            f"{'; '.join(fixed)}, which cannot be changed in place. Use another run id, or remove"
            f" the stream with `nats stream rm {wanted.name}`, which loses what it holds."
        )
        raise StreamDrift(msg, drift=(*fixed, *in_place))
    return tuple(f"{sentence}; changed" for sentence in in_place)
