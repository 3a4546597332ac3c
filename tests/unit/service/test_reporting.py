"""What a process reports of itself, and how its command line ends."""

from __future__ import annotations

import gc
import io
import os
import pty
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

import skerry.telemetry
from skerry.errors import ConfigError, RunNotFound, SkerryError, first_cause
from skerry.service.entry import answer, application, bus_from, exit_on_error, run_service
from skerry.service.reporting import ForgivingStream, add_span, telemetry
from skerry.settings import loading
from skerry.settings.local import LocalSettings, NatsSettings, TelemetrySettings
from skerry.telemetry import export, tracing
from skerry.telemetry.export import Complain, Identity, Telemetry

FULL = """
import resource, structlog
from skerry.service.reporting import configure
configure('info', service='s')
log = structlog.get_logger()
log.info('before')
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
log.info('during')
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
log.info('after')
"""


def test_a_service_outlives_a_full_disk_under_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        done = subprocess.run([sys.executable, "-c", FULL], stderr=file, check=False)
    said = log.read_text()
    assert done.returncode == 0, said
    assert '"before"' in said
    assert '"after"' in said


NAMED = """
import structlog
from skerry.service.reporting import configure
configure('info', service='s')
try:
    raise ValueError('\\x1b[2J')
except ValueError:
    structlog.get_logger().exception('said', learner='\\x1b]0;pwned\\x07')
"""


def test_a_line_holds_nothing_that_a_terminal_obeys() -> None:
    ours, terminal = pty.openpty()
    subprocess.run([sys.executable, "-c", NAMED], stderr=terminal, check=True)
    os.close(terminal)
    said = os.read(ours, 1 << 16)
    os.close(ours)
    assert b"]0;pwned" in said
    assert b"\x1b]" not in said
    assert b"\x1b[2J" not in said


@pytest.mark.parametrize("computes", [False, True])
def test_a_program_that_computes_seldom_looks_for_cycles(
    computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, seen, before = application(), list[int](), gc.get_threshold()
    app.command()(lambda: seen.append(gc.get_threshold()[0]))
    monkeypatch.setattr("sys.argv", ["skerry-x"])
    monkeypatch.setattr("os._exit", sys.exit)
    try:
        with pytest.raises(SystemExit):
            answer(app, computes=computes)
    finally:
        gc.set_threshold(*before)
    assert (seen[0] > before[0]) is computes


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "log").open("w", buffering=1) as file:
        logger = structlog.PrintLogger(ForgivingStream(file))  # type: ignore[arg-type] # all of a file that it needs
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                structlog.PrintLogger(file).msg("lost")
            logger.msg("lost")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_carries_the_ids_of_the_span_it_is_written_in_and_of_no_other() -> None:
    trace = tracing.trace_id("run", 0, 2)
    with tracing.within(tracing.context(trace)):
        inside = add_span(None, "info", {"event": "x"})
        named = add_span(None, "info", {"event": "x", "trace_id": "its own"})
    assert (inside["trace_id"], inside["span_id"]) == (trace, tracing.span_id(trace))
    assert named["trace_id"] == "its own"
    assert add_span(None, "info", {"event": "x"}) == {"event": "x"}


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("Set a.b."), 2), (SkerryError("Broken."), 1), (RunNotFound("None."), 2)],
)
def test_our_error_is_one_sentence_and_its_exit_code(
    error: SkerryError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        raise error

    with pytest.raises(SystemExit) as raised:
        run_service(main())
    assert raised.value.code == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_defect_of_a_service_keeps_its_traceback_and_our_error_comes_first_in_its_group() -> None:
    defect, ours = BaseExceptionGroup("g", [ZeroDivisionError()]), ConfigError("wrong")
    with pytest.raises(BaseExceptionGroup), exit_on_error(logs=True):
        raise defect
    group = BaseExceptionGroup("g", [ValueError("x"), BaseExceptionGroup("h", [OSError(), ours])])
    assert first_cause(group) is ours


MISTYPED = b"SUACIADQ7YPC4LJXBYHG6TL7UVKQRQY4NHNPAHBGGVIWC4ZCXGOGZWCFTA"
"""The seed of an NKey with another last letter but one."""


@pytest.mark.parametrize(
    ("setting", "content", "why"),
    [
        ("password_file", None, r"read \(No such file"),
        ("password_file", b"\xff\xfe", r"read \(it is not text"),
        ("credentials", None, r"used \(No such file"),
        ("credentials", b"\xff\xfe", r"used \(what it holds is damaged"),
        ("credentials", MISTYPED, r"used \(what it holds is damaged"),
    ],
)
def test_a_secret_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, setting: str, content: bytes | None, why: str
) -> None:
    secret = tmp_path / "secret"
    if content:
        secret.write_bytes(content)
    nats = NatsSettings().model_copy(update={setting: secret})
    with pytest.raises(ConfigError, match=rf"nats\.{setting} is .*, which cannot be {why}"):
        bus_from(nats, "test")


