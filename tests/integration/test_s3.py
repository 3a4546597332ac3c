"""Checkpoints in a real S3 server: interrupted uploads, leftovers, refusals, and the commands."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import numpy as np
import obstore
import pytest

from skerry.algorithm.fragments import LeafSpec
from skerry.errors import CheckpointCorrupt, ConfigError, StoreError
from skerry.log import ledger, state
from skerry.log.memory import MemoryBroker
from skerry.log.nats.bus import NatsBus
from skerry.settings.models import RunConfig
from skerry.store import s3_draft, s3_sweep
from skerry.store.checkpoint import fragments, plan_of, verify
from skerry.store.opening import S3Access
from skerry.store.s3 import S3Store
from skerry.store.s3_client import listed
from skerry.store.s3_draft import S3Draft
from skerry.store.s3_layout import DRAFTS, PARTS, SWEEPS
from skerry.store.s3_sweep import announce
from skerry_checkpointer.service import Checkpointer
from tests.support.nats_server import NatsServer
from tests.support.s3_server import BUCKET, S3Server
from tests.support.scripted_run import LEAVES, ScriptedRun

pytestmark = pytest.mark.nats

DEADLINE_S = 90.0
MANIFEST_BYTES = b'{"made": "up"}\n'
BIG = (*LEAVES, LeafSpec("big", (3, 600_000)))
"""Enough for every fragment to have parts of its own."""

PAUSING = """
import asyncio, sys, threading
from pathlib import Path
from skerry.log.nats.bus import NatsBus
from skerry.store.opening import S3Access
from skerry.store.s3 import S3Store
from skerry.store.s3_draft import S3Draft
from skerry_checkpointer.service import checkpointer

class Draft(S3Draft):
    def drop(self, file):
        if len(self._files) == 2:
            self._refs()  # both files' parts have arrived
            print("half sent", flush=True)
            threading.Event().wait()

S3Store.draft = lambda self, name: Draft(self._client, self.url, name)
access = S3Access(sys.argv[3], "us-east-1", Path(sys.argv[4]), "writer")
asyncio.run(checkpointer(NatsBus(sys.argv[1]), "run", S3Store(sys.argv[2], access), 5.0))
"""


@pytest.fixture
def url(run_id: str) -> str:
    return f"s3://{BUCKET}/{run_id}/run"


@pytest.fixture
def store(s3_server: S3Server, url: str) -> S3Store:
    return S3Store(url, s3_server.access())


def settings_of(server: S3Server, url: str) -> list[str]:
    return [
        "--set",
        f"store.url={url.rpartition('/')[0]}",
        "--set",
        f"store.endpoint={server.endpoint}",
        "--set",
        f"store.credentials={server.credentials}",
        "--set",
        "store.profile=writer",
    ]


@asynccontextmanager
async def process(*arguments: str) -> AsyncGenerator[Process]:
    """A Python process that does not outlive the test."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=PIPE, stderr=PIPE
    )
    try:
        yield running
    finally:
        with suppress(ProcessLookupError):
            running.kill()
        await running.communicate()


async def told(*arguments: str) -> str:
    """What a command prints; it has to succeed."""
    async with process("-m", "skerry_checkpointer", "checkpoints", *arguments) as running:
        out, err = await asyncio.wait_for(running.communicate(), DEADLINE_S)
        assert running.returncode == 0, err.decode()
        return out.decode()


def written(store: S3Store, name: str, content: bytes = b"content") -> S3Draft:
    draft = store.draft(name)
    draft.append("a.bin", content)
    draft.commit(MANIFEST_BYTES)
    return draft


def parts(store: S3Store) -> dict[str, object]:
    return {meta["path"]: meta["last_modified"] for meta in listed(store._client, PARTS)}


