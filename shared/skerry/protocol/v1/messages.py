"""Generated from proto/skerry/protocol/v1 by proto/generate.py: do not edit.

proto/skerry/protocol/v1/frame.proto explains units, defaults and how the schema may change.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from skerry.algorithm.fragments import LeafSpec

__all__ = [
    "CheckpointRecord",
    "ChunkHeader",
    "ChunkRef",
    "CloseReason",
    "Commit",
    "CommitOrigin",
    "Consumed",
    "ContributionHeader",
    "ContributionKind",
    "Drill",
    "Evaluation",
    "FRAME_KINDS",
    "Fence",
    "FrameKind",
    "InnerState",
    "LearnerPhase",
    "LearnerProgress",
    "Manifest",
    "MasterOrigin",
    "MemberRecord",
    "Part",
    "Pulse",
    "Quarantine",
    "QuarantineReason",
    "Record",
    "RefusalCause",
    "Refused",
    "Round",
    "RunRecord",
    "RunState",
    "Start",
    "SyncerPulse",
    "Unnamed",
]


class ContributionKind(StrEnum):
    """What a contribution holds."""

    OUTER_GRADIENT = "outer_gradient"
    """What the learner changed since it adopted the fragment."""
    GENESIS = "genesis"
    """The fresh parameters, negated, as version 1 of a fragment."""


class LearnerPhase(StrEnum):
    """What a learner is doing."""

    STARTING = "starting"
    CATCHING_UP = "catching_up"
    TRAINING = "training"
    FINISHED = "finished"
    """Takes no more steps, and still answers rounds."""
    STOPPED = "stopped"


class RunState(StrEnum):
    """A run is open until the syncer has committed every learner's last contribution."""

    OPEN = "open"
    FINISHED = "finished"


class InnerState(StrEnum):
    """With which state of the inner optimizer a learner begins."""

    NEW = "new"
    """The learner's first start, at the run's first step: there is nothing to restore."""
    WARM = "warm"
    """Restored from its last checkpoint of it."""
    COLD = "cold"
    """Begun again, so the learning rate rises again."""


class QuarantineReason(StrEnum):
    """Why a learner is in quarantine."""

    BY_HAND = "by_hand"
    REPEATS = "repeats"
    """It sends again what was merged before."""
    FREE_RIDES = "free_rides"
    """It sends nothing of its own."""
    OVERLONG = "overlong"
    """What it sends is many times as long as what the others send."""
    OPPOSED = "opposed"
    """What it sends points against what the others send."""


class CommitOrigin(StrEnum):
    """What a commit comes from."""

    GENESIS = "genesis"
    """Fresh parameters, version 1."""
    ROUND = "round"
    """A round that closed; Commit.reason says why."""
    RESTORED = "restored"
    """A checkpoint with which the fragment's history in this log begins, at any version."""
    REPLACED = "replaced"
    """A checkpoint that was put back over the past that the fragment has in this log."""


class CloseReason(StrEnum):
    """Why a round closed."""

    ALL_ARRIVED = "all_arrived"
    """At least K contributed, and so did every learner that was expected."""
    GRACE_OVER = "grace_over"
    """K contributed, and the grace window after the K-th has passed."""
    SHORT_HANDED = "short_handed"
    """Fewer than K learners are alive, and all of them contributed."""
    TIMEOUT = "timeout"
    """Open for the whole timeout, with at least one contribution."""
    FINAL_EMPTY = "final_empty"
    """A final round without any contribution."""
    NOTHING_COUNTS = "nothing_counts"
    """Every contribution was refused, so the new version equals the one before."""


class MasterOrigin(StrEnum):
    """What a commit goes on from where it is not the master that was committed before: the
    syncer that had it is gone, and merging again what was contributed since the snapshot did not
    give it back.
    """

    REPLAYED = "replayed"
    """What merging again gave: this syncer's machine rounds differently."""
    GLOBAL = "global"
    """The global fragment of the version before: the log lacks a contribution that was to be
    merged.
    """


