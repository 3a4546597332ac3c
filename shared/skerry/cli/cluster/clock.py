"""The wall clock of a service, set from outside: libfaketime and a file per service.

Only ``time()`` and its kin move; the monotonic clock, by which services wait and decide, does not.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

CLOCKS = "clocks"
"""Folder below the run folder; one file per service says how far off its clock is."""
DRAFT = ".draft"
LIBRARIES = ("faketime/libfaketimeMT.so.1", "faketime/libfaketime.so.1")
FIX = (
    "create the run with chaos.clocks = true, on a machine with libfaketime (on Debian: apt install"
    " faketime)"
)


def library() -> Path | None:
    """Return libfaketime's shared library, or None where it is not installed."""
    roots = [*Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib"), Path("/usr/local/lib")]
    found = (root / name for root in roots for name in LIBRARIES)
    return next((path for path in found if path.is_file()), None)


def file_of(folder: Path, name: str) -> Path:
    """Return the file that says how far off a service's clock is."""
    return folder / CLOCKS / name


def environment(folder: Path, name: str) -> dict[str, str]:
    """Return what a service is started with so that its clock, right at first, can be set.

    Empty where the library is not installed.
    """
    lib = library()
    if lib is None:
        return {}
    move(folder, name, 0.0)
    return {
        "LD_PRELOAD": str(lib),
        "FAKETIME_TIMESTAMP_FILE": str(file_of(folder, name).resolve()),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_CACHE_DURATION": "1",
        "NO_FAKE_STAT": "1",
    }


def move(folder: Path, name: str, seconds: float) -> None:
    """Set a service's clock this far off; it follows within a second."""
    path = file_of(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + DRAFT)
    draft.write_text(f"{seconds:+f}\n", encoding="utf-8")
    draft.replace(path)


def forget(folder: Path) -> None:
    """Remove the clocks of an earlier start of the cluster: what runs now does not read them."""
    shutil.rmtree(folder / CLOCKS, ignore_errors=True)


def names(folder: Path) -> list[str]:
    """Return the services whose clock can be set."""
    return sorted(path.name for path in (folder / CLOCKS).glob("*") if path.suffix != DRAFT)


def is_off(folder: Path, name: str) -> bool:
    """Return True if a service's clock has been moved and not set right again."""
    try:
        return float(file_of(folder, name).read_text("utf-8")) != 0.0
    except ValueError:
        return True


def was_read(folder: Path, name: str) -> bool:
    """Return True if the service has looked at its clock since it was moved."""
    stat = file_of(folder, name).stat()
    return stat.st_atime_ns > stat.st_mtime_ns


def sweep(pid: int) -> None:
    """Remove what libfaketime leaves in shared memory when its process ends."""
    for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
        with contextlib.suppress(OSError):
            (Path("/dev/shm") / name).unlink()  # noqa: S108 - where the kernel keeps it
