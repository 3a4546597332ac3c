"""The shape of a decoder, read from a Hugging Face ``config.json``; without JAX.

Every key that is used is checked before anything is allocated. What this decoder does not compute
is refused in one sentence, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn, TypeAlias

from skerry.errors import ModelError

MOST_BYTES = 4 << 20
"""Largest ``config.json`` that is read; real ones have a few thousand bytes."""
MOST_LAYERS = 4096
MOST_WIDTH = 1 << 20
MOST_VOCAB = 1 << 24
MOST_EXPERTS = 1 << 14
MOST_PARAMETERS = 1 << 44

Kind: TypeAlias = Literal["full_attention", "sliding_attention"]
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions (arXiv 2104.09864) and how they are stretched over longer texts.

    ``llama3`` divides the frequencies whose wavelength exceeds ``original`` / ``low`` by
    ``factor``, leaves those below ``original`` / ``high``, and goes over linearly in between.
    ``proportional`` turns the first ``share`` of a head only. ``yarn`` (arXiv 2309.00071) leaves
    pairs that turn more than ``high`` times in ``original`` positions, divides the frequencies of
    those that turn less than ``low`` times by ``factor``, and goes over linearly in between, from
    whole pair to whole pair if ``truncated``; queries and keys are multiplied by ``gain``.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "proportional", "yarn"] = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    share: float = 1.0
    gain: float = 1.0
    truncated: bool = True


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer: how many, how many of them see a token, and how wide each is."""

    count: int
    chosen: int
    width: int
    normalised: bool
    """Whether the weights of the chosen ones are made to sum to 1."""
    balance: float
    """Coefficient of the load-balancing loss (arXiv 2101.03961)."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The properties in which blocks of one model may differ."""

    kind: Kind
    kv_heads: int
    head_dim: int
    mlp: int
    """Width of the gated MLP; 0: the experts are in its place."""
    experts: bool = False
    values: bool = True
    """False: the keys, before their norm, are the values."""
    source: int | None = None
    """The earlier layer whose keys and values this one uses."""


@dataclass(frozen=True, slots=True)
class Arch:
    """One decoder-only transformer; ``config`` is the ``config.json`` that it was read from."""

    family: str
    vocab: int
    width: int
    heads: int
    layers: tuple[Layer, ...]
    full: Rope
    sliding: Rope
    config: str
    activation: str = "silu"
    eps: float = 1e-6
    tied: bool = False
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    value_norm: bool = False
    sandwich: bool = False
    """Whether results of attention and MLP are also normed before they are added."""
    gain_offset: float = 0.0
    """Constant that a norm adds to its weight."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of the width."""
    score_scale: float | None = None
    """Factor on attention's scores; None: one over the square root of a head's width."""
    score_cap: float | None = None
    logit_cap: float | None = None
    experts: Experts | None = None
    per_layer: int = 0
    """Width of each layer's own embeddings; 0: none."""
    per_layer_vocab: int = 0

    @property
    def architecture(self) -> str:
        """The class of transformers that loads it."""
        return FAMILIES[self.family]

    def rope(self, layer: Layer) -> Rope:
        return self.full if layer.kind == FULL else self.sliding

    def scale(self, layer: Layer) -> float:
        return layer.head_dim**-0.5 if self.score_scale is None else self.score_scale


FAMILIES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
}
"""``model_type`` of ``config.json``, and the class that transformers loads an export with."""

MULTIMODAL = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
"""Families whose ``text_config`` is one of ours: only their text model is read and written."""

OMITTED = {"gemma3_text": {"heads": 8, "vocab": 262_208}}
"""Sizes that published configs leave out where they are transformers' defaults."""


def refuse(problem: str) -> NoReturn:
    """Raise ModelError with the ``problem`` of a config that cannot be used."""
    msg = f"The model's config.json {problem}"
    raise ModelError(msg, path="model.config")


