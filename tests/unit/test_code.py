"""Which functions a setting may name: those of modules that this machine's owner allowed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from skerry import code
from skerry.settings.checks import refuse_code
from skerry.settings.loading import load, run_config_from_json, to_json
from skerry.settings.models import RunConfig


@pytest.fixture(autouse=True)
def nothing_allowed(allow_code: Callable[..., None]) -> None:
    del allow_code


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the user's own that imports a dangerous function."""
    module = ModuleType("mine.models")
    names: dict[str, Any] = module.__dict__
    exec("def build(): return 'built'", names)  # noqa: S102 - defined in that module
    names |= {"getoutput": subprocess.getoutput, "hidden": partial(subprocess.getoutput, cmd="id")}
    names["partly"] = partial(names["build"])
    monkeypatch.setitem(sys.modules, "mine", ModuleType("mine"))
    monkeypatch.setitem(sys.modules, "mine.models", module)
    return module


def test_code_from_elsewhere_is_refused_with_what_to_do_before_it_is_imported() -> None:
    sys.modules.pop("antigravity", None)
    with pytest.raises(code.CodeRefused) as caught:
        code.load("antigravity:fly", "model.factory")
    assert "'antigravity:fly', and this machine does not allow code" in str(caught.value)
    assert "add --set allow_code=antigravity, or set SKERRY_ALLOW_CODE=" in str(caught.value)
    assert (caught.value.exit_code, caught.value.path) == (2, "model.factory")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("sets", "environ"),
    [
        (["allow_code=mine"], {}),
        (["allow_code=other, mine.models"], {}),
        (['allow_code=["mine"]'], {}),
        ([], {"SKERRY_ALLOW_CODE": "mine"}),
        (["model.factory=mine.models:another"], {}),
        (["outer.preset=mine.models:make"], {}),
        (["sync.merge=mine.models:rule"], {}),
        (["train.inner=mine.models:make"], {}),
    ],
)
def test_the_owner_of_a_machine_allows_a_module(
    mine: ModuleType, sets: Sequence[str], environ: dict[str, str]
) -> None:
    load(None, sets, environ)
    assert code.load("mine.models:build", "model.factory")() == "built"
    assert code.load("mine.models:partly", "model.factory")() == "built"


@pytest.mark.parametrize("reference", ["mine.models:getoutput", "mine.models:hidden"])
def test_what_an_allowed_module_only_imports_is_refused(mine: ModuleType, reference: str) -> None:
    code.allow(["mine"])
    with pytest.raises(code.CodeRefused, match="code from 'subprocess'"):
        code.load(reference, "model.factory")


@pytest.mark.parametrize(
    "reference", ["mine2:build", "minelayer.x:build", "skerry.service.control:ask", "os:system"]
)
def test_a_module_with_a_similar_name_is_not_allowed(reference: str) -> None:
    code.allow(["mine"])
    with pytest.raises(code.CodeRefused):
        code.refuse(reference, "model.factory")


@pytest.mark.parametrize(
    ("reference", "refusal"),
    [
        ("optax:adamw", None),
        ("skerry.algorithm.outer:make_outer", None),
        ("skerry.models.transformer:Transformer", None),
        ("optax:chain", code.CodeRefused),
        ("skerry.algorithm.outer:import_module", (code.CodeRefused, AttributeError)),
    ],
)
def test_our_own_rules_and_optaxs_documented_optimizers_are_allowed(
    reference: str, refusal: type[Exception] | None
) -> None:
    with pytest.raises(refusal) if refusal else nullcontext():
        assert callable(code.load(reference, "outer.preset"))


def test_optax_has_every_optimizer_that_is_allowed() -> None:
    import optax  # pyright: ignore[reportMissingTypeStubs]

    assert [name for name in code.OPTAX.split() if not hasattr(optax, name)] == []


def test_settings_from_elsewhere_allow_nothing() -> None:
    config = RunConfig.model_validate({"model": {"factory": "subprocess:getoutput"}})
    taken = run_config_from_json(to_json(config))
    assert code.allowed() == ()
    with pytest.raises(code.CodeRefused, match=r"model\.factory is 'subprocess:getoutput'"):
        refuse_code(taken)
