"""What a learner makes of an accelerator: ``make gpu``, in under ten minutes.

Runs the codec's tests on the device, a training run whose learner is killed and comes back, and
models of growing size, our loop with sync in turns with a plain JAX loop. Without an accelerator it
runs one tiny size end to end, and says what it did not measure.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_learner import Sizes, measure
from harness import Goal, parser, write

from skerry.models.machine import peak_flops
from skerry.models.presets import arch_of
from skerry.models.tensors import flops_per_token
from skerry.settings.models import ModelConfig

ROOT = Path(__file__).parents[2]
TORCH = Path(__file__).with_name("torch_loop.py")
OF_TORCH = 0.9
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
MFU_GOALS = {"0.3b": 0.35, "1b": 0.45, "3b": 0.50}


@dataclass(frozen=True, slots=True)
class Speed:
    """One size: tokens per second and model FLOPs utilisation, with sync and of a plain loop.

    ``tokens_s_torch`` are those of torch.compile, None where there is no torch.
    """

    preset: str
    tokens_s_plain: float
    tokens_s_sync: float
    tflops_sync: float
    mfu_plain: float | None
    mfu_sync: float | None
    tokens_s_torch: float | None


def speed(sizes: Sizes, device: str) -> Speed:
    """Measure one size."""
    theirs = torch_speed(sizes)
    found = asyncio.run(measure(sizes, pinned=False))
    plain = sizes.batch * sizes.seq_len / (found.plain_wall_ms / 1e3)
    ours = plain * found.speed_wall
    each = flops_per_token(
        arch_of(ModelConfig.model_validate({"preset": sizes.preset})), sizes.seq_len
    )
    most = peak_flops(device)
    share = [None if most is None else rate * each / most for rate in (plain, ours)]
    return Speed(sizes.preset, plain, ours, ours * each / 1e12, share[0], share[1], theirs)


def torch_speed(sizes: Sizes) -> float | None:
    """Return tokens per second of the same model by transformers and torch.compile, on its own.

    On a CPU the graph is run as it is: there it says that the loop works, and nothing of its speed.
    """
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return None
    arch = arch_of(ModelConfig.model_validate({"preset": sizes.preset}))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(arch.config)
        counts = (sizes.batch, sizes.seq_len, sizes.turns * sizes.steps)
        command = [sys.executable, str(TORCH), str(config), *map(str, counts)]
        done = subprocess.run(
            command + (["eager"] if sizes in ON_CPU else []),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        print(f"torch.compile failed at {sizes.preset}: {done.stderr[-300:]}")
        return None
    return float(done.stdout.split()[-1])


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
    print(
        f"  {'size':<6} {'tokens/s plain':>15} {'with sync':>12} {'torch':>12}"
        f" {'TFLOP/s':>9} {'MFU':>7}"
    )
    for row in rows:
        mfu = "?" if row.mfu_sync is None else f"{row.mfu_sync:.1%}"
        torch = "?" if row.tokens_s_torch is None else f"{row.tokens_s_torch:,.0f}"
        print(
            f"  {row.preset:<6} {row.tokens_s_plain:>15,.0f} {row.tokens_s_sync:>12,.0f}"
            f" {torch:>12} {row.tflops_sync:>9.2f} {mfu:>7}"
        )
    if on_cpu:
        print("Not measured: any accelerator, and torch.compile, whose graph ran uncompiled here.")
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
    goals += [
        Goal(
            f"{row.preset} with sync against torch.compile",
            OF_TORCH,
            row.tokens_s_sync / row.tokens_s_torch,
            device.device_kind,
        )
        for row in rows
        if row.tokens_s_torch is not None and not on_cpu
    ]
    write("gpu", [asdict(row) for row in rows], goals, chosen.json)
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