class Keys:
    """A table of a ``config.json``, each key checked as it is read; null counts as absent."""

    def __init__(self, table: Mapping[str, Any], where: str = "") -> None:
        self.table = table
        self._where = where

    def whole(self, name: str, default: int | None = None, *, least: int = 1, most: int) -> int:
        """Return an integer in [least, most]; ``default`` None: the key is needed."""
        value = self._given(name, default)
        if type(value) is not int or not least <= value <= most:
            refuse(f"has {self._show(name)}: it must be a whole number, {least} to {most}.")
        return value

    def real(
        self, name: str, default: float | None = None, *, least: float = 0.0, most: float = 1e12
    ) -> float:
        """Return a finite number in (least, most]."""
        value = self._given(name, default)
        if type(value) not in {int, float} or not least < value <= most:
            refuse(f"has {self._show(name)}: it must be a number over {least:g}.")
        return float(value)

    def cap(self, name: str, default: float | None = None) -> float | None:
        """Return a number over 0, or None where the key is absent."""
        absent = self.table.get(name, default) is None
        return None if absent else self.real(name, default)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._given(name, default)
        if type(value) is not bool:
            refuse(f"has {self._show(name)}: it must be true or false.")
        return value

    def choice(self, name: str, default: str, among: Sequence[str]) -> str:
        """Return one of some words."""
        value = self._given(name, default)
        if value not in among:
            refuse(f"has {self._show(name)}: this decoder knows {', '.join(among)}.")
        return str(value)

    def part(self, name: str) -> Mapping[str, Any]:
        """Return a table in the table; empty where the key is absent."""
        value = self._given(name, {})
        if not isinstance(value, dict):
            refuse(f"has {self._show(name)}: it must be a table.")
        return value

    def listed(self, name: str, length: int) -> list[Any] | None:
        """Return a list of that length, or None where the key is absent."""
        value = self.table.get(name)
        if value is not None and (not isinstance(value, list) or len(value) != length):
            refuse(f"has {self._show(name)}: it must list one entry for each of {length}.")
        return value

    def _given(self, name: str, default: Any) -> Any:
        value = self.table.get(name)
        if value is None:
            value = default
        if value is None:
            refuse(f"lacks {self._where}{name}.")
        return value

    def _show(self, name: str) -> str:
        return f"{self._where}{name} = {str(self.table.get(name))[:60]!r}"


def parse(text: str) -> dict[str, Any]:
    """Return the table in a ``config.json``; ModelError if it does not hold one."""
    if len(text) > MOST_BYTES:
        refuse(f"has {len(text)} bytes, more than {MOST_BYTES}: is it a config?")
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse(f"is not JSON ({str(error)[:80]}).")
    if not isinstance(table, dict):
        refuse("is not a JSON object.")
    return table


def text_table(text: str) -> dict[str, Any]:
    """Return the table of the text model that a ``config.json`` describes."""
    table = parse(text)
    if text_model := MULTIMODAL.get(str(table.get("model_type"))):
        table = {**Keys(table).part("text_config"), "model_type": text_model}
    return table


def read_arch(text: str) -> Arch:
    """Return the shape that a ``config.json`` describes; ModelError for what we do not compute."""
    return arch_from(text_table(text))


