"""The settings of a run: every table, with the default, unit and bounds of each field.

All services of a run share its ``RunConfig``; the ledger stores it when the run is created, with
what its mode has filled in. ``settings.local`` has what belongs to one machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from skerry.algorithm.fragments import MOST_SHARDS
from skerry.algorithm.schemes import AUTO, CHUNK_BYTES, DELTAS, SCHEMES
from skerry.settings.modes import MUON_LR, WITH_MUON, Mode, clauses

WHOLE = 2**63
"""Integers have 64 bits: each is at least ``-WHOLE`` and less than ``WHOLE``."""


class Table(BaseModel):
    """A table of settings: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _complete(cls, value: object) -> object:
        """Expand ``~`` at the start of a path; refuse an integer of more than 64 bits."""
        if isinstance(value, Path):
            return value.expanduser()
        if isinstance(value, int) and not -WHOLE <= value < WHOLE:
            kind, bound = ("less_than", {"lt": WHOLE}) if value > 0 else ("least", {"ge": -WHOLE})
            raise PydanticCustomError(kind, "out of bounds", bound)
        return value


def _by_comma(value: object) -> object:
    """Return a list as a tuple; text, as --set and the environment give it, is split."""
    if isinstance(value, str):
        return tuple(part for text in value.split(",") if (part := text.strip()))
    return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType] - pydantic judges the elements


Texts = Annotated[tuple[str, ...], BeforeValidator(_by_comma)]


if TYPE_CHECKING:
    ContributionScheme: TypeAlias = str
    GlobalScheme: TypeAlias = str
    DeltaScheme: TypeAlias = str
else:  # the table of schemes says which there are
    ContributionScheme = Literal[tuple(SCHEMES)]
    GlobalScheme = Literal[tuple(name for name, scheme in SCHEMES.items() if scheme.for_global)]
    DeltaScheme = Literal[(AUTO, "none", *DELTAS)]


class ModelConfig(Table):
    """The model to train."""

    preset: Literal[
        "nano", "micro", "small", "base", "0.1b", "0.3b", "1b", "3b", "7b", "12b", "moe-0.3b", "own"
    ] = "nano"
    """A built-in size; ``skerry plan`` prints its parameters. ``own`` stands in the record of a run
    whose training loops brought a model of their own."""
    config: str = Field(default="", max_length=1 << 20)
    """The text of a Hugging Face ``config.json``, instead of a preset."""
    path: str = ""
    """A folder of Hugging Face weights that a new run begins with; read when it is created."""
    weights: str = Field(default="", max_length=64)
    """Digest of the weights that the run began with; set when it is created."""
    factory: str = ""
    """``module:function`` that returns a model of your own; empty: the built-in decoder."""
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Keyword arguments for ``factory``."""
    lora_rank: int = Field(default=0, ge=0, le=1024)
    """Rank of the adapters that are trained instead of the model; 0: the model is trained."""
    lora_alpha: float | None = Field(default=None, gt=0)
    """Adapters are scaled by alpha / rank; unset: twice the rank."""
    lora_targets: Texts = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """The matrices that get adapters, by the last part of their names."""
    layers: int | None = Field(default=None, ge=1)
    """Transformer blocks; this and the sizes below replace those of the preset or config."""
    d_model: int | None = Field(default=None, ge=8)
    """Width of the residual stream."""
    heads: int | None = Field(default=None, ge=1)
    """Query heads; must divide d_model."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads; must divide heads."""
    d_ff: int | None = Field(default=None, ge=8)
    """Width of the gated MLP."""
    vocab: int | None = Field(default=None, ge=2)
    """Tokens in the vocabulary; 256 for bytes."""


