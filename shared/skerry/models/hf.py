"""Folders of Hugging Face weights: read lazily by slices, written so that transformers loads them.

A folder has ``config.json`` and ``model.safetensors``, or shards with ``model.safetensors.index
.json``. Leaf names are those on disk, except for experts, which one leaf stacks, and for the text
model inside a multimodal one. Only ``load`` needs JAX.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from skerry.folders import writing
from skerry.models.arch import Arch, parse, read_arch
from skerry.models.folder import CONFIG, fault, read_text
from skerry.models.names import EXPERTS
from skerry.models.saving import save_tensors
from skerry.models.tensors import tensors_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs"
SHARD_BYTES = 5_000_000_000
MOST_INDEX_BYTES = 256 << 20
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that are copied beside exported weights, if the source has them."""

FLOATS = {"F32", "F16", "BF16", "F64"}
DTYPES: Mapping[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}
EXPERT_PARTS: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "mixtral": (".block_sparse_moe.", ("w1", "w3"), ("w2",)),
    "qwen3_moe": (".mlp.", ("gate_proj", "up_proj"), ("down_proj",)),
}
"""For each family the module of its experts on disk, the names of gate and up, and of down."""

TOWERS = re.compile(
    r"(?:^|\.)(?:vision_tower|audio_tower|multi_modal_projector|embed_\w+|vision_\w+)\."
)
USELESS = re.compile(r"\.rotary_emb\.inv_freq$|\.self_attn\.[kv]_(?:proj|norm)\.weight$")
"""Tensors that a folder may hold unused, besides a tied head."""

