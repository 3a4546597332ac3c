"""Certificates of tests' own, made with openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="no openssl to make a certificate with")


def self_signed(folder: Path) -> Path:
    """Make ``tls.crt`` for 127.0.0.1, which signs itself; ``tls.key`` lies beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "tls.crt"
    subprocess.run(
        (
            *(str(OPENSSL), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(folder / "tls.key"), "-out", str(made)),
        ),
        check=True,
        capture_output=True,
    )
    return made
