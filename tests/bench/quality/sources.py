"""Which sources made a result: a digest of the code that trains, merges and judges.

``cells.CODE`` is raised by hand, and says which results may stand in one table. The digest says
what was really run: it changes with every edit, also with those that change no result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from skerry.errors import LabError

PACKAGES = (
    *("skerry.algorithm", "skerry.protocol", "skerry.log", "skerry.models", "skerry.data"),
    *("skerry_tools.lab", "skerry_syncer", "skerry_learner"),
)


class SourcesEdited(LabError):
    """Somebody edited the code while it ran: runs made from now on would be of other code."""


def sources(packages: Sequence[str] = PACKAGES) -> str:
    """Return what tells the packages' .py files, as they are imported here, from all others.

    16 hexadecimal digits, of every file's path within its package and of its bytes.
    """
    digest = hashlib.blake2b(digest_size=8)
    for package in packages:
        folder = _folder(package)
        for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).parts):
            for part in (
                f"{package}/{path.relative_to(folder).as_posix()}".encode(),
                path.read_bytes(),
            ):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
    return digest.hexdigest()


def check_sources(expected: str, own: str) -> None:
    """Raise SourcesEdited unless a worker's sources are those that the runner began with."""
    if own != expected:
        msg = (
            f"The sources were edited while the benchmark ran ({expected} when it began, {own}"
            " now): start it again, and leave its checkout alone meanwhile."
        )
        raise SourcesEdited(msg)


def _folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        msg = f"The package {package} is not installed: its sources cannot be told."
        raise LabError(msg)
    return Path(spec.origin).parent
