"""A JAX loop of one's own in two processes: one learner, killed and started again."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skerry.client.inner_file import read_file
from skerry.client.loop_thread import LoopThread
from tests.support.builders import wait_until
from tests.support.joins import CONFIG, ENDLESS, violations
from tests.support.nats_server import NatsServer
from tests.support.several import Several

pytestmark = [
    pytest.mark.nats,
    pytest.mark.drill,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("quiet"),
]


def processes(
    url: str, run: str, folder: Path, config: dict[str, Any], *, fails: int = -1
) -> Several:
    """Start two processes of one learner, with two fake devices each; one may fail."""
    devices = "--xla_force_host_platform_device_count=2"
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    script = Path(__file__).with_name("spread.py")
    environment = {"XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu"}
    arguments = url, run, address, json.dumps(config), str(fails)
    return Several(folder, script, *arguments, environment=environment)


def test_two_processes_are_one_learner_to_the_end(
    shared_nats: NatsServer, run_id: str, thread: LoopThread, syncer: None, tmp_path: Path
) -> None:
    with processes(shared_nats.url, run_id, tmp_path / "logs", dict(CONFIG)) as both:
        assert both.ended() == [0, 0], both.said()
        assert both.said("ends") == [["ends after 80 with 320 values close to the goal"]] * 2
    assert violations(thread, shared_nats.url, run_id) == ()


def test_two_processes_are_killed_and_go_on_with_their_optimizers_state(
    shared_nats: NatsServer, run_id: str, thread: LoopThread, syncer: None, tmp_path: Path
) -> None:
    asked = shared_nats.url, run_id
    config: dict[str, Any] = {**ENDLESS, "learner": {"save_every_s": 0.2}}
    folder = tmp_path / "learners" / run_id / "a"
    files = [[folder / f"inner-{n}-of-2.{kept}" for kept in ("state", "before")] for n in (0, 1)]
    with processes(*asked, tmp_path / "first", config) as both:
        wait_until(lambda: all(file.exists() for each in files for file in each))
        both.processes[1].kill()
        assert both.processes[0].wait(30) == 1, both.said()
        assert "error: Process 1 of this learner is lost" in both.said("error:")[0][0]
    sums = [dict(map(saved_momentum, filter(Path.exists, each))) for each in files]
    newest = max(sums[0].keys() & sums[1].keys())
    with processes(*asked, tmp_path / "second", config) as both:
        wait_until(lambda: all(both.said("begins")))
        assert both.said("begins") == [[f"begins with {each[newest]!r}"] for each in sums]
    assert violations(thread, shared_nats.url, run_id) == ()


@pytest.mark.parametrize("fails", [0, 1])
def test_an_error_in_one_process_ends_both(
    shared_nats: NatsServer, run_id: str, syncer: None, tmp_path: Path, fails: int
) -> None:
    with processes(*(shared_nats.url, run_id), tmp_path / "logs", ENDLESS, fails=fails) as both:
        codes = both.ended(60)
        assert 0 not in codes, both.said()
        assert "ValueError: an error of the loop's own" in both.said("ValueError:")[fails]
        assert "of this learner" in "".join(both.said("of this learner")[1 - fails]), both.said()


def saved_momentum(path: Path) -> tuple[int, float]:
    """Return the step of a save and the sum of the momentum in it."""
    saved, tensors = read_file(path, None)
    return saved.step, sum(float(tensor.astype(np.float64).sum()) for tensor in tensors.values())
