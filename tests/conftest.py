"""Fixtures that every kind of test may ask for."""

from __future__ import annotations

import gc
import logging
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from skerry import code
from tests.support import compiling
from tests.support.nats_server import NatsServer
from tests.support.processes import Watched
from tests.support.s3_server import S3Server
from tests.support.telemetry import Collected
from tests.support.tiny import TWO, tiny

settings.register_profile("skerry", deadline=None)  # machines are busy; no test is about time
settings.load_profile("skerry")

compiling.compile_quickly()


def pytest_collection_finish() -> None:
    """Leave thousands of tests and what they import out of every later garbage collection."""
    gc.collect()
    gc.freeze()


WORDS = "the fragment travels and the learner goes on and nobody waits for the others "


@pytest.fixture
def allow_code(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Allow no code but what always is, until this test ends; returns what allows modules."""
    monkeypatch.setattr(code, "_allowed", set[str]())
    return lambda *modules: code.allow(modules)


@pytest.fixture
def collected() -> Iterator[Collected]:
    """The spans and metrics that this test's code emits."""
    with Collected() as telemetry:
        yield telemetry


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A real nats-server of this test's own, with an empty store."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def shared_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One real nats-server for all tests that leave it running; tell runs apart by ``run_id``."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One real S3 server for all tests; tell their entries apart by prefix."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def run_id() -> str:
    """A run id that no other test uses."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About a megabyte of text with a structure that a tiny model learns at once."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(20):
        turned = " ".join(WORDS.split()[i % 7 :])
        (folder / f"{i}.txt").write_text(f"chapter {i}\n" + (turned + f" {i}\n") * 700)
    return folder


@pytest.fixture(scope="session")
def jax_cache() -> Path:
    """One compilation cache for all learners and workers, so that only the first compiles."""
    return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])


@pytest.fixture(scope="module")
def optimised() -> Iterator[None]:
    """Compile as a user's process does, for a module of tests about bits."""
    with compiling.optimised():
        yield


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Have ctrl-c interrupt, here and in children: a shell has background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def silent() -> Iterator[None]:
    """Log nothing, and leave no trace in the tests that look at logs."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.fixture
def tiny_config(tmp_path: Path, corpus: Path) -> Path:
    """A config file for a run that would go on for very long."""
    path = tmp_path / "run.toml"
    path.write_text(tiny(corpus, 1_000_000, *TWO))
    return path


@pytest.fixture
def short_config(tmp_path: Path, corpus: Path) -> Path:
    """A config file for a run that ends by itself."""
    path = tmp_path / "short.toml"
    path.write_text(tiny(corpus, 400, *TWO))
    return path


@pytest.fixture
def watched() -> Watched:
    """A supervisor of real processes that keeps its events."""
    return Watched()
