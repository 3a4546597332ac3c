"""The outer optimizer: how the syncer applies a merged outer gradient.

A contribution is ``anchor - local``, so the merged outer gradient is *subtracted*, like a gradient.
Presets follow DiLoCo (arXiv 2311.08105: Nesterov, lr 0.7, momentum 0.9 at H = 500) and our own
quality benchmark:

- ``nesterov``: lr 0.7, momentum 0.9;
- ``direct``: lr 1, no momentum: the global model is the mean of the local ones;
- ``auto``: ``direct`` below H = 64, from there on Nesterov with lr 0.7 and momentum 0.5;
- ``adamw``: a learner's AdamW, for mode ``data-parallel``;
- ``module:function``: any optax transformation, built by your function.

Decoupled DiLoCo (2604.21428) prints no outer learning rate; experiment ``outer`` of
docs/quality.md has the runs that ``auto`` rests on. The presets need neither jax nor optax; those
of momentum equal ``optax.sgd`` to the last bit.
"""
# pyright: basic

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from skerry import code
from skerry.algorithm import backend
from skerry.algorithm.fragments import BLOCK, Fragment, Plan, clear_padding, padded
from skerry.algorithm.merge import Direction, direction, scaled
from skerry.algorithm.merge_numpy import OuterGradient, whole
from skerry.algorithm.presets import OUTERS, Sgd, resolved
from skerry.algorithm.rates import learning_rate
from skerry.errors import ConfigError, Diverged

if TYPE_CHECKING:
    from optax import GradientTransformation

    F32s = NDArray[np.float32]

MOMENTUM = "momentum"
FIRST, SECOND, COUNT = "first_moment", "second_moment", "count"
CHUNK = 64 * 1024
"""Elements in one pass of AdamW, so that the vectors of a step stay in cache."""


class Outer(NamedTuple):
    """An outer optimizer as pure functions over padded f32 vectors; state is opaque.

    ``leaves`` turns a state into named f32 vectors of whole blocks, for storage; ``restore`` is its
    inverse, given the master. ``fused`` is set if the merge and the step can share a pass,
    ``bare_gradients`` if contributions are gradients, not differences of parameters.
    """

    name: str
    init: Callable[[F32s], Any]
    apply: Callable[[F32s, F32s, Any], tuple[F32s, Any]]
    leaves: Callable[[Any], dict[str, F32s]]
    restore: Callable[[F32s, Mapping[str, F32s]], Any]
    fused: Sgd | None = None
    bare_gradients: bool = False


def make_outer(
    preset: str,
    *,
    lr: float | None,
    momentum: float | None,
    h_steps: int,
    adamw: Outer | None = None,
) -> Outer:
    """Build the outer optimizer of a preset; ``lr`` and ``momentum`` override the preset's.

    ``adamw`` is ``adamw_of`` the run, which the preset of that name needs.

    Raises ConfigError for an unknown preset (with the nearest one), a bad number, or a factory
    that cannot be loaded or does not return an optax transformation.
    """
    if lr is not None and not (lr > 0 and math.isfinite(lr)):
        msg = f"outer.lr is {lr}: give a positive number"
        raise ConfigError(msg, path="outer.lr")
    if momentum is not None and not 0 <= momentum < 1:
        msg = f"outer.momentum is {momentum}: give a number from 0 up to, but not including, 1"
        raise ConfigError(msg, path="outer.momentum")
    if ":" in preset:
        return from_optax(
            preset, optax_named(preset, "outer.preset", {"lr": lr, "momentum": momentum})
        )
    if preset not in OUTERS:
        nearest = next(iter(get_close_matches(preset, OUTERS, n=1, cutoff=0.0)), "")
        msg = (
            f"outer.preset {preset!r} is not known: did you mean {nearest!r}? "
            f"Use one of {', '.join(OUTERS)}, or module:function"
        )
        raise ConfigError(msg, path="outer.preset", nearest=nearest)
    if preset == "adamw":
        if adamw is None or (lr, momentum) != (None, None):
            msg = (
                "outer.preset 'adamw' takes one fragment of bare gradients, and its rate and decays"
                " from the training settings: set mode=data-parallel, or another preset"
            )
            raise ConfigError(msg, path="outer.preset")
        return adamw
    name, default = resolved(preset, h_steps)
    sgd = Sgd(default.lr if lr is None else lr, default.momentum if momentum is None else momentum)
    return _sgd_outer(name, sgd)


