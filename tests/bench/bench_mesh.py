"""What one of eight devices holds against the formula: ``python tests/bench/bench_mesh.py``.

The devices are fake, XLA's account of a compiled step is real: arguments are parameters and
moments, temporaries gradients and activations. A CPU keeps what ``remat`` would compute again.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

import jax
import numpy as np
from harness import Goal, parser, write

from skerry.models import mesh
from skerry.models.base import build_model
from skerry.settings.models import DataConfig, ModelConfig, RunConfig, TrainConfig
from skerry_learner.trainer.step import TrainState
from skerry_learner.trainer.trainer import Programs

MIB = 1024**2
DENSE = {"layers": 4, "d_model": 256, "heads": 4, "kv_heads": 2, "d_ff": 512}
WIDE = {"layers": 4, "d_model": 512, "heads": 8, "kv_heads": 2, "d_ff": 2048}
WORDS = {**DENSE, "vocab": 8192}


class Shape(NamedTuple):
    """A learner: its mesh, its model, and the batch of a step."""

    mesh: str
    model: dict[str, Any]
    batch: int
    seq: int
    accumulate: int = 1

    def __str__(self) -> str:
        model = f"{self.model['layers']} layers of {self.model['d_model']}"
        parts = f", in {self.accumulate} parts" if self.accumulate > 1 else ""
        vocab = f", vocabulary {self.model['vocab']}" if "vocab" in self.model else ""
        return f"{self.mesh}, {model}{vocab}, batch {self.batch} x {self.seq}{parts}"


SHAPES = (
    Shape("fsdp=1", DENSE, 8, 256),
    Shape("fsdp=8", DENSE, 64, 256),
    Shape("fsdp=8", DENSE, 64, 256, 2),
    Shape("fsdp=8", WORDS, 16, 256),
    Shape("fsdp=8", WIDE, 128, 128),
    Shape("data=2,fsdp=4", DENSE, 64, 256),
    Shape("fsdp=4,tensor=2", DENSE, 64, 256),
)


class Found(NamedTuple):
    """Bytes on one device: what XLA says of a step, and what the formula says."""

    shape: str
    state: float
    state_estimate: float
    step: float
    step_estimate: float


def measure(shape: Shape) -> Found:
    """Compile a step and compare its account with the formula."""
    config = RunConfig(
        model=ModelConfig.model_validate(shape.model),
        data=DataConfig(batch=shape.batch, seq_len=shape.seq),
        train=TrainConfig(accumulate=shape.accumulate, precision="float32"),
    )
    model, on = build_model(config.model, config.train), mesh.make_mesh(shape.mesh)
    programs = Programs.of(model, config, on)
    shapes = jax.eval_shape(programs.init, jax.random.key(0))
    state = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        TrainState(shapes, jax.eval_shape(programs.init_moments, shapes)),
        programs.places,
    )
    rows = jax.ShapeDtypeStruct((shape.batch, shape.seq + 1), np.int32, sharding=mesh.by_rows(on))
    lowered = programs.step.lower(
        state, {"tokens": rows}, np.float32(0), np.float32(1), programs.frozen
    )
    taken: Any = lowered.compile().memory_analysis()
    need = programs.need
    return Found(
        str(shape),
        taken.argument_size_in_bytes,
        need.parameters + need.moments,
        taken.temp_size_in_bytes,
        need.gradients + need.activations,
    )


def main() -> None:
    chosen = parser("Memory of a step on a mesh, against the formula.").parse_args()
    print("mesh: MiB on each device, by XLA and by the formula: parameters and moments, a step")
    found: list[Found] = []
    for shape in SHAPES:
        found.append(one := measure(shape))
        print(
            f"  {one.shape:<66} {one.state / MIB:7.1f} {one.state_estimate / MIB:7.1f}"
            f" {one.step / MIB:8.1f} {one.step_estimate / MIB:8.1f}"
            f" ({one.step_estimate / one.step:.2f})",
            flush=True,
        )
    state = max(abs(one.state_estimate / one.state - 1) for one in found)
    step = max(abs(one.step_estimate / one.step - 1) for one in found)
    goals = [
        Goal("parameters and moments, off by", 0.05, state, "of it", at_most=True),
        Goal("a step's gradients and activations, off by", 0.25, step, "of it", at_most=True),
    ]
    write("mesh", [one._asdict() for one in found], goals, chosen.json)


if __name__ == "__main__":
    main()
