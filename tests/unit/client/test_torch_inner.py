"""The state of torch optimizers as a learner saves it."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
torch_inner: Any = pytest.importorskip("skerry.client.torch_inner")


class Quantised(torch.Tensor):  # type: ignore[misc, name-defined] # torch counts as untyped
    """Stands for the tensors of optimizers in eight bits, which do not know every operation."""


def stepped(kind: Any) -> tuple[Any, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)

    def closure() -> Any:
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return optimizer, model


def test_tensors_and_numbers_are_saved_by_name() -> None:
    state = torch_inner.state_of(*stepped(torch.optim.AdamW))
    assert set(state) == {
        f"AdamW|{name}|{key}|float32"
        for name in ("weight", "bias")
        for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_a_state_that_cannot_be_saved_whole_is_not_saved() -> None:
    assert torch_inner.state_of(*stepped(torch.optim.LBFGS)) == {}
    optimizer, model = stepped(torch.optim.AdamW)
    momentum = optimizer.state[model.weight]["exp_avg"]
    optimizer.state[model.weight]["exp_avg"] = momentum.as_subclass(Quantised)
    assert torch_inner.state_of(optimizer, model) == {}
