"""Every error Skerry raises on purpose, in one tree.

A subclass also inherits the builtin that it refines and carries its data as attributes, so that a
caller can act on the data and a person can read the sentence. The message is one sentence that
says what is wrong and one that says what to do.
"""

from __future__ import annotations

from typing import ClassVar, cast


class SkerryError(Exception):
    """The root: catch it at a composition root and print the sentence, never a traceback."""

    exit_code = 1


class ConfigError(SkerryError, ValueError):
    """A setting is wrong; ``path`` names it, ``nearest`` the key that was probably meant."""

    exit_code = 2

    def __init__(self, message: str, *, path: str = "", nearest: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.nearest = nearest


class PlanError(ConfigError):
    """No fragment plan exists for these leaves and this number of fragments."""


class CorpusError(ConfigError):
    """The training text cannot be used: unreadable, empty, or shorter than one sequence."""


class ModelError(ConfigError):
    """A model could not be built or does not follow the model protocol."""


class WireError(SkerryError, ValueError):
    """Bytes that a receiver refuses; ``cause`` names the RefusalCause under which they count."""

    cause: ClassVar[str]


class Truncated(WireError):
    """Fewer bytes than the header promises."""

    cause = "truncated"


class Oversized(WireError):
    """A size above what this fragment can have; refused before anything is allocated."""

    cause = "oversized"


class Corrupt(WireError):
    """The checksum does not match, or the payload does not decode."""

    cause = "corrupt"


class WrongVersion(WireError):
    """A wire version that this release does not read."""

    cause = "wrong_version"


class WrongRun(WireError):
    """A message of another run."""

    cause = "wrong_run"


class WrongPlan(WireError):
    """A message that was cut by another fragment plan."""

    cause = "wrong_plan"


class UnknownScheme(WireError):
    """A quantisation scheme that this release does not know."""

    cause = "unknown_scheme"


class Implausible(WireError):
    """A message that decodes, with values that no honest service writes."""

    cause = "implausible"


class BusError(SkerryError):
    """The log cannot be used as asked."""


class BrokerUnavailable(BusError, ConnectionError):
    """No server answers at ``url``."""

    def __init__(self, message: str, *, url: str = "") -> None:
        super().__init__(message)
        self.url = url


class BrokerUnfit(BusError):
    """The server cannot carry a run: too old, no JetStream, or too small a ``max_payload``."""

    exit_code = 2


class Denied(BusError):
    """The broker does not let this login use ``subject``; asking again changes nothing."""

    exit_code = 2

    def __init__(self, message: str, *, subject: str = "") -> None:
        super().__init__(message)
        self.subject = subject


class StorageFull(BusError, OSError):
    """The stream or the disk under it has no room; nothing that was acknowledged is lost."""


class StreamDrift(BusError):
    """A stream exists with settings that cannot be changed in place; ``drift`` lists them."""

    exit_code = 2

    def __init__(self, message: str, *, drift: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.drift = drift


class Conflict(BusError):
    """A compare-and-set lost: the subject is no longer at the sequence that was expected."""

    def __init__(self, message: str, *, subject: str = "", expected: int = 0) -> None:
        super().__init__(message)
        self.subject = subject
        self.expected = expected


class Fenced(BusError):
    """Another syncer holds this shard's fence; this one must step down."""

    exit_code = 3


class Overtaken(BusError):
    """What a manifest points at has been replaced by a newer commit: read the manifest again."""


class StateLost(BusError):
    """The log lacks what its own records name; the message says what, and where it still is."""

    exit_code = 4


class ContributionGone(StateLost):
    """The window no longer holds a contribution that must be merged again."""


class HistoryBroken(BusError):
    """A log breaks one of its promises; the message names the first violation."""

    exit_code = 5


class Superseded(SkerryError):
    """A newer incarnation of this learner has joined; this one must stop."""

    exit_code = 3


class RunNotFound(BusError, LookupError):
    """No run of that id in this log."""

    exit_code = 2


class RunMismatch(BusError):
    """The run in the log is not the one that was asked for."""

    exit_code = 2


class RunFinished(BusError):
    """The run takes no more learners: it is finished."""

    exit_code = 2


class Diverged(SkerryError, ArithmeticError):
    """A non-finite loss or outer gradient."""


class LabError(SkerryError):
    """A lab run cannot come to its end."""


class StoreError(SkerryError, OSError):
    """A checkpoint store cannot be read or written."""


class CheckpointCorrupt(StoreError):
    """A checkpoint does not match its own digests; ``path`` names the file."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


def first_cause(error: BaseException) -> BaseException:
    """Return the error to report: inside a group, a SkerryError before anything else."""
    while isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        inner = [first_cause(e) for e in group.exceptions]
        error = next((e for e in inner if isinstance(e, SkerryError)), inner[0])
    return error
