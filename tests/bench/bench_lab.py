"""How fast the lab trains M = 8 learners: ``python tests/bench/bench_lab.py``.

Beside it, in the same process and by turns of some seconds, the same model is trained alone on
batches eight times as large, by the same trainer: as many tokens a step as all learners of the lab
take together, without anything that a learner does beside its steps. Both may use every core. On
a machine that others use too, the ratio of CPU times says more than that of the clock on the wall.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import jax
from harness import Goal, parser, write

from skerry.data.stream import Stream
from skerry.service.reporting import configure
from skerry.settings.models import DataConfig, RunConfig, SyncConfig, TrainConfig
from skerry_learner.trainer.step import StepResult
from skerry_learner.trainer.trainer import Trainer
from skerry_learner.work import prepare
from skerry_tools.lab.lab import Lab
from skerry_tools.lab.learner import feed
from skerry_tools.lab.scenario import REFERENCE, Judging, LabScenario

GOAL = 0.95
SETTLE_S = 0.3
"""Before a turn, so that what the other one has handed to the device is done."""
FIRST_STEP = 20
ENDLESS = 1_000_000


def config(learners: int, steps: int, batch: int) -> RunConfig:
    """Return a run of the small reference model with the default way to synchronise."""
    return RunConfig(
        model=REFERENCE,
        data=DataConfig(seq_len=64, batch=batch),
        train=TrainConfig(steps=steps),
        sync=SyncConfig(learners=learners),
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens a second of one turn, and per second of CPU time of all threads together."""

    tokens_s: float
    tokens_cpu_s: float


@dataclass(frozen=True, slots=True)
class Moment:
    """When a turn began."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), time.process_time())

    def turn(self, tokens: int) -> Turn:
        """Return the turn that ends now."""
        now = Moment.now()
        return Turn(tokens / (now.wall_s - self.wall_s), tokens / (now.cpu_s - self.cpu_s))


class Enough(Exception):
    """As many turns as were asked for."""


class Alone:
    """The same model, trained by one trainer on the batches of all."""

    def __init__(self, learners: int, batch: int) -> None:
        self.config = config(1, ENDLESS, batch * learners)
        work = prepare(self.config)
        self.trainer = Trainer(work.model, self.config, work.plan)
        stream = Stream(work.corpus, 0)
        self.batches = feed(stream, self.config.data.batch, None, 0).__enter__()
        self.trainer.warm(lambda: None)

    def turn(self, seconds: float) -> Turn:
        """Train for so many seconds; a step's loss is read during the next."""
        steps, began = 1, Moment.now()
        before = self._step()
        while time.perf_counter() - began.wall_s < seconds:
            after = self._step()
            jax.device_get(before)
            before, steps = after, steps + 1
        jax.device_get(before)
        data = self.config.data
        return began.turn(steps * data.batch * data.seq_len)

    def _step(self) -> StepResult:
        return self.trainer.step(next(self.batches).batch, 0.5)


@dataclass(slots=True)
class Turns:
    """Called after every commit of the lab: now and then the other one has a turn."""

    alone: Alone
    count: int
    seconds: float
    began: tuple[Moment, int] | None = None
    of_lab: list[Turn] = field(default_factory=list[Turn])
    of_alone: list[Turn] = field(default_factory=list[Turn])

    def __call__(self, lab: Lab) -> None:
        if lab.progress.step < FIRST_STEP:
            return
        steps = sum(one.tally.steps for one in lab.islands)
        if self.began is not None:
            began, before = self.began
            if time.perf_counter() - began.wall_s < self.seconds:
                return
            data = lab.config.data
            self.of_lab.append(began.turn((steps - before) * data.batch * data.seq_len))
            time.sleep(SETTLE_S)
            self.of_alone.append(self.alone.turn(self.seconds))
            if len(self.of_lab) >= self.count:
                raise Enough
        self.began = Moment.now(), steps


@dataclass(frozen=True, slots=True)
class Verdict:
    """Medians over turns; ratios are those of each pair of turns."""

    learners: int
    turns: int
    lab_tokens_s: float
    alone_tokens_s: float
    ratio: float
    ratio_cpu: float
    xla_flags: str


def measure(learners: int, batch: int, turns: int, seconds: float) -> Verdict:
    """Run both by turns and compare them."""
    configure("error", service="bench")
    alone = Alone(learners, batch)
    alone.turn(1.0)
    taken = Turns(alone, turns, seconds)
    judging = Judging(points=1, batches=1)
    scenario = LabScenario(run=config(learners, ENDLESS, batch), judging=judging)
    with suppress(Enough):
        Lab(scenario, watch=taken).run()
    pairs = list(zip(taken.of_lab, taken.of_alone, strict=True))
    return Verdict(
        learners=learners,
        turns=len(pairs),
        lab_tokens_s=statistics.median(lab.tokens_s for lab, _ in pairs),
        alone_tokens_s=statistics.median(other.tokens_s for _, other in pairs),
        ratio=statistics.median(lab.tokens_s / other.tokens_s for lab, other in pairs),
        ratio_cpu=statistics.median(lab.tokens_cpu_s / other.tokens_cpu_s for lab, other in pairs),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
    )


def main() -> None:
    options = parser("The lab's tokens a second, beside one trainer's.")
    options.add_argument("--learners", type=int, default=8, help="learners (default 8)")
    options.add_argument("--batch", type=int, default=16, help="of each learner (default 16)")
    options.add_argument("--turns", type=int, default=12, help="turns of each (default 12)")
    options.add_argument("--seconds", type=float, default=2.0, help="length of a turn (default 2)")
    chosen = options.parse_args()
    found = measure(chosen.learners, chosen.batch, chosen.turns, chosen.seconds)
    print(
        f"lab: {found.learners} learners {found.lab_tokens_s:,.0f} tokens/s, one trainer with"
        f" batches {found.learners} times as large {found.alone_tokens_s:,.0f} tokens/s:"
        f" {found.ratio:.3f} (median of {found.turns} turns), {found.ratio_cpu:.3f} by CPU time"
    )
    goal = Goal("lab: 8 learners", GOAL, found.ratio, "of one trainer")
    write("lab", [asdict(found)], [goal], chosen.json)


if __name__ == "__main__":
    main()
