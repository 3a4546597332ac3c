"""One region's process in ``bench_wan.py``: the same model, text and steps for every contestant.

``wan_loop.py FILE`` reads what to do from a JSON file, prints a line of JSON for each step, and one
with the held-out loss every ``judge_every`` steps. Steps take at least ``step_s``, so that what is
compared is what a contestant adds to them.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import skerry.torch
from skerry.algorithm.rates import learning_rate
from skerry.client.batches import of_run
from skerry.data.corpus import load_corpus
from skerry.settings.models import RunConfig

GO = "go"
"""The file that is written once all of Skerry's learners have been imported."""
JUDGED = 32
"""Held-out sequences that a loss is the mean of."""
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
PATIENCE = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Contest:
    """What one process does: ``how`` it trains, as which ``rank`` of ``size``.

    ``url`` is the first rank's address and port, or the broker's. ``bucket_mb`` is that of DDP.
    """

    how: str
    rank: int
    size: int
    url: str
    config: RunConfig
    step_s: float
    steps: int
    judge_every: int
    bucket_mb: float
    seed: int
    go: Path

    @classmethod
    def read(cls, path: Path) -> Contest:
        found: dict[str, Any] = json.loads(path.read_text())
        config = RunConfig.model_validate(found.pop("config"))
        return cls(config=config, go=path.parent / GO, **found)


class Training:
    """A model, its optimizer and its text; a learner's own, or a rank's."""

    def __init__(self, asked: Contest) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(asked.seed)
        self.asked = asked
        self.model = skerry.torch.model_of(asked.config)
        self.called: Any = self.model
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=asked.config.train.lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        text = load_corpus(asked.config.data).held_out
        self._held_out = torch.from_numpy(text.batch(np.arange(JUDGED))["tokens"]).long()
        self.taken, self._due_s = 0, time.monotonic()

    def take(self, batch: Any, done: float) -> torch.Tensor:
        """Take one step on a batch at progress ``done`` in [0, 1]; return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = float(learning_rate(self.asked.config.train, done))
        loss = _loss(self.called, torch.from_numpy(batch.batch["tokens"]).long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def end_step(self) -> None:
        """Wait until the step has taken its time, say so, and judge the model now and then."""
        self.taken += 1
        time.sleep(max(0.0, self._due_s + self.asked.step_s - time.monotonic()))
        _say(step=self.taken, at_s=time.monotonic())
        if self.asked.judge_every and self.taken % self.asked.judge_every == 0:
            with torch.no_grad():
                _say(judged=self.taken, loss=float(_loss(self.model, self._held_out)))
        self._due_s = time.monotonic()  # judging is nobody's training


def _loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def _say(**said: float) -> None:
    print(json.dumps(said), flush=True)


def ddp(training: Training) -> None:
    """Average the gradients of each step, in buckets that overlap with the backward pass."""
    asked = training.asked
    training.called = DistributedDataParallel(training.model, bucket_cap_mb=asked.bucket_mb)
    if asked.how == "ddp-fp16":
        training.called.register_comm_hook(None, fp16_compress_hook)
    for batch in islice(of_run(asked.config, asked.rank, 0), asked.steps):
        training.take(batch, training.taken / asked.steps)
        training.end_step()


def diloco(training: Training) -> None:
    """Average the changes of H steps, and wait for it: DiLoCo as torchft runs it, in f32."""
    asked, h_steps = training.asked, training.asked.config.sync.h_steps
    parameters = list(training.model.parameters())
    anchor = torch.nn.utils.parameters_to_vector(parameters).detach().clone()
    dist.broadcast(anchor, 0)
    torch.nn.utils.vector_to_parameters(anchor.clone(), parameters)
    outer = torch.optim.SGD([anchor], lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    batches = of_run(asked.config, asked.rank, 0)
    for number, batch in enumerate(islice(batches, asked.steps), 1):
        training.take(batch, training.taken / asked.steps)
        if number % h_steps == 0:
            moved = anchor - torch.nn.utils.parameters_to_vector(parameters).detach()
            dist.all_reduce(moved)
            anchor.grad = moved / asked.size
            outer.step()
            torch.nn.utils.vector_to_parameters(anchor.clone(), parameters)
        training.end_step()


def skerry_learner(training: Training) -> None:
    """Train as a learner of a run."""
    asked = training.asked
    _say(ready=1)
    while not asked.go.exists():  # importing takes a busy machine many steps' time
        time.sleep(0.05)
    about: dict[str, Any] = {"run": "wan", "name": f"site-{asked.rank}", "config": asked.config}
    with skerry.torch.join(
        asked.url, model=training.model, optimizer=training.optimizer, **about
    ) as island:
        for batch in island.batches():
            loss = training.take(batch, island.progress)
            island.step(tokens=batch.tokens, loss=loss)
            training.end_step()


TRAIN = {
    "ddp-f32": ddp,
    "ddp-fp16": ddp,
    "diloco": diloco,
    "skerry": skerry_learner,
}


def main() -> None:
    asked = Contest.read(Path(sys.argv[1]))
    if asked.how != "skerry":
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{asked.url}",
            rank=asked.rank,
            world_size=asked.size,
            timeout=PATIENCE,
        )
    TRAIN[asked.how](Training(asked))


if __name__ == "__main__":
    main()
