"""Writing a checkpoint: what memory it takes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.settings.models import RunConfig
from skerry.store.local import LocalStore
from skerry.store.writer import CheckpointWriter
from tests.support.builders import commit, run_record

LEAVES, SIZE = 8, 1 << 20


def test_parameters_and_their_bytes_are_never_in_memory_together(tmp_path: Path) -> None:
    cut = plan([LeafSpec(f"w{number}", (SIZE,)) for number in range(LEAVES)], LEAVES)
    record = run_record("run", cut, RunConfig().model_dump_json())
    tracemalloc.start()
    try:
        writer = CheckpointWriter(LocalStore(tmp_path / "run"), record, cut, 1)
        for fragment in cut.fragments:
            made = commit(fragment=fragment.index, plan_digest=cut.digest)
            writer.add(made, np.ones(fragment.padded_size, np.float32), None)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        writer.finish(index=0, learners=[], ledger_sequence=1, now_ns=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held > 4 * LEAVES * SIZE
    assert peak - held < 4 * SIZE
