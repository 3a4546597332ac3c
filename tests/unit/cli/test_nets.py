"""Which services have a namespace, and what they could not reach from it."""

from __future__ import annotations

import pytest

from skerry.cli.nets import refuse_loopback
from skerry.errors import ConfigError
from skerry.settings import LocalSettings

LOCAL = LocalSettings()


def local(**tables: dict[str, str]) -> LocalSettings:
    return LocalSettings.model_validate(tables)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.8.8.8"])
def test_a_collector_on_loopback_is_refused(host: str) -> None:
    told = local(telemetry={"endpoint": f"http://{host}:4318"})
    with pytest.raises(ConfigError, match=r"telemetry\.endpoint is .* cannot reach"):
        refuse_loopback(told, {})


def test_a_bucket_on_loopback_is_refused_wherever_its_address_comes_from() -> None:
    named = local(store={"url": "s3://b", "endpoint": "http://127.0.0.1:8333"})
    with pytest.raises(ConfigError, match=r"store\.endpoint"):
        refuse_loopback(named, {})
    found = {"AWS_ENDPOINT_URL": "http://localhost:8333"}
    with pytest.raises(ConfigError, match=r"store\.endpoint"):
        refuse_loopback(local(store={"url": "s3://b"}), found)


def test_what_is_elsewhere_or_unused_is_no_reason() -> None:
    refuse_loopback(LOCAL, {"AWS_ENDPOINT_URL": "http://localhost:8333"})
    refuse_loopback(local(telemetry={"endpoint": "https://otel.example:4318"}), {})
    off = local(telemetry={"endpoint": "http://127.0.0.1:4318"})
    telemetry = off.telemetry.model_copy(update={"traces": False, "metrics": False})
    refuse_loopback(off.model_copy(update={"telemetry": telemetry}), {})
