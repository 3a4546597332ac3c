"""Runs an example's learner in its own process, slowly; prints what its parameters are at the end.

python copying.py EXAMPLE URL NAME RUN PAUSE_S
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np


def main(example: str, url: str, name: str, run: str, pause_s: str) -> None:
    path = Path(__file__).parents[2] / "examples" / f"{example}.py"
    spec = spec_from_file_location(example, path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    plain, kept = module.batches, []
    made = module.skerry.torch if example.startswith("torch") else module.skerry
    join = made.join

    def paced(shard: int, start: int) -> Iterator[Any]:
        for batch in plain(shard, start):
            time.sleep(float(pause_s))
            yield batch

    def keep(*args: Any, **options: Any) -> Any:
        kept.append((join(*args, **options), options))
        return kept[0][0]

    module.batches, made.join = paced, keep
    module.CONFIG |= {"train": {"steps": 10_000_000, "duration_s": 40.0}}
    module.main(url, name, run)
    island, options = kept[0]
    model = options.get("model")
    held = dict(model.named_parameters()) if model is not None else island.params
    for leaf in sorted(held):
        value = held[leaf].detach().numpy() if model is not None else np.asarray(held[leaf])
        print(f"ends with {leaf} {hashlib.sha256(value.tobytes()).hexdigest()}", flush=True)
    loaded = sorted({"jax", "torch"} & set(sys.modules))
    print(f"loaded {' '.join(loaded)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
