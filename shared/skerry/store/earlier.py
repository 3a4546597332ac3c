"""Checkpoints of Skerry 0.1, formats 1 and 2: what their commits say, in the terms of today."""

from __future__ import annotations

import re
from typing import Any

from skerry.protocol.messages import CloseReason, CommitOrigin, RefusalCause

FORMATS = (1, 2)
"""Format 1 had one file of outer state for all fragments, format 2 has one for each."""
RESTORED = re.compile(r"restored from (.*?)(?: at version (\d+))?", re.DOTALL)
"""How 0.1 said that a checkpoint wrote a commit; with a version, over a past in the same log."""


def upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an earlier manifest as those of the newest format."""
    state = [{**saved, "commit": _commit(saved["commit"])} for saved in values["state"]]
    return {**values, "state": state}


def _commit(values: dict[str, Any]) -> dict[str, Any]:
    """Return a commit whose reason was a sentence, and whose refusals had words for causes.

    A word that this release does not know is left out: nothing that goes on from a checkpoint
    depends on it.
    """
    known = [refused for refused in values["refused"] if refused["cause"] in set(RefusalCause)]
    return {**values, "refused": known, **_origin(values["reason"])}


def _origin(reason: str) -> dict[str, Any]:
    if reason == "genesis":
        return {"origin": CommitOrigin.GENESIS, "reason": None}
    if (found := RESTORED.fullmatch(reason)) is not None:
        source, version = found.groups()
        origin = CommitOrigin.REPLACED if version else CommitOrigin.RESTORED
        restored = {"source": source, "source_version": int(version or 0)}
        return {"origin": origin, "reason": None, **restored}
    known = CloseReason(reason) if reason in set(CloseReason) else None
    return {"origin": CommitOrigin.ROUND, "reason": known}
