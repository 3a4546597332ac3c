"""Which services have a namespace, and what they could not reach from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from skerry.cli.cluster import wires
from skerry.cli.cluster.nets import namespaces, refuse_elsewhere
from skerry.cli.cluster.place import Place
from skerry.cli.cluster.services import Team
from skerry.errors import ConfigError
from skerry.settings.models import LocalSettings


def local(**tables: Mapping[str, object]) -> LocalSettings:
    return LocalSettings.model_validate(tables)


@pytest.mark.parametrize(
    "telemetry",
    [
        {"endpoint": "http://127.0.0.1:4318"},
        {"endpoint": "https://otel.example", "traces": False},
        {"metrics_endpoint": "https://otel.example/v1/metrics"},
    ],
)
def test_a_collector_cannot_be_reached_wherever_it_is(telemetry: Mapping[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.endpoint is .* nothing but their broker"):
        refuse_elsewhere(local(telemetry=telemetry))


def test_a_bucket_cannot_be_reached_either() -> None:
    with pytest.raises(ConfigError, match=r"store\.url is s3://b"):
        refuse_elsewhere(local(store={"url": "s3://b"}))


def test_what_is_not_used_is_no_reason() -> None:
    refuse_elsewhere(LocalSettings())
    off = {"endpoint": "http://127.0.0.1:4318", "traces": False, "metrics": False}
    refuse_elsewhere(local(telemetry=off, store={"endpoint": "http://127.0.0.1:8333"}))


def test_a_cluster_without_namespaces_forgets_those_of_one_that_was_killed(tmp_path: Path) -> None:
    place = Place("r", tmp_path)
    place.folder.mkdir()
    row = {"space": "gone", "device": "d", "outer": "10.213.0.1", "inner": "10.213.0.2"}
    (place.folder / wires.WIRES).write_text(json.dumps({"learner-1": row}))
    assert wires.read(place.folder)
    with namespaces(place, Team(1), LocalSettings()) as held:
        assert held == wires.read(place.folder) == {}
