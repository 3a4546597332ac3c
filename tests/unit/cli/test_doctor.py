"""Doctor: every check says something, and what is missing comes with a fix."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from skerry import installing
from skerry.cli import doctor
from skerry.cli.doctor import FAIL, OK, WARN, Finding, Found, examine, run_doctor
from skerry.settings.loading import load
from skerry.settings.local import Settings


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Settings:
    """Leave out the check that starts JAX, and look for no broker on the usual port."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "jax_devices", lambda: (OK, "cpu", ""))
    return load(None, ["nats.url=nats://127.0.0.1:1"], {})


def by_name(settings: Settings, *, reach_broker: bool = False) -> dict[str, Finding]:
    return {f.check: f for f in examine(settings, reach_broker=reach_broker)}


def test_every_finding_that_is_not_ok_has_a_fix(quick: Settings) -> None:
    found = by_name(quick, reach_broker=True)
    assert all(f.fix for f in found.values() if f.verdict is not OK)
    assert {"cores and memory", "nats-server", "broker", "disk", "numba cache"} <= set(found)


@pytest.mark.parametrize(("named", "verdict"), [(False, OK), (True, FAIL)])
def test_only_a_broker_that_was_named_must_answer(
    quick: Settings, named: bool, verdict: doctor.CheckLevel
) -> None:
    assert by_name(quick, reach_broker=named)["broker"].verdict is verdict


def test_a_broker_that_does_not_answer_is_named_without_its_password() -> None:
    away = {"SKERRY_NATS__URL": "nats://me:secret@127.0.0.1:1,nats://token@127.0.0.1:2"}
    _, found, _ = doctor.broker(load(None, [], away), required=True)
    masked = "nats://me:***@127.0.0.1:1,nats://***@127.0.0.1:2"
    assert found.startswith(f"{masked}: No NATS server answered at {masked} for ")


def test_a_missing_package_names_its_extra(
    quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installing, "version_of", lambda name: "" if name == "optax" else "1.0")
    findings = by_name(quick)
    assert findings["extra learner"].found == "without optax"
    assert findings["extra learner"].fix.endswith("[learner]'")
    assert findings["extra checkpointer"].verdict is OK


def test_an_old_nats_server_fails_and_one_that_is_not_there_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "nats-server"
    old.write_text("#!/bin/sh\necho nats-server: v2.9.10\n")
    old.chmod(0o755)
    monkeypatch.setenv("SKERRY_NATS_SERVER", str(old))
    verdict, found, _ = doctor.nats_server()
    assert (verdict, found) == (FAIL, f"2.9.10 at {old}")
    monkeypatch.setenv("SKERRY_NATS_SERVER", "/nowhere/nats-server")
    verdict, _, fix = doctor.nats_server()
    assert (verdict, "/nowhere/nats-server" in fix) == (WARN, True)


def test_a_full_disk_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "LEAST_DISK_BYTES", 1 << 62)
    assert doctor.disk(tmp_path / "not" / "yet")[0] is FAIL


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert doctor.disk(tmp_path)[0] is FAIL
    tmp_path.chmod(0o700)


def test_a_taken_port_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert doctor.port("127.0.0.1", server.getsockname()[1])[0] is WARN


def test_a_check_that_breaks_is_a_finding(quick: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Found:
        msg = "gone"
        raise OSError(msg)

    monkeypatch.setattr(doctor, "cores_and_memory", broken)
    finding = by_name(quick)["cores and memory"]
    assert (finding.verdict, "gone" in finding.found) == (FAIL, True)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("nats", "code"), [("nats://127.0.0.1:1", 1), (None, 0)])
def test_json_and_lines_say_what_the_exit_code_says(
    capsys: pytest.CaptureFixture[str], nats: str | None, code: int
) -> None:
    for as_json in (True, False):
        with pytest.raises(SystemExit) as exited:
            run_doctor(config=None, sets=[], nats=nats, as_json=as_json)
        assert exited.value.code == code
        shown = capsys.readouterr().out
        if as_json:
            report = json.loads(shown)
            failed = [c["check"] for c in report["checks"] if c["verdict"] == "fail"]
            assert (report["ok"], failed) == (not code, ["broker"] * code)
        else:
            assert ("FAIL broker" in shown) is bool(code)