class DataConfig(Table):
    """The text to train on."""

    source: Literal["stdlib", "text", "tokens", "prepared"] = "stdlib"
    """Sources of the Python standard library, text files, memory-mapped token shards, or folders
    that ``skerry data prepare`` wrote."""
    factory: str = ""
    """``module:function`` that returns a dataset with ``__len__`` and ``__getitem__``, instead of
    ``source``."""
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Keyword arguments for ``factory``."""
    tokenizer_folder: str = ""
    """Folder of a tokenizer for ``text``, which may then also be JSON lines or Parquet, or for a
    dataset; a learner tokenises at its first start. Empty: text is read as bytes."""
    field: str = "text"
    """Column or key of the text in JSON lines, Parquet and datasets; ``messages``:
    conversations."""
    paths: Texts = ()
    """Files and folders, for all sources but ``stdlib``; for ``text`` and ``tokens`` also patterns
    (``logs/*.txt``) and ``s3://bucket/prefix``, reached by the settings ``store`` or AWS_... A
    learner that names its own reads them instead of those in the run's record."""
    weights: tuple[float, ...] = ()
    """Weight of each of ``paths`` in what a learner reads; empty: their size."""
    packing: Literal["stream", "documents", "fit"] = "stream"
    """``documents``: documents in one sequence do not attend to each other. ``fit``: in addition, a
    document that fits into a sequence is not cut, and padding fills the rest. Both need a model
    that takes batches with segments, as the built-in ones do."""
    tokenizer: str = ""
    """Digest of the tokenizer that all learners' text is prepared with; the first one sets it."""
    suffixes: Texts = (".py", ".txt", ".md", ".rst")
    """Name endings of the text files to read in a folder."""
    token_dtype: Literal["uint8", "uint16", "uint32"] = "uint16"  # noqa: S105 - a dtype
    """Element type of raw token shards."""
    seq_len: int = Field(default=128, ge=8)
    """Tokens per sequence."""
    batch: int = Field(default=8, ge=1)
    """Sequences in each step of each learner."""
    streams: int = Field(default=8, ge=1)
    """Disjoint data streams; learners beyond that number read an earlier stream, reshuffled."""
    partition: Literal["interleaved", "contiguous"] = "interleaved"
    """``interleaved``: each stream samples all text; ``contiguous``: each has a part of its own."""
    held_out: float = Field(default=0.02, gt=0, lt=0.5)
    """Share of the text that no learner trains on; a hash of the content picks it."""
    seed: int = 0
    """Seed of the shuffle."""

    @property
    def of_bytes(self) -> bool:
        """True where a token is a byte of the text."""
        return self.source in ("stdlib", "text") and not (self.factory or self.tokenizer_folder)


ENDS = ("train.steps", "train.duration_s", "train.tokens")
"""The settings that end a run; a run that goes on from a checkpoint may change them."""


class TrainConfig(Table):
    """The steps of a learner."""

    inner: str = "adamw"
    """``adamw``, ``muon`` (matrices by Muon, the rest by AdamW, at one learning rate), ``gradient``
    (a step subtracts the bare gradient, for mode data-parallel), or ``module:function`` that takes
    ``learning_rate`` and returns an optax optimizer. Where neither this nor ``lr`` is set, presets
    nano and micro are trained from scratch with ``muon`` at 1.2e-2 and 6e-3 (experiments
    ``optimizer`` and ``size`` of docs/quality.md)."""
    steps: int = Field(default=1000, ge=1)
    """Steps on the global clock after which the run ends."""
    duration_s: float | None = Field(default=None, gt=0)
    """Ends the run this many seconds after its first commit, if that is sooner than ``steps``."""
    tokens: int | None = Field(default=None, ge=1)
    """Ends the run once about this many tokens of all learners have been merged, if that is sooner
    than ``steps``. More learners shorten the run, and the learning rate follows. The same tokens in
    fewer steps end at a higher loss (experiment ``scavenging`` of docs/quality.md)."""
    lr: float = Field(default=3e-3, gt=0)
    """Peak learning rate of the inner optimizer (experiment ``learning-rate`` of
    docs/quality.md)."""
    schedule: Literal["warmup-cosine", "warmup-stable-decay", "constant"] = "warmup-cosine"
    """The learning rate after its warm-up falls along a cosine, stays constant and falls at the
    end, or stays constant."""
    lr_final: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of the run, as a share of the peak; ``constant`` ignores it."""
    warmup: float = Field(default=0.05, ge=0, lt=1)
    """Share of the run during which the learning rate rises."""
    decay: float = Field(default=0.2, gt=0, le=1)
    """Share of the run, at its end, during which ``warmup-stable-decay`` lowers the learning rate;
    not measured."""
    accumulate: int = Field(default=1, ge=1)
    """Equal parts into which a step splits its batch, one after the other; must divide data.batch.
    Activations take the memory of one part, and the result is the same. Only the loss that balances
    experts is the mean over parts, which is stricter than over the whole batch."""
    b1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    b2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of AdamW's second moment (experiment ``inner`` of docs/quality.md)."""
    weight_decay: float = Field(default=0.1, ge=0)
    """AdamW's decoupled weight decay, on matrices only."""
    clip: float = Field(default=1.0, gt=0)
    """Gradients with a larger global norm are scaled down to it."""
    remat: str = Field(
        default="none", pattern=r"^(none|blocks|(attention|mlp)(,(attention|mlp))*)$"
    )
    """Which activations of a block its gradient computes again: ``none``; all (``blocks``); or all
    but the output of ``attention``, of ``mlp``, or of both joined by a comma. With ``none``, layers
    in a loop keep the results of matrix products and compute the rest again."""
    layers: Literal["auto", "unrolled", "scanned"] = "auto"
    """``unrolled``: the program has each layer by itself; ``scanned``: layers that repeat are one
    loop over stacks of their parameters, which compiles and loads sooner and holds fewer
    activations; ``auto``: scanned from 12 layers on, unrolled with adapters."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the arithmetic; ``auto``: bfloat16 where the hardware has it (NVIDIA: from Ampere
    on), else float32."""
    seed: int = 0
    """Seed of the initial parameters."""
    inner_max_age_steps: int = Field(default=1000, ge=0)
    """A learner that starts again uses a saved inner optimizer state of at most this age, in steps
    (experiment ``failures`` of docs/quality.md: warm and cold)."""
    rewarm_steps: int = Field(default=50, ge=0)
    """Steps over which the learning rate rises again after a start without a saved state; not
    measured: experiment ``failures`` uses the default."""


class SyncConfig(Table):
    """When and how learners synchronise; experiments are those of docs/quality.md."""

    learners: int = Field(default=2, ge=1)
    """Learners that the run is planned for (M); more or fewer may take part at any time."""
    fragments: int = Field(default=8, ge=1)
    """Fragments that the model is cut into (P). In mode ``streaming`` one of P and H must divide
    the other. Not measured."""
    h_steps: int = Field(default=24, ge=1)
    """Steps between two rounds of a fragment (H); the default is the paper's. Fewer give a lower
    loss, where links allow it: experiments ``outer`` and ``batch``."""
    overlap_steps: int = Field(default=2, ge=0)
    """Steps that a learner takes while its round is open (tau): experiment ``adoption``."""
    shards: int = Field(default=1, ge=1, le=MOST_SHARDS)
    """Groups of fragments, each with one syncer and with streams of its own for state and
    contributions: fragment f is in shard f modulo this."""
    lease_s: float = Field(default=2.0, gt=0)
    """Seconds of silence after which another syncer takes a syncer's shards."""
    quorum: int = Field(default=1, ge=1)
    """Contributions with which a round may close (K): experiment ``speeds``."""
    grace_gamma: float = Field(default=0.8, ge=0, lt=1)
    """After its quorum a round waits for more contributions, for this share of the time until it
    would delay other rounds, and for at least one step; 0: no wait. Experiments ``speeds``,
    ``lateness``."""
    round_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which a round without a quorum closes with what it has; without any
    contribution it is opened again. No grace window is longer."""
    max_staleness: int = Field(default=4, ge=0)
    """A contribution whose base is more versions behind is refused and counted: experiment
    ``lateness`` compares it with 0. The grace window makes this rare."""
    staleness_discount: float = Field(default=0.5, gt=0, le=1)
    """Factor on a contribution's weight for each version that its base is behind: experiment
    ``lateness``. The grace window makes this rare, unless rounds take longer than H steps."""
    merge: str = "rda"
    """How outer gradients are merged: ``average`` or ``rda`` (experiment ``outer``), which both
    average embeddings; ``trimmed_mean`` or ``median_of_means``, which outvote a hostile minority
    value by value; or ``module:function``, a ``skerry.algorithm.merge.MergeRule``."""
    adoption: Literal["overwrite", "blend", "rebase"] = "rebase"
    """How a learner combines its own progress with a new global fragment: experiment
    ``adoption``."""
    blend_alpha: float = Field(default=0.5, ge=0, le=1)
    """Share of the learner's own value that ``blend`` keeps."""
    contribution_scheme: ContributionScheme = "int4"
    """Quantisation of contributions: experiment ``quantisation``."""
    global_scheme: GlobalScheme = "bf16"
    """Type of the global fragments that learners start from: experiment ``quantisation``."""
    delta_scheme: DeltaScheme = AUTO
    """Quantisation of the change of a global fragment, which is what learners in step read; what it
    leaves out is sent with the next version. ``auto``: for each change the fewest bits that leave
    out at most 1/128 of a block's largest parameter (experiment ``deltas``). ``none``: learners
    read each version whole."""
    keyframe_every: int = Field(default=16, ge=1, le=256)
    """Versions from one keyframe to the next: the log keeps these whole, for learners that are
    further behind."""
    snapshot_every: int = Field(default=16, ge=1, le=4096)
    """Versions from one snapshot (the syncer's f32 parameters and outer optimizer) to the next. A
    syncer that takes over reads the newest and merges again what was contributed since; they come
    sooner if ``log.window_bytes`` would not keep that."""
    chunk_bytes: int = Field(default=CHUNK_BYTES, ge=4096)
    """Largest payload of one message, in bytes, without its envelope."""


class ContainConfig(Table):
    """What keeps one hostile or broken learner from harming a run (docs/results/hostile.md).

    Every rule compares a learner with two others at least.
    """

    clip: float = Field(default=3.0, ge=0)
    """An outer gradient may be this many times as long as the median of the others' recent ones: a
    longer one is shortened to that, and refused beyond 2.5 times that; 0: no limit."""
    share: float = Field(default=2.5, ge=0)
    """A learner's share of a merge is at most this many times an equal share; 0: no limit."""
    steps: float = Field(default=8.0, ge=0)
    """A contribution's steps, with their tokens, count up to this many times the median of the
    others', for ``train.tokens`` as well; it is refused if more than that are missing from its
    learner's pulses. 0: all count."""
    repeats: bool = True
    """Refuses outer gradients that were merged before and those without work: zeros, and copies of
    the others' or of the newest global change."""
    opposed: bool = True
    """Refuses an outer gradient that points against the others', where these agree."""
    quarantine: bool = True
    """Puts a learner into quarantine if half of its newest contributions were refused by these
    rules, or nearly all point against the others'; ``skerry quarantine`` does it by hand."""


class OuterConfig(Table):
    """The outer optimizer on the syncer."""

    preset: str = "auto"
    """``auto`` (by H: experiment ``outer`` of docs/quality.md), ``nesterov``, ``direct``, ``adamw``
    (for mode data-parallel), or ``module:function`` that returns an optax optimizer."""
    lr: float | None = Field(default=None, gt=0)
    """Outer learning rate; unset: the preset's."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Outer momentum; unset: the preset's."""


class CheckpointConfig(Table):
    """When checkpoints are written, and which are kept."""

    every_s: float = Field(default=30.0, gt=0)
    """Seconds between checkpoints; the start and the end of a run have one, too."""
    keep_newest: int = Field(default=3, ge=1)
    """How many of the newest checkpoints are kept."""
    keep_every: int = Field(default=10, ge=0)
    """One checkpoint in this many is kept longer; 0: none."""
    thin: bool = True
    """Whether those of ``keep_every`` thin out as they age; false: all of them stay."""


class EvalConfig(Table):
    """When the evaluator measures the global model, and on how much held-out text."""

    every_s: float = Field(default=15.0, gt=0)
    """Least seconds between evaluations; the end of a run has one, too."""
    batches: int = Field(default=8, ge=1)
    """Held-out batches, of data.batch sequences each; every evaluation reads the same."""
    ema: float = Field(default=0.0, ge=0, lt=1)
    """Decay, per version of a fragment, of a moving average of the global model, such as 0.5. The
    evaluator keeps the average, judges it too, and saves it in folder ``ema`` of the run's
    checkpoints, for ``skerry eval``, ``sample`` and ``export``; 0: no average."""
    sample_tokens: int = Field(default=96, ge=0, le=512)
    """Tokens that the global model writes at each evaluation, for people to read; 0: none."""


class LogConfig(Table):
    """The streams of a run's log."""

    replicas: int = Field(default=1, ge=1, le=5)
    """Copies of each stream in a broker cluster."""
    window_bytes: int = Field(default=512 * 1024**2, ge=1024**2)
    """Bytes of contributions that are kept for replay, in equal parts for each shard; the broker
    reserves them at once. If unset, raised where needed to hold ``sync.snapshot_every`` rounds, and
    the initial parameters twice."""
    window_s: float = Field(default=24 * 3600.0, gt=0, le=9e9)
    """Seconds for which contributions are kept; the smaller of both bounds counts."""

    def bytes_for(self, wanted: int) -> int:
        """Return ``window_bytes``, or if it is unset the larger of its default and ``wanted``."""
        unset = self.window_bytes == LogConfig.model_fields["window_bytes"].default
        return max(self.window_bytes, wanted) if unset else self.window_bytes


class LivenessConfig(Table):
    """How silence is judged, by the intervals of each learner's own pulses."""

    pulse_s: float = Field(default=0.5, gt=0)
    """Seconds between a learner's pulses, each sent at the end of a step."""
    suspect_phi: float = Field(default=3.0, gt=0)
    """A learner is suspect from this phi on; phi is -log10 of the chance that it is alive."""
    gone_phi: float = Field(default=8.0, gt=0)
    """A learner is gone from this phi on, or earlier if the broker reports its connection
    closed."""


class ChaosConfig(Table):
    """Whether ``skerry chaos`` may inject faults."""

    allow: bool = False
    """Allows faults in this run."""
    clocks: bool = False
    """Starts services under libfaketime, so that chaos can move their clocks; they become slower, a
    learner by more than half."""


class RunConfig(Table):
    """The settings that are equal on all machines of a run."""

    mode: Mode = "decoupled"
    """Sets what the tables below leave open, and refuses settings that contradict it."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    sync: SyncConfig = SyncConfig()
    contain: ContainConfig = ContainConfig()
    outer: OuterConfig = OuterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    liveness: LivenessConfig = LivenessConfig()
    chaos: ChaosConfig = ChaosConfig()

    @model_validator(mode="after")
    def _fill_in(self) -> Self:
        """Fill in what the mode says; a stored config, where all is set, stays as it is."""
        for clause in clauses(self.mode, self.sync.learners):
            name, _, key = clause.path.partition(".")
            table: Table = getattr(self, name)
            if clause.value is not None and key not in table.model_fields_set:
                # Frozen for all others: no one has seen this value yet.
                vars(self)[name] = table.model_copy(update={key: clause.value})
        model, open_yet = self.model, not self.train.model_fields_set & {"inner", "lr"}
        is_preset = not (model.config or model.path or model.factory or model.lora_rank)
        lr = MUON_LR.get(model.preset)
        if lr and is_preset and open_yet and self.mode in WITH_MUON:
            vars(self)["train"] = self.train.model_copy()
            vars(self.train).update(inner="muon", lr=lr)  # does not count as set by the user
        return self

    def for_model(self, model: ModelConfig) -> Self:
        """Return the config for another model, with the defaults that are that model's."""
        given = self.model_dump(exclude_unset=True)
        return self.model_validate({**given, "model": model})
