"""A torch module's parameters as fragments: the same plan, formulas and bits as a JAX learner's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import skerry
from skerry.algorithm import fragments
from skerry.algorithm.fragments import Plan
from skerry.errors import Diverged, ModelError
from skerry.settings.models import SyncConfig

torch = pytest.importorskip("torch")
torch_fragments: Any = pytest.importorskip("skerry.client.torch_fragments")
torch.set_num_threads(1)

METHODS = ("overwrite", "blend", "rebase")


def module(dtype: Any = None) -> Any:
    torch.manual_seed(0)
    made = torch.nn.ModuleDict(
        {
            "embed_tokens": torch.nn.Embedding(50, 24),
            "up": torch.nn.Linear(24, 70),
            "down": torch.nn.Linear(70, 24),
        }
    )
    return made.to(dtype)


def sync_of(method: str = "rebase", scheme: str = "bf16") -> SyncConfig:
    return SyncConfig.model_validate(
        {"adoption": method, "blend_alpha": 0.25, "global_scheme": scheme}
    )


def held(model: Any, method: str = "rebase", scheme: str = "bf16") -> tuple[Any, Plan]:
    plan = fragments.plan(torch_fragments.leaves_of(model), 3)
    return torch_fragments.TorchFragments(plan, sync_of(method, scheme), model), plan


def local(model: Any, plan: Plan, fragment: int) -> NDArray[np.float32]:
    named = dict(model.named_parameters())
    leaves = [named[spec.name].detach().float().numpy() for spec in plan.leaves]
    return fragments.gather(plan.fragments[fragment], leaves)


def global_fragment(plan: Plan, fragment: int, seed: int) -> NDArray[np.float32]:
    """Values that bf16 holds, zeros in the padding, as the wire decodes them."""
    draw = np.random.default_rng(seed)
    leaves = [draw.normal(size=spec.shape).astype(np.float32) for spec in plan.leaves]
    vector = fragments.gather(plan.fragments[fragment], leaves)
    return (vector.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def step(model: Any, seed: int, size: float = 1e-3) -> None:
    """Change every parameter a little, as an optimizer does."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * size)


def test_a_compiled_module_has_the_names_of_the_module() -> None:
    whole = torch.nn.ModuleDict({"_orig_mod": module()})  # as torch.compile wraps one
    inside = module()
    inside["up"] = torch.nn.ModuleDict({"_orig_mod": inside["up"]})
    for compiled in (whole, inside):
        assert torch_fragments.leaves_of(compiled) == torch_fragments.leaves_of(module())
        fragments_, plan = held(compiled)
        fragments_.adopt(0, global_fragment(plan, 0, 1))


def test_leaves_are_sorted_named_and_marked_as_everywhere() -> None:
    model = module()
    model["head"] = torch.nn.Linear(24, 50, bias=False)
    model["head"].weight = model["embed_tokens"].weight  # tied: counts once, by its first name
    model["up"].bias.requires_grad_(requires_grad=False)
    model.register_buffer("positions", torch.zeros(7))
    leaves = torch_fragments.leaves_of(model)
    assert [(leaf.name, leaf.trainable, leaf.embedding) for leaf in leaves] == [
        ("down.bias", True, False),
        ("down.weight", True, False),
        ("embed_tokens.weight", True, True),
        ("up.weight", True, False),
        ("up.bias", False, False),
    ]


def test_genesis_says_the_parameters_relative_to_zero() -> None:
    model = module()
    its, plan = held(model)
    for fragment in range(3):
        np.testing.assert_array_equal(-its.genesis(fragment), local(model, plan, fragment))


