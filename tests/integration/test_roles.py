"""The table of roles against what services really say to a broker that writes it all down."""

from __future__ import annotations

import os
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from skerry.cli.cluster.broker import KEYS, LOG, find_server
from skerry.protocol.roles import Role
from skerry.protocol.subjects import Subjects
from skerry.service.keyring import Keyring
from tests.support.keyed import refusals
from tests.support.processes import SKERRY

pytestmark = [pytest.mark.nats, pytest.mark.drill]

RUN = "r"
NAMES = Subjects(RUN)
SAID = re.compile(r'nkey:(\w+)" - <<- \[H?PUB (\S+)')
SELDOM = (
    "$JS.API.STREAM.INFO.",  # by who follows it, after an outage
    "$JS.API.STREAM.MSG.GET.",  # in a cluster
    "$JS.API.STREAM.CREATE.",  # by the first learner, and for what a broker forgot
    "$JS.API.STREAM.UPDATE.",  # by a newer release
    NAMES.quarantine(),  # of a learner that offends
)
MEMBERS = NAMES.stream("MEMBERS")
OVER_JUNK = f"{MEMBERS}.*"
"""Who asks for the newest start of each learner reads further back where that one is none."""
SELDOM_OF = {
    Role.FOUNDER: f"{NAMES.shard(0).stream('CONTRIB')}.*",  # after a restart
    Role.SYNCER: (f"DIRECT.GET.{NAMES.stream('PULSE')}", OVER_JUNK),  # idem
    Role.CHECKPOINTER: OVER_JUNK,
}


def covers(pattern: str, subject: str) -> bool:
    """Return True if NATS's pattern matches the subject."""
    words, tokens = pattern.split("."), subject.split(".")
    if words[-1] == ">":
        words, tokens = words[:-1], tokens[: len(words) - 1] if len(tokens) >= len(words) else []
    pairs = zip(words, tokens, strict=False)
    return len(words) == len(tokens) and all(word in {"*", token} for word, token in pairs)


@pytest.mark.timeout(600)  # a whole cluster compiles
def test_each_service_may_say_what_it_says_and_nothing_more(
    tmp_path: Path, short_config: Path, jax_cache: Path
) -> None:
    traced = tmp_path / "nats-traced"
    traced.write_text(f'#!/bin/sh\nexec {find_server()} -V "$@"\n')
    traced.chmod(0o700)
    env = {"SKERRY_NATS_SERVER": str(traced), "JAX_COMPILATION_CACHE_DIR": str(jax_cache)}
    words = [*SKERRY, "up", str(short_config), "--run", RUN, "--set", "health.port=0"]
    words += ["--set", "train.steps=60"]
    subprocess.run(words, cwd=tmp_path, env=os.environ | env, check=True, timeout=580)
    broker = tmp_path / ".skerry" / RUN / "broker"
    assert refusals(broker) == []
    granted = Keyring.opened(broker / KEYS).grants
    said: defaultdict[Role, set[str]] = defaultdict(set)  # only the first founder creates the run
    for key, subject in SAID.findall((broker / LOG).read_text(errors="replace")):
        said[granted[key].role].add(subject)
    services = [grant for grant in granted.values() if grant.role is not Role.ADMIN]
    assert {grant.role for grant in services} == {
        Role.FOUNDER, Role.SYNCER, Role.CHECKPOINTER, Role.EVALUATOR, Role.HEALTH_MONITOR
    }  # fmt: skip
    for grant in services:
        unused = [
            pattern
            for pattern in grant.publishes()
            if not pattern.startswith(SELDOM)
            and not pattern.endswith(SELDOM_OF.get(grant.role, "."))
            and not any(covers(pattern, subject) for subject in said[grant.role])
        ]
        assert unused == [], f"{grant.name} never uses what it may do"
