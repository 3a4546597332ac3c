"""A checkpoint is the state after every commit up to one ledger sequence, and after no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from skerry.errors import Corrupt, Overtaken, StateLost
from skerry.log import recovery, state_writer
from skerry.log.base import Deliver, Record
from skerry.log.memory import MemoryBus
from skerry.log.run_records import readable
from skerry.protocol.messages import Commit
from skerry.protocol.parts import MASTER, newest
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.store.checkpoint import Checkpoint, verify
from skerry.store.local import LocalStore
from skerry_checkpointer import cut as cuts
from skerry_checkpointer.cut import CUTS, ConsistentCut, read_cut, take_cut
from skerry_checkpointer.service import Checkpointer
from tests.support.checkpoints import begun, save
from tests.support.scripted_run import ScriptedRun

FRAGMENTS = 3


@dataclass(frozen=True, slots=True)
class Act:
    """What the syncers do while the checkpointer waits for one answer of the bus.

    ``commit`` publishes a fragment's next manifest; its ledger record waits until an act says
    ``append``, as that of another shard may; ``whole``: with a snapshot.
    """

    commit: int | None = None
    append: bool = False
    whole: bool = True


acts = st.builds(
    Act, st.one_of(st.none(), st.integers(0, FRAGMENTS - 1)), st.booleans(), st.booleans()
)


class BusyBus(MemoryBus):
    """A checkpointer's bus: before every answer the syncers do what the script says next."""

    def __init__(self, scripted: ScriptedRun, acts: Sequence[Act]) -> None:
        assert isinstance(scripted.bus, MemoryBus)
        super().__init__(scripted.bus.broker)
        self.scripted, self.acts = scripted, list(acts)
        self.unwritten: dict[int, Commit] = {}
        self.snapshots = {(fragment, 1): 1 for fragment in range(FRAGMENTS)}

    async def get(self, stream: str, sequence: int) -> Record | None:
        await self.go_on()
        return await MemoryBus.get(self, stream, sequence)

    async def last_each(self, pattern: str) -> list[Record]:
        await self.go_on()
        return await MemoryBus.last_each(self, pattern)

    async def follow(
        self, pattern: str | Sequence[str], *, deliver: Deliver = Deliver.ALL, after: int = 0
    ) -> AsyncGenerator[Record]:
        """Let the syncers go on also while there is nothing to read yet."""
        records = MemoryBus.follow(self, pattern, deliver=deliver, after=after)
        while True:
            step = asyncio.ensure_future(anext(records))
            try:
                while not step.done():
                    await self.go_on()
                    await asyncio.sleep(0)
            finally:
                step.cancel()
            yield step.result()

    async def go_on(self) -> None:
        act = self.acts.pop(0) if self.acts else Act(append=True)
        if act.commit is not None and act.commit not in self.unwritten:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(state_writer, "append_commit", self.later)
                made = await self.scripted.commit(act.commit, whole=act.whole)
            master = newest(made, MASTER)
            assert master is not None
            self.snapshots[act.commit, made.commit.version] = master.version
        if act.append:
            for fragment in sorted(self.unwritten, reverse=True):
                await recovery.append_commit(self.scripted.bus, self.unwritten.pop(fragment))

    async def later(self, _bus: object, commit: Commit, _after: int | None) -> None:
        self.unwritten[commit.fragment] = commit


async def committed() -> ScriptedRun:
    """Begin a run and commit every fragment once."""
    scripted = await begun()
    await scripted.commit_all()
    return scripted


async def cut_of(scripted: ScriptedRun) -> ConsistentCut:
    found = await take_cut(scripted.bus, "run", scripted.plan)
    assert found is not None
    return found


async def ignore(*_: object) -> None:
    return None


async def state_after(scripted: ScriptedRun, sequence: int) -> tuple[tuple[int, int], ...]:
    """Fold the ledger up to a sequence: version and digest of every fragment."""
    found: dict[int, tuple[int, int]] = {}
    stream = f"SKERRY_{scripted.record.run}_LEDGER"
    for at in range(1, sequence + 1):
        record = await scripted.bus.get(stream, at)
        assert record is not None
        if ".commit." in record.subject:
            commit = readable(Commit, record, scripted.record.run)
            assert commit is not None
            found[commit.fragment] = (commit.version, commit.params_digest)
    return tuple(found[i] for i in range(FRAGMENTS))


async def saved_under(acts: Sequence[Act], store: LocalStore) -> tuple[ScriptedRun, Checkpoint]:
    scripted = await committed()
    busy = BusyBus(scripted, acts)
    written = await Checkpointer.of(busy, scripted.record, store).save()
    assert written is not None
    assert verify(store, written.name) == written.checkpoint
    for saved in written.checkpoint.state:
        assert saved.snapshot is not None
        of = saved.commit.fragment, saved.commit.version
        assert saved.snapshot.commit.version == busy.snapshots[of]
    return scripted, written.checkpoint


