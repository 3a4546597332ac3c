"""A learner without a model: speaks the whole protocol, moves parameters by a known random walk.

What a run of puppets must commit can be computed from the log alone, so that fault tests compare
parameters exactly and start in milliseconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from skerry.bus import contributions, ledger, presence, state
from skerry.core.backend import cpu
from skerry.core.merge import slice_norms
from skerry.wire.codec import pack
from skerry.wire.messages import (
    ContributionHeader,
    ContributionKind,
    LearnerPhase,
    Pulse,
    RunRecord,
    RunState,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from skerry.bus.base import Bus
    from skerry.core.fragments import Fragment, Plan

    Vector = NDArray[np.float32]


def run_record(run: str, plan: Plan, config_json: str) -> RunRecord:
    """Return the record of a run whose parameters are those of ``plan``."""
    return RunRecord(
        run=run,
        config_json=config_json,
        leaves=plan.leaves,
        fragments=len(plan.fragments),
        plan_digest=plan.digest,
        created_ns=time.time_ns(),
        skerry_version="test",
        state=RunState.OPEN,
    )


def walk(fragment: Fragment, *key: object) -> Vector:
    """Return f32 (padded,): a small random step that depends on ``key`` only; padding is zero."""
    seed = hashlib.blake2b(repr((fragment.index, *key)).encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(seed))
    vector = np.zeros(fragment.padded_size, np.float32)
    for offset, part in zip(fragment.offsets, fragment.slices, strict=False):
        vector[offset : offset + part.size] = rng.normal(0, 1e-2, part.size)
    return vector


@dataclass(slots=True)
class Puppet:
    """One puppet: ``await puppet.train()`` pulses and answers rounds until it is cancelled.

    ``step_s`` is its pretended step time; ``steps`` after which it calls itself finished; answers
    to rounds towards versions below ``poisoned_below`` are not finite.
    """

    bus: Bus
    run: str
    plan: Plan
    name: str
    scheme: str = "f32"
    step_s: float = 0.02
    steps: int = 1_000_000
    poisoned_below: int = 0
    incarnation: int = 0
    versions: dict[int, int] = field(default_factory=dict[int, int])
    answered: dict[int, int] = field(default_factory=dict[int, int])
    identity: int = 0
    began_s: float = 0.0
    based_at: dict[int, int] = field(default_factory=dict[int, int])

    async def train(self) -> None:
        """Join, offer genesis, then pulse and answer rounds until cancelled."""
        member = await ledger.join(self.bus, self.run, self.name, "test", time.time_ns())
        self.incarnation = member.incarnation
        self.began_s = asyncio.get_running_loop().time()
        await self.offer_genesis()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pulse())
            group.create_task(self._adopt())
            group.create_task(self._answer())

    @property
    def step(self) -> int:
        return min(
            self.steps, int((asyncio.get_running_loop().time() - self.began_s) / self.step_s)
        )

    async def offer_genesis(self) -> None:
        """Offer every fragment that the log has no version of."""
        have = await state.read_manifests(self.bus, self.run, self.plan)
        for fragment in self.plan.fragments:
            if fragment.index not in have:
                await self._send(
                    fragment, -walk(fragment, "init"), ContributionKind.GENESIS, 0, 1, "f32"
                )

    async def _pulse(self) -> None:
        while True:
            await self.pulse(self.step)
            await asyncio.sleep(0.05)

    async def pulse(self, step: int) -> None:
        """Publish one pulse that tells of this step."""
        finished = step >= self.steps
        pulse = Pulse(
            run=self.run,
            learner=self.name,
            incarnation=self.incarnation,
            phase=LearnerPhase.FINISHED if finished else LearnerPhase.TRAINING,
            sent_ns=time.time_ns(),
            step=step,
            steps=step,
            tokens=step * 100,
            cursor=step,
            loss=1.0,
            step_time_s=self.step_s,
            busy_s=step * self.step_s,
            alive_s=step * self.step_s,
            bytes_up=0,
            bytes_down=0,
            contributions=self.identity,
        )
        await presence.publish_pulse(self.bus, pulse)

    async def _adopt(self) -> None:
        manifests = state.follow_manifests(self.bus, self.run, self.plan)
        async with aclosing(manifests):
            async for manifest in manifests:
                index = manifest.commit.fragment
                self.versions[index] = manifest.commit.version
                self.based_at[index] = self.step

    async def _answer(self) -> None:
        rounds = presence.follow_rounds(self.bus, self.run, self.plan.digest)
        async with aclosing(rounds):
            async for opened in rounds:
                index = opened.fragment
                if self.answered.get(index, 0) >= opened.version or index not in self.versions:
                    continue
                self.answered[index] = opened.version
                poison = opened.version < self.poisoned_below
                await self.send_gradient(index, opened.version, poison=poison)

    async def send_gradient(self, index: int, round_version: int, *, poison: bool = False) -> None:
        """Contribute the next step of the walk; ``poison`` makes its first value infinite (f32)."""
        fragment = self.plan.fragments[index]
        delta = walk(fragment, self.name, self.incarnation, self.identity + 1)
        await self._send(
            fragment,
            delta,
            ContributionKind.OUTER_GRADIENT,
            self.versions[index],
            round_version,
            self.scheme,
            poison=poison,
        )

    async def _send(
        self,
        fragment: Fragment,
        vector: Vector,
        kind: ContributionKind,
        base_version: int,
        round_version: int,
        scheme: str,
        *,
        poison: bool = False,
    ) -> None:
        self.identity += 1
        start = self.based_at.get(fragment.index, 0)
        stop = max(start, self.step)
        header = ContributionHeader(
            kind=kind,
            learner=self.name,
            incarnation=self.incarnation,
            identity=self.identity,
            fragment=fragment.index,
            base_version=base_version,
            round_version=round_version,
            step=stop,
            steps=stop - start,
            tokens=(stop - start) * 100,
            cursor_from=start,
            cursor_to=stop,
            loss=1.0,
            captured_ns=time.time_ns(),
            norms=slice_norms(fragment, vector),
        )
        planes = cpu().quantise(scheme, vector)
        if poison:
            planes.codes[0, :4] = np.array([np.inf], "<f4").view(np.uint8)
        chunks = pack(scheme, planes, 64 * 1024)
        await contributions.send(self.bus, self.run, self.plan, header, chunks)
