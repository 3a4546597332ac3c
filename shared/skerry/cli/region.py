"""``skerry region``: give a region a broker of its own, beside its learners."""

from __future__ import annotations

import asyncio
import shlex
from typing import Annotated

import typer

from skerry.cli.keys import KEYS, Folder, Shards
from skerry.protocol.roles import Grant, Role
from skerry.service.entry import Nats, Run, Sets, application, exit_on_error, settings_from

Region = Annotated[str, typer.Argument(help="Name of the region.", metavar="NAME")]

app = application(bare_shows_help=True)


@app.command()
def init(
    name: Region,
    *,
    hub: Annotated[
        str,
        typer.Option(help="The hub's leaf node addresses: tls://host:7422,...", metavar="URLS"),
    ],
    learner: Annotated[
        list[str] | None, typer.Option(help="Also make a key for a learner there.", metavar="NAME")
    ] = None,
    ca: Annotated[
        str, typer.Option(help="The hub's CA file, by its path over there.", metavar="FILE")
    ] = "",
    run: Run = "main",
    shards: Shards = None,
    keys: Folder = KEYS,
) -> None:
    """Make the keys of a region, and print the configuration of its broker."""
    from skerry.service.accounts import shards_of
    from skerry.service.keyring import ACCOUNTS, changing
    from skerry.service.region import CONFIG, begin_region, cache_of

    with exit_on_error(), changing(keys) as held:
        region = Grant(Role.REGION, name, run, shards or shards_of(run, held.grants.values()))
        folder = begin_region(held, region, learner or [], hub, ca)
        print((folder / CONFIG).read_text("utf-8"))
        again = "again" if held.signer else "again, twice: a new account needs two reloads"
        print(f"# 1. Have the hub read {keys / ACCOUNTS} {again}.")
        print(f"# 2. Copy the folder {folder}, which holds a secret, to the region's broker, and")
        print(f"#    start it there: nats-server -c {CONFIG}")
        given = f"--keys {shlex.quote(str(keys))} --nats nats://ITS-HOST"
        print(f"# 3. Make its cache: skerry region cache {name} {given}")
        print(f"#    (with the key {held.seed(cache_of(name))}).")


@app.command()
def cache(
    name: Region,
    *,
    nats: Nats = None,
    set_: Sets = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="Keep all that a run needs to go on without its hub.")
    ] = False,
    keys: Folder = KEYS,
) -> None:
    """Make the cache of a region's broker, or make it again."""
    from skerry.service.keyring import Keyring
    from skerry.service.region import cache_of, make_cache

    with exit_on_error():
        held = Keyring.opened(keys)
        region, seed = held.region_of(name), held.seed(cache_of(name))
        local = settings_from(nats, None, [f"nats.credentials={seed}", *(set_ or [])]).local
        asyncio.run(make_cache(local.nats, region, standby=standby))
        what = "all of" if standby else "what learners all read of"
        print(f"The broker of region {name} keeps {what} run {region.run}.")
