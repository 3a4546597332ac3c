"""Files that only their owner may read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from skerry.errors import ConfigError, SkerryError


@contextlib.contextmanager
def writing(path: Path) -> Generator[None]:
    """Turn the OSError of a write into a ConfigError that says what to do."""
    try:
        yield
    except SkerryError:  # some are OSErrors, too, and say what to do
        raise
    except OSError as error:
        msg = (
            f"{path.absolute()} cannot be written ({error.strerror or error}): start this command "
            "in a folder of your own, where there is room."
        )
        raise ConfigError(msg, path="run") from error


def write_private(path: Path, text: str, *, public: bool = False) -> None:
    """Replace a file by one that only its owner may read; ConfigError if that fails.

    With ``public`` everybody who reaches its folder may read it.
    """
    draft = path.with_name(f"{path.name}.draft")
    with writing(path):
        path.parent.mkdir(mode=0o755 if public else 0o700, parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        if public:
            os.fchmod(handle, 0o644)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(handle)  # the keys that it holds are nowhere else
        draft.replace(path)


@contextlib.contextmanager
def private_file(path: Path, text: str) -> Generator[None]:
    """Keep a file that only its owner may read while the context lasts."""
    try:
        write_private(path, text)
        yield
    finally:
        path.unlink(missing_ok=True)
