"""A folder of a Hugging Face model: its small files, and how its faults are reported."""

from __future__ import annotations

from pathlib import Path

from skerry.errors import ModelError
from skerry.models.arch import MOST_BYTES

CONFIG = "config.json"


def fault(folder: Path, problem: str) -> ModelError:
    return ModelError(f"{folder} {problem}", path="model.path")


def read_text(folder: Path, name: str = CONFIG, most: int = MOST_BYTES) -> str:
    """Return a small text file of a folder; ModelError if there is none or it is too large."""
    path = folder / name
    if not path.is_file():
        problem = (
            f"has no {name}: name a model's folder of this machine; `hf download` fetches one."
        )
        raise fault(folder, problem)
    try:
        if path.stat().st_size > most:
            raise fault(folder, f"has a {name} of more than {most} bytes.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise fault(folder, f"has a {name} that cannot be read: {error}.") from error
