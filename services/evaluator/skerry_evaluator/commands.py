"""``skerry eval`` and ``skerry sample``: what their command lines do."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from skerry.data.corpus import Corpus, load_corpus
from skerry_evaluator.evaluate import Verdict, evaluate
from skerry_evaluator.restored import restore
from skerry_evaluator.sample import sample, to_text, to_tokens


def print_verdicts(
    paths: Sequence[str | Path],
    *,
    batches: int | None,
    as_json: bool,
    sets: Sequence[str] = (),
) -> None:
    """Evaluate checkpoints and print a line for each, in order; JSON objects if asked for."""
    corpora: dict[str, Corpus] = {}
    for path in paths:
        restored = restore(path, sets)
        data = restored.config.data
        key = data.model_dump_json()
        if key not in corpora:
            corpora[key] = load_corpus(data)
        verdict = evaluate(restored, corpora[key], batches=batches)
        print(json.dumps(plain(verdict)) if as_json else sentence(verdict), flush=True)


def plain(verdict: Verdict) -> dict[str, object]:
    """Return a verdict for JSON, which knows no infinity and no NaN: None in their place."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(verdict).items()
    }


def sentence(verdict: Verdict) -> str:
    """Say a verdict to a person."""
    bits = verdict.bits_per_byte
    per_byte = "" if bits is None else f", {bits:.4f} bits per byte"
    return (
        f"{verdict.checkpoint}: step {verdict.step}, held-out loss {verdict.loss:.4f} nats per"
        f" token{per_byte}, perplexity {verdict.perplexity:.3f} ({verdict.evaluated_tokens} tokens"
        f" of text {verdict.text})"
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
    start = to_tokens(restored, prompt)
    tokens = list(sample(restored, start, count=count, temperature=temperature, seed=seed))
    text = to_text(restored, tokens)
    if as_json:
        print(json.dumps({"checkpoint": str(path), "prompt": prompt, "text": text}))
    else:
        space = " " if restored.config.data.source == "tokens" else ""  # between numbers
        print(f"{prompt}{space}{text}")
