"""How fast the lab trains M = 8 learners: ``python tests/bench/bench_lab.py``.

Beside it, in the same process and by turns of some seconds, the same model is trained alone on
batches eight times as large, by the same trainer: as many tokens a step as all learners of the lab
take together, without anything that a learner does beside its steps. Both may use every core.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import asdict, dataclass, field

import jax
from harness import Goal, parser, write

from skerry.runtime.logs import configure
from skerry.settings import DataConfig, RunConfig, SyncConfig, TrainConfig
from skerry_lab.lab import Lab
from skerry_lab.learner import Feed
from skerry_lab.scenario import REFERENCE, Judging, Scenario
from skerry_learner.data.stream import Stream
from skerry_learner.joining import prepare
from skerry_learner.trainer.step import StepResult
from skerry_learner.trainer.trainer import Trainer

GOAL = 0.7
SETTLE_S = 0.3
"""Before a turn, so that what the other one has handed to the device is done."""
FIRST_STEP = 20


def config(learners: int, steps: int, batch: int) -> RunConfig:
    """Return a run of the small reference model with the default way to synchronise."""
    return RunConfig(
        model=REFERENCE,
        data=DataConfig(seq_len=64, batch=batch),
        train=TrainConfig(steps=steps),
        sync=SyncConfig(learners=learners),
    )


class Alone:
    """The same model, trained by one trainer on the batches of all."""

    def __init__(self, learners: int) -> None:
        self.config = config(1, 1_000_000, 4 * learners)
        work = prepare(self.config)
        self.trainer = Trainer(work.model, self.config, work.plan)
        stream = Stream(work.corpus, 0)
        feed = Feed(stream, cursor=0, batch=self.config.data.batch, vocab=None)
        self.batches = feed.__enter__()
        self.trainer.warm(lambda: None)

    def rate(self, seconds: float) -> float:
        """Return tokens a second over so many seconds; a step's loss is read during the next."""
        steps, began = 1, time.perf_counter()
        before = self._step()
        while time.perf_counter() - began < seconds:
            after = self._step()
            jax.device_get(before)
            before, steps = after, steps + 1
        jax.device_get(before)
        data = self.config.data
        return steps * data.batch * data.seq_len / (time.perf_counter() - began)

    def _step(self) -> StepResult:
        return self.trainer.step(next(self.batches).tokens, 0.5)


@dataclass(slots=True)
class Turns:
    """Called after every commit of the lab: now and then the other one has a turn."""

    alone: Alone
    seconds: float
    began: tuple[float, int] | None = None
    lab_rates: list[float] = field(default_factory=list[float])
    alone_rates: list[float] = field(default_factory=list[float])

    def __call__(self, lab: Lab) -> None:
        if lab.course.step < FIRST_STEP:
            return
        steps, now = sum(career.tally.steps for career in lab.careers), time.perf_counter()
        if self.began is not None:
            if now - self.began[0] < self.seconds:
                return
            data = lab.config.data
            tokens = (steps - self.began[1]) * data.batch * data.seq_len
            self.lab_rates.append(tokens / (now - self.began[0]))
            time.sleep(SETTLE_S)
            self.alone_rates.append(self.alone.rate(self.seconds))
        self.began = time.perf_counter(), steps


@dataclass(frozen=True, slots=True)
class Verdict:
    """Medians over turns; ``ratio`` is that of each pair of turns."""

    learners: int
    turns: int
    lab_tokens_s: float
    alone_tokens_s: float
    ratio: float
    xla_flags: str


def measure(learners: int, steps: int, seconds: float) -> Verdict:
    """Run both by turns and compare them."""
    configure("error", service="bench")
    alone = Alone(learners)
    alone.rate(1.0)
    turns = Turns(alone, seconds)
    judging = Judging(points=1, batches=1, final_batches=1)
    Lab(Scenario(run=config(learners, steps, 4), judging=judging), watch=turns).run()
    pairs = zip(turns.lab_rates, turns.alone_rates, strict=True)
    return Verdict(
        learners=learners,
        turns=len(turns.lab_rates),
        lab_tokens_s=statistics.median(turns.lab_rates),
        alone_tokens_s=statistics.median(turns.alone_rates),
        ratio=statistics.median(lab / other for lab, other in pairs),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
    )


def main() -> None:
    options = parser("The lab's tokens a second, beside one trainer's.")
    options.add_argument("--learners", type=int, default=8, help="learners (default 8)")
    options.add_argument("--steps", type=int, default=600, help="steps of the run (default 600)")
    options.add_argument("--seconds", type=float, default=2.0, help="length of a turn (default 2)")
    chosen = options.parse_args()
    found = measure(chosen.learners, chosen.steps, chosen.seconds)
    print(
        f"lab: {found.learners} learners {found.lab_tokens_s:,.0f} tokens/s, one trainer with"
        f" batches {found.learners} times as large {found.alone_tokens_s:,.0f} tokens/s:"
        f" {found.ratio:.3f} (median of {found.turns} turns)"
    )
    goal = Goal("lab: 8 learners", GOAL, found.ratio, "of one trainer")
    write("lab", [asdict(found)], [goal], chosen.json)


if __name__ == "__main__":
    main()
