"""The files that a corpus names: paths, folders, patterns, and objects in a bucket.

Objects are copied once, and found again by what they hold.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import xxhash

from skerry import installing
from skerry.errors import CorpusError, SkerryError
from skerry.folders import matching
from skerry.settings import loading
from skerry.settings.local import STORE_KINDS, store_kinds

COPIES = Path(".skerry/data")
CORRECT = "correct data.paths, or the command."


def find_files(named: Sequence[str], suffixes: Sequence[str]) -> list[Path]:
    """Return every named file, and those with these suffixes below every named folder.

    A name may be a pattern, such as ``logs/*.txt``, or the address of objects in a bucket. Raises
    CorpusError for a name without any file, and for a pipe, which cannot be read twice.
    """
    found: list[Path] = []
    for name in named:
        if not name:
            msg = f"One of the texts has no name (`.` is this folder): {CORRECT}"
            raise CorpusError(msg, path="data.paths")
        files = copies(name, suffixes) if is_remote(name) else _local(name, suffixes)
        if not files and not is_remote(name) and not matching(name):
            msg = f"There is no {name}: {CORRECT}"
            raise CorpusError(msg, path="data.paths")
        if not files:
            msg = f"{name} names no file that ends in {', '.join(suffixes)}: {CORRECT}"
            raise CorpusError(msg, path="data.paths")
        found += files
    return found


def unreadable(error: OSError) -> CorpusError:
    """Return what to say about a file or folder that cannot be read."""
    why = error.strerror or error
    msg = f"Cannot read {error.filename}: {why}. Make it readable or leave it out."
    return CorpusError(msg, path="data.paths")


def _local(name: str, suffixes: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for path in matching(name):
        if path.is_dir():
            found += sorted(p for p in files_below(path) if p.suffix in suffixes and p.is_file())
        elif path.is_fifo():
            msg = f"{name} is a pipe, and text is read more than once: write it to a file first."
            raise CorpusError(msg, path="data.paths")
        else:
            found.append(path)
    return [*dict.fromkeys(found)]  # a pattern matches folders, and what is in them


def files_below(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder and the folders linked there, each once.

    Raises CorpusError for a folder that cannot be read. ``rglob`` would skip it, and links: two
    learners would read different texts without a warning.
    """

    def refuse(error: OSError) -> None:
        raise unreadable(error)

    seen = set[Path]()
    for root, below, names in os.walk(folder, onerror=refuse, followlinks=True):
        below.sort()  # so that every machine finds a folder by the same of two links
        if (here := Path(root).resolve()) in seen:
            below.clear()
            continue
        seen.add(here)
        yield from (Path(root, name) for name in names)


def is_remote(named: str) -> bool:
    """Return True for the address of a bucket."""
    scheme, mark, _ = named.partition("://")
    return bool(mark) and scheme in store_kinds()


def copies(url: str, suffixes: Sequence[str], folder: Path = COPIES) -> list[Path]:
    """Return local copies of the object at ``url``, or of those with these suffixes below it.

    An object is copied once for each of its contents (its ETag); a copy appears when it is whole.
    How the bucket is reached say this machine's settings ``store`` and what every cloud tool reads.
    Raises CorpusError where something cannot be read.
    """
    scheme = url.partition("://")[0]
    try:
        adapter = import_module(f"{STORE_KINDS}.{scheme}")
    except ImportError as error:
        msg = (
            f"Text at {scheme}:// needs {error.name}: install it with"
            f" `{installing.command(extra=scheme)}`."
        )
        raise CorpusError(msg, path="data.paths") from error
    access = loading.store()
    try:
        found: list[Path] = adapter.copies(url, access, folder, tuple(suffixes))
    except SkerryError as error:
        raise CorpusError(str(error), path="data.paths") from error
    except OSError as error:
        msg = f"Cannot copy {url} to {folder}: {error.strerror or error}. Free or mend that disk."
        raise CorpusError(msg, path="data.paths") from error
    if not found:
        msg = f"{url} names no object that ends in {', '.join(suffixes)}: {CORRECT}"
        raise CorpusError(msg, path="data.paths")
    return found


def copied_folder(url: str, suffixes: Sequence[str], mark: str, folder: Path = COPIES) -> Path:
    """Return a local folder with copies of the objects below ``url``, one of them named ``mark``.

    Raises CorpusError where objects of several folders lie there, or none.
    """
    files = copies(url, suffixes, folder)
    marks = sum(file.name == mark for file in files)
    if marks != 1 or len({file.name for file in files}) < len(files):
        msg = f"{url} has {marks} objects named {mark}: name the address of one prepared folder."
        raise CorpusError(msg, path="data.paths")
    digest = xxhash.xxh3_128_hexdigest("\n".join(str(file) for file in files).encode())
    whole = folder / digest
    if whole.is_dir():
        return whole
    draft = Path(tempfile.mkdtemp(dir=folder))
    for file in files:
        (draft / file.name).symlink_to(file.absolute())
    try:
        draft.rename(whole)
    except OSError:  # another process was first
        shutil.rmtree(draft)
    return whole
