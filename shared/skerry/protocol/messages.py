"""What the services say to each other, as plain values.

``skerry.protocol.records`` turns each of them into protobuf bytes and back.
Times are nanoseconds since the epoch by the sender's clock, for people to read:
no decision depends on two machines agreeing about them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from skerry.algorithm.fragments import LeafSpec
from skerry.algorithm.liveness import Activity


class RunState(StrEnum):
    """A run is open until the syncer has committed every learner's last contribution."""

    OPEN = "open"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """``ledger.run``: the run as it was created; the newest record on the subject counts.

    ``config_json`` is the resolved RunConfig; a service that joins takes it from here.
    """

    run: str
    config_json: str
    leaves: tuple[LeafSpec, ...]
    fragments: int
    plan_digest: int
    created_ns: int
    skerry_version: str
    state: RunState = RunState.OPEN
    restored_from: str = ""


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """``ledger.member.<learner>``: one start of a learner's process.

    The data shard of a learner is the rank of its name by first appearance in the ledger. Said
    once to join (``inner`` empty) and once more, for the same incarnation, when the learner knows
    where it goes on: ``cursor`` and ``step`` then hold its start, ``contrib_sequence`` is where its
    ``Start`` lies in CONTRIB, and ``inner`` says what became of its inner optimizer's state:
    ``new``, ``warm`` (read back, ``inner_age_steps`` old) or ``cold`` (begun anew).
    """

    run: str
    learner: str
    incarnation: int
    host: str
    joined_ns: int
    shard: int
    cursor: int = 0
    step: int = 0
    inner: str = ""
    inner_age_steps: int = 0
    contrib_sequence: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """``round.<f>``: the syncer asks for contributions towards ``version`` of a fragment.

    ``final`` rounds come after training has ended and collect what is left. ``attempt`` counts how
    often the round was opened before, because nobody's contribution came.
    """

    run: str
    plan_digest: int
    fragment: int
    version: int
    due_step: int
    opened_ns: int
    syncer: str
    final: bool = False
    trace_id: str = ""
    attempt: int = 0


class LearnerPhase(StrEnum):
    """What a learner is doing; ``FINISHED`` still answers rounds but takes no more steps."""

    STARTING = "starting"
    CATCHING_UP = "catching_up"
    TRAINING = "training"
    FINISHED = "finished"
    STOPPED = "stopped"

    @property
    def activity(self) -> Activity:
        """What of this matters to whoever judges liveness."""
        if self in {LearnerPhase.STARTING, LearnerPhase.CATCHING_UP}:
            return Activity.WAITING
        return Activity(self.value)


@dataclass(frozen=True, slots=True)
class Pulse:
    """``pulse.<learner>``: progress, so that a live network loop beside a dead trainer looks dead.

    ``step`` is on the global clock (a learner that joins late starts at the run's step), ``steps``
    and ``tokens`` count what this incarnation did, steps included whose outcome was not finite and
    that changed nothing: ``loss`` is NaN behind one. ``busy_s`` is time spent inside training steps
    and ``alive_s`` time since the process started. What else that time went into: ``compile_s`` to
    start and compile, ``recover_s`` to catch up with the log, ``wait_s`` for others in a blocking
    mode, ``replay_s`` for steps on data that an earlier incarnation had seen in vain (not in
    ``busy_s``); releases before these fields leave them 0. ``bytes_up`` and ``bytes_down`` count
    payloads of this incarnation, ``f32_bytes_...`` the same vectors in float32; ``encode_s`` is
    what encoding those that were sent took, ``decode_s`` decoding those that were read.
    """

    run: str
    learner: str
    incarnation: int
    phase: LearnerPhase
    sent_ns: int
    step: int
    steps: int
    tokens: int
    cursor: int
    loss: float
    step_time_s: float
    busy_s: float
    alive_s: float
    bytes_up: int
    bytes_down: int
    contributions: int
    versions: tuple[int, ...] = ()
    max_staleness: int = 0
    syncs_skipped: int = 0
    compile_s: float = 0.0
    recover_s: float = 0.0
    wait_s: float = 0.0
    replay_s: float = 0.0
    f32_bytes_up: int = 0
    f32_bytes_down: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SyncerPulse:
    """``syncer.<name>``: a syncer lives and holds ``shards`` by the fence tokens in ``fences``.

    ``instance`` tells two processes of one name apart. Silence for longer than the lease frees the
    shards; what makes a take-over safe is the fence alone. Only the last word of one that ends in
    order names no host.
    """

    run: str
    syncer: str
    instance: str
    sent_ns: int
    shards: tuple[int, ...] = ()
    fences: tuple[int, ...] = ()
    host: str = ""

    @property
    def leaves(self) -> bool:
        return not self.host


@dataclass(frozen=True, slots=True)
class Drill:
    """``pulse.drill.lease``: who injects faults into the run, from when on; empty: nobody does.

    Silence for longer than the lease frees it; what makes taking it safe is compare-and-set.
    """

    run: str
    holder: str
    began_ns: int
    sent_ns: int


@dataclass(frozen=True, slots=True)
class Start:
    """``contrib.start.<learner>``: no contribution of an older incarnation behind this one counts.

    It lies in the stream of the contributions itself, so its place among them is the same for
    everybody: a learner that comes back reads up to it, and knows all that can ever be merged of
    what its predecessors sent.
    """

    run: str
    learner: str
    incarnation: int
    sent_ns: int