class RefusalCause(StrEnum):
    """Why a contribution, or a message that cannot be read, was refused."""

    TRUNCATED = "truncated"
    """Fewer bytes than the frame promises."""
    OVERSIZED = "oversized"
    """A size above what the fragment can have."""
    CORRUPT = "corrupt"
    """A wrong checksum, or contents that contradict themselves."""
    WRONG_VERSION = "wrong_version"
    WRONG_RUN = "wrong_run"
    WRONG_PLAN = "wrong_plan"
    UNKNOWN_SCHEME = "unknown_scheme"
    INCOMPLETE = "incomplete"
    """Some chunks never came."""
    SUPERSEDED = "superseded"
    """A newer incarnation of the learner had started before it was whole."""
    TOO_STALE = "too_stale"
    """Its base is older than sync.max_staleness allows."""
    BASE_IN_FUTURE = "base_in_future"
    """Its base is newer than the fragment."""
    DIVERGED = "diverged"
    """The merge would not be finite with it."""
    GENESIS = "genesis"
    """Initial parameters that the fragment no longer needs, or a gradient before it has any."""
    IMPLAUSIBLE = "implausible"
    """Numbers that no honest learner sends."""
    WRONG_SCHEME = "wrong_scheme"
    """A scheme that this run does not use."""
    UNKNOWN_BASE = "unknown_base"
    """A base that this fragment never had."""
    TOO_MANY = "too_many"
    """More contributions than may be pending at once."""
    REPEATED = "repeated"
    """The contents of a contribution that was merged before."""
    FREE_RIDING = "free_riding"
    """No work of its own: zeros where others have learnt, what the others send, or what moved
    the fragment last.
    """
    QUARANTINED = "quarantined"
    """Its learner is in quarantine."""
    OVERLONG = "overlong"
    """Many times as long as may be."""
    OPPOSED = "opposed"
    """It points against what the others send, who agree with each other."""


@dataclass(frozen=True, slots=True)
class ContributionHeader:
    """What a learner says about its contribution; travels with the first chunk."""

    kind: ContributionKind
    learner: str
    incarnation: int
    identity: int
    """Counts a learner's contributions to one fragment from 1, within one incarnation."""
    fragment: int
    base_version: int
    """The version that the outer gradient is relative to."""
    round_version: int
    """The version that the answered round makes."""
    step: int
    """The global clock at the capture."""
    steps: int
    """Steps that the gradient is made of. Steps whose loss or gradient was not finite changed
    nothing and are left out here and in ``tokens``.
    """
    tokens: int
    cursor_from: int
    """The data that it was made from is [cursor_from, cursor_to), in sequences of the learner's
    shard.
    """
    cursor_to: int
    loss: float
    """NaN before the first measurement, and after a step that was skipped."""
    captured_ns: int
    trace_parent: str = ""
    """W3C trace context of the span that sends it; empty where the trace is not sampled."""
    norms: tuple[float, ...] = ()
    """L2 norms of the decoded outer gradient, one per slice of the fragment; none for genesis."""
    slice_tokens: tuple[int, ...] = ()
    """Of ``tokens``, those that reached each slice of the fragment, such as those routed to an
    expert; none where all reached every slice.
    """


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The envelope of one payload chunk; the packed bytes follow it in the frame, outside
    protobuf.
    """

    run: str
    plan_digest: int
    fragment: int
    version: int
    """The version that a chunk of global state belongs to, or a contribution's base version."""
    sender: str
    """The learner, or the syncer that holds the shard."""
    incarnation: int
    """The learner's incarnation, or the syncer's fence token."""
    index: int
    count: int
    scheme: str
    """Quantisation scheme by name."""
    first_block: int
    blocks: int
    raw_bytes: int
    """Size before compression."""
    part: str = ""
    """Name of the part of the global state; empty for a contribution."""
    identity: int = 0
    """Of the contribution; 0 for global state."""
    contribution: ContributionHeader | None = None
    """With the first chunk of a contribution only."""


@dataclass(frozen=True, slots=True)
class Start:
    """contrib.<shard>.start.<learner>: no older incarnation's contribution counts that comes
    after this.

    It lies in the stream of each shard's contributions, so its place among them is the same for
    every reader: a learner that comes back reads up to it, and then knows everything of its
    predecessors that can still be merged.
    """

    run: str
    learner: str
    incarnation: int
    sent_ns: int
    shard: int = 0
    """In whose stream of contributions it lies; a learner publishes one in each."""


@dataclass(frozen=True, slots=True)
class Round:
    """round.<f>: the syncer asks for contributions towards ``version`` of a fragment."""

    run: str
    plan_digest: int
    fragment: int
    version: int
    due_step: int
    """The step of the global clock for which it was opened."""
    opened_ns: int
    syncer: str
    final: bool = False
    """A round after training has ended, which collects what is left."""
    trace_id: str = ""
    attempt: int = 0
    """How often this round was opened before, because no contribution came."""


