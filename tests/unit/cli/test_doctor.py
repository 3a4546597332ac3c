"""Doctor: every check says something, and what is missing comes with a fix."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from skerry.cli import doctor
from skerry.cli.doctor import CheckLevel, Finding, as_json, examine, run_doctor
from skerry.settings.loading import load
from skerry.settings.models import Settings


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Settings:
    """Leave out the check that starts JAX, and look for no broker on the usual port."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "jax_devices", lambda: doctor.OK("cpu"))
    return load(None, ["nats.url=nats://127.0.0.1:1"], {})


def by_name(settings: Settings, *, reach_broker: bool = False) -> dict[str, Finding]:
    return {f.check: f for f in examine(settings, reach_broker=reach_broker)}


def test_every_finding_that_is_not_ok_has_a_fix(quick: Settings) -> None:
    found = by_name(quick, reach_broker=True)
    assert all(f.fix for f in found.values() if f.verdict is not CheckLevel.OK)
    assert {"python", "nats-server", "broker", "disk", "numba cache", "clock"} <= set(found)


def test_a_broker_that_was_not_asked_for_may_be_missing(quick: Settings) -> None:
    assert by_name(quick)["broker"].verdict is CheckLevel.OK


def test_a_broker_that_was_named_must_answer(quick: Settings) -> None:
    assert by_name(quick, reach_broker=True)["broker"].verdict is CheckLevel.FAIL


def test_a_missing_package_names_its_extra(
    quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name == "optax" else "1.0")
    findings = by_name(quick)
    assert findings["extra learner"].found == "without optax"
    assert findings["extra learner"].fix == "pip install 'skerry[learner]'"
    assert findings["extra checkpointer"].verdict is CheckLevel.OK


def test_an_old_nats_server_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "nats-server"
    old.write_text("#!/bin/sh\necho nats-server: v2.9.10\n")
    old.chmod(0o755)
    monkeypatch.setenv("SKERRY_NATS_SERVER", str(old))
    finding = doctor.nats_server()
    assert finding.verdict is CheckLevel.FAIL
    assert finding.found.startswith("2.9.10")


def test_a_server_that_is_not_there_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_NATS_SERVER", "/nowhere/nats-server")
    finding = doctor.nats_server()
    assert finding.verdict is CheckLevel.WARN
    assert "/nowhere/nats-server" in finding.fix


def test_a_full_disk_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "LEAST_DISK_BYTES", 1 << 62)
    assert doctor.disk(tmp_path / "not" / "yet").verdict is CheckLevel.FAIL


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert doctor.disk(tmp_path).verdict is CheckLevel.FAIL
    tmp_path.chmod(0o700)


def test_a_taken_port_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        finding = doctor.port("127.0.0.1", server.getsockname()[1])
    assert finding.verdict is CheckLevel.WARN


def test_a_check_that_breaks_is_a_finding(quick: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        msg = "gone"
        raise OSError(msg)

    monkeypatch.setattr(doctor, "python", broken)
    finding = by_name(quick)["python"]
    assert finding.verdict is CheckLevel.FAIL
    assert "gone" in finding.found


def test_report_is_ok_unless_something_failed() -> None:
    warned = [Finding("a", CheckLevel.WARN, "x", "y")]
    assert as_json(warned)["ok"] is True
    assert as_json([*warned, Finding("b", CheckLevel.FAIL, "x", "y")])["ok"] is False


@pytest.mark.usefixtures("quick")
def test_json_says_what_the_exit_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        run_doctor(config=None, sets=[], nats="nats://127.0.0.1:1", as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert exited.value.code == 1
    assert report["ok"] is False
    assert [c["check"] for c in report["checks"] if c["verdict"] == "fail"] == ["broker"]


@pytest.mark.usefixtures("quick")
def test_lines_show_the_fix_below(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_doctor(config=None, sets=[], nats="nats://127.0.0.1:1", as_json=False)
    assert "FAIL broker" in capsys.readouterr().out