@pytest.mark.parametrize(
    "service", ["checkpointer", "evaluator", "health_monitor", "learner", "syncer"]
)
def test_every_service_says_so_and_exits_with_2(service: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", f"skerry_{service}", "--set", "nats.user=me", "--set"]
    words += [f"nats.password_file={tmp_path / 'none'}"]
    ended = subprocess.run(words, capture_output=True, check=False, text=True)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith("error: nats.password_file is ")


def local(*sets: str) -> LocalSettings:
    return loading.load(None, sets, {}).local


def test_without_an_address_no_telemetry_begins() -> None:
    with telemetry(local(), "syncer", "run", "s"):
        assert not tracing.on()


def test_a_missing_sdk_is_one_sentence_with_the_fix_and_leaves_no_main_pending(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(skerry.telemetry, "export")
    monkeypatch.setitem(sys.modules, "skerry.telemetry.export", None)

    async def main() -> None:
        raise AssertionError

    wanted = local("telemetry.endpoint=http://127.0.0.1:1")
    with pytest.raises(SystemExit) as ended:  # a coroutine that is left behind warns: an error here
        run_service(main(), telemetry(wanted, "syncer", "run", "s"))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "error: telemetry.endpoint needs OpenTelemetry's SDK, which is not installed"
    )
    assert "[otel]'`" in said


def test_what_is_to_be_sent_where_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Identity, TelemetrySettings]] = []

    def start(identity: Identity, settings: TelemetrySettings, complain: Complain) -> Telemetry:
        seen.append((identity, settings))
        return Telemetry(identity, TelemetrySettings(), complain)

    monkeypatch.setattr(export, "Telemetry", start)
    nats = NatsSettings(url="tls://me:secret@broker:4443,nats://other")
    wanted = local("telemetry.endpoint=http://c:4318").model_copy(update={"nats": nats})
    with telemetry(wanted, "learner", "run", "a"):
        pass
    ((identity, settings),) = seen
    assert settings is wanted.telemetry
    assert identity.resource().attributes["service.instance.id"] == "run/a"
    assert identity.broker == ("broker", 4443)


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to"), "lower data.batch"),
        (RuntimeError("Unable to initialize backend 'cuda': FAILED"), "skerry doctor"),
    ],
)
def test_what_a_person_can_mend_of_jax_is_one_sentence_in_a_services_log_too(
    error: Exception, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"), exit_on_error(logs=True):
        raise error
    (line,) = capsys.readouterr().err.splitlines()
    assert fix in line


def test_a_working_folder_that_is_gone_and_a_home_that_is_none_are_no_defects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"), exit_on_error():
        Path("~no-such-user/books").expanduser()
    assert "write the path in full" in capsys.readouterr().err
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(SystemExit, match="2"), exit_on_error():
        Path("keys").absolute()
    assert "change to a folder that is there" in capsys.readouterr().err


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "? caf?\n"), ("utf-8", "━ caf?\n")])
def test_what_a_terminal_cannot_write_is_replaced(
    encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with io.TextIOWrapper(written := io.BytesIO(), encoding) as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        with exit_on_error():
            print("━ caf\udce9")
        assert written.getvalue().decode() == shown
