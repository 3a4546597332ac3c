"""The book: pages that its table of contents names are there or made, and it builds whole."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.support.processes import call

ROOT = Path(__file__).parents[2]


def test_the_contents_name_pages_that_are_there_or_made() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    made = set(re.findall(r'"([\w/-]+\.md)"', (ROOT / "docs" / "book.py").read_text()))
    assert {page for page in named - made if not (ROOT / "docs" / page).is_file()} == set()


@pytest.mark.drill
@pytest.mark.timeout(600)
@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="make docs installs it")
def test_the_book_builds_without_a_broken_link(tmp_path: Path) -> None:
    done = call(sys.executable, "-m", "mkdocs", "build", "-q", "-d", tmp_path / "book", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "book" / "reference" / "settings" / "index.html").is_file()
