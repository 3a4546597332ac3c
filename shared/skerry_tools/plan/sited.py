"""A plan's file as a simulation: its sites are the islands, its links say how long rounds take.

H, P and shards that the plan chooses are those that are simulated. An answer takes its encoding,
the site's up-link and a round trip; where learners stop for rounds, a commit counts as readable
once the slowest site has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skerry.settings.tree import Tree
from skerry_tools.plan import plan, sites
from skerry_tools.plan.measured import encode_s

if TYPE_CHECKING:
    from collections.abc import Container

    from skerry.settings.models import RunConfig
    from skerry_tools.plan.links import Link, Rounds
    from skerry_tools.plan.sites import PlanTable


@dataclass(frozen=True, slots=True)
class Seat:
    """One learner: at which site, with how many chips, and how fast; times in seconds."""

    site: str
    chips: int
    step_s: float
    upload_s: float
    tokens_per_step: float


@dataclass(frozen=True, slots=True)
class Seated:
    """The learners of a plan, the run that it means, and what a commit takes in seconds."""

    seats: tuple[Seat, ...]
    run: RunConfig
    commit_s: float
    table: PlanTable
    feasible: bool


def seated(tree: Tree, others: Container[str]) -> Seated:
    """Return the learners that a tree's plan is about; tables in ``others`` are none of it.

    Raises ConfigError for sites that make no plan.
    """
    own = Tree()
    for keys, origin in tree.origins.items():
        if keys[0] not in others:
            value: Any = tree.values
            for key in keys:
                value = value[key]
            own.put(keys, value, origin)
    request = sites.from_tree(own)
    made = plan.make(request)
    rounds = made.rounds
    chosen = {path.removeprefix("sync."): value for path, value in made.chosen.items()}
    sync = request.run.sync.model_copy(update=chosen)
    seats: list[Seat] = []
    slowest_s = 0.0
    for name, link in rounds.links.items():
        site = request.scene.sites[name]
        upload_s = _upload_s(rounds, link)
        slowest_s = max(slowest_s, rounds.round_s(link) - rounds.syncer_s - upload_s)
        tokens = plan.step_tokens(request, site)
        seats += [Seat(name, site.chips, link.step_s, upload_s, tokens)] * site.learners
    return Seated(
        tuple(seats),
        request.run.model_copy(update={"sync": sync}),
        rounds.syncer_s + (0.0 if sync.overlap_steps else slowest_s),
        request.scene.plan,
        made.feasible,
    )


def _upload_s(rounds: Rounds, link: Link) -> float:
    """Return what an answer takes from a learner's boundary to the syncer, in seconds."""
    load = rounds.load
    encoding = encode_s(load.up_scheme, rounds.burst, link.cores)
    if link.local:
        return encoding
    return encoding + link.learners * rounds.burst * load.up_bits / link.up_bits_s + link.rtt_s
