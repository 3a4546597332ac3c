"""Logs on a disk that is full."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import structlog

from skerry.service.logs import ForgivingStream, add_span
from skerry.telemetry import ids, tracing

FULL = (
    "import resource\n"
    "from skerry.service.logs import configure\n"
    "import structlog\n"
    "configure('info', service='s')\n"
    "log = structlog.get_logger()\n"
    "log.info('before')\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n"
    "log.info('during')\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
    "log.info('after')\n"
)


def test_a_service_outlives_a_full_disk_under_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        done = subprocess.run([sys.executable, "-c", FULL], stderr=file, check=False)
    said = log.read_text()
    assert done.returncode == 0, said
    assert '"before"' in said
    assert '"after"' in said


def test_what_could_not_be_written_is_counted(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "log").open("w", buffering=1) as file:
        stream = ForgivingStream(file)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            structlog.PrintLogger(stream).msg("lost")  # type: ignore[arg-type]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert stream.lost > 0


def test_a_line_carries_the_ids_of_the_span_it_is_written_in_and_of_no_other() -> None:
    trace = ids.trace_id("run", 0, 2)
    with tracing.within(tracing.context(trace)):
        inside = add_span(None, "info", {"event": "x"})
        named = add_span(None, "info", {"event": "x", "trace_id": "its own"})
    assert (inside["trace_id"], inside["span_id"]) == (trace, ids.span_id(trace))
    assert named["trace_id"] == "its own"
    assert add_span(None, "info", {"event": "x"}) == {"event": "x"}
