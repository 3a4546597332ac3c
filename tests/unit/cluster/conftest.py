"""Fixtures of the tests of a local cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry.cli.cluster.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """The folder of run ``a``."""
    folder = RunFolder("a", tmp_path)
    folder.path.mkdir()
    return folder