@np.errstate(over="ignore", invalid="ignore")
def merge_and_apply(  # noqa: PLR0913, PLR0917 - what a commit consists of, in its order
    outer: Outer,
    master: F32s,
    state: Any,
    contributions: Sequence[OuterGradient],
    weights: Sequence[float],
    method: str,
    fragment: Fragment,
    averaged: Sequence[bool],
    spare: Sequence[F32s] = (),
) -> tuple[F32s, Any]:
    """Merge contributions and take one outer step.

    Returns the new master f32 (padded_size,), its padding zero whatever contributions have there,
    and the new state; the inputs are untouched. Presets decode, merge and step block by block
    without another vector.
    ``spare`` are up to two dead vectors (an earlier master and momentum) that presets write into
    instead of new memory, whose first touch costs as much as the merge.
    Raises Diverged when the merge or the step is not finite, ValueError when shapes or weights do
    not fit.
    """
    if outer.fused is None:
        found = direction(method, contributions, weights, fragment, averaged)
        moved, fresh = outer.apply(master, scaled(found), state)
        _leave(found, moved, master)
        _finish(outer, fragment, moved)
        return moved, fresh
    fitting = [vector for vector in spare if vector.size == fragment.padded_size]
    out, into = (*fitting, None, None)[:2]
    found = direction(method, contributions, weights, fragment, averaged, out)
    vector, (lr, decay), moving = found.vector, outer.fused, ~found.idle
    gains, spans = found.gains[moving], found.spans.only(moving)
    step = backend.merger().step
    fresh = step(vector, gains, spans, master, state, lr=lr, decay=decay, into=into)
    _leave(found, vector, master)
    if fresh is not None:
        _leave(found, fresh, state)
    _finish(outer, fragment, vector)
    return vector, fresh


def _finish(outer: Outer, fragment: Fragment, master: F32s) -> None:
    """Clear the padding of a new master; raise Diverged if any value is not finite."""
    # The sum says it in one pass, and only values near the largest float make it overflow.
    if not math.isfinite(master.sum()) and not np.isfinite(master).all():
        msg = f"the outer step of {outer.name} is not finite"
        raise Diverged(msg)
    clear_padding(fragment, master)


def _leave(found: Direction, new: F32s, old: F32s) -> None:
    """Write the old values where no contribution trained: what has no gradient takes no step."""
    for start, stop in zip(*found.spans.only(found.idle), strict=True):
        span = slice(start * BLOCK, stop * BLOCK)
        new[span] = old[span]


def _sgd_outer(name: str, sgd: Sgd) -> Outer:
    """Nesterov SGD whose state is the momentum vector, or None where momentum is 0."""

    def init(master: F32s) -> F32s | None:
        return np.zeros_like(master) if sgd.momentum else None

    def apply(master: F32s, merged: F32s, state: F32s | None) -> tuple[F32s, F32s | None]:
        out, one = merged.copy(), np.ones(1, np.float32)
        step = backend.merger().step
        fresh = step(out, one, whole(out), master, state, lr=sgd.lr, decay=sgd.momentum)
        return out, fresh

    def leaves(state: F32s | None) -> dict[str, F32s]:
        return {} if state is None else {MOMENTUM: state}

    def restore(master: F32s, stored: Mapping[str, F32s]) -> F32s | None:
        if not sgd.momentum:
            return None
        return _fit(stored, MOMENTUM, master.size).copy()

    return Outer(name, init, apply, leaves, restore, sgd)


