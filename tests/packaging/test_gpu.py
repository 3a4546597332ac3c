"""``make gpu`` runs to its end on a machine without an accelerator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.drill
def test_make_gpu_says_on_a_cpu_what_it_did_not_measure(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "tests/bench/bench_gpu.py", "--skip-tests", "--json", str(out)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Not measured: any accelerator, and torch.compile" in done.stdout
    (row,) = json.loads(out.read_text())["results"]
    assert row["tokens_s_sync"] > 0
    assert row["mfu_sync"] is None
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    assert row["tokens_s_torch"] > 0
