"""What ``skerry.torch.join`` costs a PyTorch loop: ``python tests/bench/bench_torch.py``.

As ``bench_join.py``, for the transformers model of the same preset.
"""

from __future__ import annotations

from bench_join import run

if __name__ == "__main__":
    run("torch", "joined_torch_loop.py")
