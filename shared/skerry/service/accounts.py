"""The broker's accounts for a set of keys: what each may do, at the hub and in its region."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skerry.protocol.roles import (
    API,
    HUB_API,
    Grant,
    Role,
    delivers_to,
    services_for_edge,
    through_cache,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from skerry.service.signing import Signer

CORE, EDGE, CACHE = "CORE", "EDGE", Role.CACHE.account
LOGIN_S = 10.0
"""Time for a client to log in. The server's own 2 s are too short for one on a busy machine."""


def home_of(grant: Grant) -> str:
    """Return the account that a key belongs to, as REGION/ACCOUNT at a region's own broker."""
    if grant.role is Role.REGION:
        return account_of(grant.name)
    return f"{grant.region}/{grant.role.account}" if grant.region else grant.role.account


def included(grants: Mapping[str, Grant], signer: Signer | None, region: str = "") -> str:
    """Return what the hub's configuration includes, or a region's, in the server's own language.

    JSON is a part of that language.
    """
    accounts = accounts_in(region, grants) if region else accounts_of(grants)
    settings: dict[str, Any] = {"accounts": accounts}
    if signer is not None:
        settings = signer.accounts(region and f"{region}/", accounts, grants)
    settings["authorization"] = {"timeout": LOGIN_S}
    return "".join(f'"{key}": {json.dumps(value, indent=1)}\n' for key, value in settings.items())


def shards_of(run: str, grants: Iterable[Grant]) -> int:
    """Return the number of shards that a run's keys are for; 1 if the run has no keys."""
    return next((grant.shards for grant in grants if grant.run == run), 1)


def accounts_of(grants: Mapping[str, Grant]) -> dict[str, Any]:
    """Return the broker's accounts for these keys, as its configuration has them."""
    services = services_for_edge(grants.values())
    regions = {key: grant for key, grant in grants.items() if grant.role is Role.REGION}
    mirrors = dict.fromkeys(s for grant in regions.values() for s in grant.mirrors())
    exports: list[dict[str, Any]] = [
        {"service": s, "response_type": kind} for s, kind in services.items()
    ]
    exports += [{"service": subject} for subject in mirrors]
    exports += [
        {"stream": f"{delivers_to(grant.name)}.>", "accounts": [account_of(grant.name)]}
        for grant in regions.values()
    ]
    here = {key: grant for key, grant in grants.items() if not grant.region}
    edge = services_for_edge(here.values())
    return {
        CORE: {"jetstream": "enabled", "users": _users(here, CORE), "exports": exports},
        EDGE: {"users": _users(here, EDGE), "imports": [_imported(s) for s in edge]},
        **{
            account_of(grant.name): _of_region(key, grant, grants.values())
            for key, grant in regions.items()
        },
    }


def account_of(region: str) -> str:
    """Return the account at the hub that a region's broker is in."""
    return f"REGION_{region}"


def _of_region(key: str, region: Grant, grants: Iterable[Grant]) -> dict[str, Any]:
    """Return the account of a region's broker: what each of its learners may do, by name."""
    learners = (g for g in grants if g.region == region.name and g.role.account == EDGE)
    said = dict.fromkeys(subject for g in learners for subject in replace(g, region="").publishes())
    delivered = {"stream": {"account": CORE, "subject": f"{delivers_to(region.name)}.>"}}
    services = [_imported(subject) for subject in (*said, *region.mirrors())]
    # Written out, because nats-server forgets what it adds by itself when it reloads.
    mappings = {f"{HUB_API}.>": f"{API}.>"}
    return {"users": [{"nkey": key}], "imports": [*services, delivered], "mappings": mappings}


def accounts_in(region: str, grants: Mapping[str, Grant]) -> dict[str, Any]:
    """Return the accounts of a region's own broker: its link is in CORE, its learners in EDGE.

    Learners' requests to JetStream's API go to the hub. What the region keeps is in CACHE, which
    reaches over the link only what fills it: a key that makes a stream also decides what goes into
    it, and where the broker is to publish that.
    """
    here = {key: grant for key, grant in grants.items() if grant.region == region}
    services = services_for_edge(here.values())
    filling = dict.fromkeys(s for g in here.values() if g.role is Role.CACHE for s in g.fills())
    kept = dict.fromkeys(stream for grant in here.values() for stream in grant.kept())
    asked = dict.fromkeys(filling, "singleton") | {_at_hub(s): k for s, k in services.items()}
    exports = [{"service": subject, "response_type": kind} for subject, kind in asked.items()]
    delivered = f"{delivers_to(region)}.>"
    imports = [_imported(_at_hub(s)) | {"to": s} for s in services]
    imports += [
        _imported(f"{API}.DIRECT.GET.{stream}", CACHE) | {"to": through_cache(stream)}
        for stream in kept
    ]
    filled = [{"stream": {"account": CORE, "subject": delivered}}, *map(_imported, filling)]
    return {
        CORE: {"users": [], "exports": [*exports, {"stream": delivered}]},
        CACHE: {
            "jetstream": "enabled",
            "users": _users(here, CACHE),
            "exports": [{"service": f"{API}.DIRECT.GET.{stream}"} for stream in kept],
            "imports": filled,
        },
        EDGE: {"users": _users(here, EDGE), "imports": imports},
    }


def _at_hub(subject: str) -> str:
    return subject.replace(API, HUB_API, 1) if subject.startswith(API) else subject


def _imported(subject: str, account: str = CORE) -> dict[str, Any]:
    return {"service": {"account": account, "subject": subject}}


def _users(grants: Mapping[str, Grant], account: str) -> list[dict[str, Any]]:
    return [
        {
            "nkey": key,
            "permissions": {
                "publish": {"allow": list(grant.publishes())},
                "subscribe": {"allow": [f"_INBOX.{key}.>"]},
            },
        }
        for key, grant in grants.items()
        if grant.role.account == account
    ]


def services_of(run: str, shards: int = 1) -> Iterable[Grant]:
    """Return the grants that a run needs beside its learners', each under its role's name."""
    others = {Role.LEARNER, Role.FOUNDER, Role.REGION, Role.CACHE}
    return (Grant(role, role, run, shards) for role in Role if role not in others)
