"""The likeness of successive outer gradients is that of the gradients which the syncer merged."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from skerry.algorithm import fragments, merge
from skerry.algorithm.merge_numpy import OuterGradient
from skerry.algorithm.outer import make_outer
from skerry.errors import Overtaken
from skerry.log import state
from skerry.log.memory import MemoryBroker
from skerry.protocol.contribution import (
    Contribution,
    ContributionAssembler,
    ContributionId,
    id_of,
)
from skerry.protocol.messages import Commit, Manifest
from skerry.protocol.parts import MASTER
from skerry.protocol.subjects import Subjects
from skerry.settings.models import OuterConfig, RunConfig
from skerry_tools.lab import lab as lab_module
from skerry_tools.lab import progress as progress_module
from skerry_tools.lab.lab import RUN, Lab
from skerry_tools.lab.progress import Rho
from skerry_tools.lab.scenario import Judging, LabScenario
from tests.support.labs import records

Vector = NDArray[np.float32]
At = tuple[int, int]
"""A fragment and one of its versions."""


class Watched(Rho):
    """Takes note of what it read."""

    last: Watched

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.read: list[At] = []
        Watched.last = self

    def _saw(self, commit: Commit, parts: Mapping[str, Vector]) -> None:
        self.read.append((commit.fragment, commit.version))
        super()._saw(commit, parts)


def gradients_of(lab: Lab) -> dict[At, Vector]:
    """Merge the contributions that lie in the log once more, by the weights in the ledger."""
    plan = lab.work.plan
    assembler = ContributionAssembler(RUN, plan)
    arrived: dict[tuple[int, ContributionId], OuterGradient] = {}
    for record in lab.broker.streams[Subjects(RUN).shard(0).stream("CONTRIB")].records.values():
        got = assembler.feed(record)
        if isinstance(got, Contribution):
            arrived[got.header.fragment, got.id] = got.gradient
    found: dict[At, Vector] = {}
    for commit in records(lab, Commit):
        if commit.version > 1:
            items = [arrived[commit.fragment, id_of(one)] for one in commit.consumed]
            fragment = plan.fragments[commit.fragment]
            found[commit.fragment, commit.version] = merge.merge(
                lab.config.sync.merge,
                items,
                [one.weight for one in commit.consumed],
                fragment,
                fragments.averaged(plan, fragment),
            )
    return found


def cosines(gradients: Mapping[At, Vector], read: list[At]) -> list[float]:
    """Return the cosine of each gradient with the one before, where three versions were read."""
    found: list[float] = []
    for fragment, version in read:
        if {(fragment, version - 1), (fragment, version - 2)} <= set(read):
            ours, last = gradients[fragment, version], gradients[fragment, version - 1]
            lengths = float(np.linalg.norm(ours) * np.linalg.norm(last))
            found.append(float(ours @ last) / lengths)
    return found


@pytest.mark.parametrize(
    "outer",
    [
        OuterConfig(preset="direct"),
        OuterConfig(preset="direct", lr=0.7),
        OuterConfig(preset="nesterov"),
    ],
    ids=["direct", "direct 0.7", "nesterov"],
)
def test_the_likeness_is_that_of_the_merged_contributions_of_versions_that_were_read(
    config: RunConfig, judging: Judging, outer: OuterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read_part(bus: Any, run: str, plan: Any, manifest: Manifest, name: str) -> Vector:
        if manifest.commit.version in {4, 9}:
            msg = "Fragment has moved on."
            raise Overtaken(msg)
        return await state.read_part(bus, run, plan, manifest, name)

    monkeypatch.setattr(
        progress_module,
        "state",
        SimpleNamespace(read_part=read_part, follow_manifests=state.follow_manifests),
    )
    monkeypatch.setattr(lab_module, "Rho", Watched)
    train = config.train.model_copy(update={"steps": 80})  # each fragment is merged ten times
    run = config.model_copy(update={"outer": outer, "train": train})
    lab = Lab(LabScenario(run=run, judging=judging, rho=True))
    rho, read = lab.run().rho, Watched.last.read
    assert {version for _, version in read} >= {3, 5, 6, 7, 8}
    assert not {version for _, version in read} & {4, 9}
    expected = cosines(gradients_of(lab), read)
    assert len(expected) >= 3 * len(lab.work.plan.fragments)  # versions 3, 7 and 8
    assert Watched.last.cosines == pytest.approx(expected, abs=1e-3)
    assert rho == pytest.approx(float(np.mean(expected)), abs=1e-3)
    assert np.ptp(expected) > 0.01, "a constant would pass"


def test_a_version_into_which_nothing_was_merged_is_no_gradient(config: RunConfig) -> None:
    """With momentum it would look like one along the momentum."""
    plan = Lab(LabScenario(run=config)).work.plan
    rho = Rho(
        MemoryBroker().connect(), RUN, plan, make_outer("nesterov", lr=1, momentum=0.5, h_steps=8)
    )
    gradients = np.array([[3, 0], [0, 4], [3, 4]], np.float32)
    momentum = np.zeros(2, np.float32)
    for version, gradient in enumerate([None, gradients[0], None, gradients[1], gradients[2]], 1):
        if gradient is not None:
            momentum = gradient + np.float32(0.5) * momentum
        merged: Any = SimpleNamespace(
            fragment=0, version=version, consumed=("one",) if gradient is not None else ()
        )
        rho._saw(merged, {MASTER: momentum, "outer.momentum": momentum})
    assert rho.cosines == pytest.approx([0.0, 0.8])
