"""Writing a checkpoint: what memory it takes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.settings.models import RunConfig
from skerry.store.checkpoint import PARAMS_FILE
from skerry.store.local import LocalStore
from skerry.store.writer import CheckpointWriter
from tests.support.builders import commit, run_record

F32s = NDArray[np.float32]

LEAVES, SIZE = 8, 1 << 20
VALUES = [0.5 + number for number in range(LEAVES)]


def written(where: Path, values: list[float]) -> tuple[int, int, list[F32s]]:
    """Write a checkpoint; returns bytes held before its end, bytes on top, and its tensors."""
    cut = plan([LeafSpec(f"w{number}", (SIZE,)) for number in range(LEAVES)], LEAVES)
    record = run_record("run", cut, RunConfig().model_dump_json())
    store = LocalStore(where)
    tracemalloc.start()
    try:
        writer = CheckpointWriter(store, record, cut, 1)
        for fragment, value in zip(cut.fragments, values, strict=True):
            made = commit(fragment=fragment.index, plan_digest=cut.digest)
            writer.add(made, np.full(fragment.padded_size, value, np.float32), None)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        name = writer.finish(index=0, learners=[], ledger_sequence=1, now_ns=1).name
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    saved = load_file(where / name / PARAMS_FILE)
    return held, peak - held, [np.asarray(saved[leaf.name], np.float32) for leaf in cut.leaves]


def test_bf16_takes_two_bytes_a_parameter_in_memory(tmp_path: Path) -> None:
    held, more, saved = written(tmp_path, VALUES)
    assert 2 * LEAVES * SIZE <= held < 2.2 * LEAVES * SIZE
    assert more < SIZE
    assert [leaf[0] for leaf in saved] == VALUES


def test_one_vector_that_is_not_bf16_makes_all_of_them_f32(tmp_path: Path) -> None:
    values = [*VALUES[:-2], 0.1, VALUES[-1]]
    held, more, saved = written(tmp_path, values)
    assert 4 * LEAVES * SIZE <= held < 4.2 * LEAVES * SIZE
    assert more < SIZE
    assert [leaf[-1] for leaf in saved] == np.array(values, np.float32).tolist()
