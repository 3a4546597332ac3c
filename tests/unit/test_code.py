"""Which functions a setting may name: those of modules that this machine's owner allowed.

An attack, too: a run record and a checkpoint name a command, and every part refuses to run it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skerry import code
from skerry.errors import ConfigError
from skerry.log.memory import MemoryBroker
from skerry.settings.checks import refuse_code
from skerry.settings.loading import load, run_config_from_json, to_json
from skerry.settings.models import RunConfig
from skerry.store.local import LocalStore
from skerry_checkpointer.restore import restore as restore_into
from skerry_checkpointer.service import Checkpointer
from skerry_evaluator.checkpoints import print_sample, print_scores
from skerry_evaluator.service import Evaluator
from skerry_learner.work import find_or_create
from skerry_syncer.run import ServedRun
from skerry_tools.audit.log import RunLog
from skerry_tools.audit.replay import replay
from tests.support.scripted_run import ScriptedRun


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


def test_what_is_no_function_is_refused_as_that(mine: ModuleType) -> None:
    mine.__dict__["rows"] = [1, 2]
    code.allow(["mine"])
    with pytest.raises(ConfigError, match="rows is no function, but list"):
        code.build("mine.models:rows", "data.factory", {})


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
        ("optax:chain", code.CodeRefused),
        ("skerry.models.decoder:Decoder", code.CodeRefused),
    ],
)
def test_only_optaxs_documented_optimizers_are_always_allowed(
    reference: str, refusal: type[Exception] | None
) -> None:
    with pytest.raises(refusal) if refusal else nullcontext():
        assert callable(code.load(reference, "outer.preset"))


@pytest.mark.parametrize(
    ("reference", "options"),
    [
        ("skerry.models.hf:write", {"folder": "made/x", "arch": None, "tensors": {}}),
        ("skerry.models.export:export_tensors", {"where": ".", "out": "made", "access": {}}),
    ],
)
def test_our_own_functions_write_nothing_because_a_run_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, options: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(code.CodeRefused):
        code.build(reference, "model.factory", options)
    assert not list(tmp_path.iterdir())


def test_optax_has_every_optimizer_that_is_allowed() -> None:
    import optax  # pyright: ignore[reportMissingTypeStubs]

    assert [name for name in code.OPTAX.split() if not hasattr(optax, name)] == []


def test_settings_from_elsewhere_allow_nothing() -> None:
    config = RunConfig.model_validate({"model": {"factory": "subprocess:getoutput"}})
    taken = run_config_from_json(to_json(config))
    assert code.allowed() == ()
    with pytest.raises(code.CodeRefused, match=r"model\.factory is 'subprocess:getoutput'"):
        refuse_code(taken)


Attack = Callable[[ScriptedRun, Path], Awaitable[object]]
EVIL_MODULE = "import pathlib; pathlib.Path({!r}).touch()\ndef make(**_): ...\n"


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the attack would create."""
    mark = tmp_path / "mark"
    (tmp_path / "evil.py").write_text(EVIL_MODULE.format(str(mark)))
    monkeypatch.syspath_prepend(tmp_path)
    return mark


async def learner(run: ScriptedRun, _folder: Path) -> object:
    return await find_or_create(run.bus, "run", RunConfig())


async def evaluator(run: ScriptedRun, _folder: Path) -> object:
    return await Evaluator.of(run.bus, run.record, "e").evaluate()


async def syncer(run: ScriptedRun, _folder: Path) -> object:
    return await ServedRun.begin(run.bus, run.record, "s", lambda: 0)


async def replayed(run: ScriptedRun, _folder: Path) -> object:
    return await replay(RunLog.of(run.bus, run.record))


async def sample(run: ScriptedRun, folder: Path) -> object:
    where = await saved(run, folder)
    return await asyncio.to_thread(print_sample, where, prompt="", count=1, temperature=0.0, seed=0)


async def evaluate(run: ScriptedRun, folder: Path) -> object:
    where = [await saved(run, folder)]
    return await asyncio.to_thread(print_scores, where, batches=1, as_json=True)


async def restore(run: ScriptedRun, folder: Path) -> object:
    return await restore_into(MemoryBroker().connect(), await saved(run, folder), "new")


async def saved(run: ScriptedRun, folder: Path) -> str:
    """Return a checkpoint of the run, as its sender may have edited it."""
    store = LocalStore(folder / "run")
    manifest = await Checkpointer.of(run.bus, run.record, store).save()
    assert manifest is not None
    return store.where(manifest.name)


EVIL_RULE: dict[str, dict[str, object]] = {"outer": {"preset": "evil:make"}}
EVIL_MERGE: dict[str, dict[str, object]] = {"sync": {"merge": "evil:make"}}
EVIL_INNER: dict[str, dict[str, object]] = {"train": {"inner": "evil:make"}}


@pytest.mark.parametrize(
    ("attack", "named"),
    [
        *((attack, None) for attack in (learner, evaluator, sample, evaluate, restore)),
        *((attack, EVIL_RULE) for attack in (syncer, replayed, restore)),
        *((attack, EVIL_MERGE) for attack in (syncer, restore)),
        (restore, EVIL_INNER),
    ],
)
async def test_a_models_command_is_not_run_and_a_rules_module_is_not_imported(
    tmp_path: Path, mark: Path, attack: Attack, named: dict[str, dict[str, object]] | None
) -> None:
    model = {"factory": "subprocess:getoutput", "options": {"cmd": f"touch {mark}"}}
    config = RunConfig.model_validate(named or {"model": model})
    run = await ScriptedRun.begin(MemoryBroker().connect(), "run", config=config)
    await run.commit_all()
    module = "evil" if named else "subprocess"
    with pytest.raises(code.CodeRefused, match=f"--set allow_code={module}"):
        await attack(run, tmp_path)
    assert not os.path.exists(mark)  # noqa: ASYNC240,PTH110 - it takes no time
