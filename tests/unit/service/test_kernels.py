"""Processes that share a cache of kernels compile them one after the other."""

from __future__ import annotations

import fcntl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skerry.service.kernels import load_kernels


def test_a_process_waits_while_another_one_compiles_for_the_cache_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_kernels()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    with (tmp_path / ".compiling").open("ab") as other, ThreadPoolExecutor(1) as pool:
        fcntl.flock(other, fcntl.LOCK_EX)
        asked = pool.submit(load_kernels)
        with pytest.raises(TimeoutError):
            asked.result(0.1)
        fcntl.flock(other, fcntl.LOCK_UN)
        asked.result()
