"""One of four learners is hostile: what it sends is contained, recorded, and replays to the bit."""

from __future__ import annotations

import asyncio
from functools import cache

import pytest

from skerry.cli.quarantine import decide
from skerry.protocol.messages import Commit, Quarantine, QuarantineReason, RefusalCause
from skerry.settings.models import RunConfig, SyncConfig, TrainConfig
from skerry_tools.audit.verify import verify
from skerry_tools.lab.hostile import Attack
from skerry_tools.lab.lab import RUN, Lab
from skerry_tools.lab.scenario import IslandSettings, Judging, LabScenario
from tests.support.labs import records

HOSTILE = "learner-3"
FOUND: dict[Attack, set[QuarantineReason | RefusalCause]] = {
    Attack.SCALED: {QuarantineReason.OVERLONG, RefusalCause.OVERLONG},
    Attack.FLIPPED: {QuarantineReason.OPPOSED, RefusalCause.OPPOSED},
    Attack.NOISE: {QuarantineReason.OVERLONG, RefusalCause.OVERLONG},
    Attack.CONSTANTS: {QuarantineReason.OVERLONG, RefusalCause.OVERLONG},
    Attack.ZEROS: {QuarantineReason.FREE_RIDES, RefusalCause.FREE_RIDING},
    Attack.REPEATS: {QuarantineReason.REPEATS, RefusalCause.REPEATED},
}
"""What each attack comes to; a quarantine refuses all that follows."""


def scenario(
    config: RunConfig, judging: Judging, learners: int, attack: Attack | None
) -> LabScenario:
    sync = SyncConfig(learners=learners, fragments=2, h_steps=8)
    names = [f"learner-{number}" for number in range(learners)]
    islands = [IslandSettings(name=n, hostile=attack if n == HOSTILE else None) for n in names]
    settings = config.model_copy(update={"sync": sync, "train": TrainConfig(steps=96)})
    return LabScenario(run=settings, judging=judging, islands=tuple(islands))


@cache
def _loss_of_three(config: str, judged: str) -> float:
    judging = Judging.model_validate_json(judged)
    return Lab(scenario(RunConfig.model_validate_json(config), judging, 3, None)).run().loss


def outcome(lab: Lab) -> tuple[set[str], set[QuarantineReason | RefusalCause]]:
    """Return who was held to something, and what it was."""
    who, what = set[str](), set[QuarantineReason | RefusalCause]()
    for commit in records(lab, Commit):
        refused = [r for r in commit.refused if r.cause is not RefusalCause.GENESIS]
        who |= {r.learner for r in refused} | {c.learner for c in commit.consumed if c.cut}
        what |= {r.cause for r in refused}
    decided = records(lab, Quarantine)
    what |= {one.reason for one in decided}
    return who | {one.learner for one in decided}, what - {RefusalCause.QUARANTINED}


@pytest.mark.drill
@pytest.mark.parametrize("attack", FOUND)
def test_one_hostile_learner_of_four_is_found_and_contained(
    attack: Attack, config: RunConfig, judging: Judging
) -> None:
    lab = Lab(scenario(config, judging, 4, attack))
    loss = lab.run().loss
    assert outcome(lab) == ({HOSTILE}, FOUND[attack])
    assert loss < 1.03 * _loss_of_three(config.model_dump_json(), judging.model_dump_json())
    report = asyncio.run(verify(lab.connect(), RUN, replay=True))
    assert not report.violations


def test_a_person_puts_a_learner_into_quarantine_and_releases_it(
    config: RunConfig, judging: Judging
) -> None:
    asked: dict[bool, int] = {}

    def watch(lab: Lab) -> None:
        for release, step in ((False, 24), (True, 56)):
            if lab.progress.step >= step and release not in asked:
                asked[release] = lab.progress.step
                lab.loop.create_task(decide(lab.connect(), RUN, "learner-1", release=release))

    lab = Lab(scenario(config, judging, 3, None), watch=watch)
    lab.run()
    merged, refused = set[int](), set[int]()
    for commit in records(lab, Commit):
        took = {c.learner for c in commit.consumed}
        merged |= {commit.step} if "learner-1" in took else set()
        refused |= {commit.step for r in commit.refused if r.cause is RefusalCause.QUARANTINED}
    assert refused
    assert min(refused) >= asked[False]
    assert not any(min(refused) < step < asked[True] for step in merged)
    assert max(merged) > asked[True]


def test_four_honest_learners_are_left_alone(config: RunConfig, judging: Judging) -> None:
    lab = Lab(scenario(config, judging, 4, None))
    lab.run()
    assert outcome(lab) == (set(), set())
