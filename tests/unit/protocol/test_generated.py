"""The generated protobuf code that is committed is what the schemas say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_generated_code_is_up_to_date() -> None:
    pytest.importorskip("grpc_tools")
    command = [sys.executable, str(ROOT / "proto" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_fails_on_a_difference(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    for folder in ("proto", "shared/skerry/protocol/v1"):
        for source in (ROOT / folder).rglob("*.*"):
            target = tmp_path / source.relative_to(ROOT)
            if "__pycache__" not in source.parts and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())
    stale = tmp_path / "shared/skerry/protocol/v1/messages.py"
    stale.write_text(stale.read_text() + "# edited\n")
    command = [sys.executable, str(tmp_path / "proto" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "messages.py" in done.stdout
