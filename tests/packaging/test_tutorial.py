"""The tutorial, run from its first cell to its last."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.ipynb"


def printed(notebook: Any) -> str:
    """Return what the cells of a notebook have printed."""
    cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    outputs = [out for cell in cells for out in cell["outputs"]]
    assert [out for out in outputs if out["output_type"] == "error"] == []
    texts = (out.get("text") or out["data"]["text/plain"] for out in outputs)
    return "\n".join("".join(text) for text in texts)


@pytest.mark.drill
@pytest.mark.timeout(900)
@pytest.mark.skipif(not importlib.util.find_spec("nbclient"), reason="make docs installs it")
def test_the_tutorial_runs_from_its_first_cell_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient, nbformat = map(importlib.import_module, ("nbclient", "nbformat"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("SKERRY_HEALTH__PORT", "0")
    notebook = nbformat.read(PAGE, 4)
    client = nbclient.NotebookClient(
        notebook, timeout=400, startup_timeout=240, kernel_name="python3"
    )
    before = psutil.Process().children(recursive=True)
    with client.setup_kernel():
        try:
            for number, cell in enumerate(notebook.cells):
                client.execute_cell(cell, number)
        finally:  # what the notebook started ends with it, also where a cell failed
            for process in {*psutil.Process().children(recursive=True)} - {*before}:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
    said = printed(notebook)
    assert "{'learner-1': 2, 'learner-2': 1}" in said  # starts of each
    assert "exit code 0" in said
    assert "The log of run main holds" in said
    assert "Replay: every version, from genesis." in said
    assert "Day 7, hour" in said
