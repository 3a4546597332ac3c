"""Tokens per second of the loader on one core: ``python tests/bench/bench_data.py``.

Batches as a trainer gets them, on the host: from prepared shards in memory-mapped files, to rows
with the documents in them. The goal is 20 times what a model of 0.1 B parameters trains on one
H200, by estimate: 6 FLOPs a parameter and token at 40 % of 989 TFLOP/s.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Goal, one_core, parser, write

from skerry.data.corpus import Corpus, load_corpus, targets_in
from skerry.data.documents import Article
from skerry.data.prepare import prepare
from skerry.data.stream import Mixture, Prefetch, Stream, stream_of
from skerry.settings.models import DataConfig

TRAINED = 0.4 * 989e12 / (6 * 0.1e9)
"""Tokens per second of the model."""
GOAL = 20
DEMO_GOAL_MS = 1.0
"""Of a step of about 98 ms."""
DOCUMENTS, TOKENS, VOCAB = 40_000, 20_000_000, 50_000
BATCH, SEQ_LEN = 64, 1024
SECONDS = 3.0
CASES: dict[str, dict[str, Any]] = {
    "stream": {"paths": ["a"]},
    "documents": {"paths": ["a"], "packing": "documents"},
    "fit": {"paths": ["a"], "packing": "fit"},
    "answers": {"paths": ["answers"], "packing": "fit"},
    "mixture": {"paths": ["a", "b"], "weights": [3, 1], "packing": "documents"},
}


def prepare_random(folder: Path, seed: int, *, weights: bool = False) -> None:
    """Prepare documents of random tokens, of lengths that spread as those of web text do."""
    random = np.random.default_rng(seed)
    sizes = random.lognormal(5.8, 1.0, DOCUMENTS)
    sizes = np.maximum(8, sizes * TOKENS / sizes.sum()).astype(np.int64)
    articles = (
        Article(
            tokens=random.integers(0, VOCAB, size).astype(np.uint32),
            weights=random.random(size) < 0.5 if weights else None,
        )
        for size in sizes
    )
    prepare(articles, None, folder)


def speed(stream: Stream | Mixture, batch: int) -> float:
    """Return batches per second of CPU time, with the targets of each counted."""
    stream.read(0, batch)
    count, began_s, cpu_s = 0, time.monotonic(), time.process_time()
    while time.monotonic() - began_s < SECONDS:
        targets_in(stream.read(count * batch, batch))
        count += 1
    return count / (time.process_time() - cpu_s)


def prefetched(corpus: Corpus) -> float:
    """Return batches per second of CPU time from files to the device, through the thread."""
    with Prefetch(stream_of(corpus, 0), 0, batch=BATCH, vocab=VOCAB) as batches:
        next(batches)
        count, began_s, cpu_s = 0, time.monotonic(), time.process_time()
        while time.monotonic() - began_s < SECONDS:
            next(batches)
            count += 1
        return count / (time.process_time() - cpu_s)


def main() -> None:
    given = parser(__doc__ or "").parse_args()
    one_core()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        for part, weights in (("a", False), ("b", False), ("answers", True)):
            prepare_random(Path(name, part), len(found), weights=weights)
        for label, case in CASES.items():
            paths = [str(Path(name, path)) for path in case["paths"]]
            config = {"source": "prepared", "seq_len": SEQ_LEN, "streams": 1, **case}
            corpus = load_corpus(DataConfig.model_validate(config | {"paths": paths}))
            found[label] = speed(stream_of(corpus, 0), BATCH) * BATCH * SEQ_LEN
            if label == "fit":
                found["fit, prefetched"] = prefetched(corpus) * BATCH * SEQ_LEN
    demo = DataConfig()
    demo_ms = 1e3 / speed(stream_of(load_corpus(demo), 0), demo.batch)
    print(f"data: one core; a model of 0.1 B trains {TRAINED / 1e6:.2f} M tokens/s, by estimate")
    for label, rate in found.items():
        print(f"  {label:<20} {rate / 1e6:>8.1f} M tokens/s {rate / TRAINED:>8.1f}")
    print(f"  a batch of the demo takes {demo_ms:.2f} ms")
    goals = [
        Goal(f"data: {label}", GOAL, rate / TRAINED, "of an H200's training")
        for label, rate in found.items()
    ]
    goals.append(Goal("data: the demo's batch", DEMO_GOAL_MS, demo_ms, "ms", at_most=True))
    write("data", [found | {"demo_ms": demo_ms}], goals, given.json)


if __name__ == "__main__":
    main()
