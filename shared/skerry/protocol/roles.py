"""What each role of a run may say to the broker: one table, from which its configuration is made.

Learners and readers live in an account of their own, EDGE, and reach the log in CORE through
service imports: in one account any of them could have the broker answer onto a subject of the log,
and so write it. Syncers and admins write the log anyway.
A region has a broker of its own, a leaf node, whose learners it alone knows: at the hub it has an
account that may do what they may, and fill its cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from skerry.protocol.subjects import ANY, PREFIX, STREAM_KINDS, StreamKind, Subjects

API = "$JS.API"
HUB_API = "$JS.hub.API"
"""The prefix by which a region's broker reaches JetStream at the hub, whose domain is ``hub``."""
REGION_MARK = "skerry-"
"""The prefix of the domain of a region's broker, which tells its clients that there is a cache."""
CACHE_API = "$JS.CACHE"
"""The prefix by which a region's learners ask for what its broker holds itself."""
MANY_ANSWERS = (f"{API}.DIRECT.GET.", f"{API}.CONSUMER.MSG.NEXT.")
"""Requests that more than one message may answer."""


class Role(StrEnum):
    """Who a key is for; ``FOUNDER`` is a learner that may also create its run."""

    LEARNER = "learner"
    FOUNDER = "founder"
    SYNCER = "syncer"
    CHECKPOINTER = "checkpointer"
    EVALUATOR = "evaluator"
    HEALTH_MONITOR = "health-monitor"
    AUDIT = "audit"
    ADMIN = "admin"
    REGION = "region"
    CACHE = "cache"

    @property
    def account(self) -> str:
        """The account that its keys belong to."""
        if self in {Role.REGION, Role.CACHE}:  # a region's broker at the hub; in the region
            return self.upper()
        return "CORE" if self in {Role.SYNCER, Role.ADMIN} else "EDGE"


READ: Mapping[Role, tuple[StreamKind, ...]] = {
    Role.LEARNER: STREAM_KINDS,
    Role.FOUNDER: STREAM_KINDS,
    Role.SYNCER: STREAM_KINDS,
    Role.CHECKPOINTER: ("STATE", "LEDGER", "MEMBERS"),
    Role.EVALUATOR: ("STATE", "LEDGER"),
    Role.HEALTH_MONITOR: ("LEDGER", "MEMBERS", "PULSE"),
    Role.AUDIT: STREAM_KINDS,
}
LISTING = frozenset({Role.SYNCER, Role.HEALTH_MONITOR, Role.AUDIT})
"""Roles that look at the sizes of streams."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A role in a run, under a name; a name of ``*`` stands for every one. Admins have all runs.

    ``shards`` are those of the run, each of which has streams of its own. With a ``region`` only
    its broker takes the key. It expires at ``until``, in seconds since 1970; 0: never.
    """

    role: Role
    name: str = ANY
    run: str = "main"
    shards: int = 1
    region: str = ""
    until: int = 0

    def publishes(self) -> tuple[str, ...]:
        """Return the subjects that it may publish on, requests to the broker among them."""
        if self.role is Role.ADMIN:
            return (f"{PREFIX}.>", f"{API}.>")
        if self.role is Role.REGION:
            return self.mirrors()
        if self.role is Role.CACHE:
            said = [f"{API}.INFO", f"{HUB_API}.INFO", f"{API}.STREAM.LIST"]
            for stream in self.mirrored():
                said += [f"{API}.STREAM.*.{stream}", *_reading(stream)]
            return tuple(said)
        listing = [f"{API}.STREAM.LIST"] if self.role in LISTING else []
        names = Subjects(self.run)
        streams = (s for kind in READ[self.role] for s in names.streams(kind, self.shards))
        reads = (request for stream in streams for request in _reading(stream))
        cached = (through_cache(stream) for stream in self.kept() if self.region)
        return (f"{API}.INFO", *listing, *reads, *self._writing(), *cached)

    def kept(self) -> tuple[str, ...]:
        """Return the streams of which a region keeps a part, under their own names."""
        return Subjects(self.run).streams("STATE", self.shards)

    def mirrored(self) -> tuple[str, ...]:
        """Return the streams that a region keeps whole where it is a standby."""
        names = Subjects(self.run)
        return (*self.kept(), names.stream("LEDGER"), names.stream("MEMBERS"))

    def mirrors(self) -> tuple[str, ...]:
        """Return the requests by which a region's broker fills its cache."""
        return tuple(
            request
            for stream in self.mirrored()
            for request in (f"{API}.CONSUMER.CREATE.{stream}", f"$JS.FC.{stream}.>")
        )

    def fills(self) -> tuple[str, ...]:
        """Return the requests to the hub by which a region's cache fills itself."""
        asks = (request.replace(API, HUB_API, 1) for request in self.mirrors())
        return (f"{HUB_API}.INFO", *asks)

    def _writing(self) -> tuple[str, ...]:
        names = Subjects(self.run)
        of_shards = names.shard(ANY)
        named = of_shards.contribution(learner=self.name), names.member(self.name)
        match self.role:
            case Role.LEARNER:
                return (*named, names.pulse(self.name))
            case Role.FOUNDER:
                declared = (
                    f"{API}.STREAM.{request}.{stream}"
                    for request in ("CREATE", "UPDATE")
                    for kind in STREAM_KINDS
                    for stream in names.streams(kind, self.shards)
                )
                return (*named, names.pulse(self.name), names.ledger("run"), *declared)
            case Role.SYNCER:
                # A single server forgets what it held in memory.
                again = f"{API}.STREAM.CREATE.{names.stream('PULSE')}"
                ledger = names.commit(), names.quarantine(), names.ledger("run")
                writes = (*of_shards.of_stream("STATE"), *ledger)
                return (*writes, names.round(), names.syncer(), again)
            case Role.CHECKPOINTER:
                return (names.ledger("checkpoint"),)
            case Role.EVALUATOR:
                return (names.ledger("eval"),)
            case _:
                return ()


def _reading(stream: str) -> tuple[str, ...]:
    """Return the requests by which a stream is read: ``MSG.GET`` asks a cluster's leader."""
    of_stream = ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")
    of_consumer = ("CONSUMER.CREATE", "CONSUMER.DELETE", "CONSUMER.MSG.NEXT")
    return (
        *(f"{API}.{request}.{stream}" for request in of_stream),
        *(f"{API}.{request}.{stream}.*" for request in of_consumer),
    )


def through_cache(stream: str) -> str:
    """Return the request for what a region's own broker holds of a stream."""
    return f"{CACHE_API}.DIRECT.GET.{stream}"


def delivers_to(region: str) -> str:
    """Return the subject on which the hub sends a region what it keeps."""
    return f"{PREFIX}-deliver.{region}"


def services_for_edge(grants: Iterable[Grant]) -> dict[str, str]:
    """Return what CORE does for EDGE: the response type of each request, by its subject."""
    edge = {
        Grant(g.role, run=g.run, shards=g.shards): None for g in grants if g.role.account == "EDGE"
    }
    subjects = dict.fromkeys(subject for grant in edge for subject in grant.publishes())
    return {s: "stream" if s.startswith(MANY_ANSWERS) else "singleton" for s in subjects}
