"""Saving a run from a standby whose hub is gone."""

from __future__ import annotations

from typing import Any

from skerry.store.finding import locate
from skerry.store.local import LocalStore
from skerry_checkpointer.promote import rescue
from tests.support.checkpoints import begun, save


class NoHub:
    async def hub_answers(self) -> bool:
        return False


async def test_what_is_saved_counts_as_newer_than_what_the_store_has(store: LocalStore) -> None:
    scripted = await begun()
    standby: Any = scripted.bus
    standby.mirrors = NoHub()
    for step in (7, 8):
        await scripted.commit_all(step=step)
        await save(scripted, store)
    await scripted.commit_all(step=9)
    written = await rescue(standby, "run", store)
    assert written.checkpoint.index == 2
    assert locate(store.root)[1] == written.name
