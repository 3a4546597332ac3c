"""The subjects and stream names of a run: built and parsed here and nowhere else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from skerry.algorithm.fragments import shard_of
from skerry.errors import ConfigError

PREFIX = "skerry"
TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
ANY: Literal["*"] = "*"
"""Matches any one token: a subject without a number or a name is the pattern of all of them."""
OWN = "{{name()}}"
"""Stands for a client's own name, which the broker fills in from its key."""

Number = int | Literal["*"]
START = "start"
RunStream = Literal["LEDGER", "MEMBERS", "PULSE"]
ShardStream = Literal["STATE", "CONTRIB"]
StreamKind = RunStream | ShardStream
RUN_HEADS: dict[RunStream, tuple[str, ...]] = {
    "LEDGER": ("ledger",),
    "MEMBERS": ("member",),
    "PULSE": ("pulse", "round", "syncer"),
}
"""Which subjects a stream of the run captures, by the token after the run."""
SHARD_HEADS: dict[ShardStream, str] = {"STATE": "state", "CONTRIB": "contrib"}
"""Which subjects a stream of a shard captures, by the token after the run; the shard follows."""
STREAM_KINDS: tuple[StreamKind, ...] = (*RUN_HEADS, *SHARD_HEADS)
SHARED_KINDS = ("delta", "keyframe")
"""Kinds of chunks that every learner reads, so that a region keeps them."""


def checked_token(value: object, what: str) -> str:
    """Return ``value`` if it may be one token of a subject; raise ConfigError otherwise."""
    if not isinstance(value, str) or not TOKEN.fullmatch(value):
        msg = (
            f"{what} {value!r} cannot be part of a subject: "
            "use 1 to 64 letters, digits, '_' or '-', as a text."
        )
        raise ConfigError(msg, path=what)
    return value


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects of a run as a whole; ConfigError for a run or a name that cannot be in one.

    ``shard`` returns those of a shard's state and contributions.
    """

    run: str

    def __post_init__(self) -> None:
        checked_token(self.run, "run")

    @property
    def root(self) -> str:
        return f"{PREFIX}.{self.run}"

    def shard(self, shard: Number) -> ShardSubjects:
        """Return the subjects of one shard of the run's fragments."""
        return ShardSubjects(self.root, self.run, shard)

    def of_fragment(self, fragment: int, shards: int) -> ShardSubjects:
        """Return the subjects of the shard, one of ``shards``, to which a fragment belongs."""
        return self.shard(shard_of(fragment, shards))

    def stream(self, kind: RunStream) -> str:
        return f"SKERRY_{self.run}_{kind}"

    def streams(self, kind: StreamKind, shards: int) -> tuple[str, ...]:
        """Return the streams of a kind: one of the run, or one of each shard."""
        if kind == "STATE" or kind == "CONTRIB":  # noqa: PLR1714 - what type checkers understand
            return tuple(self.shard(shard).stream(kind) for shard in range(shards))
        return (self.stream(kind),)

    def of_stream(self, kind: RunStream) -> tuple[str, ...]:
        """Return the subject patterns that a stream captures."""
        return tuple(f"{self.root}.{head}.>" for head in RUN_HEADS[kind])

    def ledger(self, record: Literal["run", "checkpoint", "eval"]) -> str:
        return f"{self.root}.ledger.{record}"

    def commit(self, fragment: Number = ANY) -> str:
        return f"{self.root}.ledger.commit.{fragment}"

    def member(self, learner: str = ANY) -> str:
        return f"{self.root}.member.{_token(learner, 'learner')}"

    def quarantine(self, learner: str = ANY) -> str:
        return f"{self.root}.ledger.quarantine.{_token(learner, 'learner')}"

    def pulse(self, learner: str = ANY) -> str:
        return f"{self.root}.pulse.{_token(learner, 'learner')}"

    def round(self, fragment: Number = ANY) -> str:
        return f"{self.root}.round.{fragment}"

    def syncer(self, name: str = ANY) -> str:
        return f"{self.root}.syncer.{_token(name, 'syncer')}"


@dataclass(frozen=True, slots=True)
class ShardSubjects:
    """The subjects of one shard's state and contributions: its two streams capture these alone."""

    root: str
    run: str
    shard: Number

    def stream(self, kind: ShardStream) -> str:
        return f"SKERRY_{self.run}_{kind}_{self.shard}"

    def of_stream(self, kind: ShardStream) -> tuple[str, ...]:
        """Return the subject patterns that a stream captures."""
        return (f"{self.root}.{SHARD_HEADS[kind]}.{self.shard}.>",)

    def chunk(self, fragment: Number, kind: str, slot: Number = ANY, index: Number = ANY) -> str:
        """Return the subject of a chunk; ``kind`` says which readers want it."""
        return f"{self.root}.state.{self.shard}.{fragment}.{kind}.{slot}.{index}"

    def shared(self) -> tuple[str, ...]:
        """Return the patterns of all chunks that every learner reads."""
        return tuple(f"{self.root}.state.{self.shard}.*.{kind}.>" for kind in SHARED_KINDS)

    def manifest(self, fragment: Number = ANY) -> str:
        return f"{self.root}.state.{self.shard}.{fragment}.manifest"

    def fence(self) -> str:
        return f"{self.root}.state.{self.shard}.fence"

    def contribution(self, fragment: Number = ANY, learner: str = ANY) -> str:
        """Return a contribution's subject; the pattern of all fragments matches starts, too."""
        return f"{self.root}.contrib.{self.shard}.{fragment}.{_token(learner, 'learner')}"

    def start(self, learner: str = ANY) -> str:
        return f"{self.root}.contrib.{self.shard}.{START}.{_token(learner, 'learner')}"


def drill_of(run: str) -> str:
    """Return the subject of the drill's lease, with one token more than a pulse has."""
    return f"{Subjects(run).root}.pulse.drill.lease"


def stream_of(subject: str) -> str:
    """Return the stream that captures ``subject``; raise ConfigError if it is not one of ours."""
    head, run, kind, shard = [*subject.split("."), "", "", ""][:4]
    if head == PREFIX and run:
        for of_run, heads in RUN_HEADS.items():
            if kind in heads:
                return Subjects(run).stream(of_run)
        for of_shard, only in SHARD_HEADS.items():
            if kind == only and shard.isdecimal():
                return Subjects(run).shard(int(shard)).stream(of_shard)
    msg = f"{subject!r} is not a Skerry subject."
    raise ConfigError(msg, path="subject")


def is_shared(pattern: str) -> bool:
    """Return True for a pattern of chunks that every learner reads."""
    head, _, _, kind = [*pattern.split("."), *[""] * 6][2:6]
    return head == SHARD_HEADS["STATE"] and kind in SHARED_KINDS


def contributor(subject: str) -> tuple[int, str]:
    """Return the fragment and the learner of a contribution's subject; fragment -1 if it has none.

    A publisher may use any subject that the stream captures, so the fragment need not exist.
    """
    fragment, learner = subject.split(".")[-2:]
    return (int(fragment) if fragment.isdecimal() else -1), learner


def _token(name: str, what: str) -> str:
    return name if name in {ANY, OWN} else checked_token(name, what)