Read: TypeAlias = Callable[[tuple[slice, ...]], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor on disk; ``read`` returns a block of it, f32, given a slice for each axis."""

    shape: tuple[int, ...]
    read: Read

    def __array__(self, dtype: Any = None) -> NDArray[Any]:
        whole = self.read(tuple(slice(0, size) for size in self.shape))
        return whole if dtype is None else whole.astype(dtype)


def read_config(folder: str | Path) -> Arch:
    """Return the shape of the model in a folder; ModelError for one that we do not compute."""
    return read_arch(read_text(Path(folder)))


def read_tensors(folder: str | Path, arch: Arch) -> dict[str, LazyTensor]:
    """Return every leaf of a model by name, unread.

    Raises ModelError for a tensor that is missing, unknown, of another shape or not a float, and
    for an index or a file that is not valid.
    """
    where = Path(folder)
    stored = _stored(where)
    found: dict[str, LazyTensor] = {}
    used: set[str] = set()
    for name, tensor in tensors_of(arch).items():
        parts = [[name]] if name in stored else disk_names(arch, name, tensor.shape[0])
        for disk in (disk for row in parts for disk in row):
            if disk not in stored:
                raise fault(where, f"lacks the tensor {disk}, which its config.json asks for.")
            used.add(disk)
        found[name] = _lazy(where, name, tensor.shape, [[stored[d] for d in row] for row in parts])
    _refuse_unknown(where, arch, stored.keys() - used)
    return found


def disk_names(arch: Arch, name: str, count: int) -> list[list[str]]:
    """Return the tensors on disk that make a leaf: for each expert, those that its rows join.

    Any other leaf is one tensor.
    """
    if arch.family not in EXPERT_PARTS:
        return [[name]]
    module, wide, narrow = EXPERT_PARTS[arch.family]
    if not EXPERTS.search(name):
        return [[name.replace(".mlp.gate.", f"{module}gate.")]]
    base = name[: name.index(".mlp.experts.")]
    parts = wide if name.endswith("gate_up_proj") else narrow
    return [
        [f"{base}{module}experts.{expert}.{part}.weight" for part in parts]
        for expert in range(count)
    ]


def write(
    folder: str | Path,
    arch: Arch,
    tensors: Mapping[str, Any],
    source: str | Path | None = None,
    *,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model that transformers loads: shards, index, config, and the source's companions.

    ``tensors`` are arrays or lazy tensors by leaf name. The files appear when all are written; a
    folder that has anything in it, or cannot be written, is refused with ConfigError.
    """
    with writing(Path(folder)) as draft:
        _write_tensors(draft, arch, tensors, dtype, shard_bytes)
        table = parse(arch.config) | {"architectures": [arch.architecture], "dtype": dtype}
        table.pop("torch_dtype", None)  # the older name of dtype
        (draft / CONFIG).write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")
        for name in COMPANIONS:
            if source is not None and (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, draft / name)


def digest(folder: str | Path) -> str:
    """Return the xxh3-128 over a folder's config and weights, which a run's record names.

    Raises ModelError for a folder that has none.
    """
    where, state = Path(folder), xxhash.xxh3_128()
    for name in (CONFIG, *sorted(set(_files(where).values()))):
        state.update(name.encode() + b"\0")
        try:
            with (where / name).open("rb") as file:
                while part := file.read(1 << 24):
                    state.update(part)
        except OSError as error:
            raise fault(where, f"has no {name} that can be read ({error.strerror}).") from error
    return state.hexdigest()


def load(
    folder: str | Path, arch: Arch, places: Mapping[str, Any], dtype: Any = np.float32
) -> dict[str, Any]:
    """Return a folder's weights as JAX arrays by name, each device's part read on its own."""
    import jax  # the rest of this module runs without it

    return {
        name: jax.make_array_from_callback(
            tensor.shape, places[name], partial(_block, tensor, np.dtype(dtype))
        )
        for name, tensor in read_tensors(folder, arch).items()
    }


def _block(tensor: LazyTensor, dtype: np.dtype[Any], at: Any) -> NDArray[Any]:
    """Return a device's part of a tensor, given JAX's slices for it."""
    return tensor.read(tuple(at)).astype(dtype, copy=False)


def _files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor by the tensor's name; ``*`` alone: all are in that file."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).is_file():
            raise fault(folder, f"has neither {SINGLE} nor {INDEX}: is it a model's folder?")
        return {"*": SINGLE}
    text = read_text(folder, INDEX, MOST_INDEX_BYTES)
    try:
        files = json.loads(text)["weight_map"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise fault(folder, f"has an {INDEX} without a weight_map.") from error
    if not isinstance(files, dict) or not files:
        raise fault(folder, f"has an {INDEX} whose weight_map is no table.")
    for name, file in files.items():
        plain = isinstance(file, str) and "/" not in file and file.endswith(".safetensors")
        if not plain:
            problem = f"has an {INDEX} that places {name[:80]} in {str(file)[:80]!r}"
            raise fault(folder, f"{problem}: only .safetensors files beside it are read.")
    return files


def _reason(path: Path, error: Exception) -> str:
    """Return why a file of weights cannot be read: often only a pointer to it was cloned."""
    try:
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                pull = "`git lfs pull` in the folder fetches the weights"
                return f"it is a pointer of Git LFS; {pull}"
    except OSError as unread:  # safetensors says "missing" for any file that it cannot open
        return unread.strerror or str(unread)
    return str(error)


def _stored(folder: Path) -> dict[str, Any]:
    """Return an open slice of every stored tensor, by the name that a text model has for it."""
    files = _files(folder)
    found: dict[str, Any] = {}
    for file in sorted(set(files.values())):
        try:
            opened: Any = safe_open(folder / file, framework="numpy")
            held = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no dict
        except (OSError, SafetensorError) as error:
            why = _reason(folder / file, error)
            raise fault(folder, f"has a {file} that cannot be read: {why}.") from error
        if "*" not in files:
            wrong = next((n for n, where in files.items() if where == file and n not in held), None)
            if wrong is not None:
                raise fault(folder, f"has no {wrong[:80]} in {file}, where {INDEX} places it.")
        found |= held
    if any("language_model." in name for name in found):
        found = {
            name.replace("language_model.model.", "model.")
            .replace("model.language_model.", "model.")
            .removeprefix("language_model."): held
            for name, held in found.items()
            if not TOWERS.search(name) or "language_model." in name
        }
    return found


def _lazy(
    folder: Path, name: str, shape: tuple[int, ...], parts: Sequence[Sequence[Any]]
) -> LazyTensor:
    """Return a leaf that is one tensor on disk, or one expert after another."""
    single = len(parts) == 1 and len(parts[0]) == 1 and len(shape) != 3
    whole = len(parts) == 1 and len(parts[0]) == 1 and tuple(parts[0][0].get_shape()) == shape
    rows = shape[1] // len(parts[0]) if len(shape) == 3 else 0
    wanted = shape if single or whole else (rows, *shape[2:])
    for row in parts:
        for part in row:
            if tuple(part.get_shape()) != wanted:
                problem = f"has {name} in the shape {tuple(part.get_shape())}"
                raise fault(folder, f"{problem}, but its config.json makes it {wanted}.")
            if part.get_dtype() not in FLOATS:
                problem = f"has {name} as {part.get_dtype()}"
                raise fault(folder, f"{problem}: float32, bfloat16 or float16 are needed.")
    if single or whole:
        return LazyTensor(shape, lambda at: _f32(parts[0][0][at]))

    def stacked(at: tuple[slice, ...]) -> NDArray[np.float32]:
        experts = range(shape[0])[at[0]]
        out = np.empty(
            [len(experts), *(len(range(n)[s]) for n, s in zip(shape[1:], at[1:], strict=True))],
            np.float32,
        )
        for place, expert in enumerate(experts):
            block = [_f32(part[:]) for part in parts[expert]]
            out[place] = np.concatenate(block)[at[1:]]
        return out

    return LazyTensor(shape, stacked)


def _f32(values: Any) -> NDArray[np.float32]:
    return np.ascontiguousarray(values, dtype=np.float32)


def _refuse_unknown(folder: Path, arch: Arch, names: set[str]) -> None:
    known = {"lm_head.weight"} if arch.tied else set[str]()
    unknown = sorted(name for name in names - known if not USELESS.search(name))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        problem = f"has the tensor {unknown[0][:80]}{more}, unknown to a {arch.family}"
        raise fault(folder, f"{problem}: is this its config.json?")


def _pieces(arch: Arch) -> Iterator[tuple[str, str, int, tuple[slice, ...]]]:
    """Yield for each tensor to write its name, its leaf, its elements, and its part of the leaf."""
    for leaf, tensor in tensors_of(arch).items():
        parts = disk_names(arch, leaf, tensor.shape[0])
        if len(tensor.shape) != 3 or parts == [[leaf]]:
            yield parts[0][0], leaf, tensor.size, ()
            continue
        rows = tensor.shape[1] // len(parts[0])
        for expert, row in enumerate(parts):
            for number, name in enumerate(row):
                at = slice(expert, expert + 1), slice(number * rows, (number + 1) * rows)
                yield name, leaf, rows * tensor.shape[2], at


def _write_tensors(
    folder: Path, arch: Arch, tensors: Mapping[str, Any], dtype: str, shard_bytes: int
) -> None:
    """Write all tensors in shards, and an index if there are several."""
    width = np.dtype(DTYPES[dtype]).itemsize
    shards: list[list[tuple[str, str, int, tuple[slice, ...]]]] = [[]]
    filled = 0
    for piece in _pieces(arch):
        if filled and filled + piece[2] * width > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(piece)
        filled += piece[2] * width
    names: dict[str, str] = {}
    leaf_held, whole = "", np.empty(0)
    for number, shard in enumerate(shards, 1):
        file = (
            SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        block: dict[str, NDArray[Any]] = {}
        for name, leaf, _, at in shard:
            if leaf_held != leaf:
                leaf_held, whole = leaf, np.asarray(tensors[leaf])
            part = whole[at][0] if at else whole
            block[name] = np.ascontiguousarray(part, dtype=DTYPES[dtype])
            names[name] = file
        save_tensors(block, folder / file)
    if len(shards) > 1:
        total = width * sum(size for _, _, size, _ in _pieces(arch))
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