class TestParts:
    def test_equal_content_is_sent_once(self, store: S3Store) -> None:
        first, second = written(store, "first"), written(store, "second")
        assert (first.sent_bytes, first.reused_bytes) == (7, 0)
        assert (second.sent_bytes, second.reused_bytes) == (0, 7)

    def test_a_vector_that_did_not_change_is_not_sent_again(self, store: S3Store) -> None:
        vectors = [os.urandom(2_000_000) for _ in range(3)]
        for name in ("first", "second"):
            draft = store.draft(name)
            for vector in vectors:
                draft.append("a.bin", vector)
            draft.commit(MANIFEST_BYTES)
            vectors[1] = os.urandom(2_000_000)
        assert (draft.sent_bytes, draft.reused_bytes) == (2_000_000, 4_000_000)

    def test_a_deleted_entry_takes_with_it_only_what_nobody_else_needs(
        self, store: S3Store
    ) -> None:
        shared, own = os.urandom(2_000_000), os.urandom(1_500_000)
        for name, second in (("first", own), ("second", b"")):
            draft = store.draft(name)
            draft.append("a.bin", shared)
            draft.append("a.bin", second)
            draft.commit(MANIFEST_BYTES)
        assert store.delete("first")
        assert len(parts(store)) == 1
        with closing(store.open("second", "a.bin")) as file:
            assert file.read() == shared

    def test_a_damaged_part_is_found(self, store: S3Store) -> None:
        written(store, "first")
        (path,) = parts(store)
        obstore.put(store._client, path, b"Content")
        with (
            closing(store.open("first", "a.bin")) as file,
            pytest.raises(CheckpointCorrupt, match=r"first/a\.bin is damaged"),
        ):
            file.read()

    def test_an_entry_whose_answer_was_lost_keeps_its_name(self, store: S3Store) -> None:
        draft = store.draft("first")
        draft.append("a.bin", b"a")
        draft.commit(MANIFEST_BYTES)
        assert draft.commit(MANIFEST_BYTES) == "first"
        assert store.names() == ["first"]


