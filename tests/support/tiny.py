"""Settings of a run so small that a real learner trains it in seconds."""

from __future__ import annotations

from pathlib import Path

SETTINGS = """
mode = "{mode}"
[model]
layers = 1
d_model = 32
heads = 2
kv_heads = 1
d_ff = 64
[data]
source = "text"
paths = ["{text}"]
seq_len = 64
batch = 8
streams = 4
[train]
steps = {steps}
lr = 3e-3
[sync]
chunk_bytes = 65536
{sync}
[log]
window_bytes = 268435456
[checkpoint]
every_s = 2.0
[liveness]
pulse_s = 0.1
"""

SEQUENCE, BATCH = 64, 8
"""Tokens of a sequence, and sequences of a step: what ``SETTINGS`` says."""

TWO = ("fragments = 2", "h_steps = 10", "learners = 2")


def tiny(text: Path, steps: int, *sync: str, mode: str = "decoupled") -> str:
    """Return a run's TOML; ``sync`` are lines of its ``[sync]`` table, a mode fills in the rest."""
    return SETTINGS.format(text=text, steps=steps, sync="\n".join(sync), mode=mode)