@given(st.lists(acts, max_size=60))
@example([Act(commit=0), Act(), Act(commit=2, append=True)])  # 2 enters the ledger before 0
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_checkpoint_is_the_fold_of_the_ledger_up_to_its_sequence(
    tmp_path_factory: pytest.TempPathFactory, acts: list[Act]
) -> None:
    async def check() -> None:
        store = LocalStore(tmp_path_factory.mktemp("store"))
        try:
            scripted, checkpoint = await saved_under(acts, store)
        except Overtaken:
            assert store.names() == []
            return
        assert checkpoint.content == await state_after(scripted, checkpoint.ledger_sequence)

    asyncio.run(check())


async def test_commits_at_every_turn_do_not_keep_a_checkpoint_from_being_written(
    tmp_path: Path,
) -> None:
    """Every tenth answer of the bus meets a commit: the double buffer leaves time to read."""
    steady = [
        Act(commit=i // 10 % FRAGMENTS if i % 10 == 0 else None, append=True) for i in range(300)
    ]
    scripted, checkpoint = await saved_under(steady, LocalStore(tmp_path))
    assert checkpoint.content == await state_after(scripted, checkpoint.ledger_sequence)


@pytest.mark.parametrize(
    ("committed_meanwhile", "read"),
    [([2, 2], [(0, 1), (1, 1), (2, 3)]), ([0, 2, 2], [(0, 1), (1, 1), (0, 2), (2, 3)])],
)
async def test_a_newer_cut_reads_again_what_has_changed_and_only_that(
    committed_meanwhile: list[int], read: list[tuple[int, int]]
) -> None:
    """The second commit after a version overwrites it: fragment 2 is overtaken."""
    scripted = await committed()
    kept: list[tuple[int, int]] = []

    async def keep(commit: Commit, *_given: object) -> None:
        kept.append((commit.fragment, commit.version))
        if len(kept) == 1:
            for fragment in committed_meanwhile:
                await scripted.commit(fragment)

    await read_cut(scripted.bus, "run", scripted.plan, await cut_of(scripted), keep)
    assert kept == read


async def test_a_link_that_is_too_slow_is_one_sentence_after_some_attempts() -> None:
    scripted = await committed()
    count = 0

    async def keep(*_given: object) -> None:
        nonlocal count
        count += 1
        for _ in range(2):
            await scripted.commit_all()

    with pytest.raises(Overtaken, match="too slow for this"):
        await read_cut(scripted.bus, "run", scripted.plan, await cut_of(scripted), keep)
    assert count == CUTS


async def test_chunks_that_are_gone_name_fragment_and_version() -> None:
    scripted = await committed()
    found = await cut_of(scripted)
    stream = scripted.bus.broker.streams["SKERRY_run_STATE_0"]  # type: ignore[attr-defined] # in memory
    for chunk in scripted.manifests[1].parts[1].chunks:
        stream.drop(chunk.sequence)
    with pytest.raises(StateLost, match="fragment 1 at version 1"):
        await read_cut(scripted.bus, "run", scripted.plan, found, ignore)


async def test_a_manifest_that_the_ledger_never_gets_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted = await committed()

    monkeypatch.setattr(state_writer, "append_commit", ignore)
    monkeypatch.setattr(cuts, "LEDGER_DEADLINE_S", 0.01)
    await scripted.commit(2)
    with pytest.raises(StateLost, match="fragment 2, version 2"):
        await take_cut(scripted.bus, "run", scripted.plan)


async def test_state_that_was_rolled_back_is_named_and_blames_no_link() -> None:
    scripted = await committed()
    older = encode(scripted.manifests[1])
    for index in (1, 0, 2):
        await scripted.commit(index)
    await scripted.bus.publish("skerry.run.state.0.1.manifest", older)
    with pytest.raises(StateLost, match=r"fragment 1 at version 2.*is of version 1"):
        await take_cut(scripted.bus, "run", scripted.plan)


async def test_what_is_stored_for_a_fragment_that_does_not_exist_stops_no_checkpoint(
    store: LocalStore,
) -> None:
    scripted = await committed()
    other = replace(
        scripted.manifests[0], commit=replace(scripted.manifests[0].commit, fragment=77)
    )
    for fragment, payload in ((77, encode(other)), (78, b"junk")):
        await scripted.bus.publish(Subjects("run").shard(0).manifest(fragment), payload)
        await scripted.bus.publish(Subjects("run").commit(fragment), payload)
    assert await save(scripted, store)


@pytest.mark.parametrize("parts", [(), ("outer.momentum",)])
async def test_a_manifest_without_a_master_is_an_error_and_no_crash(parts: tuple[str, ...]) -> None:
    scripted = await committed()
    forged = scripted.manifests[1]
    forged = replace(forged, parts=tuple(part for part in forged.parts if part.name in parts))
    await scripted.bus.publish(Subjects("run").shard(0).manifest(1), encode(forged))
    with pytest.raises(Corrupt, match=r"fragment 1 .* has no whole master"):
        await read_cut(scripted.bus, "run", scripted.plan, await cut_of(scripted), ignore)
