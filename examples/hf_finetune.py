# pyright: basic
"""Fine-tune a Hugging Face model with its Trainer, as a learner of Skerry.

    skerry syncer --run tune                                          # once, anywhere
    python examples/hf_finetune.py nats://127.0.0.1:4222 site-a tiny  # on each island

The last argument is the folder of a causal language model; if there is none, a tiny one of random
weights is made there. It learns the bytes of this program: replace them by your tokenizer and data.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

import skerry.torch

BATCH, SEQ = 4, 64
CONFIG = {
    "data": {"batch": BATCH, "seq_len": SEQ},  # their product: the most tokens of a step
    "train": {"steps": 60},
    "sync": {"learners": 1, "fragments": 4, "h_steps": 20},
}


def make(folder: str) -> None:
    """Write a model of a few thousand random weights, in the format of any other."""
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def rows() -> list[dict[str, torch.Tensor]]:
    """Return the examples: ``input_ids``, and ``labels`` that are -100 where nothing is learnt."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    return [{"input_ids": row, "labels": row} for row in text.unfold(0, SEQ + 1, SEQ)]


def main(url: str, name: str, folder: str, run: str = "tune") -> None:
    """Train until the run is over, and save the global state."""
    if not Path(folder, "config.json").exists():
        make(folder)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=TrainingArguments(
            output_dir=f"{folder}-{name}",
            max_steps=1_000_000,  # the run ends it
            learning_rate=1e-3,
            per_device_train_batch_size=BATCH,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=rows(),
        callbacks=[skerry.torch.SkerryCallback(url, run=run, name=name, config=CONFIG)],
    )
    trainer.train()
    trainer.save_model()
    print(f"saved {folder}-{name} after {trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 3 else sys.exit(__doc__)
