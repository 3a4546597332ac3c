"""What learners hold on each of eight fake devices, beside what a plan says of them.

Run by ``test_memory`` in a process of its own, or by hand for the table of docs/results/memory.md:
``python -m tests.unit.tools.plan.memory_on_eight`` with ``XLA_FLAGS`` as there.
Prints JSON: by model and optimizer the bytes of the plan and those measured.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np

from skerry.algorithm.fragments import plan
from skerry.algorithm.schedule import Schedule, learner_room
from skerry.models.base import build_model, specs_of
from skerry.models.mesh import make_mesh
from skerry.models.presets import PRESETS
from skerry.settings.tree import Tree
from skerry_learner.trainer.trainer import Programs, Trainer
from skerry_tools.plan.memory import learner_need
from skerry_tools.plan.question import question
from skerry_tools.plan.trained import deployment

MESH = "fsdp=8"
DENSE = {"preset": "0.1b", "layers": 4, "d_model": 256, "heads": 4, "kv_heads": 2, "d_ff": 704}
SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "head_dim": 64, "vocab_size": 1024}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 512, "num_attention_heads": 4}
MOE = {"config": json.dumps({**PRESETS["moe-0.3b"], **SMALL, **EXPERTS, "num_key_value_heads": 2})}
DENSE["vocab"] = 4096
MODELS = {"dense": DENSE, "experts": MOE, "adapters": {**DENSE, "lora_rank": 8}}
ROWS = {"dense": (16, 64), "experts": (8, 32), "adapters": (16, 64)}


def on_first_device() -> int:
    first = jax.devices()[0]
    shards = (one for array in jax.live_arrays() for one in array.addressable_shards)
    return sum({id(s.data): s.data.nbytes for s in shards if s.device == first}.values())


def compared(model: dict[str, Any], inner: str, batch: int, seq_len: int) -> dict[str, list[float]]:
    """Return bytes of state, of a step and of fragments in flight: planned and measured."""
    data, train = {"batch": batch, "seq_len": seq_len}, {"inner": inner, "precision": "float32"}
    site = {"up": "1 Gbit/s", "step_time": "1 s", "mesh": MESH}
    tables = {"model": model, "train": train, "data": data, "sites": {"a": site}}
    asked = question(Tree(tables))
    at, run = deployment(asked), asked.run
    need, built = learner_need(at, at.sites["a"]), build_model(run.model, run.train)
    before, cut = on_first_device(), plan(specs_of(built), run.sync.fragments)
    programs = Programs.of(built, run, make_mesh(MESH))
    trainer = Trainer(built, run, cut, programs, blank=True)
    for part in cut.fragments:
        trainer.adopt(part.index, np.zeros(part.padded_size, np.float32))
    state = on_first_device() - before
    room = learner_room(Schedule(run.sync.fragments, run.sync.h_steps, run.sync.overlap_steps), 1)
    largest = sorted(cut.fragments, key=lambda part: -part.size)[:room]
    sent = [trainer.capture(part.index) for part in largest]
    flight = on_first_device() - before - state
    assert len(sent) == room
    rows = {"tokens": np.zeros((batch, seq_len + 1), np.int32)}
    batch_on_mesh = trainer.place(rows)
    factors = np.float32(0), np.float32(1), programs.frozen
    compiled = programs.step.lower(trainer.state, batch_on_mesh, *factors).compile()
    step: Any = compiled.memory_analysis()
    found = {
        "state": [need.state, state],
        "step": [need.gradients + need.activations, step.temp_size_in_bytes],
        "flight": [need.flight, flight],
    }
    total = [sum(pair[column] for pair in found.values()) for column in (0, 1)]
    return {**found, "all": total}


if __name__ == "__main__":
    print(
        json.dumps(
            {
                f"{name}, {inner}": compared(model, inner, *ROWS[name])
                for name, model in MODELS.items()
                for inner in ("adamw", "muon")
            }
        )
    )
