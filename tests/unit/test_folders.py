"""Which text a run may have a machine read: what its owner named, and what lies below that."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from skerry import folders
from skerry.algorithm.fragments import LeafSpec
from skerry.cli.cluster.cluster import ServedBroker, prepared
from skerry.cli.cluster.folder import RunFolder, shut
from skerry.cli.cluster.processes import ProcessTable
from skerry.cli.up import ignored
from skerry.client import joining
from skerry.client.batches import of_run
from skerry.client.joined import PlannedLeaves
from skerry.data.files import find_files
from skerry.errors import ConfigError
from skerry.folders import writing
from skerry.log.memory import MemoryBus
from skerry.settings.loading import load, with_own_data
from skerry.settings.models import ModelConfig, RunConfig
from skerry_evaluator.service import Evaluator
from skerry_learner.work import find_or_create
from tests.support.scripted_run import ScriptedRun
from tests.support.small_run import bus

__all__ = ["bus"]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with text, a file beside it, and links from inside to that and to elsewhere."""
    monkeypatch.setattr(folders, "_allowed", set[str]())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "books").mkdir(parents=True)
    (tmp_path / "data" / "books" / "a.txt").write_text("text")
    (tmp_path / "secret").write_text("word")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "data" / "out").symlink_to("/etc")
    return tmp_path / "data"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_of_another_users_run_is_found_shut(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    assert shut(None, tmp_path) is None
    (tmp_path / "main").chmod(0)
    assert shut(None, tmp_path) == shut("main", tmp_path) == tmp_path / "main"
    assert shut("other", tmp_path) is None
    tmp_path.chmod(0)
    assert shut("other", tmp_path) == tmp_path
    tmp_path.chmod(0o700)
    (tmp_path / "main").chmod(0o700)


def naming(path: object) -> RunConfig:
    return RunConfig.model_validate({"data": {"source": "text", "paths": [str(path)]}})


@pytest.mark.parametrize(
    "name",
    [
        "{0}",
        "{0}/books",
        "{0}/books/*.txt",
        "{0}/b*",
        "data/books",
        "s3://mine/text",
        "s3://mine/x/y",
    ],
)
def test_what_lies_below_an_allowed_folder_is_read(root: Path, name: str) -> None:
    load(None, [f"allow_data={root},s3://mine"])
    with_own_data(naming(name.format(root)), RunConfig())


@pytest.mark.parametrize(
    "name",
    [
        *("/etc/passwd", "{0}/../secret", "{0}/link", "{0}/*/../../secret", "{0}2", "secret"),
        *("{0}/l?nk", "my books", "{0}/[l]*", "{0}/**/*", "{0}/out*/passwd"),
        *(["{0}/**x"] if sys.version_info < (3, 13) else []),  # from then on it is {0}/*x
        *("s3://mine2/x", "s3://min", "s3://mine/../x", "~/.ssh/id_rsa", "{0}/\x00"),
    ],
)
def test_what_lies_elsewhere_is_refused_with_what_to_do(root: Path, name: str) -> None:
    load(None, [f"allow_data={root},s3://mine"])
    said = re.escape(shlex.quote(name.format(root)))
    with pytest.raises(ConfigError, match=f"add --set allow_data={said}\\.") as caught:
        with_own_data(naming(name.format(root)), RunConfig())
    assert (caught.value.exit_code, caught.value.path) == (2, "data.paths")


def test_what_a_machine_names_itself_is_read(root: Path) -> None:
    given = load(None, ["data.source=text", f'data.paths=["{root}/books"]']).run
    assert with_own_data(naming("/etc/passwd"), given).data.paths == (f"{root}/books",)
    with_own_data(naming(f"{root}/books"), RunConfig())  # as an evaluator with those settings does


async def test_no_service_reads_what_a_runs_creator_names(bus: MemoryBus) -> None:
    scripted = await ScriptedRun.begin(bus, config=naming("/etc/passwd"))
    with pytest.raises(ConfigError, match="/etc/passwd, which this machine does not offer"):
        await find_or_create(bus, "run", RunConfig())
    with pytest.raises(ConfigError, match="/etc/passwd, which this machine does not offer"):
        Evaluator.of(bus, scripted.record, "e")


async def test_a_loop_joins_a_run_whose_text_it_may_not_read(bus: MemoryBus) -> None:
    """It may have a loader of its own; the run's text stays refused where it would be read."""
    planned, model = partial(PlannedLeaves, (LeafSpec("w", (8, 8)),)), ModelConfig(preset="own")
    await joining.find_or_create(bus, "run", naming("/etc/passwd"), planned, model)
    _, config, _ = await joining.find_or_create(bus, "run", RunConfig(), planned, model)
    with pytest.raises(ConfigError, match="/etc/passwd, which this machine does not offer"):
        next(of_run(config, 0, 0))


async def test_an_evaluator_reads_the_text_that_its_own_settings_name(
    bus: MemoryBus, root: Path
) -> None:
    scripted = await ScriptedRun.begin(bus, config=naming("/etc/passwd"))
    given = load(None, ["data.source=text", f'data.paths=["{root}/books"]']).run
    assert Evaluator.of(bus, scripted.record, "e", given=given).config.data == given.data
    assert ignored(scripted.record, naming("/etc/passwd"), given)[1:] == [], "both read their own"


def test_a_tokenizer_is_text_of_this_machine_too(root: Path) -> None:
    table = {"source": "text", "paths": ["books"], "tokenizer_folder": "/home/me"}
    load(None, [f"allow_data={root.parent}/books"])
    with pytest.raises(ConfigError, match=r"tokenizer_folder is /home/me.* with data\.tokenizer_f"):
        with_own_data(RunConfig.model_validate({"data": table}), RunConfig())


def test_a_relative_path_that_up_was_given_is_found_from_any_folder(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    paths = '["books", "b*/*.txt", "~/x", "s3://mine/text"]'
    given = load(None, ["data.source=text", f"data.paths={paths}", "data.tokenizer_folder=books"])
    folder = RunFolder("run", root.parent)
    folder.path.mkdir(parents=True)
    broker = ServedBroker(given.local.nats, ProcessTable(folder.processes))
    data = prepared(given, broker, folder).run.data
    assert load(folder.settings, environ={}).run.data == data
    monkeypatch.chdir("/")
    assert find_files(data.paths[:2], (".txt",)) == [root / "books" / "a.txt"] * 2
    assert data.paths[2:] == ("~/x", "s3://mine/text")
    assert data.tokenizer_folder == str(root / "books")


KILLED = """
import os, pathlib, signal, sys
from skerry.folders import writing
with writing(pathlib.Path(sys.argv[1])) as draft:
    (draft / "half").write_text("half of it")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_that_a_killed_writer_began_is_written_by_the_next(tmp_path: Path) -> None:
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False)
    assert len([*out.iterdir()]) == 1
    with writing(out) as draft:
        (draft / "whole").write_text("all of it")
        with pytest.raises(ConfigError, match="is not empty"), writing(out):
            pass  # that one is at work
    assert [path.name for path in out.iterdir()] == ["whole"]
