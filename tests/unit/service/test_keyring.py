"""The folder of a broker's keys."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from skerry.errors import ConfigError
from skerry.log.nats.login import NatsOptions, login_of
from skerry.protocol.roles import Grant, Role
from skerry.service.keyring import ACCOUNTS, REGISTER, Keyring

A = Grant(Role.LEARNER, "a", "r", shards=2)


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    made = Keyring(tmp_path / "keys")
    made.add(Grant(Role.ADMIN, "admin", "r"), A)
    return made


def test_only_the_owner_reads_keys_and_no_file_but_its_own_holds_a_secret(
    keyring: Keyring,
) -> None:
    paths = [path for path in keyring.folder.iterdir() if path.is_file()]
    assert {path.name for path in paths} == {"admin.nk", "a.nk", REGISTER}
    assert stat.S_IMODE(keyring.folder.stat().st_mode) == 0o700
    secret = keyring.seed("a").read_text().strip()
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (secret in path.read_text()) == (path.name == "a.nk")
    accounts = keyring.folder / ACCOUNTS  # for a container to read, whose parent keeps others out
    assert (stat.S_IMODE(accounts.stat().st_mode), secret in accounts.read_text()) == (0o644, False)


def test_a_key_opens_the_account_of_its_role_and_is_found_again(keyring: Keyring) -> None:
    name = login_of(NatsOptions(credentials=keyring.seed("a"))).name
    again = Keyring.opened(keyring.folder)
    assert again.grants == keyring.grants
    assert again.grants[name] == A
    edge = (keyring.folder / ACCOUNTS).read_text().partition('"EDGE"')[2]
    assert name in edge
    assert len(again.grants) == 2


def test_a_key_that_is_rotated_or_revoked_is_in_no_account(keyring: Keyring) -> None:
    old = login_of(NatsOptions(credentials=keyring.seed("a"))).name
    keyring.rotate("a")
    new = login_of(NatsOptions(credentials=keyring.seed("a"))).name
    accounts = (keyring.folder / ACCOUNTS).read_text()
    assert (old in accounts, new in accounts) == (False, True)
    keyring.revoke("a")
    assert new not in (keyring.folder / ACCOUNTS).read_text()
    assert not keyring.seed("a").exists()


def held(keyring: Keyring) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in keyring.folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("grant", "words"),
    [
        (A, "Another key is named 'a'"),
        (Grant(Role.LEARNER, "b.>", "r"), "name 'b.>' cannot"),
        (Grant(Role.LEARNER, "../b", "r"), "name '../b' cannot"),
        (Grant(Role.LEARNER, "b", "*"), r"run '\*' cannot"),
    ],
)
def test_a_key_that_cannot_be_is_refused_and_leaves_nothing(
    keyring: Keyring, grant: Grant, words: str
) -> None:
    before = held(keyring)
    with pytest.raises(ConfigError, match=words):
        keyring.add(Grant(Role.LEARNER, "new", "r"), grant)
    assert held(keyring) == before


def test_a_name_without_a_key_is_one_sentence(keyring: Keyring) -> None:
    for act in (keyring.rotate, keyring.revoke):
        with pytest.raises(ConfigError, match=r"No key in .* is named 'x'"):
            act("x")


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{}x",
        "[1]",
        '[{"key": "U", "role": "boss", "name": "a", "run": "r"}]',
        '[{"key": "U", "role": "learner", "name": "a\\"}", "run": "r"}]',
        '[{"key": "U", "role": "learner", "name": "a", "run": 7}]',
    ],
)
def test_a_folder_without_keys_that_can_be_read_is_one_sentence(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / REGISTER).write_text(text)
    with pytest.raises(
        ConfigError, match="There are no keys in" if text is None else "cannot be read"
    ):
        Keyring.opened(tmp_path)


@pytest.mark.parametrize("act", [Keyring.begun, Keyring.opened])
def test_a_folder_of_another_user_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], Keyring]
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)  # what tests run as may read everything
    with pytest.raises(ConfigError, match=r"\(Permission denied\): start this command as the user"):
        act(tmp_path)