def arch_from(table: Mapping[str, Any]) -> Arch:
    """Return the shape that the table of a text model describes; ModelError as ``read_arch``."""
    keys = Keys(table)
    family = keys.choice("model_type", "", tuple(FAMILIES))
    if table.get("quantization_config"):
        refuse("names a quantisation: weights in float32, bfloat16 or float16 are needed.")
    if table.get("use_bidirectional_attention"):
        refuse("asks for bidirectional attention: this decoder is causal.")
    count = keys.whole("num_hidden_layers", most=MOST_LAYERS)
    omitted = OMITTED.get(family, {})
    heads = keys.whole("num_attention_heads", omitted.get("heads"), most=MOST_WIDTH)
    act = "hidden_activation" if family in _GEMMAS else "hidden_act"
    usual = "gelu_pytorch_tanh" if family.startswith("gemma") else "silu"
    common: dict[str, Any] = {
        "family": family,
        "vocab": keys.whole("vocab_size", omitted.get("vocab"), least=2, most=MOST_VOCAB),
        "width": keys.whole("hidden_size", most=MOST_WIDTH),
        "heads": heads,
        "config": json.dumps(table, indent=2, sort_keys=True),
        "activation": ACTIVATIONS[keys.choice(act, usual, tuple(ACTIVATIONS))],
        "eps": keys.real("rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6, most=1.0),
        "tied": keys.flag("tie_word_embeddings", default=family.startswith("gemma")),
    }
    layers = _layers(keys, family, common["width"], heads, count)
    details = _gemma(keys, family) if family.startswith("gemma") else _plain(keys, family)
    sliding = any(layer.kind == SLIDING for layer in layers)
    window = keys.whole("sliding_window", 4096, most=1 << 30) if sliding else None
    full, local = _ropes(keys, family)
    arch = Arch(layers=layers, full=full, sliding=local, window=window, **common, **details)
    return _checked(arch)


def _plain(keys: Keys, family: str) -> dict[str, Any]:
    bias = family == "qwen2" or keys.flag("attention_bias", default=False)
    return {
        "qkv_bias": bias,
        "out_bias": bias and family != "qwen2",
        "mlp_bias": family == "llama" and keys.flag("mlp_bias", default=False),
        "qk_norm": family in {"qwen3", "qwen3_moe"},
        "experts": _experts(keys, family),
    }


def _gemma(keys: Keys, family: str) -> dict[str, Any]:
    bias = keys.flag("attention_bias", default=False)
    details: dict[str, Any] = {
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": family in {"gemma3_text", "gemma4_text"},
        "sandwich": family != "gemma",
        "scaled_embedding": True,
        "logit_cap": keys.cap("final_logit_softcapping", 30.0 if family == "gemma2" else None),
    }
    if family == "gemma4_text":
        per_layer = keys.whole("hidden_size_per_layer_input", 256, least=0, most=MOST_WIDTH)
        vocab = keys.whole("vocab_size_per_layer_input", 262_144, most=MOST_VOCAB)
        return details | {
            "value_norm": True,
            "score_scale": 1.0,
            "experts": _experts(keys, family),
            "per_layer": per_layer,
            "per_layer_vocab": vocab if per_layer else 0,
        }
    if family == "gemma":
        return details | {"gain_offset": 1.0}
    scale = keys.real("query_pre_attn_scalar", 256.0) ** -0.5
    capped = keys.cap("attn_logit_softcapping", 50.0 if family == "gemma2" else None)
    return details | {"gain_offset": 1.0, "score_scale": scale, "score_cap": capped}


def _experts(keys: Keys, family: str) -> Experts | None:
    counts = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}
    given = family == "gemma4_text" and keys.flag("enable_moe_block", default=False)
    if family not in counts and not given:
        return None
    name = counts.get(family, "num_experts")
    if family == "qwen3_moe" and name not in keys.table:
        name = "num_local_experts"
    count = keys.whole(name, most=MOST_EXPERTS)
    chosen = "top_k_experts" if family == "gemma4_text" else "num_experts_per_tok"
    width = "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
    balance = "router_aux_loss_coef"
    usual = 0.0 if family == "gemma4_text" else 0.001
    return Experts(
        count=count,
        chosen=keys.whole(chosen, most=count),
        width=keys.whole(width, most=MOST_WIDTH),
        normalised=family != "qwen3_moe" or keys.flag("norm_topk_prob", default=False),
        balance=keys.real(balance, usual, least=-1e-9, most=1e3),
    )


