"""An attack: a run record and a checkpoint name a command, and every part refuses to run it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from skerry import code
from skerry.log.memory import MemoryBroker
from skerry.settings.models import RunConfig
from skerry.store.local import LocalStore
from skerry_checkpointer.restore import restore as restore_into
from skerry_checkpointer.service import Checkpointer
from skerry_evaluator.checkpoints import print_sample, print_scores
from skerry_evaluator.service import Evaluator
from skerry_learner.joining import find_or_create
from skerry_syncer.run import ServedRun
from skerry_tools.audit.log import RunLog
from skerry_tools.audit.replay import replay
from tests.support.scripted_run import ScriptedRun

Attack = Callable[[ScriptedRun, Path], Awaitable[object]]
EVIL_MODULE = "import pathlib; pathlib.Path({!r}).touch()\ndef make(**_): ...\n"


@pytest.fixture(autouse=True)
def nothing_allowed(allow_code: Callable[..., None]) -> None:
    del allow_code


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
    return await asyncio.to_thread(
        print_sample, where, prompt="", count=1, temperature=0.0, seed=0, as_json=True
    )


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
