"""The parameters of a torch module as fragments, with an anchor and perhaps a capture of each.

Used by one thread. What is read and written are flat views of the parameters' own memory: plain
tensors as they are, DTensors by the rows that lie here. Anchors have the bits of the run's global
scheme, so those of a run in bf16 take two bytes a parameter.

A parameter of 16 bits cannot hold every adopted value. The remainder is kept in f32 beside it and
added whenever the parameter is read, so a contribution is computed from f32 values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parameter import is_lazy

from skerry.algorithm import adoption
from skerry.algorithm.fragments import Fragment, LeafSpec, Plan
from skerry.algorithm.planes import Planes, diverged
from skerry.algorithm.quantise_torch import dequantise, quantise, slice_norms
from skerry.errors import ModelError
from skerry.models import names
from skerry.settings.models import SyncConfig

COMPILED = "_orig_mod."
FSDP1 = "_fsdp_wrapped_module."
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def parameters_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return a module's parameters by name, and the buffers that are leaves of its checkpoint.

    Modules that ``torch.compile`` wrapped keep their names.
    """
    constants = ((n, t) for n, t in model.named_buffers() if names.CONSTANT.search(n))
    held = (*model.named_parameters(), *constants)
    return {name.replace(COMPILED, ""): tensor for name, tensor in held}


def leaves_of(model: object, embeddings: tuple[str, ...] | None = None) -> tuple[LeafSpec, ...]:
    """Name a module's parameters, sorted by name, those that are frozen last.

    Tied parameters count once, by their first name; a block's constant is frozen if the block's
    norm is. ``embeddings`` are name parts of tensors to be averaged; None: those of
    ``names.averaged``. Frozen ones may have any type, integers included. Raises ModelError if
    ``model`` is not a module, has no parameters to train, or one of these is not a float of 16 or
    32 bits, is sharded along anything but its rows, or has no values yet.
    """
    if not isinstance(model, torch.nn.Module):
        msg = f"The model must be a torch.nn.Module, not {model!r:.80}."
        raise ModelError(msg, path="model")
    reshard(sharded(model))
    specs: list[LeafSpec] = []
    held = parameters_of(model)
    for name, tensor in sorted(held.items()):
        learns = held.get(names.CONSTANT.sub(".input_layernorm.weight", name), tensor)
        if learns.requires_grad and (unfit := _unfit(name, tensor)):
            msg = f"Parameter {name} {unfit}, or freeze it (requires_grad_(False)) before join."
            raise ModelError(msg, path="model")
        shape = tuple(tensor.shape)
        embedding = (
            names.averaged(name)
            if embeddings is None
            else any(part in embeddings for part in name.split("."))
        )
        unit = names.unit_of(name, shape)
        specs.append(LeafSpec(name, shape, embedding, learns.requires_grad, unit))
    if not any(spec.trainable for spec in specs):
        msg = "The model has no parameter that requires a gradient: there is nothing to train."
        raise ModelError(msg, path="model")
    return tuple(sorted(specs, key=lambda spec: not spec.trainable))


def sharded(model: torch.nn.Module) -> list[Any]:
    """Return the parts of a module that ``fully_shard`` has sharded."""
    return [part for part in model.modules() if hasattr(part, "reshard")]


def reshard(parts: list[Any]) -> None:
    """Put gathered parameters back into shards: a pass without gradients leaves them gathered."""
    for part in parts:
        part.reshard()


def _unfit(name: str, tensor: Tensor) -> str:
    """Say why a learner cannot train a tensor, and what to do; empty if it can."""
    if FSDP1 in name:
        return "is a piece of FullyShardedDataParallel's: shard the model with fully_shard"
    if is_lazy(tensor):
        return "has no shape yet: run the model on a batch first"
    if tensor.dtype not in FLOATS:
        kind = str(tensor.dtype).removeprefix("torch.")
        return f"is {kind}: make it float32, bfloat16 or float16"
    placements = getattr(tensor, "placements", ())
    sharded = [placement for placement in placements if not placement.is_replicate()]
    if len(sharded) > 1 or not all(placement.is_shard(0) for placement in sharded):
        return f"is sharded as {placements}: shard it by rows (fully_shard) or not at all"
    if tensor.is_meta:
        return "is on the device meta and has no values: load it on a real one (model.to_empty)"
    return ""


def trained(model: torch.nn.Module) -> dict[Any, Any]:
    """Return the parameters that require gradients, each by its identity, and their shapes."""
    return {p: p.shape for p in model.parameters() if p.requires_grad}


@dataclass(frozen=True, slots=True)
class LocalRange:
    """This process's elements of a parameter, flat ``[start, stop)``, and their fragment offset.

    ``owned`` if this process contributes them; other processes may hold copies.
    """

    leaf: int
    start: int
    stop: int
    offset: int
    owned: bool = True

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)


