"""The training loop that anybody would write with PyTorch and transformers, for the same model.

``torch_loop.py CONFIG BATCH SEQ STEPS [BACKEND]`` prints its tokens per second. CONFIG is a file
with the model's ``config.json``; BACKEND is that of ``torch.compile``, by default its own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SETTLE = 5
"""Steps that are not timed: the first ones compile."""


def main() -> None:
    path, batch, seq, steps = sys.argv[1:5]
    backend = (*sys.argv[5:], "inductor")[0]
    table = json.loads(Path(path).read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**table))
    made = made.to(device)
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3, fused=device == "cuda")
    model: Any = torch.compile(made, backend=backend)
    shape = int(batch), int(seq) + 1
    tokens = torch.randint(0, 256, shape, device=device)
    began_s, taken = 0.0, SETTLE + int(steps)
    for number in range(taken):
        if number == SETTLE:
            _settle(device)
            began_s = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    _settle(device)
    print(int(steps) * int(batch) * int(seq) / (time.perf_counter() - began_s))


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
