"""The simulation finds bugs that are known to be there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from skerry.algorithm import fragments
from skerry.log import ledger, state
from skerry.log.base import Bus, Receipt
from skerry.log.recovery import Predecessor, append_commit
from skerry.log.state_writer import StateWriter
from skerry.protocol.messages import Commit
from skerry.protocol.shard import PendingFragment
from skerry_tools.chaos.plan import FaultPlan
from tests.support.simulation.scenario import draw_plan
from tests.support.simulation.schedule import simulate

MOST_SEEDS = 400


def first_failure() -> tuple[FaultPlan, tuple[str, ...]]:
    """Return the plan of the first seed that fails, and how."""
    for seed in range(MOST_SEEDS):
        plan = draw_plan(seed)
        if violations := simulate(plan).violations:
            return plan, violations
    pytest.fail(f"{MOST_SEEDS} schedules have not found the bug")


@pytest.mark.drill
def test_a_writer_that_ignores_its_fence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unfenced(
        writer: StateWriter, subject: str, payload: bytes, msg_id: str, *_headers: object
    ) -> Receipt:
        if subject.endswith(".manifest"):  # at full speed it is overtaken too rarely
            await asyncio.sleep(0.5)
        return await writer.bus.publish(subject, payload, msg_id=msg_id)

    monkeypatch.setattr(StateWriter, "_publish", unfenced)
    plan, _ = first_failure()
    monkeypatch.undo()
    assert simulate(plan).violations == ()


@pytest.mark.drill
def test_a_shard_that_forgets_what_is_resolved_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingFragment, "resolved", lambda _state, _contribution: False)
    # Equal contents would be refused, too, and hide it.
    monkeypatch.setattr("skerry.protocol.commit.repeats", lambda _memory, _items: set())
    plan, _ = first_failure()
    monkeypatch.undo()
    assert simulate(plan).violations == ()


@pytest.mark.drill
def test_a_run_that_ends_ahead_of_its_ledger_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def by_manifests(bus: Bus, run: str) -> Mapping[int, Commit]:
        record = await ledger.read_run(bus, run)
        cut = fragments.plan(record.leaves, record.fragments)
        manifests = await state.read_manifests(bus, run, cut)
        return {index: manifest.commit for index, manifest in manifests.items()}

    async def slowly(bus: Bus, commit: Commit, after: Predecessor | None = None) -> None:
        await asyncio.sleep(0.5)  # at full speed the ledger is one behind for too short a time
        await append_commit(bus, commit, after)

    monkeypatch.setattr("skerry.log.state_writer.append_commit", slowly)
    with monkeypatch.context() as bug:
        bug.setattr("skerry_syncer.serving.ledger.last_commits", by_manifests)
        plan, violations = first_failure()
    assert any("not in the ledger" in violation for violation in violations)
    assert simulate(plan).violations == ()