class Parameter:
    """This process's flat memory of a parameter; ``first`` is the place of its first element.

    The memory is looked up each time, because FSDP may have replaced it.
    """

    def __init__(self, tensor: Tensor, rank: int) -> None:
        self._tensor: Any = tensor
        self.first, self.size, self.owned = 0, tensor.numel(), rank == 0
        if hasattr(tensor, "placements"):
            self._place_shard()

    def _place_shard(self) -> None:
        tensor, here = self._tensor, 0
        coordinate = tensor.device_mesh.get_coordinate()
        self.owned = True
        for axis, placement in enumerate(tensor.placements):
            if placement.is_shard(0):
                rows, parts = tensor.shape[0], tensor.device_mesh.size(axis)
                here = min(coordinate[axis] * -(-rows // parts), rows)
            else:
                self.owned = self.owned and coordinate[axis] == 0
        self.first = here * math.prod(tensor.shape[1:])
        self.size = tensor.to_local().numel()

    @property
    def wide(self) -> bool:
        """True if it holds every f32."""
        return bool(self._tensor.dtype == torch.float32)

    @property
    def device(self) -> torch.device:
        return self._local().device

    def read(self) -> Tensor:
        """Return this process's flat elements; a view wherever that is possible."""
        return self._local().reshape(-1)

    def write(self, start: int, stop: int, values: Tensor) -> None:
        """Write a flat range, rounded to what the parameter holds."""
        local = self._local()
        flat = local.reshape(-1)
        flat[start:stop].copy_(values)
        if not local.is_contiguous():  # flat was a copy
            local.copy_(flat.view(local.shape))

    def _local(self) -> Tensor:
        tensor = self._tensor.detach()
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def ranges_of(fragment: Fragment, leaves: list[Parameter]) -> Iterator[LocalRange]:
    """Yield this process's ranges of a fragment."""
    for piece, offset in zip(fragment.slices, fragment.offsets, strict=False):
        leaf = leaves[piece.leaf]
        start, stop = max(piece.start, leaf.first), min(piece.stop, leaf.first + leaf.size)
        if start < stop:
            at = offset + start - piece.start
            yield LocalRange(piece.leaf, start - leaf.first, stop - leaf.first, at, leaf.owned)


class TorchGradient:
    """An outer gradient f32 (padded_size,) on a CUDA device, to be quantised where it lies.

    Another thread reads it on a stream of its own, so training does not wait for the copies. It
    may be any tensor that no longer changes.
    """

    def __init__(self, vector: Tensor) -> None:
        self.shape = tuple(vector.shape)
        self.dtype = str(vector.dtype).removeprefix("torch.")
        self._vector = vector
        self._ready = torch.cuda.current_stream(vector.device).record_event()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: FBT001 - numpy's own signature
        del copy
        stream = self._stream()
        with torch.cuda.stream(stream):
            host = _to_host(self._vector, stream=stream)[0]
        return host if dtype is None else host.astype(dtype)

    def quantise(self, scheme: str, fragment: Fragment) -> tuple[Planes, tuple[float, ...]]:
        """Return its planes, and the norms of what they decode to; Diverged if not finite."""
        stream = self._stream()
        with torch.cuda.stream(stream):
            return quantised(scheme, fragment, self._vector, stream)

    def _stream(self) -> Any:
        stream = torch.cuda.Stream(self._vector.device)
        stream.wait_event(self._ready)
        self._vector.record_stream(stream)
        return stream


def quantised(
    scheme: str, fragment: Fragment, vector: Tensor, stream: Any = None
) -> tuple[Planes, tuple[float, ...]]:
    """Quantise on the vector's device and read planes and norms, once they are there."""
    planes = quantise(scheme, vector)
    measured = slice_norms(fragment, dequantise(scheme, planes))
    codes, scales, finite, norms = _to_host(*planes, measured, stream=stream)
    if not finite:
        raise diverged()
    return Planes(codes, scales.view(np.uint16)), tuple(float(norm) for norm in norms)


def _to_host(*tensors: Tensor, stream: Any = None) -> list[NDArray[Any]]:
    """Copy tensors to the host, into pinned memory on a CUDA device."""
    on_device = stream is not None
    hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=on_device) for t in tensors]
    for host, tensor in zip(hosts, tensors, strict=True):
        host.copy_(tensor, non_blocking=on_device)
    if on_device:
        stream.synchronize()
    return [host.numpy() for host in hosts]


