"""Which processes a local cluster consists of, and what they are started with."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from skerry.cli.cluster import clock
from skerry.cli.cluster.cluster import ServedBroker, Team, prepared, stages
from skerry.cli.cluster.folder import RunFolder
from skerry.cli.cluster.processes import ProcessTable
from skerry.cli.cluster.supervisor import Command, Need
from skerry.settings.loading import load

KEYS = {"learner-1": Path("/keys/learner-1.nk")}


def commands(folder: RunFolder, team: Team, **ports: int) -> dict[str, Command]:
    return {one.name: one for stage in stages(folder, team, ports, KEYS) for one in stage}


def test_services_of_which_there_are_several_are_numbered() -> None:
    assert Team(2, syncers=2).kinds() == {
        "learner-1": "learner",
        "learner-2": "learner",
        "syncer-1": "syncer",
        "syncer-2": "syncer",
        "checkpointer": "checkpointer",
        "evaluator": "evaluator",
        "health-monitor": "health-monitor",
    }
    assert "evaluator" not in Team(1, evaluators=0).kinds()


def test_a_service_logs_in_with_a_key_of_its_own_that_its_command_line_does_not_show(
    folder: RunFolder,
) -> None:
    started = commands(folder, Team(1))
    assert started["learner-1"].env["SKERRY_NATS__CREDENTIALS"] == "/keys/learner-1.nk"
    assert "SKERRY_NATS__CREDENTIALS" not in started["syncer"].env
    assert not any("learner-1.nk" in word for word in started["learner-1"].argv)


def test_a_service_reaches_the_broker_where_its_proxy_listens(folder: RunFolder) -> None:
    started = commands(folder, Team(1), syncer=2)
    assert started["syncer"].env["SKERRY_NATS__URL"] == "nats://127.0.0.1:2"
    assert "SKERRY_NATS__URL" not in started["learner-1"].env


@pytest.mark.parametrize("clocks", [True, False])
def test_only_a_run_that_asks_for_it_has_clocks_that_can_be_set(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, clocks: bool
) -> None:
    monkeypatch.setattr(clock, "library", lambda: Path("/lib/faketime.so"))
    clock.move(folder.path, "learner-9", 0.0)  # of an earlier start
    learner = commands(folder, Team(1, chaos=True, clocks=clocks))["learner-1"]
    assert ("LD_PRELOAD" in learner.env) == clocks
    assert clock.names(folder.path) == (sorted(Team(1).kinds()) if clocks else [])


def test_only_a_syncer_and_a_learner_are_always_needed(folder: RunFolder) -> None:
    started = commands(folder, Team(1))
    assert {name: one.need for name, one in started.items()} == {
        "learner-1": Need.ALWAYS,
        "syncer": Need.ALWAYS,
        "checkpointer": Need.SETTINGS,
        "evaluator": Need.NEVER,
        "health-monitor": Need.NEVER,
    }
    assert started["evaluator"].argv[1:4] == ("-m", "skerry_evaluator", "--run")


@pytest.mark.parametrize("chaos", [True, False])
def test_only_the_monitor_of_a_run_that_allows_faults_can_ask_for_them(
    folder: RunFolder, chaos: bool
) -> None:
    started = commands(folder, Team(1, chaos=chaos))
    asking = {n for n, one in started.items() if any("health.token_file" in w for w in one.argv)}
    assert asking == ({"health-monitor"} if chaos else set())


def test_a_page_stays_at_its_port_when_its_monitor_is_started_again(folder: RunFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        for port in (0, taken):
            given = load(None, [f"health.port={port}"], {})
            broker = ServedBroker(given.local.nats, ProcessTable(folder.processes))
            kept = prepared(given, broker, folder).local.health.port
            assert kept not in {0, taken}
            assert load(folder.settings, environ={}).local.health.port == kept
            socket.create_server(("127.0.0.1", kept)).close()
