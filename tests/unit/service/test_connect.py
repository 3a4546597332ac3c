"""From settings to a bus: secrets come from files, and a file that is not there is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry.errors import ConfigError
from skerry.service.connect import bus_from
from skerry.settings.models import NatsSettings


@pytest.mark.parametrize("setting", ["password_file", "credentials"])
def test_a_secret_that_cannot_be_read_is_one_sentence(tmp_path: Path, setting: str) -> None:
    nats = NatsSettings().model_copy(update={setting: tmp_path / "none"})
    with pytest.raises(ConfigError, match=rf"nats\.{setting} is .*none, which cannot be read"):
        bus_from(nats, "test")


def test_a_secret_that_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"\xff\xfe")
    nats = NatsSettings(user="u", password_file=tmp_path / "secret")
    with pytest.raises(ConfigError, match="it is no text"):
        bus_from(nats, "test")