@pytest.mark.parametrize("method", METHODS)
def test_adoption_follows_the_formula_of_every_learner(method: Any) -> None:
    model = module()
    its, plan = held(model, method)
    for fragment in range(3):
        first = global_fragment(plan, fragment, 1)
        its.adopt(fragment, first)
        np.testing.assert_array_equal(local(model, plan, fragment), first)
    step(model, 1)
    at_capture = [local(model, plan, f) for f in range(3)]
    for fragment in range(3):
        sent = its.capture(fragment)
        wanted = global_fragment(plan, fragment, 1) - at_capture[fragment]
        np.testing.assert_array_equal(sent, wanted)
    step(model, 2)
    for fragment in range(3):
        now, new = local(model, plan, fragment), global_fragment(plan, fragment, 2)
        its.adopt(fragment, new)
        share = np.float32(0.25)
        wanted = {
            "overwrite": new,
            "blend": share * now + (np.float32(1) - share) * new,
            "rebase": new + (now - at_capture[fragment]),
        }[method]
        np.testing.assert_array_equal(local(model, plan, fragment), wanted)


def test_anchors_take_two_bytes_a_parameter_and_keep_every_bit() -> None:
    model = module()
    its, plan = held(model)
    vector = global_fragment(plan, 0, 3)
    its.adopt(0, vector)
    assert its._anchors[0].dtype is torch.bfloat16
    np.testing.assert_array_equal(its.capture(0), np.zeros_like(vector))
    exact, _ = held(module(), scheme="f32")
    odd = vector + np.float32(2**-20) * vector
    exact.adopt(0, odd)
    np.testing.assert_array_equal(exact.capture(0), np.zeros_like(vector))


def test_nothing_is_rounded_away_by_parameters_in_bf16() -> None:
    model = module(torch.bfloat16)
    its, plan = held(model)
    its.adopt(0, global_fragment(plan, 0, 1))
    step(model, 1, size=0.1)
    sent = its.capture(0)
    step(model, 2, size=0.1)
    since = its._local(0) - its._captured[0]
    new = global_fragment(plan, 0, 2)
    its.adopt(0, new)
    now = local(model, plan, 0)
    rounded = new + fragments.gather(plan.fragments[0], _leaves(plan, its, since)) - now
    assert np.abs(rounded).max() > 0, "the parameters could not hold it"
    sent = its.capture(0)
    np.testing.assert_allclose(-sent, new * 0 + _vector(plan, its, since), atol=1e-6)


def _vector(plan: Plan, its: Any, values: Any) -> NDArray[np.float32]:
    return its._owned(0, values).numpy()  # type: ignore[no-any-return] # torch is untyped here


def _leaves(plan: Plan, its: Any, values: Any) -> list[NDArray[np.float32]]:
    out = [np.zeros(spec.shape, np.float32) for spec in plan.leaves]
    fragments.scatter(plan.fragments[0], _vector(plan, its, values), out)
    return out


def test_a_reset_falls_back_to_the_anchors_and_forgets_what_is_not_finite() -> None:
    model = module()
    its, plan = held(model)
    for fragment in range(3):
        its.adopt(fragment, global_fragment(plan, fragment, 1))
    with torch.no_grad():
        model["up"].weight.fill_(torch.nan)
    its.reset()
    for fragment in range(3):
        np.testing.assert_array_equal(
            local(model, plan, fragment), global_fragment(plan, fragment, 1)
        )


def test_a_released_capture_is_local_progress_again() -> None:
    model = module()
    its, plan = held(model)
    its.adopt(0, global_fragment(plan, 0, 1))
    step(model, 1)
    sent = its.capture(0)
    its.release(0)
    np.testing.assert_array_equal(its.capture(0), sent)
    its.release(0)
    new = global_fragment(plan, 0, 2)
    now = local(model, plan, 0)
    its.adopt(0, new)
    np.testing.assert_array_equal(local(model, plan, 0), new + (now - global_fragment(plan, 0, 1)))


def test_a_parameter_in_another_order_of_memory_is_written_too() -> None:
    model = module()
    model["up"].weight = torch.nn.Parameter(model["up"].weight.detach().t().contiguous().t())
    assert not model["up"].weight.is_contiguous()
    its, plan = held(model)
    for fragment in range(3):
        its.adopt(fragment, global_fragment(plan, fragment, 4))
        np.testing.assert_array_equal(
            local(model, plan, fragment), global_fragment(plan, fragment, 4)
        )


