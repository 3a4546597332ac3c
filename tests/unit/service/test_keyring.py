"""The folder of a broker's keys."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from skerry.cli.main import app
from skerry.errors import ConfigError
from skerry.log.nats.login import NatsOptions, login_of
from skerry.protocol.roles import Grant, Role
from skerry.service.keyring import (
    ACCOUNTS,
    LINK,
    LINK_CREDENTIALS,
    REGISTER,
    Keyring,
    changing,
)
from skerry.service.private import write_private
from skerry.service.signing import SIGNER

LONGEST_LOGIN = 4096
"""Bytes that nats-server takes in one line by default."""
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


def test_of_two_commands_that_change_keys_the_second_waits(keyring: Keyring) -> None:
    folder = os.open(keyring.folder, os.O_RDONLY)
    with changing(keyring.folder) as ours:
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours.add(replace(A, name="b"))
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)
    assert sorted(g.name for g in Keyring.opened(keyring.folder).grants.values()) == [
        "a",
        "admin",
        "b",
    ]


def test_a_new_key_of_a_region_names_what_its_broker_must_read(keyring: Keyring) -> None:
    def keys(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--keys", str(keyring.folder)])
        assert done.exit_code == 0, done.output
        return done.output.replace("\n", " ")

    keys("region", "init", "eu", "--hub", "tls://hub:7422", "--run", "r")
    accounts = keyring.folder / "regions" / "eu" / ACCOUNTS
    needed = f"The broker of region eu must read {accounts}, too."
    assert needed in keys("keys", "add", "eu-2", "--region", "eu")
    assert needed in keys("keys", "rotate", "eu-2")
    assert "region eu" not in keys("keys", "rotate", "a")


def test_keys_that_expire_are_signed_by_what_only_their_owner_reads(tmp_path: Path) -> None:
    made = Keyring.begun(tmp_path / "keys", 7)
    made.add(Grant(Role.ADMIN, "admin", "r"), replace(A, shards=64))
    files = sorted(path for path in made.folder.iterdir() if path.is_file())
    assert [path.name for path in files] == ["a.creds", "admin.creds", REGISTER, SIGNER]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert made.seed("a").stat().st_size < LONGEST_LOGIN  # however much its role may say
    accounts = (made.folder / ACCOUNTS).read_text()
    signer = json.loads((made.folder / SIGNER).read_text())
    assert not [seed for seed in signer["seeds"].values() if seed in accounts]
    again = Keyring.opened(made.folder)
    assert again.grants == made.grants
    key = login_key(made, "a")
    with pytest.raises(ConfigError, match=r"expires later than that, or .* clock is behind"):
        again.renew("a", days=6)
    again.revoke("a")
    signer = json.loads((made.folder / SIGNER).read_text())
    assert signer["revoked"] == {"EDGE": {key: made.grants[key].until}}


def test_no_key_of_a_folder_has_days_where_the_first_had_none(keyring: Keyring) -> None:
    before = held(keyring)
    for act in (
        lambda: keyring.add(Grant(Role.LEARNER, "b", "r"), days=7),
        lambda: keyring.renew("a"),
    ):
        with pytest.raises(
            ConfigError,
            match=r"do not expire.*`skerry keys init --days N --like .*keys --keys OTHER`",
        ):
            act()
    assert held(keyring) == before
    with pytest.raises(ConfigError, match="--days is 0, but a key lives for 1 to 3650 days"):
        Keyring.begun(keyring.folder / "other", 0)


def login_key(keyring: Keyring, name: str) -> str:
    return next(key for key, grant in keyring.grants.items() if grant.name == name)


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


def keys(folder: Path, *words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*words, "--keys", str(folder)])
    assert done.exit_code == code, done.output
    return done.output


def test_the_keys_of_a_region_are_its_brokers_and_the_hub_knows_whose_names_it_may_use(
    tmp_path: Path,
) -> None:
    keys(tmp_path, "keys", "init", "--run", "r", "--learner", "us-0", "--shards", "2")
    made = ("region", "init", "eu", "--hub", "tls://a:1,tls://b:1", "--run", "r")
    assert 'urls: ["tls://a:1", "tls://b:1"]' in keys(tmp_path, *made, "--learner", "eu-0")
    keys(tmp_path, "keys", "add", "eu-1", "--region", "eu")
    keys(tmp_path, "keys", "revoke", "eu-0")
    held = Keyring.opened(tmp_path)
    names = {grant.name: (key, grant) for key, grant in held.grants.items()}
    assert names["eu-1"][1] == Grant(Role.LEARNER, "eu-1", "r", 2, "eu")
    hub, there = (
        json.JSONDecoder().raw_decode(path.read_text().removeprefix('"accounts": '))[0]
        for path in (tmp_path / ACCOUNTS, held.region("eu") / ACCOUNTS)
    )
    at_hub = {user["nkey"] for user in hub["EDGE"]["users"]}
    assert at_hub & {names["us-0"][0], names["eu-1"][0]} == {names["us-0"][0]}
    assert [user["nkey"] for user in there["EDGE"]["users"]] == [names["eu-1"][0]]
    assert [user["nkey"] for user in there["CACHE"]["users"]] == [names["eu-cache"][0]]
    said = {i["service"]["subject"] for i in hub["REGION_eu"]["imports"] if "service" in i}
    assert "skerry.r.pulse.eu-1" in said
    assert not [subject for subject in said if "us-0" in subject or "eu-0" in subject]
    secret = held.seed("eu").read_text().strip()
    link = held.region("eu") / LINK
    assert (secret in link.read_text(), stat.S_IMODE(link.stat().st_mode)) == (True, 0o600)
    assert secret not in (held.region("eu") / "nats.conf").read_text()


@pytest.mark.parametrize("days", [(), ("--days", "7")], ids=["static", "expiring"])
def test_a_region_begun_again_keeps_its_keys_and_has_those_that_were_missing(
    tmp_path: Path, days: tuple[str, ...]
) -> None:
    keys(tmp_path, "keys", "init", *days)
    begin = ("region", "init", "eu", "--learner", "eu-0")
    keys(tmp_path, *begin, "--hub", "tls://a:7422")
    keys(tmp_path, "keys", "revoke", "eu-cache")
    before = Keyring.opened(tmp_path)
    assert "tls://b:7422" in keys(tmp_path, *begin, "--learner", "eu-1", "--hub", "tls://b:7422")
    after = Keyring.opened(tmp_path)
    assert after.grants.items() >= before.grants.items()
    made = {grant.name for key, grant in after.grants.items() if key not in before.grants}
    assert made == {"eu-cache", "eu-1"}


@pytest.mark.parametrize(
    ("days", "link", "when"),
    [
        ((), LINK, "once its broker is started again"),
        (("--days", "7"), LINK_CREDENTIALS, "at the next login"),
    ],
)
def test_a_new_key_of_a_region_is_the_link_that_its_broker_reads(
    tmp_path: Path, days: tuple[str, ...], link: str, when: str
) -> None:
    keys(tmp_path, "keys", "init", *days)
    keys(tmp_path, "region", "init", "eu", "--hub", "tls://h:7422")
    said = keys(tmp_path, "keys", "rotate", "eu")
    assert f"{tmp_path / 'regions' / 'eu' / link}: it is read {when}" in said


def test_keys_that_expire_are_not_taken_for_others_without_what_signs_them(tmp_path: Path) -> None:
    """Their broker's accounts would be made for static keys, and its log be in another one."""
    keys(tmp_path, "keys", "init", "--days", "7")
    (tmp_path / SIGNER).unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert f"{SIGNER} is damaged or missing" in keys(tmp_path, "keys", "add", "x", code=2)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("keys", "add", "x", "--region", "us"), "knows no region 'us'"),
        (("keys", "add", "x", "--region", "eu", "--role", "syncer"), "regions have learners only"),
        (("keys", "add", "x", "--role", "region"), "`skerry region init` makes it"),
        (("region", "init", "eu", "--hub", "tls://h:7422", "--run", "x"), "key is named 'eu'"),
        (("region", "init", "admin", "--hub", "tls://h:7422"), "Another key is named 'admin'"),
        (("region", "init", "../us", "--hub", "tls://h:7422"), "'../us' cannot"),
        (("region", "init", "us", "--hub", "h:7422"), "--hub is h:7422"),
        (("region", "init", "us", "--hub", "tls://h:99999"), "--hub is tls://h:99999"),
        (("region", "init", "us", "--hub", "tls://h:7422,"), "--hub is , but"),
        (("region", "cache", "us"), "knows no region 'us'"),
    ],
)
def test_a_region_that_cannot_be_is_one_sentence(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    keys(tmp_path, "keys", "init")
    keys(tmp_path, "region", "init", "eu", "--hub", "tls://h:7422")
    before = held(Keyring.opened(tmp_path))
    assert sentence in keys(tmp_path, *words, code=2)
    assert held(Keyring.opened(tmp_path)) == before


def test_a_key_is_on_the_disk_before_it_takes_the_place_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "signer.json", list[str]()
    write_private(path, "old")

    def fsync(_handle: int) -> None:
        synced.append(path.read_text() + path.with_name("signer.json.draft").read_text())

    monkeypatch.setattr(os, "fsync", fsync)
    write_private(path, "new")
    assert synced == ["oldnew"]
    assert path.read_text() == "new"
