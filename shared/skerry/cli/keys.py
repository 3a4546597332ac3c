"""``skerry keys``: make, renew and revoke the keys of a broker of one's own."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skerry.algorithm.fragments import MOST_SHARDS
from skerry.protocol.roles import Grant, Role
from skerry.service.entry import Run, application, exit_on_error

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from skerry.service.keyring import Keyring

Name = Annotated[str, typer.Argument(help="Owner of the key: a service's --name.", metavar="NAME")]
Folder = Annotated[Path, typer.Option("--keys", help="Folder of the keys.", metavar="FOLDER")]
PidFile = Annotated[
    Path | None,
    typer.Option(help="Make the broker with this pid_file reload at once.", metavar="FILE"),
]
Shards = Annotated[
    int | None,
    typer.Option(
        help="The run's sync.shards; default: as its other keys, or 1.",
        min=1,
        max=MOST_SHARDS,
        metavar="N",
    ),
]
Days = Annotated[int | None, typer.Option(help="Days after which the key expires.", metavar="N")]
KEYS = Path("keys")

app = application(bare_shows_help=True)


@app.command()
def init(
    *,
    run: Run = "main",
    learner: Annotated[
        list[str] | None, typer.Option(help="Also make this learner's key.", metavar="NAME")
    ] = None,
    founder: Annotated[
        list[str] | None, typer.Option(help="The same, and it may create the run.", metavar="NAME")
    ] = None,
    shards: Shards = None,
    days: Days = None,
    like: Annotated[
        Path | None,
        typer.Option(help="Make keys for the names in this folder instead.", metavar="FOLDER"),
    ] = None,
    keys: Folder = KEYS,
) -> None:
    """Make a key for each service of a run, its admin and its auditor, who only reads.

    With --days, all keys of this folder expire, later ones too, and the broker knows their signer
    instead of each key. With --like, a deployment moves to such keys; those of the other folder
    stay as they are.
    """
    from skerry.service.accounts import CORE, services_of
    from skerry.service.keyring import ACCOUNTS, Keyring

    with exit_on_error():
        held = Keyring.begun(keys, days)
        named = {Role.LEARNER: learner, Role.FOUNDER: founder}
        count = shards or 1
        learners = (
            Grant(role, name, run, count) for role, names in named.items() for name in names or ()
        )
        known = Keyring.opened(like).grants.values() if like else services_of(run, count)
        held.add(*known, *learners)
        _show(held)
        print(f"The broker's config needs `include {keys / ACCOUNTS}`: the path from its folder.")
        account = CORE if held.signer is None else held.signer.public(CORE)
        print(f"The log is in the account {account}.")


@app.command()
def add(
    name: Name,
    *,
    role: Annotated[Role, typer.Option(help="Its role: what it may do.")] = Role.LEARNER,
    region: Annotated[
        str, typer.Option(help="Region whose broker the learner connects to.", metavar="NAME")
    ] = "",
    run: Run = "main",
    shards: Shards = None,
    days: Days = None,
    keys: Folder = KEYS,
    pid_file: PidFile = None,
) -> None:
    """Make one more key; a broker that must know it accepts it after a reload."""
    from skerry.service.accounts import shards_of

    with exit_on_error(), _changing(keys) as held:
        grant = granted_in(
            held, Grant(role, name, run, shards or shards_of(run, held.grants.values())), region
        )
        is_news = held.add(grant, days=days)
        print(f"{held.seed(name)} is the secret of {role} {name}: copy it to that machine, for the")
        print("user of the service alone, and name it there: --set nats.credentials=FILE.")
        if is_news:
            _reload(held, pid_file, grant.region)


@app.command()
def renew(
    names: Annotated[list[str], typer.Argument(help="Owners of the keys.", metavar="NAME...")],
    *,
    days: Days = None,
    keys: Folder = KEYS,
) -> None:
    """Extend keys that expire; no broker has to reload."""
    with exit_on_error(), _changing(keys) as held:
        for name in names:
            held.renew(name, days)
            _say_new(held, name)


@app.command()
def rotate(name: Name, *, keys: Folder = KEYS, pid_file: PidFile = None) -> None:
    """Replace a key by a new one; the broker accepts it after a reload."""
    with exit_on_error(), _changing(keys) as held:
        held.rotate(name)
        _say_new(held, name)
        _reload(held, pid_file, held.grant(name).region)


@app.command()
def revoke(name: Name, *, keys: Folder = KEYS, pid_file: PidFile = None) -> None:
    """Revoke a key; this takes effect after a reload, and others stay connected."""
    with exit_on_error(), _changing(keys) as held:
        held.revoke(name)
        _reload(held, pid_file)


@app.command()
def show(
    *,
    keys: Folder = KEYS,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with the subjects each may publish to.")
    ] = False,
) -> None:
    """List all keys, with roles and runs but no secrets."""
    from skerry.service.keyring import Keyring

    with exit_on_error():
        _show(Keyring.opened(keys), as_json=as_json)


def granted_in(held: Keyring, grant: Grant, region: str) -> Grant:
    """Return the grant, placed in a region if one is named; ConfigError if its role cannot be."""
    from skerry.errors import ConfigError

    made_elsewhere = grant.role in {Role.REGION, Role.CACHE}
    if made_elsewhere or (region and grant.role is not Role.LEARNER):
        msg = f"A key of role {grant.role} is not made here: " + (
            "`skerry region init` makes it." if made_elsewhere else "regions have learners only."
        )
        raise ConfigError(msg, path="role")
    if not region:
        return grant
    there = held.region_of(region)
    return replace(grant, run=there.run, shards=there.shards, region=region)


def _changing(keys: Path) -> AbstractContextManager[Keyring]:
    from skerry.service.keyring import changing

    return changing(keys)


def _show(held: Keyring, *, as_json: bool = False) -> None:
    rows = [
        (grant.name, grant.role.value, grant.run, key, _expires(grant))
        for key, grant in held.grants.items()
    ]
    if as_json:
        given = [grant.publishes() for grant in held.grants.values()]
        columns = ("name", "role", "run", "key", "expires", "publishes")
        lines = [
            dict(zip(columns, (*row, p), strict=True)) for row, p in zip(rows, given, strict=True)
        ]
        print(json.dumps(lines, indent=1))
        return
    for name, role, run, key, expires in rows:
        print(f"{name:<24} {role:<16} {run:<16} {key} {expires}".rstrip())


def _say_new(held: Keyring, name: str) -> None:
    """Print which secret to copy; a region's is in the link that its broker reads."""
    from skerry.service.keyring import LINK, LINK_CREDENTIALS

    path, when = held.seed(name), "at the next login"
    if any(grant.role is Role.REGION and grant.name == name for grant in held.grants.values()):
        path = held.region(name) / (LINK_CREDENTIALS if held.signer else LINK)
        when = when if held.signer else "once its broker is started again"
    print(f"Replace the old secret by {path}: it is read {when}.")


def _expires(grant: Grant) -> str:
    """Return when a key expires, '' for never."""
    return datetime.fromtimestamp(grant.until, UTC).isoformat() if grant.until else ""


def _reload(held: Keyring, pid_file: Path | None, region: str = "") -> None:
    """Have the broker read its keys again, or say how; the broker of a ``region`` must, too."""
    from skerry.service.keyring import ACCOUNTS, reload

    accounts = held.folder / ACCOUNTS
    if region:
        print(f"The broker of region {region} must read {held.region(region) / ACCOUNTS}, too.")
    if pid_file is None:
        print(f"The broker does not know yet: have it read {accounts} again, by")
        print("`nats-server --signal reload` or SIGHUP.")
        return
    reload(pid_file)
    print(f"The broker reads its configuration again. If that includes a copy of {accounts},")
    print("replace the copy, and have it reload once more: until then nothing has changed for it.")
