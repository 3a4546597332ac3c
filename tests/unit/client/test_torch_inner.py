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


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_a_saved_state_fits_and_is_given_back_in_the_shapes_that_its_optimizer_keeps(
    kind: Any,
) -> None:
    optimizer, model = stepped(kind)
    about, state = torch_inner.kind_of(optimizer, model), torch_inner.state_of(optimizer, model)
    assert about.fits(about.described(state))
    again = kind(model.parameters(), lr=0.1)
    torch_inner.restore(again, model, about.handed(state))
    restored = torch_inner.state_of(again, model)
    assert {name: value.tolist() for name, value in restored.items()} == {
        name: value.tolist() for name, value in state.items()
    }


def test_a_state_of_a_parameter_that_is_unknown_or_was_cut_otherwise_does_not_fit() -> None:
    about = torch_inner.kind_of(*stepped(torch.optim.AdamW))
    assert about.fits({"AdamW|weight|exp_avg|float32": ((2, 3), "float32")})
    assert not about.fits({"AdamW|other|exp_avg|float32": ((2, 3), "float32")})
    assert not about.fits({"AdamW|weight|exp_avg|float32|0": ((2, 3), "float32")})
