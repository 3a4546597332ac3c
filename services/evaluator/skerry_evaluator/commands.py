"""The commands ``skerry eval`` and ``skerry sample``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from skerry.data.corpus import Corpus, load_corpus
from skerry_evaluator.checkpoints import CheckpointScore, evaluate, restore
from skerry_evaluator.sampling import sample, to_text, to_tokens


def print_scores(
    paths: Sequence[str | Path],
    *,
    batches: int | None,
    as_json: bool,
    sets: Sequence[str] = (),
) -> None:
    """Evaluate checkpoints and print a line for each, in order: a sentence, or a JSON object."""
    corpora: dict[str, Corpus] = {}
    for path in paths:
        restored = restore(path, sets)
        data = restored.config.data
        key = data.model_dump_json()
        if key not in corpora:
            corpora[key] = load_corpus(data)
        found = evaluate(restored, corpora[key], batches=batches)
        print(json.dumps(to_json(found)) if as_json else sentence(found), flush=True)


def to_json(found: CheckpointScore) -> dict[str, object]:
    """Return a score for JSON, with None for infinity and NaN."""
    plain = {**asdict(found), **asdict(found.score)}
    del plain["score"]
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in plain.items()
    }


def sentence(found: CheckpointScore) -> str:
    """Return a score as a sentence."""
    score, bits = found.score, found.score.bits_per_byte
    per_byte = "" if bits is None else f", {bits:.4f} bits per byte"
    return (
        f"{found.checkpoint}: step {found.step}, held-out loss {score.loss:.4f} nats per"
        f" token{per_byte}, perplexity {score.perplexity:.3f} ({found.evaluated_tokens} tokens"
        f" of text {found.text})"
    )


def print_sample(
    path: str | Path,
    *,
    prompt: str,
    count: int,
    temperature: float,
    seed: int,
    as_json: bool,
    sets: Sequence[str] = (),
) -> None:
    """Print a prompt and its continuation."""
    restored = restore(path, sets)
    start = to_tokens(restored.config.data, prompt)
    tokens = list(sample(restored, start, count=count, temperature=temperature, seed=seed))
    text = to_text(restored.config.data, tokens)
    if as_json:
        print(json.dumps({"checkpoint": str(path), "prompt": prompt, "text": text}))
    else:
        space = " " if restored.config.data.source == "tokens" else ""  # between numbers
        print(f"{prompt}{space}{text}")