@dataclass(frozen=True, slots=True)
class SyncerPulse:
    """syncer.<name>: a syncer is alive, and holds these shards.

    Silence for longer than the lease frees the shards. What makes a take-over safe is the fence
    alone.
    """

    run: str
    syncer: str
    instance: str
    """Tells two processes of one name apart."""
    sent_ns: int
    host: str = ""
    """Empty only in the last pulse of a syncer that ends in order."""
    shards: tuple[int, ...] = ()
    fences: tuple[int, ...] = ()
    """The fence token by which it holds each of ``shards``, in the same order."""


@dataclass(frozen=True, slots=True)
class Drill:
    """pulse.drill.lease: the process that injects faults into the run.

    Silence for longer than the lease frees it; compare-and-set makes taking it safe.
    """

    run: str
    holder: str
    """Empty where the last holder has given it back."""
    began_ns: int
    sent_ns: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """pulse.<learner>: progress, so that a live network loop beside a dead trainer looks dead."""

    run: str
    learner: str
    incarnation: int
    phase: LearnerPhase
    sent_ns: int
    step: int
    """On the global clock: a learner that joins late starts at the run's step."""
    steps: int
    """Steps and tokens of this incarnation, with steps whose outcome was not finite and that
    changed nothing.
    """
    tokens: int
    cursor: int
    """How far the learner's data shard has been read, in sequences."""
    loss: float
    """NaN after a step that was not finite."""
    step_time_s: float
    busy_s: float
    """Time spent inside training steps."""
    alive_s: float
    """Time since the process started. What is in none of busy_s, compile_s, recover_s, wait_s
    and replay_s was idle.
    """
    bytes_up: int
    """Payloads of this incarnation."""
    bytes_down: int
    contributions: int
    versions: tuple[int, ...]
    """The version of each fragment that the learner has adopted."""
    max_staleness: int = 0
    syncs_skipped: int = 0
    compile_s: float = 0.0
    """To start and compile."""
    recover_s: float = 0.0
    """To catch up with the log."""
    wait_s: float = 0.0
    """For other learners, in a blocking mode."""
    replay_s: float = 0.0
    """Steps on data that an earlier incarnation had used in vain; not in busy_s."""
    f32_bytes_up: int = 0
    """What bytes_up and bytes_down would be in float32."""
    f32_bytes_down: int = 0
    encode_s: float = 0.0
    """Time that encoding and decoding payloads took, beside the steps."""
    decode_s: float = 0.0
    digest_mismatches: int = 0
    """Global fragments that deltas made into something else than what was committed, and that
    were read from a keyframe again.
    """
    region: str = ""
    """The region whose broker the learner is connected to, none where that is the hub; and how
    much of bytes_down came out of its cache.
    """
    cached_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """ledger.run: the run as it was created; the newest record on the subject counts."""

    run: str
    config_json: str
    """The resolved RunConfig: a service that joins takes it from here."""
    leaves: tuple[LeafSpec, ...]
    fragments: int
    shards: int
    """Into how many shards the fragments are dealt: each has streams of its own for state and
    contributions.
    """
    plan_digest: int
    created_ns: int
    skerry_version: str
    state: RunState
    restored_from: str = ""
    """The checkpoint that the run began from; empty where it began from fresh parameters."""


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """member.<learner>: one start of a learner's process.

    Written once to join, and once more for the same incarnation when the learner knows where it
    goes on: only that second record has ``inner``, and the place where it starts. The data shard of
    a learner is the rank of its name among those that have joined.
    """

    run: str
    learner: str
    incarnation: int
    """Counts the starts of a name from 1; 0 in a restored run, where it keeps a data shard for a
    name.
    """
    host: str
    joined_ns: int
    shard: int
    cursor: int = 0
    """Where the learner starts in its data shard, in sequences."""
    step: int = 0
    """Where the learner starts on the global clock."""
    inner: InnerState | None = None
    inner_age_steps: int = 0
    """How old the inner optimizer's state is, where it is warm."""
    contrib_sequences: tuple[int, ...] = ()
    """Where its Start lies in CONTRIB of each shard."""
    data: str = ""
    """Digest of the text that the learner reads, where it is known."""
    offers: bool = False
    """The learner has the run's initial parameters, and may offer them."""
    mesh: str = ""
    """What it computes on: devices by mesh axis (none: one device), the name of one, and how
    many tokens a second their peak would train, where that is known.
    """
    device: str = ""
    peak_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """ledger.checkpoint: a checkpoint was written and read back.

    It is the global state after every commit up to ``ledger_sequence``, and after no other.
    """

    run: str
    path: str
    digest: str
    """SHA-256 of its manifest, as hexadecimal digits."""
    versions: tuple[int, ...]
    """The version of each fragment, in order."""
    step: int
    tokens: int
    written_ns: int
    size_bytes: int
    ledger_sequence: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """ledger.eval: the global state of these versions, evaluated on held-out text."""

    run: str
    evaluator: str
    step: int
    tokens: int
    """Tokens that the state has been trained on."""
    versions: tuple[int, ...]
    loss: float
    perplexity: float
    bits_per_byte: float
    """NaN where a token is not a byte."""
    evaluated_tokens: int
    text_digest: int
    """Digest of the evaluated batches. Evaluators whose digests differ read different text, and
    their losses must not be compared.
    """
    evaluated_ns: int
    sample: str = ""
    """Text that the state generates, at most 512 bytes of UTF-8; empty where its model cannot be
    sampled.
    """
    average_loss: float = 0.0
    """Loss of the moving average of the global model (eval.ema) on the same text; 0 where there
    is none.
    """


