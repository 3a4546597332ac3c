"""What a loop's other processes do at a boundary: what the first one says, until that is done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import structlog

from skerry.algorithm.fragments import LeafSpec, Plan, plan
from skerry.client.inner_file import Origin, Saved, write_file
from skerry.client.inner_state import StateKind, shapes_in
from skerry.client.joined import JoinedIsland, Joining
from skerry.client.loop_island import Follower, LoopIsland, Obey
from skerry.client.peer import Deed
from skerry.client.processes import Assignment, LeadProcess
from skerry.client.standing import Standing
from skerry.errors import ConfigError, RunFinished, RunMismatch, SkerryError
from skerry.settings import loading
from skerry.settings.local import LearnerSettings, LocalSettings, Settings
from skerry.settings.models import RunConfig
from tests.support.builders import wait_until
from tests.unit.client.test_processes import joined

LEAVES = (LeafSpec("w", (300,)), LeafSpec("v", (20,)))
CONFIG = RunConfig()
DIGEST = plan(LEAVES, CONFIG.sync.fragments).digest
ORIGIN = Origin("run", 1, DIGEST, 2, "a", processes=2)
STANDING = Standing(
    done=False, fell_back=True, start=4, shard=1, cursor=8, progress=0.5, versions=(2, 3)
)
KIND = StateKind(dict, shapes_in, lambda: dict, dict)


class Scene:
    """The first process of a learner, another one, and what that has done to its fragments."""

    def __init__(self, lead: LeadProcess, follower: Follower, done: list[Any]) -> None:
        self.lead = lead
        self.follower = follower
        self.done = done

    def boundary(self, *said: tuple[Any, ...]) -> Standing:
        for deed, *words in said:
            self.lead.post(deed, *words)
        self.lead.post(Deed.DONE, *astuple(STANDING))
        return self.follower.follow()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    structlog.configure()
    local = LearnerSettings(path=tmp_path, save_every_s=0.001)
    done = list[Any]()

    def hold(_: Assignment, cut: Plan, config: RunConfig) -> Obey:
        assert (cut.digest, config) == (DIGEST, CONFIG)
        return lambda *said: done.append(said)

    with joined() as (lead, process, _, _lost):
        yield Scene(lead, Follower(process, settings_of(local), LEAVES, hold), done)
    structlog.reset_defaults()


def settings_of(learner: LearnerSettings) -> Settings:
    return Settings(local=LocalSettings(learner=learner))


def held(origin: Origin = ORIGIN) -> tuple[Any, ...]:
    return Deed.HOLD, *asdict(Assignment(origin, 3, 1, loading.to_json(CONFIG))).values()


def test_a_process_does_what_the_first_one_says_and_knows_where_the_learner_is(
    scene: Scene,
) -> None:
    deeds = ((Deed.GENESIS, 0), (Deed.ADOPT, 0, 7), (Deed.RESET,))
    assert scene.boundary(held(), *deeds) == STANDING
    assert scene.done == list(deeds)
    assert scene.boundary((Deed.CAPTURE, 1)) == STANDING
    assert scene.follower.config == CONFIG


def test_a_process_with_other_tensors_says_so(scene: Scene) -> None:
    with pytest.raises(RunMismatch, match="other tensors than the first one"):
        scene.boundary(held(replace(ORIGIN, plan_digest=1)))


def test_a_process_whose_first_one_has_left_says_so(scene: Scene) -> None:
    scene.lead.close()
    with pytest.raises(SkerryError, match="has left its block"):
        scene.follower.follow()


def test_processes_that_have_parted_are_told_to_join_anew() -> None:
    class Refused:
        def join(self, _: object) -> JoinedIsland:
            msg = "finished"
            raise RunFinished(msg)

    with joined() as (lead, _process, _connection, _lost):
        island = LoopIsland(cast("Joining", Refused()), lead, None)
        with pytest.raises(RunFinished), island:
            pass
        with pytest.raises(ConfigError, match="call join again, in each of them"), island:
            pass


def test_a_block_inside_of_a_learners_own_is_refused_and_one_after_it_is_not() -> None:
    """It would join a second time, and so end the first."""

    class Joins:
        def join(self, _: object) -> JoinedIsland:
            return cast("JoinedIsland", object())

    island = LoopIsland(cast("Joining", Joins()), None, None)
    for _ in range(2):
        with island, pytest.raises(ConfigError, match="is in its block already"), island:
            pass


def test_a_process_restores_and_saves_its_own_part(scene: Scene, tmp_path: Path) -> None:
    moments = {"mu": np.arange(5, dtype=np.float32)}
    path = tmp_path / "run" / "a" / "inner-1-of-2.state"
    saved = Saved(replace(ORIGIN, process=1), 2, 30, 30)
    write_file(path, saved, shapes_in(moments), moments.values(), "draft")
    scene.boundary(held())
    scene.follower.begin_saving(KIND)
    assert scene.lead.all_found(10) == [{(2, 30)}]
    scene.boundary((Deed.RESTORE, 2, 30))
    np.testing.assert_array_equal(scene.follower.restored["mu"], moments["mu"])
    wait_until(scene.lead.all_ready)
    scene.follower.state = lambda: moments
    scene.lead.order_save(True, 31, 1)
    scene.boundary()
    wait_until(path.with_suffix(".before").exists)
    wait_until(scene.lead.all_ready)
    scene.follower.end(None)


def test_a_process_that_keeps_nothing_finds_nothing(scene: Scene) -> None:
    scene.follower._settings = settings_of(LearnerSettings(save_every_s=0))
    scene.boundary(held())
    scene.follower.begin_saving(KIND)
    assert scene.lead.all_found(10) == [set()]
    assert scene.boundary((Deed.SAVE, True, 1, 1)) == STANDING
    assert not scene.done
