"""What a learner makes of an accelerator: ``make gpu``, in under ten minutes.

Runs the codec's tests on the device, a training run whose learner is killed and comes back, and
models of growing size, our loop with sync in turns with a plain JAX loop. Without an accelerator it
runs one tiny size end to end, and says what it did not measure.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_learner import Sizes, measure
from harness import Goal, parser, write

from skerry.models.presets import arch_of
from skerry.models.tensors import flops_per_token
from skerry.settings.models import ModelConfig

ROOT = Path(__file__).parents[2]
TESTS = {
    "codec on the device": ("tests/unit/algorithm/test_quantise.py", "-k", "jax"),
    "a learner killed, and back": ("tests/fault/test_learner_faults.py", "-k", "killed"),
}
ON_GPU = (
    Sizes("0.3b", batch=16, seq_len=2048, turns=2, steps=24),
    Sizes("1b", batch=8, seq_len=2048, turns=2, steps=16),
    Sizes("3b", batch=4, seq_len=2048, turns=1, steps=12),
)
ON_CPU = (Sizes("nano", batch=2, seq_len=32, turns=1, steps=6),)
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "B200": 2250.0, "A100": 312.0, "L40S": 362.0}
"""Dense bf16 by the name of the device."""
MFU_GOALS = {"0.3b": 0.35, "1b": 0.45, "3b": 0.50}


@dataclass(frozen=True, slots=True)
class Speed:
    """One size: tokens per second and model FLOPs utilisation, with sync and of a plain loop."""

    preset: str
    tokens_s_plain: float
    tokens_s_sync: float
    tflops_sync: float
    mfu_plain: float | None
    mfu_sync: float | None


def peak(device: str) -> float | None:
    """Return the FLOP/s that a device has by its name; None if the table lacks it."""
    return next((1e12 * flops for name, flops in PEAK_TFLOPS.items() if name in device), None)


def speed(sizes: Sizes, device: str) -> Speed:
    """Measure one size."""
    found = asyncio.run(measure(sizes, pinned=False))
    plain = sizes.batch * sizes.seq_len / (found.plain_wall_ms / 1e3)
    ours = plain * found.speed_wall
    each = flops_per_token(
        arch_of(ModelConfig.model_validate({"preset": sizes.preset})), sizes.seq_len
    )
    most = peak(device)
    share = [None if most is None else rate * each / most for rate in (plain, ours)]
    return Speed(sizes.preset, plain, ours, ours * each / 1e12, share[0], share[1])


def tested(arguments: tuple[str, ...]) -> bool:
    """Run tests on the device; return True if they pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "drill or not drill", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main() -> int:
    options = parser("What a learner makes of an accelerator.")
    options.add_argument("--skip-tests", action="store_true", help="only measure speed")
    chosen = options.parse_args()
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    os.environ.setdefault("JAX_PLATFORMS", "")
    import jax  # after its settings

    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    passed = {} if chosen.skip_tests else {name: tested(call) for name, call in TESTS.items()}
    rows = [speed(sizes, device.device_kind) for sizes in (ON_CPU if on_cpu else ON_GPU)]
    print(f"{device.device_kind}: " + "; ".join(f"{n}: {ok}" for n, ok in passed.items()))
    print(f"  {'size':<6} {'tokens/s plain':>15} {'with sync':>12} {'TFLOP/s':>9} {'MFU':>7}")
    for row in rows:
        mfu = "?" if row.mfu_sync is None else f"{row.mfu_sync:.1%}"
        print(
            f"  {row.preset:<6} {row.tokens_s_plain:>15,.0f} {row.tokens_s_sync:>12,.0f}"
            f" {row.tflops_sync:>9.2f} {mfu:>7}"
        )
    print(
        "Not measured: torch.compile on the same model" + (", any accelerator." if on_cpu else ".")
    )
    goals = [
        Goal(
            f"MFU of {row.preset} with sync",
            MFU_GOALS[row.preset],
            row.mfu_sync,
            device.device_kind,
        )
        for row in rows
        if row.mfu_sync is not None and row.preset in MFU_GOALS
    ]
    write("gpu", [asdict(row) for row in rows], goals, chosen.json)
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
