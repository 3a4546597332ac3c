"""A learner's devices as one mesh, and where each of its arrays lies on it.

``models.axes`` says how a mesh splits tensors. On one device everything lies there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from skerry.algorithm.fragments import LeafSpec
from skerry.errors import ConfigError
from skerry.models.axes import AUTO, AXES, BY_ROWS, SETTING, MeshSizes, sizes_of, splits
from skerry.models.base import Frozen, path_name
from skerry.models.machine import Machine
from skerry.models.memory import MemoryNeed

T = TypeVar("T")


def make_mesh(setting: str = AUTO, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a learner's mesh over the first of its devices; ConfigError if they are too few."""
    devices = jax.devices() if devices is None else devices
    sizes = sizes_of(setting, len(devices))
    automatic = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(sizes, AXES, axis_types=automatic, devices=devices[: sizes.devices])


def sizes_on(mesh: Mesh) -> MeshSizes:
    """Return the devices along each axis of a mesh."""
    return MeshSizes(**mesh.shape)


def machine_of(mesh: Mesh, host: str) -> Machine:
    """Return the machine that a mesh's learner reports."""
    axes = ",".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    return Machine(host, axes, mesh.devices.flat[0].device_kind)


def machine_of_arrays(arrays: Any, host: str) -> Machine:
    """Return the machine of a training loop, by the devices of its first array."""
    where = getattr(jax.tree.leaves(arrays)[0], "sharding", None)
    if isinstance(where, NamedSharding) and isinstance(where.mesh, Mesh):
        return machine_of(where.mesh, host)
    devices = jax.devices()[:1] if where is None else [*where.device_set]
    mesh = f"devices={len(devices)}" if len(devices) > 1 else ""
    return Machine(host, mesh, devices[0].device_kind)


def in_turn(made: T) -> T:
    """Return a program's results; on a CPU with several devices, wait until they are computed.

    Those devices share the CPU's threads: two programs in flight may each hold the threads that the
    other one waits for, until XLA gives up. Every program that a learner dispatches to its mesh
    goes through here; accelerators have a queue each, and do not wait.
    """
    first = next((leaf for leaf in jax.tree.leaves(made) if isinstance(leaf, jax.Array)), None)
    if first is not None and first.sharding.num_devices > 1 and on_cpu(first):
        jax.block_until_ready(made)
    return made


def on_cpu(array: Any) -> bool:
    """Return True for an array whose devices are a CPU's."""
    return all(device.platform == "cpu" for device in array.devices())


def one_device() -> Mesh:
    return make_mesh(devices=jax.devices()[:1])


def copied(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(BY_ROWS))


def on_mesh() -> bool:
    """Return True while a program is traced for a mesh that has the axes of rows."""
    return set(BY_ROWS) <= set(jax.sharding.get_abstract_mesh().axis_names)


def rows_apart(rows: jax.Array) -> jax.Array:
    """Shard activations, ``[batch * seq, ...]``, by rows on the mesh that is traced for.

    By default XLA splits them like the weights they are multiplied by, and holds several copies.
    """
    if not on_mesh():
        return rows
    lying: jax.Array = jax.lax.with_sharding_constraint(rows, PartitionSpec(BY_ROWS))
    return lying