def test_a_device_quantises_with_the_bits_of_the_host() -> None:
    from skerry.algorithm import quantise_numba

    model = module()
    its, plan = held(model)
    vector = its.initial(1)
    planes, norms = torch_fragments.quantised("int4", plan.fragments[1], vector)
    wanted = quantise_numba.quantise("int4", vector.numpy())
    assert all(np.array_equal(a, b) for a, b in zip(planes, wanted, strict=True))
    assert len(norms) == len(plan.fragments[1].slices)
    with pytest.raises(Diverged):
        torch_fragments.quantised("int4", plan.fragments[1], vector * torch.inf)


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_a_parameter_that_is_no_float_of_ours_is_refused_in_a_sentence(dtype: str) -> None:
    model = module(getattr(torch, dtype)) if dtype == "float64" else torch.nn.Module()
    model.extra = torch.nn.Parameter(torch.zeros(3, dtype=getattr(torch, dtype)))
    with pytest.raises(ModelError, match="float32, bfloat16 or float16"):
        torch_fragments.leaves_of(model)


def test_a_module_of_which_each_process_has_unnamed_pieces_is_refused_in_a_sentence() -> None:
    model = torch.nn.ModuleDict({"_fsdp_wrapped_module": module()})
    with pytest.raises(ModelError, match="shard the model with fully_shard"):
        torch_fragments.leaves_of(model)


def test_of_frozen_parameters_nothing_is_asked() -> None:
    model = module()
    for dtype in (torch.uint8, torch.int32, torch.float64):
        codes = torch.zeros(3, dtype=dtype)
        model.register_parameter(str(dtype)[6:], torch.nn.Parameter(codes, requires_grad=False))
    leaves = torch_fragments.leaves_of(model)
    assert [leaf.name for leaf in leaves if not leaf.trainable] == ["float64", "int32", "uint8"]


def test_a_module_with_nothing_to_train_is_refused_in_a_sentence() -> None:
    frozen = module().requires_grad_(requires_grad=False)
    with pytest.raises(ModelError, match="nothing to train"):
        torch_fragments.leaves_of(frozen)


def test_what_is_no_module_or_has_no_values_is_refused_in_a_sentence() -> None:
    for model in (list(module().parameters()), torch.nn.Linear, module().state_dict()):
        with pytest.raises(ModelError, match=r"The model must be a torch\.nn\.Module, not"):
            torch_fragments.leaves_of(model)
    with torch.device("meta"):
        empty = torch.nn.Linear(3, 4)
    with pytest.raises(ModelError, match="bias is on the device meta and has no values"):
        torch_fragments.leaves_of(empty)
    with pytest.raises(ModelError, match="weight has no shape yet: run the model on a batch first"):
        torch_fragments.leaves_of(torch.nn.LazyLinear(4, bias=False))


def test_a_vector_of_a_device_without_cuda_is_handed_over_by_the_host() -> None:
    class Elsewhere:
        device = torch.device("mps")

        def cpu(self) -> Any:
            return torch.arange(3.0)

    np.testing.assert_array_equal(torch_fragments.handed_over(Elsewhere()), [0.0, 1.0, 2.0])


def test_stacked_experts_are_the_same_tensors_to_a_jax_and_a_torch_loop() -> None:
    class Experts(torch.nn.Module):  # type: ignore[misc, name-defined] # torch counts as untyped
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.zeros(4, 6, 8))

    module = torch.nn.ModuleDict({"experts": Experts()})
    (theirs,) = torch_fragments.leaves_of(module)
    params = {"experts.gate_up_proj": np.zeros((4, 6, 8), np.float32)}
    (ours,) = skerry.join("nats://127.0.0.1:1", params=params)._joining.leaves
    assert ours == theirs
    assert ours.unit == 6 * 8
