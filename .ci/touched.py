"""Print the tests of the packages that differ from the branch's base, for ``make check``.

What is committed since ``git merge-base HEAD <base>`` counts, and what is not committed yet; the
base is the first argument, ``main`` by default. Tests that start processes are left to
``make test``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

DOCS = "tests/packaging/test_docs.py tests/packaging/test_repository.py"

TESTS = (
    (r"(tests/(?:unit|contract|packaging)/(?:.+/)?test_.+)", r"\1"),
    (r"shared/skerry/cli/cluster/.+", "tests/unit/cluster"),
    (r"shared/skerry/(\w+)(?:/.+|\.py)", r"tests/unit/\1 tests/unit/test_\1.py"),
    (r"shared/skerry_tools/(\w+)(?:/.+|\.py)", r"tests/unit/tools/\1"),
    (r"services/(\w+)/.+", r"tests/unit/\1"),
    (r"proto/.+", "tests/unit/protocol"),
    (r"(?:docs/)?[^/]+|\.ci/.+", DOCS),
)
"""Paths, and where their tests are if there are any; the first pattern that fits counts."""


def git(*arguments: str) -> list[str]:
    """Return the lines that a git command prints, none where it fails."""
    done = subprocess.run(
        ["git", *arguments],  # noqa: S607 - of the contributor's own PATH
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed(base: str) -> set[str]:
    """Return the paths that differ from where this branch left ``base``, new ones included."""
    since = git("merge-base", "HEAD", base) or ["HEAD"]
    untracked = git("ls-files", "--others", "--exclude-standard")
    return {*git("diff", "--name-only", since[0]), *untracked}


def tests_of(path: str) -> list[str]:
    """Return where the tests of a file are; they may not exist."""
    found = ((re.fullmatch(pattern, path), tests) for pattern, tests in TESTS)
    return next((match.expand(tests).split() for match, tests in found if match), [])


def main() -> None:
    """Print one path a line; nothing where no test belongs to what has changed."""
    base = sys.argv[1] if len(sys.argv) > 1 else "main"
    found = {test for path in changed(base) for test in tests_of(path)}
    there = {test for test in found if Path(test).exists()}
    inside = {test for test in there if any(str(p) in there for p in PurePosixPath(test).parents)}
    print("\n".join(sorted(there - inside)))


if __name__ == "__main__":
    main()