def flat(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a vector or of rows over every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def shardings(model: Any, specs: Sequence[LeafSpec], mesh: Mesh) -> tuple[NamedSharding, ...]:
    """Return the sharding of each tensor, by the model's ``axes`` if it has them."""
    found = splits(specs, getattr(model, "axes", {}), mesh.shape)
    return tuple(NamedSharding(mesh, PartitionSpec(*names)) for names in found)


def frozen_shapes(model: Any, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and shardings of a model's leaves that are not trained, by name."""
    specs: tuple[LeafSpec, ...] = getattr(model, "frozen", ())
    dtype = getattr(model, "frozen_dtype", "float32")
    return {
        spec.name: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=place)
        for spec, place in zip(specs, shardings(model, specs, mesh), strict=True)
    }


def frozen_leaves(model: Any, mesh: Mesh | None = None) -> Frozen:
    """Return the leaves of a model that are not trained, each device with its own part of them."""
    shapes = frozen_shapes(model, mesh or one_device())
    return model.frozen_leaves({n: s.sharding for n, s in shapes.items()}) if shapes else {}


def with_params(state: Any, known: Mapping[tuple[str, tuple[int, ...]], NamedSharding]) -> Any:
    """Return the sharding of each tensor of an optimizer's state: that of its parameter.

    ``state`` holds arrays or their shapes; ``known`` has the parameters' shardings, by name and
    shape. A tensor belongs to the parameter of its shape whose name ends its own; any other, such
    as a count, is copied.
    """
    elsewhere = NamedSharding(next(iter(known.values())).mesh, PartitionSpec())

    def place_of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        parts = path_name(path).split(".")
        ends = ((".".join(parts[start:]), tuple(leaf.shape)) for start in range(len(parts)))
        return next((known[end] for end in ends if end in known), elsewhere)

    return jax.tree_util.tree_map_with_path(place_of, state)


def own_rows(mesh: Mesh, count: int) -> range:
    """Return the rows of a batch that this process's devices need."""
    places = by_rows(mesh).addressable_devices_indices_map((count,)).values()
    held = [range(count)[place[0]] for place in places if place is not None]
    return range(min(rows.start for rows in held), max(rows.stop for rows in held))


def put_rows(values: NDArray[Any], place: Sharding, first: int, count: int) -> jax.Array:
    """Return a batch of ``count`` rows on the devices; ``values`` are those from ``first`` on.

    This process's devices need no others.
    """
    shape = (count, *values.shape[1:])
    parts = [
        jax.device_put(values[rows.start - first : rows.stop - first], device, may_alias=False)
        for device, index in place.addressable_devices_indices_map(shape).items()
        for rows in [range(count)[index[0] if index else slice(None)]]
    ]
    return jax.make_array_from_single_device_arrays(shape, place, parts)


def put(values: NDArray[Any], place: Sharding) -> jax.Array:
    """Return a copy of a host's values on the devices; each gets only its own part."""
    return put_parts(values.shape, place, lambda index: values[index])


def put_parts(
    shape: tuple[int, ...], place: Sharding, part: Callable[[tuple[slice, ...]], NDArray[Any]]
) -> jax.Array:
    """Return an array whose parts are copied to this process's devices; ``part`` gives each."""
    parts = [
        jax.device_put(part(index or ()), device, may_alias=False)
        for device, index in place.addressable_devices_indices_map(shape).items()
    ]
    return jax.make_array_from_single_device_arrays(shape, place, parts)


def held_bytes(shapes: Any, places: Any = None) -> int:
    """Return the bytes of a tree of arrays, or of their shapes, on each device of the mesh."""

    def held(leaf: Any, place: NamedSharding) -> int:
        return math.prod(place.shard_shape(tuple(leaf.shape))) * int(leaf.dtype.itemsize)

    places = jax.tree.map(lambda leaf: leaf.sharding, shapes) if places is None else places
    return sum(jax.tree.leaves(jax.tree.map(held, shapes, places)))


def check_memory(mesh: Mesh, need: MemoryNeed) -> None:
    """Raise ConfigError if training needs more memory than a device has, before compiling.

    Nothing is raised if a device does not report its memory, such as a CPU.
    """
    for device in mesh.local_devices:
        limit = (device.memory_stats() or {}).get("bytes_limit", 0)
        if limit and need.total > limit:
            raise ConfigError(too_little(need, limit, mesh.size), path=SETTING)


def too_little(need: MemoryNeed, limit: int, devices: int) -> str:
    """Say what does not fit into ``limit`` bytes of each device, and what to change."""
    fewer = "set train.remat=blocks, or train.accumulate to take the batch in more parts"
    more = (
        f"give this learner more devices ({SETTING} with a larger fsdp), or the run a smaller model"
    )
    remedy = fewer if need.total - need.activations <= limit else more
    return (
        f"Training needs {need.total:,.0f} bytes on each of {devices} devices, and one has"
        f" {limit:,}: {need}; {remedy}."
    )
