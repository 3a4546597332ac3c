"""Saves and restores the state of a torch optimizer, by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from skerry.client.inner_file import Shapes
from skerry.client.inner_state import Arrays, StateKind
from skerry.client.torch_fragments import Parameter, handed_over, parameters_of

State = dict[str, Any]
"""Tensors, and numbers as scalar tensors, by ``optimizer|parameter|key|type``; the name of a shard
also has ``|first``, the place of its first element."""

PLAIN = (torch.Tensor, torch.nn.Parameter, int, float, bool)


def kind_of(optimizer: Any, model: torch.nn.Module) -> StateKind:
    """Return how to save an optimizer's state of a module's parameters."""
    held = parameters_of(model)
    shapes = {name: tuple(lying_here(p).shape) for name, p in held.items()}
    places = {name: _place(p) for name, p in held.items()}

    def fits(found: Shapes) -> bool:
        return all(
            entry[:1] == [type(optimizer).__name__]
            and len(entry) >= 4
            and (shape == () or entry[4:] == places.get(entry[1]))
            # A shard's tensors are of its shape, or were cut otherwise.
            and (not entry[4:] or shape == shapes.get(entry[1]))
            and isinstance(getattr(torch, entry[3], None), torch.dtype)
            for entry, (shape, _) in ((name.split("|"), about) for name, about in found.items())
        )

    return StateKind(lambda state: state, _described, lambda: _copied, _handed, fits=fits)


def lying_here(tensor: Any) -> Any:
    """Return this process's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def _place(tensor: Any) -> list[str]:
    """Return where this process's part of a parameter begins; nothing for a whole one."""
    return [str(Parameter(tensor, 0).first)] if hasattr(tensor, "placements") else []


def state_of(optimizer: Any, model: torch.nn.Module) -> State:
    """Return an optimizer's state of a module's parameters, as it is.

    It is empty if a part of it is neither a plain tensor nor a number: half a state is useless.
    """
    found: State = {}
    for name, parameter in parameters_of(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if not (type(value) in PLAIN or hasattr(value, "placements")):
                return {}
            held = torch.as_tensor(value)
            kind = str(held.dtype).removeprefix("torch.")
            place = _place(parameter) if hasattr(held, "placements") else []
            found["|".join([type(optimizer).__name__, name, key, kind, *place])] = held
    return found


def restore(optimizer: Any, model: torch.nn.Module, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Give an optimizer the state that was saved; its settings stay as they are."""
    places = [id(p) for group in optimizer.param_groups for p in group["params"]]
    held = parameters_of(model)
    named = {name: places.index(id(p)) for name, p in held.items() if id(p) in places}
    state: dict[int, dict[str, Any]] = {}
    for label, array in tensors.items():
        _, name, key, kind, *place = label.split("|")
        value: Any = torch.from_numpy(np.array(array)).view(getattr(torch, kind))
        if name in named:
            value = _spread(value, held[name]) if place else value
            state.setdefault(named[name], {})[key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _spread(local: Any, parameter: Any) -> Any:
    """Return this process's part as a tensor that is sharded like the parameter."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local.to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _described(state: Arrays) -> Shapes:
    """Return shapes and dtypes as ``_handed`` hands them over."""
    kinds = {name: str(t.dtype).removeprefix("torch.") for name, t in state.items()}
    return {
        name: (
            tuple(lying_here(t).shape),
            "int16" if kinds[name] == "bfloat16" else kinds[name],
        )
        for name, t in state.items()
    }


def _copied(state: Arrays) -> Arrays:
    return _handed({name: tensor.detach().clone() for name, tensor in state.items()})


def _handed(state: Arrays) -> Arrays:
    """Return each tensor in a type that numpy has: the bits of a bfloat16 as integers."""
    found = dict[str, Any]()
    for name, tensor in state.items():
        local = lying_here(tensor)
        bits = local.view(torch.int16) if local.dtype == torch.bfloat16 else local
        found[name] = handed_over(bits)
    return found