class ContributionKind(StrEnum):
    """``GENESIS`` carries the fresh parameters (negated) as version 1 of a fragment."""

    OUTER_GRADIENT = "outer_gradient"
    GENESIS = "genesis"


@dataclass(frozen=True, slots=True)
class ContributionHeader:
    """What a learner says about its contribution; travels with chunk 0.

    ``norms`` are the L2 norms of the *decoded* outer gradient, one per slice of the fragment.
    ``[cursor_from, cursor_to)`` is the data it was made from; ``steps`` and ``tokens`` leave out
    what was skipped of it because a loss or gradient was not finite. ``identity`` is unique per
    (learner, incarnation, fragment): learners count them from 1. ``loss`` is NaN while none has
    been measured, and behind a skipped step.
    """

    kind: ContributionKind
    learner: str
    incarnation: int
    identity: int
    fragment: int
    base_version: int
    round_version: int
    step: int
    steps: int
    tokens: int
    cursor_from: int
    cursor_to: int
    loss: float
    captured_ns: int
    norms: tuple[float, ...] = ()
    trace_parent: str = ""


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """One stored chunk: where it is and what it must be."""

    sequence: int
    size: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Part:
    """One vector of a fragment's state, whole.

    ``name`` is ``params`` (what learners read), ``master`` or ``outer.<name>``; parts that are one
    vector have the same chunks, which say the name of the first of them. ``digest`` is
    xxh3-64 over the *decoded* f32 padded vector, so that it also checks the decoder.
    """

    name: str
    scheme: str
    digest: int
    chunks: tuple[ChunkRef, ...]
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class Consumed:
    """One contribution that a commit merged, with the weight it had.

    ``arrived_ns`` is when the syncer had it whole, by the clock of the commit's ``opened_ns``; 0
    for one that was made for an earlier round and waited for this one.
    """

    learner: str
    incarnation: int
    identity: int
    sequence_first: int
    sequence_last: int
    base_version: int
    staleness: int
    step: int
    steps: int
    tokens: int
    cursor_from: int
    cursor_to: int
    weight: float
    loss: float
    arrived_ns: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """One contribution that will never be merged, and why; zeros where its header never came.

    What tells of no contribution, being bytes that nobody can read, says at which ``sequence`` of
    CONTRIB they lie; 0 everywhere else, and in releases before this field.
    """

    cause: str
    learner: str
    incarnation: int = 0
    identity: int = 0
    tokens: int = 0
    cursor_from: int = 0
    cursor_to: int = 0
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class LearnerProgress:
    """What the log has accepted from a learner up to this commit, for this fragment."""

    learner: str
    incarnation: int
    identity: int
    tokens: int
    cursor: int


@dataclass(frozen=True, slots=True)
class Commit:
    """``ledger.commit.<f>``: fragment f went from version-1 to version, and why. Kept for ever."""

    run: str
    plan_digest: int
    fragment: int
    version: int
    step: int
    reason: str
    syncer: str
    fence: int
    opened_ns: int
    closed_ns: int
    quorum_s: float
    grace_s: float
    consumed: tuple[Consumed, ...]
    refused: tuple[Refused, ...]
    contrib_floor: int
    progress: tuple[LearnerProgress, ...]
    params_digest: int
    master_digest: int
    final: bool = False
    trace_id: str = ""
    merge_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Manifest:
    """``state.<f>.manifest``: the commit point. ``commit`` goes to the ledger as it stands here.

    ``contrib_floor`` in the commit: every contribution to this fragment at or below that stream
    sequence is resolved; above it, those in ``progress`` by identity are.
    """

    commit: Commit
    slot: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Fence:
    """``state.fence.<shard>``: who may commit; its stream sequence is the fencing token."""

    run: str
    shard: int
    holder: str
    taken_ns: int


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """``ledger.checkpoint``: a checkpoint was written and read back.

    It is the global state after every commit up to ``ledger_sequence``, and after no other.
    """

    run: str
    path: str
    digest: str
    versions: tuple[int, ...]
    step: int
    tokens: int
    written_ns: int
    size_bytes: int
    ledger_sequence: int = 0


MOST_SAMPLE_BYTES = 512


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``ledger.eval``: the global state of these versions, evaluated on held-out text.

    ``loss`` is in nats per token, ``bits_per_byte`` NaN where a token is not a byte. ``tokens`` are
    those that the state has been trained on, ``evaluated_tokens`` those it was judged by.
    ``text_digest`` is xxh3-64 over the evaluated batches: evaluators whose digests differ read
    different text, and their losses must not be compared. ``sample`` is what the state writes, at
    most ``MOST_SAMPLE_BYTES`` of UTF-8; empty where its model cannot be sampled.
    """

    run: str
    evaluator: str
    step: int
    tokens: int
    versions: tuple[int, ...]
    loss: float
    perplexity: float
    bits_per_byte: float
    evaluated_tokens: int
    text_digest: int
    evaluated_ns: int
    sample: str = ""


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The envelope of one payload chunk; sizes in bytes, ``raw_bytes`` before blosc2.

    ``version`` is the version a state chunk belongs to, or a contribution's base version.
    """

    run: str
    plan_digest: int
    fragment: int
    version: int
    sender: str
    incarnation: int
    index: int
    count: int
    scheme: str
    first_block: int
    blocks: int
    raw_bytes: int
    part: str = ""
    identity: int = 0
    contribution: ContributionHeader | None = None
    extra: dict[str, str] = field(default_factory=dict[str, str])