class Moments(NamedTuple):
    """First and second moment f32 (padded_size,), and how many steps have been taken."""

    first: F32s
    second: F32s
    steps: int


def outer_of(config: Any, plan: Plan) -> Outer:
    """Return the outer optimizer of a run by its settings; raises as ``make_outer`` does."""
    given = config.outer
    return make_outer(
        given.preset,
        lr=given.lr,
        momentum=given.momentum,
        h_steps=config.sync.h_steps,
        adamw=adamw_of(config.train, plan),
    )


def adamw_of(training: Any, plan: Plan) -> Outer | None:
    """Return the learner's own AdamW as a step on averaged gradients; None for other runs.

    Mode ``data-parallel`` takes it: its learners send bare gradients of a single fragment, because
    clipping by the global norm needs all of them. It does what the learner's step does, in its
    order: clipping, Adam (arXiv 1412.6980) with bias correction and eps = 1e-8, decoupled weight
    decay on matrices only (AdamW, arXiv 1711.05101), and the run's learning rate at its own step.
    The results are equal up to the order of f32 roundings; ``from_optax`` takes five times as long.
    ``training`` is the section ``train`` of the settings.
    """
    if training.inner != "gradient" or len(plan.fragments) != 1:
        return None
    (fragment,) = plan.fragments
    spans = zip(fragment.slices, pairwise(fragment.offsets), strict=True)
    matrices = [span for piece, span in spans if len(plan.leaves[piece.leaf].shape) >= 2]
    b1, a1 = np.float32(training.b1), np.float32(1 - training.b1)
    b2, a2 = np.float32(training.b2), np.float32(1 - training.b2)
    eps, decay = np.float32(1e-8), np.float32(training.weight_decay)

    def apply(master: F32s, merged: F32s, state: Moments) -> tuple[F32s, Moments]:
        norm = float(np.sqrt(backend.merger().segment_squares(merged, whole(merged))[0]))
        if norm == 0:  # a round of no work, or of skipped steps
            return master.copy(), state
        count, clip = state.steps + 1, np.float32(min(1.0, training.clip / norm))
        unbias = np.float32(1 - training.b1**count), np.float32(1 - training.b2**count)
        rate = np.float32(learning_rate(training, min(1.0, state.steps / training.steps)))
        out, first, second = np.empty_like(master), np.empty_like(master), np.empty_like(master)
        chunks = [slice(at, min(at + CHUNK, master.size)) for at in range(0, master.size, CHUNK)]
        with np.errstate(over="ignore", invalid="ignore"):
            for at in chunks:
                g = merged[at] * clip
                first[at] = a1 * g + b1 * state.first[at]
                second[at] = a2 * (g * g) + b2 * state.second[at]
                out[at] = (first[at] / unbias[0]) / (np.sqrt(second[at] / unbias[1]) + eps)
            for start, stop in matrices:
                out[start:stop] += decay * master[start:stop]
            for at in chunks:
                out[at] = master[at] - rate * out[at]
        return out, Moments(first, second, count)

    def leaves(state: Moments) -> dict[str, F32s]:
        count = np.array([state.steps], np.float32)  # exact up to 2^24 steps
        return {FIRST: state.first, SECOND: state.second, COUNT: _to_vector(count)}

    def restore(master: F32s, stored: Mapping[str, F32s]) -> Moments:
        first, second = (_fit(stored, name, master.size).copy() for name in (FIRST, SECOND))
        return Moments(first, second, int(_fit(stored, COUNT, 1)[0]))

    def init(master: F32s) -> Moments:
        return Moments(np.zeros_like(master), np.zeros_like(master), 0)

    return Outer("adamw", init, apply, leaves, restore, bare_gradients=True)


