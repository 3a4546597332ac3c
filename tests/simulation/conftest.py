"""What every simulated schedule needs: silence."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quiet(silent: None) -> None:
    """Log nothing: a schedule that fails is run again by hand."""
    del silent
