"""Writes safetensors files for other programs, which other users may run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file


def save_tensors(tensors: Mapping[str, NDArray[Any]], path: Path) -> None:
    """Write tensors to a new file, readable by all who may read other new files of this user."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({**tensors}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # the library's name for an OSError
        raise OSError(str(error)) from error
    path.chmod(mode)  # the library makes it readable to its owner alone