@dataclass(frozen=True, slots=True)
class Quarantine:
    """ledger.quarantine.<learner>: nothing of the learner is merged; the newest record counts."""

    run: str
    learner: str
    reason: QuarantineReason
    by: str
    """The syncer by whose rule it was decided, or the host on which somebody did."""
    decided_ns: int
    released: bool = False
    """The learner is merged again from here on. Refusals from before do not count against it:
    each syncer forgets them at its first commit while the learner is in quarantine.
    """


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """One stored chunk: where it is, and what it must be."""

    sequence: int
    """Its sequence in the STATE stream."""
    size: int
    checksum: int
    """Of the whole message."""


@dataclass(frozen=True, slots=True)
class Part:
    """One vector of a fragment's state, of the manifest's version or an earlier one."""

    name: str
    """What learners read: ``keyframe``, the global fragment whole, or ``delta``, the difference
    from the version before. What a syncer starts from: ``master`` and ``outer.<name>``.
    """
    scheme: str
    digest: int
    """Of the decoded, padded f32 vector, so that it also checks the decoder; of a delta, that of
    the global fragment which it leads to.
    """
    chunks: tuple[ChunkRef, ...]
    blocks: int
    """Length of the vector in blocks of 256; an outer optimizer's state has its own."""
    version: int
    """The version of the fragment that it belongs to."""
    slot: int
    """Which of the chunk buffers of its kind it lies in."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """One contribution that a commit merged, with the weight it had."""

    learner: str
    incarnation: int
    identity: int
    sequence_first: int
    sequence_last: int
    base_version: int
    staleness: int
    """How many versions behind the merge its base was."""
    step: int
    steps: int
    tokens: int
    cursor_from: int
    cursor_to: int
    weight: float
    """Its share of the merge: the weights of a commit add up to 1."""
    loss: float
    arrived_ns: int = 0
    """When the syncer had it whole, by the clock of the commit's opened_ns; 0 for one that was
    made for an earlier round and waited for this one.
    """
    norm: float = 0.0
    """L2 norm of its outer gradient, decoded, as it came."""
    cut: float = 0.0
    """The share of its length that was cut off before it was merged, since it was too long."""
    uncounted: float = 0.0
    """The share of its tokens and steps that its weight leaves out, since they were too many."""
    digest: int = 0
    """Of its codes and scales."""
    alignment: float = 0.0
    """Cosine between its outer gradient and the mean direction of the other learners' in this
    merge, by a sample; 0 where there are fewer than two others.
    """


@dataclass(frozen=True, slots=True)
class Refused:
    """One contribution that will never be merged, and why.

    Its numbers are 0 where its header never arrived. One without an identity is about bytes that
    cannot be read, and ``sequence`` says where in CONTRIB they are.
    """

    cause: RefusalCause
    learner: str
    incarnation: int = 0
    identity: int = 0
    tokens: int = 0
    cursor_from: int = 0
    cursor_to: int = 0
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Unnamed:
    """How many refusals of one learner's contributions a commit has no room to name."""

    learner: str
    count: int