def from_optax(name: str, transformation: GradientTransformation) -> Outer:
    """Wrap any optax transformation; it sees one f32 vector (padded_size,) per fragment."""
    import jax
    import optax

    def _update(master: Any, merged: Any, state: Any) -> tuple[Any, Any]:
        updates, fresh = transformation.update(merged, state, master)
        return optax.apply_updates(master, updates), fresh

    update = jax.jit(_update)

    def init(master: F32s) -> Any:
        return transformation.init(jax.numpy.array(master))

    def apply(master: F32s, merged: F32s, state: Any) -> tuple[F32s, Any]:
        fresh, state = update(jax.numpy.array(master), jax.numpy.array(merged), state)
        return np.array(fresh), state

    def named(state: Any) -> dict[str, Any]:
        paths = jax.tree_util.tree_leaves_with_path(state)
        clean = (re.sub(r"\W+", "_", jax.tree_util.keystr(path)).strip("_") for path, _ in paths)
        return {f"{i}_{n}": leaf for i, (n, (_, leaf)) in enumerate(zip(clean, paths, strict=True))}

    def leaves(state: Any) -> dict[str, F32s]:
        return {key: _to_vector(np.asarray(leaf)) for key, leaf in named(state).items()}

    def restore(master: F32s, stored: Mapping[str, F32s]) -> Any:
        blank = init(master)
        values = [
            jax.numpy.array(_from_vector(stored, key, np.asarray(leaf)))
            for key, leaf in named(blank).items()
        ]
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(blank), values)

    return Outer(name, init, apply, leaves, restore)


def optax_named(
    path: str, setting: str, options: Mapping[str, float | None]
) -> GradientTransformation:
    """Return the transformation that ``setting`` names, made with the options that are set.

    Raises CodeRefused if this machine does not allow it, ConfigError if it is no such thing.
    """
    given = {key: value for key, value in options.items() if value is not None}
    made = code.build(path, setting, given)
    if not (callable(getattr(made, "init", None)) and callable(getattr(made, "update", None))):
        msg = f"{setting} {path!r} returned {type(made).__name__}, not an optax transformation."
        raise ConfigError(msg, path=setting)

    from jax import tree
    from optax import GradientTransformationExtraArgs, with_extra_args_support

    own = with_extra_args_support(cast("GradientTransformation", made))

    def update(updates: Any, *given: Any, **more: Any) -> Any:
        try:
            moved = own.update(updates, *given, **more)
            tree.map(_require_like, moved[0], updates)
        except Exception as error:
            about = code.failure(error, "updates like the gradients, and its state")
            msg = f"The update of {setting} {path!r} failed {about}"
            raise ConfigError(msg, path=setting) from error
        return moved

    return GradientTransformationExtraArgs(own.init, update)


def _require_like(update: Any, gradient: Any) -> None:
    """Raise ValueError for an update of another shape: adding it would broadcast."""
    if np.shape(update) != np.shape(gradient):
        msg = f"shape {np.shape(update)} for a gradient of shape {np.shape(gradient)}"
        raise ValueError(msg)


def _fit(stored: Mapping[str, F32s], name: str, size: int) -> F32s:
    found = stored.get(name)
    if found is None or found.size != padded(size):
        msg = f"the stored outer state has no {name!r} of {size} values: it is another optimizer's"
        raise ConfigError(msg, path="outer.preset")
    return found


def _to_vector(leaf: NDArray[Any]) -> F32s:
    """Return a leaf for storage: f32 as it is, any other type one byte per value, exact in f32."""
    flat = leaf.ravel() if leaf.dtype == np.float32 else np.frombuffer(leaf.tobytes(), np.uint8)
    vector = np.zeros(padded(flat.size), np.float32)
    vector[: flat.size] = flat
    return vector


def _from_vector(stored: Mapping[str, F32s], name: str, like: NDArray[Any]) -> NDArray[Any]:
    """Return the stored leaf, with the shape and dtype of ``like``."""
    size = like.size if like.dtype == np.float32 else like.nbytes
    flat = _fit(stored, name, size)[:size]
    raw = flat.tobytes() if like.dtype == np.float32 else flat.astype(np.uint8).tobytes()
    return np.frombuffer(raw, like.dtype).reshape(like.shape)