class TestSweep:
    def test_leftovers_stay_for_a_successor_and_then_go(
        self, store: S3Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written(store, "kept", b"kept")
        draft = store.draft("first")
        draft.append("a.bin", os.urandom(2_000_000))
        draft.seal()
        draft.discard()
        assert store.sweep() == []
        monkeypatch.setattr(s3_sweep, "RESUME_S", -1.0)
        assert len(store.sweep()) == 1
        assert len(parts(store)) == 1

    def test_nothing_is_swept_while_somebody_writes(
        self, store: S3Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written(store, "first")
        draft = store.draft("second")
        draft.append("a.bin", b"content")
        monkeypatch.setattr(s3_sweep, "RESUME_S", -1.0)
        store.delete("first")
        assert store.sweep() == []
        draft.commit(MANIFEST_BYTES)
        with closing(store.open("second", "a.bin")) as file:
            assert file.read() == b"content"

    def test_a_draft_that_begins_during_a_sweep_reuses_nothing(self, store: S3Store) -> None:
        written(store, "first")
        announce(store._client, f"{SWEEPS}/somebody")
        assert written(store, "second").reused_bytes == 0
        assert len(parts(store)) == 2

    def test_a_draft_that_fell_silent_counts_as_dead(
        self, store: S3Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written(store, "first")
        announce(store._client, f"{DRAFTS}/somebody")
        monkeypatch.setattr(s3_sweep, "DEAD_S", -1.0)
        assert store.delete("first")
        assert parts(store) == {}

    def test_a_draft_that_stood_still_gives_up(
        self, store: S3Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        draft = store.draft("first")
        monkeypatch.setattr(s3_draft, "DEAD_S", -1.0)
        with pytest.raises(StoreError, match="begun anew"):
            draft.append("a.bin", b"content")
        draft.discard()

    def test_parts_that_vanished_are_noticed_before_the_entry_appears(self, store: S3Store) -> None:
        draft = store.draft("first")
        draft.append("a.bin", os.urandom(2_000_000))
        draft._refs()
        obstore.delete(store._client, list(parts(store)))
        with pytest.raises(CheckpointCorrupt, match="not there as it was sent"):
            draft.commit(MANIFEST_BYTES)
        draft.discard()
        assert store.names() == []

    def test_an_entry_that_cannot_be_read_protects_every_part(
        self, store: S3Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written(store, "first")
        obstore.put(store._client, "entries/first.json", b"{}")
        monkeypatch.setattr(s3_sweep, "RESUME_S", -1.0)
        assert store.sweep() == []


class TestRefusals:
    def test_a_bucket_that_is_not_there(self, s3_server: S3Server) -> None:
        elsewhere = S3Store("s3://nowhere/run", s3_server.access())
        for act in (elsewhere.names, elsewhere.sweep, lambda: elsewhere.draft("a")):
            with pytest.raises(StoreError, match="There is no bucket 'nowhere'"):
                act()

    def test_credentials_that_may_only_read(self, s3_server: S3Server, url: str) -> None:
        reader = S3Store(url, s3_server.access("reader"))
        assert reader.names() == []
        with pytest.raises(StoreError, match="too little"):
            reader.draft("a")

    def test_wrong_keys_never_show_in_the_sentence(
        self, s3_server: S3Server, url: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "credentials"
        file.write_text("[x]\naws_access_key_id=writer\naws_secret_access_key=not-this-one\n")
        wrong = S3Store(url, S3Access(s3_server.endpoint, "us-east-1", file, "x"))
        with pytest.raises(StoreError, match="check the keys") as caught:
            wrong.names()
        assert "not-this-one" not in str(caught.value)

    def test_a_credentials_file_without_the_profile(self, s3_server: S3Server, url: str) -> None:
        with pytest.raises(ConfigError, match=r"no keys under \[other\]"):
            S3Store(url, s3_server.access("other"))

    def test_nobody_answers(self, s3_server: S3Server, url: str) -> None:
        access = S3Access("http://127.0.0.1:1", "", s3_server.credentials, "writer", 1.0)
        with pytest.raises(StoreError, match="does not answer"):
            S3Store(url, access).names()


async def test_a_checkpoint_in_s3_is_listed_verified_and_restored(
    nats_server: NatsServer, s3_server: S3Server, url: str, store: S3Store
) -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    await scripted.commit_all(step=7, tokens=70)
    await Checkpointer.of(scripted.bus, scripted.record, store).save()
    where, options = f"{url}/step-00000007", settings_of(s3_server, url)
    (found,) = json.loads(await told("list", "--json", *options))
    assert (found["path"], found["run"], found["step"]) == (where, "run", 7)
    assert json.loads(await told("verify", "--json", where, *options))["ok"]
    said = await told("restore", url, "--run", "again", "--nats", nats_server.url, *options)
    assert said == f"Run again is restored from {where}.\n"
    async with NatsBus(nats_server.url) as bus:
        cut = plan_of(verify(store, "step-00000007"), where)
        for saved, vectors in fragments(store, "step-00000007"):
            fragment = cut.fragments[saved.commit.fragment]
            latest = await state.read_latest(bus, "again", cut, fragment)
            assert latest is not None
            for part, vector in vectors.items():
                np.testing.assert_array_equal(latest[1][part], vector)


@pytest.mark.fault
async def test_an_upload_that_was_killed_is_gone_on_with(
    nats_server: NatsServer, s3_server: S3Server, url: str, store: S3Store
) -> None:
    config = RunConfig.model_validate({"checkpoint": {"every_s": 3600}})
    async with NatsBus(nats_server.url) as bus:
        run = await ScriptedRun.begin(bus, leaves=BIG, config=config)
        await run.commit_all(step=1)
        where = (nats_server.url, url, s3_server.endpoint, str(s3_server.credentials))
        async with process("-c", PAUSING, *where) as writer:
            assert writer.stdout is not None
            line = await asyncio.wait_for(writer.stdout.readline(), DEADLINE_S)
            assert line == b"half sent\n"
            writer.send_signal(signal.SIGKILL)
            await writer.wait()
        sent = parts(store)
        assert sent
        assert store.names() == []
        await run.finish()
        service = ("-m", "skerry_checkpointer", "--nats", nats_server.url, "--run", "run")
        async with process(*service, *settings_of(s3_server, url)) as running:
            assert await asyncio.wait_for(running.wait(), DEADLINE_S) == 0
        assert verify(store, "step-00000001").versions == (1, 1, 1)
        now = parts(store)
        assert {path: now[path] for path in sent} == sent  # none was sent a second time
        assert len(now) > len(sent)
        assert await ledger.last_checkpoint(bus, "run") is not None