@dataclass(frozen=True, slots=True)
class LearnerProgress:
    """What the log has accepted from a learner up to and including a commit, for one fragment."""

    learner: str
    incarnation: int
    """Incarnation and identity of the newest contribution that was merged."""
    identity: int
    tokens: int
    cursor: int
    """How far the learner's data counts as used."""


@dataclass(frozen=True, slots=True)
class Commit:
    """ledger.commit.<f>: fragment f went from version-1 to version, and why. Kept for ever."""

    run: str
    plan_digest: int
    fragment: int
    version: int
    step: int
    """The global clock when the round closed."""
    origin: CommitOrigin
    syncer: str
    fence: int
    """The token of the fence under which it was written."""
    opened_ns: int
    closed_ns: int
    quorum_s: float
    """From opening the round to its K-th contribution."""
    grace_s: float
    """From the K-th contribution to closing the round."""
    consumed: tuple[Consumed, ...]
    refused: tuple[Refused, ...]
    contrib_floor: int
    """Every contribution to this fragment at or below this sequence of CONTRIB is resolved;
    above it those are that ``progress`` covers by identity.
    """
    progress: tuple[LearnerProgress, ...]
    params_digest: int
    """Of the global fragment that learners read, decoded."""
    master_digest: int
    final: bool = False
    trace_id: str = ""
    merge_s: float = 0.0
    """Time that the merge and the outer step took."""
    reason: CloseReason | None = None
    """Why the round closed; None where ``origin`` is no round."""
    source: str = ""
    """The checkpoint that a restored or replaced state comes from."""
    source_version: int = 0
    """The fragment's version in ``source``, where it was put back over a past and counts on from
    that.
    """
    previous: int = 0
    """Digest of the bytes of the fragment's commit record before this one in the ledger, 0 for
    the first. The records of a fragment form a chain, in which a changed one is found.
    """
    unnamed: tuple[Unnamed, ...] = ()
    """The contributions that were refused beyond those that ``refused`` has room to name."""
    master_origin: MasterOrigin | None = None
    """None where a commit goes on from the master that was committed before."""
    outer_version: int = 0
    """The version whose outer optimizer's state a commit goes on with where ``master_origin`` is
    the global fragment.
    """


@dataclass(frozen=True, slots=True)
class Manifest:
    """state.<shard>.<f>.manifest: the commit point. The commit goes to the ledger as it stands
    here.
    """

    commit: Commit
    parts: tuple[Part, ...]
    """Those of this version, and of earlier ones that readers may need: the newest keyframe, the
    deltas of the last versions, the newest master and state of the outer optimizer.
    """
    shard: int = 0
    """To which its fragment belongs."""


@dataclass(frozen=True, slots=True)
class Fence:
    """state.<shard>.fence: who may commit; the stream sequence of the record is the fence token."""

    run: str
    shard: int
    holder: str
    taken_ns: int


class FrameKind(IntEnum):
    """What a frame holds, as its kind byte says. Numbers are never reused."""

    CHUNK = 1
    RUN = 2
    MEMBER = 3
    ROUND = 4
    PULSE = 5
    MANIFEST = 6
    COMMIT = 7
    FENCE = 8
    CHECKPOINT = 9
    SYNCER_PULSE = 10
    START = 11
    EVALUATION = 12
    DRILL = 13
    QUARANTINE = 14


FRAME_KINDS: dict[type[Any], FrameKind] = {
    ChunkHeader: FrameKind.CHUNK,
    RunRecord: FrameKind.RUN,
    MemberRecord: FrameKind.MEMBER,
    Round: FrameKind.ROUND,
    Pulse: FrameKind.PULSE,
    Manifest: FrameKind.MANIFEST,
    Commit: FrameKind.COMMIT,
    Fence: FrameKind.FENCE,
    CheckpointRecord: FrameKind.CHECKPOINT,
    SyncerPulse: FrameKind.SYNCER_PULSE,
    Start: FrameKind.START,
    Evaluation: FrameKind.EVALUATION,
    Drill: FrameKind.DRILL,
    Quarantine: FrameKind.QUARANTINE,
}
"""The kind of the frame that holds each message."""

Record = (
    RunRecord
    | MemberRecord
    | Round
    | Pulse
    | Manifest
    | Commit
    | Fence
    | CheckpointRecord
    | SyncerPulse
    | Start
    | Evaluation
    | Drill
    | Quarantine
)
"""A message in a frame of its own, without payload."""
