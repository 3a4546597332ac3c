"""A process that stands behind the others says so to the kernel, for itself alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from skerry.service.priority import AUTOGROUP

ASK = (
    "import os, threading\n"
    "from skerry.service.priority import AUTOGROUP, yield_to_others\n"
    "over = threading.Event()\n"
    "other = threading.Thread(target=over.wait)\n"
    "other.start()\n"
    "yield_to_others(7)\n"
    "[t.join() for t in threading.enumerate() if t.name == 'yield']\n"
    "print(os.nice(0), os.getpriority(os.PRIO_PROCESS, other.native_id),"
    " AUTOGROUP.read_text() if AUTOGROUP.exists() else '')\n"
    "over.set()"
)


def niceness_of(*, own_session: bool) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        capture_output=True,
        text=True,
        check=True,
        start_new_session=own_session,
    )
    return done.stdout.strip()


def test_a_service_is_nicer_than_before() -> None:
    before = int(subprocess.check_output(["nice"], text=True))
    assert niceness_of(own_session=False).split()[0] == str(min(19, before + 7))


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own here")
def test_threads_that_run_already_are_as_nice() -> None:
    own, thread, *_ = niceness_of(own_session=False).split()
    assert thread == own


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel shares out by process")
def test_its_own_session_is_as_nice_and_somebody_elses_is_left_alone() -> None:
    niceness = niceness_of(own_session=True).split()[0]
    assert niceness_of(own_session=True).endswith(f"nice {niceness}")
    assert niceness_of(own_session=False).endswith(AUTOGROUP.read_text().strip())
