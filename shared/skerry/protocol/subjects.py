"""The subjects and stream names of a run: built and parsed here and nowhere else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from skerry.errors import ConfigError

PREFIX = "skerry"
TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")

StreamKind = Literal["STATE", "LEDGER", "CONTRIB", "PULSE"]
STREAM_KINDS: tuple[StreamKind, ...] = ("STATE", "LEDGER", "CONTRIB", "PULSE")


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
    """All subjects of one run."""

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
        heads = {
            "STATE": ("state.>",),
            "LEDGER": ("ledger.>",),
            "CONTRIB": ("contrib.>",),
            "PULSE": ("pulse.>", "round.>", "syncer.>"),
        }[kind]
        return tuple(f"{self.root}.{head}" for head in heads)

    def stream_of(self, subject: str) -> str:
        """Return the name of the stream that captures ``subject``."""
        head = subject.removeprefix(f"{self.root}.").partition(".")[0]
        kinds: dict[str, StreamKind] = {
            "state": "STATE",
            "ledger": "LEDGER",
            "contrib": "CONTRIB",
            "pulse": "PULSE",
            "round": "PULSE",
            "syncer": "PULSE",
        }
        return self.stream(kinds[head])

    # STATE
    def chunk(self, fragment: int, slot: int, index: int) -> str:
        return f"{self.root}.state.{fragment}.{slot}.{index}"

    def chunks(self, fragment: int, slot: int) -> str:
        return f"{self.root}.state.{fragment}.{slot}.*"

    def manifest(self, fragment: int) -> str:
        return f"{self.root}.state.{fragment}.manifest"

    def manifests(self) -> str:
        return f"{self.root}.state.*.manifest"

    def fence(self, shard: int) -> str:
        return f"{self.root}.state.fence.{shard}"

    def fences(self) -> str:
        return f"{self.root}.state.fence.*"

    # LEDGER
    def run_record(self) -> str:
        return f"{self.root}.ledger.run"

    def commit(self, fragment: int) -> str:
        return f"{self.root}.ledger.commit.{fragment}"

    def commits(self) -> str:
        return f"{self.root}.ledger.commit.*"

    def checkpoint(self) -> str:
        return f"{self.root}.ledger.checkpoint"

    def evaluation(self) -> str:
        return f"{self.root}.ledger.eval"

    def member(self, learner: str) -> str:
        return f"{self.root}.ledger.member.{checked_token(learner, 'learner')}"

    def members(self) -> str:
        return f"{self.root}.ledger.member.*"

    # CONTRIB
    def contribution(self, fragment: int, learner: str) -> str:
        return f"{self.root}.contrib.{fragment}.{checked_token(learner, 'learner')}"

    def contributions(self, fragment: int | None = None) -> str:
        """Return the pattern of one fragment's contributions; None: all, and every ``Start``."""
        return f"{self.root}.contrib.{'*' if fragment is None else fragment}.*"

    def contributions_of(self, learner: str) -> str:
        """Return the pattern of everything that one learner has sent to CONTRIB."""
        return f"{self.root}.contrib.*.{checked_token(learner, 'learner')}"

    def start(self, learner: str) -> str:
        return f"{self.root}.contrib.start.{checked_token(learner, 'learner')}"

    def starts(self) -> str:
        return f"{self.root}.contrib.start.*"

    # PULSE
    def pulse(self, learner: str) -> str:
        return f"{self.root}.pulse.{checked_token(learner, 'learner')}"

    def pulses(self) -> str:
        return f"{self.root}.pulse.*"

    def round(self, fragment: int) -> str:
        return f"{self.root}.round.{fragment}"

    def rounds(self) -> str:
        return f"{self.root}.round.*"

    def syncer(self, name: str) -> str:
        return f"{self.root}.syncer.{checked_token(name, 'syncer')}"

    def syncers(self) -> str:
        return f"{self.root}.syncer.*"

    def drill(self) -> str:
        """Return the subject of the drill's lease, with one token more than a pulse has."""
        return f"{self.root}.pulse.drill.lease"


def run_of(subject: str) -> str:
    """Return the run that a subject belongs to; raise ConfigError if it is not one of ours."""
    head, _, rest = subject.partition(".")
    run = rest.partition(".")[0]
    if head != PREFIX or not run:
        msg = f"{subject!r} is not a Skerry subject."
        raise ConfigError(msg, path="subject")
    return run


def contributor(subject: str) -> tuple[int, str]:
    """Return the fragment and the learner of a contribution's subject; fragment -1 if it has none.

    A publisher may use any subject that the stream captures, so the fragment need not exist.
    """
    fragment, learner = subject.split(".")[-2:]
    return (int(fragment) if fragment.isdecimal() else -1), learner
