"""What a run asks of this machine, looked at before anything is created."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from skerry import folders
from skerry.cli import ready
from skerry.errors import ConfigError, CorpusError
from skerry.settings import loading
from skerry.store.local import LocalStore
from tests.support.checkpoints import begun, save, store

__all__ = ["store"]


@pytest.mark.parametrize(
    ("own", "sets", "further", "refused"),
    [
        ({"steps": 7}, (), (), r"set train\.steps=14"),
        ({"steps": 8}, (), (), ""),
        ({"steps": 7}, ("train.steps=9",), ("train.steps=9",), ""),
        ({"steps": 7}, ("train.steps=7",), ("train.steps=7",), r"set train\.steps=14"),
        # of a file: it is not what the run is restored with
        ({"steps": 7}, ("train.steps=9",), (), r"set train\.steps=14"),
        ({"steps": 8, "tokens": 70}, (), (), r"at token 70.*set train\.tokens=140"),
        ({"steps": 8, "tokens": 71}, (), (), ""),
        ({"steps": 8, "tokens": 70}, ("train.tokens=71",), ("train.tokens=71",), ""),
    ],
)
async def test_a_checkpoint_at_the_end_of_its_run_is_refused_unless_the_run_goes_on(
    store: LocalStore,
    own: dict[str, int],
    sets: tuple[str, ...],
    further: tuple[str, ...],
    refused: str,
) -> None:
    scripted = await begun(train=own)
    await scripted.commit_all(step=7, tokens=70)
    where = str(store.root / await save(scripted, store))
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        ready.check(loading.load(None, sets), "nats://broker:4222", where, further)


async def test_the_text_of_a_checkpoint_is_refused_before_anything_is_created(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_allowed", set[str]())
    scripted = await begun(data={"source": "text", "paths": ["/its/text"]})
    await scripted.commit_all(step=7, tokens=70)
    where = str(store.root / await save(scripted, store))
    with pytest.raises(ConfigError, match=r"does not offer.*allow_data=/its/text"):
        ready.check(loading.load(), "nats://broker:4222", where)
    ready.check(loading.load(None, ["allow_data=/its/text"]), "nats://broker:4222", where)


async def test_a_run_that_begins_anew_is_told_of_its_earlier_checkpoints(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "my runs" / "again")
    local = loading.load(None, [f"store.path={store.root.parent}"]).local
    left_behind = partial(ready.left_behind, local.store, store.root.name)
    assert left_behind(fresh=False) == ""
    scripted = await begun(data={"source": "text", "paths": ["/its/text"]})
    await scripted.commit_all(step=0)
    await save(scripted, store)
    assert left_behind(fresh=False) == ""
    await scripted.commit_all(step=7, tokens=70)
    where = store.where(await save(scripted, store))
    options = f"--run again --from '{where}' --set allow_data=/its/text"
    assert f"{options}` goes on from step 7" in left_behind(fresh=False)
    assert left_behind(fresh=True) == ""


def test_a_folder_of_json_lines_is_text_where_there_is_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"text": "a"}\n')
    assigned = ["data.source=text", f"data.paths={tmp_path}"]
    with pytest.raises(CorpusError, match="names no file"):
        ready.check(loading.load(None, assigned), "nats://broker:4222")
    assigned.append(f"data.tokenizer_folder={tmp_path}")
    ready.check(loading.load(None, assigned), "nats://broker:4222")
