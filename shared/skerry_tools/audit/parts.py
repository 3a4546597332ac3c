"""Which vectors a fragment's newest version consists of, and that they are those of its commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from skerry.algorithm.fragments import BLOCK
from skerry.log.state import MASTER, PARAMS
from skerry_tools.audit.branch import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.algorithm.fragments import Fragment, Plan
    from skerry.protocol.messages import Manifest
    from skerry.settings.models import RunConfig

OUTER = "outer."


def wanted(config: RunConfig, plan: Plan, fragment: Fragment) -> dict[str, int]:
    """Return by name how many blocks each part must have that the run's settings need.

    Of an outer optimizer that a person's own function builds only a replay can tell: nobody's code
    is run for a mere look.
    """
    whole = fragment.padded_size // BLOCK
    parts: dict[str, int] = {PARAMS: whole, MASTER: whole}
    if ":" in config.outer.preset:
        return parts
    outer = Policy().make_outer(config, plan)
    leaves = outer.leaves(outer.init(np.zeros(fragment.padded_size, np.float32)))
    return parts | {OUTER + name: vector.size // BLOCK for name, vector in leaves.items()}


def contradiction(manifest: Manifest, blocks: Mapping[str, int]) -> str:
    """Return how a manifest's parts are not what its commit and the settings say; empty: they are.

    Without this the ledger could tell of any digest: bytes are compared with their part's alone.
    """
    commit, held = manifest.commit, {part.name: part for part in manifest.parts}
    if len(held) != len(manifest.parts):
        return "the manifest names a part twice"
    if missing := sorted(blocks.keys() - held.keys()):
        return f"the manifest lacks its part {missing[0]!r}"
    for name, number in blocks.items():
        if held[name].blocks != number:
            return f"its part {name!r} has {held[name].blocks} blocks and not {number}"
    told = {PARAMS: commit.params_digest, MASTER: commit.master_digest}
    for name, digest in told.items():
        if held[name].digest != digest:
            return f"its part {name!r} is another vector than the commit tells of"
    return ""
