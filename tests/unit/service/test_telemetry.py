"""A service's telemetry, begun and ended around its main."""

from __future__ import annotations

import sys

import pytest

import skerry.telemetry
from skerry.errors import ConfigError
from skerry.service.entry import run_service
from skerry.service.telemetry import telemetry
from skerry.settings import loading
from skerry.settings.models import LocalSettings, TelemetrySettings
from skerry.telemetry import export, tracing
from skerry.telemetry.export import Complain, Identity, Telemetry


def local(*sets: str) -> LocalSettings:
    return loading.load(None, sets, {}).local


@pytest.fixture
def no_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry's SDK is not installed."""
    monkeypatch.delattr(skerry.telemetry, "export")
    monkeypatch.setitem(sys.modules, "skerry.telemetry.export", None)


def test_without_an_address_nothing_begins() -> None:
    with telemetry(local(), "syncer", "run", "s"):
        assert not tracing.on()


def test_a_missing_sdk_is_one_sentence_with_the_fix(no_sdk: None) -> None:
    wanted = local("telemetry.endpoint=http://127.0.0.1:1")
    with (
        pytest.raises(ConfigError, match=r"pip install 'skerry\[otel\]'"),
        telemetry(wanted, "syncer", "run", "s"),
    ):
        raise AssertionError


def test_what_is_to_be_sent_where_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Identity, TelemetrySettings]] = []

    def start(identity: Identity, settings: TelemetrySettings, _: Complain) -> Telemetry:
        seen.append((identity, settings))
        return Telemetry()

    monkeypatch.setattr(export, "start", start)
    wanted = local(
        "telemetry.endpoint=http://c:4318",
        "nats.url=tls://me:secret@broker:4443,nats://other",
    )
    with telemetry(wanted, "learner", "run", "a"):
        pass
    ((identity, settings),) = seen
    assert settings is wanted.telemetry
    assert identity.resource().attributes["service.instance.id"] == "run/a"
    assert identity.broker == ("broker", 4443)


def test_a_service_whose_telemetry_cannot_begin_says_why_and_leaves_no_main_pending(
    no_sdk: None, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        raise AssertionError

    wanted = local("telemetry.endpoint=http://127.0.0.1:1")
    with pytest.raises(SystemExit) as ended:  # a coroutine that is left behind warns: an error here
        run_service(main(), telemetry(wanted, "syncer", "run", "s"))
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: telemetry.endpoint is set, but")