def _layers(keys: Keys, family: str, width: int, heads: int, count: int) -> tuple[Layer, ...]:
    kinds = _kinds(keys, family, count)
    usual_kv = 4 if family in _GEMMAS else heads
    kv_heads = keys.whole("num_key_value_heads", usual_kv, most=heads)
    usual_dim = {"qwen3": 128, "gemma": 256, "gemma2": 256, "gemma3_text": 256, "gemma4_text": 256}
    head_dim = keys.whole("head_dim", usual_dim.get(family, max(1, width // heads)), most=1 << 16)
    if family == "gemma4_text":
        return _gemma4_layers(keys, kinds, kv_heads, head_dim)
    sparse = _sparse_layers(keys, family, count)
    mlp = 0 if all(sparse) else keys.whole("intermediate_size", most=MOST_WIDTH)
    return tuple(
        Layer(kind, kv_heads, head_dim, 0 if experts else mlp, experts=experts)
        for kind, experts in zip(kinds, sparse, strict=True)
    )


def _sparse_layers(keys: Keys, family: str, count: int) -> list[bool]:
    """Return for each layer whether experts take the place of its MLP."""
    if family != "qwen3_moe":
        return [family == "mixtral"] * count
    dense = keys.table.get("mlp_only_layers") or []
    every = keys.whole("decoder_sparse_step", 1, most=MOST_LAYERS)
    if not isinstance(dense, list):
        refuse("has mlp_only_layers: it must be a list of layers.")
    return [layer not in dense and (layer + 1) % every == 0 for layer in range(count)]


def _kinds(keys: Keys, family: str, count: int) -> list[Kind]:
    """Return whether each layer attends to all tokens before, or within the window only."""
    given = keys.listed("layer_types", count)
    if given is not None and family in {"qwen2", "qwen3", *_GEMMAS}:
        if any(kind not in {FULL, SLIDING} for kind in given):
            refuse("has layer_types other than full_attention and sliding_attention.")
        slides = [kind == SLIDING for kind in given]
    elif family in _GEMMAS:
        every = 2 if family == "gemma2" else 6
        if family == "gemma3_text":
            every = keys.whole("sliding_window_pattern", every, most=MOST_LAYERS)
        slides = [(layer + 1) % every != 0 for layer in range(count)]
    elif family.startswith("qwen"):
        first = keys.whole("max_window_layers", 28, least=0, most=MOST_LAYERS)
        asked = keys.flag("use_sliding_window", default=False)
        every_layer = family == "qwen3_moe"
        slides = [asked and (every_layer or layer >= first) for layer in range(count)]
    else:
        asked = family in {"mistral", "mixtral"} and keys.table.get("sliding_window") is not None
        slides = [asked] * count
    if family == "gemma4_text":
        slides[-1] = False
    return [SLIDING if slide else FULL for slide in slides]


_GEMMAS = ("gemma2", "gemma3_text", "gemma4_text")


def _gemma4_layers(
    keys: Keys, kinds: Sequence[Kind], kv_heads: int, head_dim: int
) -> tuple[Layer, ...]:
    """Return Gemma 4's layers: wider global heads, keys as values, and layers that share them."""
    wide = keys.whole("global_head_dim", 512, most=1 << 16)
    same = keys.flag("attention_k_eq_v", default=False)
    few = keys.whole("num_global_key_value_heads", kv_heads, most=MOST_WIDTH) if same else kv_heads
    shared = keys.whole("num_kv_shared_layers", 0, least=0, most=len(kinds) - 1)
    mlp = keys.whole("intermediate_size", most=MOST_WIDTH)
    doubled = keys.flag("use_double_wide_mlp", default=False)
    sparse = keys.flag("enable_moe_block", default=False)
    overrides, first = keys.part("per_layer_config"), len(kinds) - shared
    layers: list[Layer] = []
    for number, kind in enumerate(kinds):
        full = kind == FULL
        own = Keys(_table(overrides.get(str(number))), f"per_layer_config.{number}.")
        source = None
        if number >= first:
            source = max((at for at in range(first) if kinds[at] == kind), default=None)
            if source is None:
                refuse(f"shares the keys of a {kind} layer that it does not have.")
        layers.append(
            Layer(
                kind,
                own.whole("num_key_value_heads", few if full else kv_heads, most=MOST_WIDTH),
                own.whole("head_dim", wide if full else head_dim, most=1 << 16),
                mlp * (2 if doubled and source is not None else 1),
                experts=sparse,
                values=not (same and full),
                source=source,
            )
        )
    return tuple(layers)


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _ropes(keys: Keys, family: str) -> tuple[Rope, Rope]:
    """Return the rotary positions of full and of sliding layers, from new or old spellings."""
    given = keys.part("rope_parameters")
    trained = {"original_max_position_embeddings": keys.table.get("max_position_embeddings")}
    scaling = keys.part("rope_scaling")
    theta = keys.real("rope_theta", 1e6 if family in {"mixtral", *_GEMMAS[1:]} else 1e4)
    if family == "gemma2":
        theta = keys.real("rope_theta", 1e4)
    if not any(kind in given for kind in (FULL, SLIDING)):
        local = theta
        if family == "gemma3_text":
            local = keys.real("rope_local_base_freq", 1e4)
        if family == "gemma4_text":
            return Rope(theta, "proportional", share=0.25), Rope(1e4)
        full = _rope({**trained, **scaling, **given}, theta)
        split = family == "gemma3_text"
        return full, Rope(local) if split else full
    local = 1e4 if family in _GEMMAS else theta
    full = _rope({**trained, **_table(given.get(FULL)), **scaling}, theta)
    return full, _rope(_table(given.get(SLIDING)), local)


def _rope(table: Mapping[str, Any], theta: float) -> Rope:
    keys = Keys({"rope_type": table.get("type"), **table}, "rope_parameters.")
    known = ("default", "linear", "llama3", "proportional", "yarn")
    kind: Any = keys.choice("rope_type", "default", known)
    share = keys.real("partial_rotary_factor", 1.0, most=1.0)
    if share != 1.0 and kind != "proportional":
        refuse(f"turns {share:g} of each head only: this decoder turns whole heads.")
    theta = keys.real("rope_theta", theta)
    if kind == "default":
        return Rope(theta)
    factor = keys.real("factor", 1.0 if kind == "proportional" else None)
    if kind == "yarn":
        return _yarn(keys, theta, factor)
    if kind != "llama3":
        return Rope(theta, kind, factor, share=share)
    low, high = keys.real("low_freq_factor"), keys.real("high_freq_factor")
    if high <= low:
        refuse(f"has a high_freq_factor of {high:g}: it must exceed low_freq_factor.")
    original = keys.whole("original_max_position_embeddings", most=1 << 30)
    return Rope(theta, kind, factor, low, high, original)


def _yarn(keys: Keys, theta: float, factor: float) -> Rope:
    """Return YaRN's positions; its gain grows with the logarithm of the factor."""
    low, high = keys.real("beta_slow", 1.0), keys.real("beta_fast", 32.0)
    if high <= low or theta <= 1.0:
        refuse(f"has a beta_fast of {high:g}: it must exceed beta_slow, and rope_theta 1.")
    original = keys.whole("original_max_position_embeddings", most=1 << 30)
    scales = [keys.table.get(name) for name in ("mscale", "mscale_all_dim")]
    over, under = (keys.real("mscale"), keys.real("mscale_all_dim")) if all(scales) else (1.0, 0.0)
    grown = 0.1 * math.log(max(factor, 1.0))
    gain = keys.real("attention_factor", (over * grown + 1) / (under * grown + 1))
    truncated = keys.flag("truncate", default=True)
    return Rope(theta, "yarn", factor, low, high, original, gain=gain, truncated=truncated)


def _checked(arch: Arch) -> Arch:
    """Return an arch whose numbers fit each other."""
    for layer in arch.layers:
        if layer.head_dim % 2:
            refuse(f"has heads of {layer.head_dim} (head_dim): their width must be even.")
        if arch.heads % layer.kv_heads:
            keys = f"{layer.kv_heads} key heads (model.kv_heads)"
            refuse(f"has {keys}, which do not divide its {arch.heads} heads (model.heads).")
    if not math.isfinite(arch.eps):
        refuse("has an rms_norm_eps that is not finite.")
    return arch
