"""The subjects and stream names of a run: built and parsed here and nowhere else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from skerry.errors import ConfigError

PREFIX = "skerry"
TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
ANY: Literal["*"] = "*"
"""Matches any one token: a subject without a number or a name is the pattern of all of them."""

Number = int | Literal["*"]
StreamKind = Literal["STATE", "LEDGER", "CONTRIB", "PULSE"]
HEADS: dict[StreamKind, tuple[str, ...]] = {
    "STATE": ("state",),
    "LEDGER": ("ledger",),
    "CONTRIB": ("contrib",),
    "PULSE": ("pulse", "round", "syncer"),
}
"""Which subjects a stream captures, by the token after the run."""
STREAM_KINDS = tuple(HEADS)


def checked_token(value: str, what: str) -> str:
    """Return ``value`` if it may be one token of a subject; raise ConfigError otherwise."""
    if not TOKEN.fullmatch(value):
        msg = (
            f"{what} {value!r} cannot be part of a subject: "
            "use 1 to 64 letters, digits, '_' or '-'."
        )
        raise ConfigError(msg, path=what)
    return value


@dataclass(frozen=True, slots=True)
class Subjects:
    """All subjects of one run; ConfigError for a run or a name that cannot be part of one."""

    run: str

    def __post_init__(self) -> None:
        checked_token(self.run, "run")

    @property
    def root(self) -> str:
        return f"{PREFIX}.{self.run}"

    def stream(self, kind: StreamKind) -> str:
        return f"SKERRY_{self.run}_{kind}"

    def of_stream(self, kind: StreamKind) -> tuple[str, ...]:
        """Return the subject patterns that a stream captures."""
        return tuple(f"{self.root}.{head}.>" for head in HEADS[kind])

    def chunk(self, fragment: int, kind: str, slot: int, index: Number = ANY) -> str:
        """Return the subject of a chunk; ``kind`` says which readers want it."""
        return f"{self.root}.state.{fragment}.{kind}.{slot}.{index}"

    def manifest(self, fragment: Number = ANY) -> str:
        return f"{self.root}.state.{fragment}.manifest"

    def fence(self, shard: Number = ANY) -> str:
        return f"{self.root}.state.fence.{shard}"

    def ledger(self, record: Literal["run", "checkpoint", "eval"]) -> str:
        return f"{self.root}.ledger.{record}"

    def commit(self, fragment: Number = ANY) -> str:
        return f"{self.root}.ledger.commit.{fragment}"

    def member(self, learner: str = ANY) -> str:
        return f"{self.root}.ledger.member.{_token(learner, 'learner')}"

    def quarantine(self, learner: str = ANY) -> str:
        return f"{self.root}.ledger.quarantine.{_token(learner, 'learner')}"

    def contribution(self, fragment: Number = ANY, learner: str = ANY) -> str:
        """Return the subject of a contribution; the pattern of all fragments has every start."""
        return f"{self.root}.contrib.{fragment}.{_token(learner, 'learner')}"

    def start(self, learner: str = ANY) -> str:
        return f"{self.root}.contrib.start.{_token(learner, 'learner')}"

    def pulse(self, learner: str = ANY) -> str:
        return f"{self.root}.pulse.{_token(learner, 'learner')}"

    def round(self, fragment: Number = ANY) -> str:
        return f"{self.root}.round.{fragment}"

    def syncer(self, name: str = ANY) -> str:
        return f"{self.root}.syncer.{_token(name, 'syncer')}"


def drill_of(run: str) -> str:
    """Return the subject of the drill's lease, with one token more than a pulse has."""
    return f"{Subjects(run).root}.pulse.drill.lease"


def stream_of(subject: str) -> str:
    """Return the stream that captures ``subject``; raise ConfigError if it is not one of ours."""
    head, run, kind = [*subject.split("."), "", ""][:3]
    if head == PREFIX and run:
        for stream, heads in HEADS.items():
            if kind in heads:
                return Subjects(run).stream(stream)
    msg = f"{subject!r} is not a Skerry subject."
    raise ConfigError(msg, path="subject")


def contributor(subject: str) -> tuple[int, str]:
    """Return the fragment and the learner of a contribution's subject; fragment -1 if it has none.

    A publisher may use any subject that the stream captures, so the fragment need not exist.
    """
    fragment, learner = subject.split(".")[-2:]
    return (int(fragment) if fragment.isdecimal() else -1), learner


def _token(name: str, what: str) -> str:
    return name if name == ANY else checked_token(name, what)