class TorchFragments:
    """A module's parameters as the fragments of a learner; they change in place.

    ``rank`` is the process's among those of this learner. Each process holds the anchors of its own
    part; a captured vector is zero where other processes contribute: the sum of all is the capture.
    """

    def __init__(
        self, plan: Plan, sync: SyncConfig, model: torch.nn.Module, *, rank: int = 0
    ) -> None:
        tensors = parameters_of(model)
        self._plan = plan
        self._sync = sync
        self._leaves = [Parameter(tensors[spec.name], rank) for spec in plan.leaves]
        self._ranges = [list(ranges_of(f, self._leaves)) for f in plan.fragments]
        self._device = self._leaves[0].device
        self._anchors: dict[int, Tensor] = {}
        self._captured: dict[int, Tensor] = {}
        self._left_over: dict[int, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where the first parameter lies: vectors are made there."""
        return self._device

    def genesis(self, fragment: int) -> Any:
        """Return the outer gradient of the parameters relative to zero: f32 (padded_size,)."""
        return handed_over(self.initial(fragment))

    def capture(self, fragment: int) -> Any:
        """Return ``anchor - local``, f32 (padded_size,), and remember local for the adoption."""
        return handed_over(self.progress(fragment))

    def initial(self, fragment: int) -> Tensor:
        """Return the negated parameters that this process contributes, zero elsewhere."""
        return self._owned(fragment, 0.0 - self._local(fragment))

    def progress(self, fragment: int) -> Tensor:
        """Return ``anchor - local`` where this process contributes it, zero elsewhere."""
        local = self._local(fragment)
        if self._sync.adoption == "rebase":
            self._captured[fragment] = local
        return self._owned(fragment, self._anchors[fragment] - local)

    def release(self, fragment: int) -> None:
        """Forget what was captured: no commit will merge it, so it is local progress again."""
        self._captured.pop(fragment, None)

    def adopt(self, fragment: int, vector: NDArray[np.float32]) -> None:
        """Take in a decoded global fragment, f32 (padded_size,); it becomes the anchor.

        The first adoption of a fragment overwrites it.
        """
        self.take(fragment, self.to_device(vector))

    def to_device(self, vector: NDArray[np.float32]) -> Tensor:
        """Return a vector on the parameters' device; the copy may be asynchronous."""
        host = torch.from_numpy(vector if vector.flags.writeable else vector.copy())
        on_cuda = self.device.type == "cuda"
        return (host.pin_memory() if on_cuda else host).to(self.device, non_blocking=on_cuda)

    def take(self, fragment: int, whole: Tensor) -> None:
        """Adopt this process's part of a vector that is on the parameters' device."""
        new = torch.cat([whole[r.place] for r in self._ranges[fragment]] or [whole[:0]])
        anchor = self._anchors.get(fragment)
        if anchor is None or self._sync.adoption == "overwrite":
            self._write(fragment, new)
            self._captured.pop(fragment, None)
        else:
            base = self._captured.pop(fragment, anchor).to(torch.float32)
            share = torch.tensor(self._sync.blend_alpha, dtype=torch.float32, device=new.device)
            local = self._local(fragment)
            self._write(fragment, adoption.adopt(self._sync.adoption, local, base, new, share))
        exact = torch.bfloat16 if self._sync.global_scheme == "bf16" else torch.float32
        self._anchors[fragment] = new.to(exact)

    def reset(self) -> None:
        """Fall back to the anchors, after the loss has diverged.

        What is in flight stays in flight: its progress comes back with the global state.
        """
        for fragment, anchor in self._anchors.items():
            whole = anchor.to(torch.float32)
            self._write(fragment, whole)
            if fragment in self._captured:
                self._captured[fragment] = whole

    def _local(self, fragment: int) -> Tensor:
        """Return this process's part of a fragment, f32, one range after another."""
        parts = [
            self._leaves[r.leaf].read()[r.start : r.stop].to(self.device, torch.float32)
            for r in self._ranges[fragment]
        ]
        local = torch.cat(parts) if parts else torch.zeros(0, device=self.device)
        left_over = self._left_over.get(fragment)
        return local if left_over is None else local + left_over

    def _write(self, fragment: int, values: Tensor) -> None:
        """Write f32 values into the parameters, and keep the remainder of those of 16 bits."""
        self._left_over.pop(fragment, None)
        at = 0
        for r in self._ranges[fragment]:
            size = r.stop - r.start
            self._leaves[r.leaf].write(r.start, r.stop, values[at : at + size])
            at += size
        if not all(self._leaves[r.leaf].wide for r in self._ranges[fragment]):
            self._left_over[fragment] = values - self._local(fragment)

    def _owned(self, fragment: int, local: Tensor) -> Tensor:
        """Return the padded vector of what this process contributes, zero elsewhere."""
        size = self._plan.fragments[fragment].padded_size
        vector = torch.zeros(size, dtype=torch.float32, device=self.device)
        at = 0
        for r in self._ranges[fragment]:
            if r.owned:
                vector[r.place] = local[at : at + r.stop - r.start]
            at += r.stop - r.start
        return vector


def handed_over(vector: Tensor) -> Any:
    """Return a vector in the form that the network's thread reads."""
    return TorchGradient(vector) if vector.device.type == "cuda" else vector.cpu().numpy()
