"""Ledgers without a run: a tiny model of the protocol draws histories in which all holds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from skerry.algorithm import weighting
from skerry.protocol.commit import progress_after
from skerry.protocol.contribution import ContributionRules, id_of
from skerry.protocol.messages import (
    Commit,
    CommitOrigin,
    Consumed,
    InnerState,
    LearnerProgress,
    MemberRecord,
    RefusalCause,
    Refused,
)
from skerry.protocol.shard import StalenessRule
from skerry_tools.audit.checks import Checks, Rules
from tests.support.builders import commit, member

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.protocol.contribution import Contribution
    from skerry_tools.audit.accounts import Violation

RUN = "r"
TOKENS = 16
"""Of one sequence of data."""
DISCOUNT = 0.5
RULES = Rules(2, ContributionRules(TOKENS), StalenessRule(4, DISCOUNT))

Record = MemberRecord | Commit


@dataclass(slots=True)
class Learner:
    """One learner of the model; ``sent`` is what waits, by fragment."""

    name: str
    shard: int
    incarnation: int = 0
    cursor: int = 0
    identities: dict[int, int] = field(default_factory=dict[int, int])
    origins: dict[int, int] = field(default_factory=dict[int, int])
    sent: dict[int, list[Consumed]] = field(default_factory=dict[int, list[Consumed]])
    known: int = 0


@dataclass(slots=True)
class Model:
    """Draws a run: learners that start again, late and refused contributions, two fences."""

    rng: random.Random
    fragments: int = 3
    learners: list[Learner] = field(default_factory=list[Learner])
    versions: dict[int, int] = field(default_factory=dict[int, int])
    rows: dict[int, dict[str, LearnerProgress]] = field(
        default_factory=dict[int, dict[str, LearnerProgress]]
    )
    fences: dict[int, int] = field(default_factory=dict[int, int])
    sequence: int = 0
    records: list[Record] = field(default_factory=list[Record])

    def start(self, learner: Learner) -> None:
        """Let a learner begin, again or for the first time, behind all it has offered."""
        learner.incarnation += 1
        learner.cursor = learner.known
        learner.identities.clear()
        learner.origins = dict.fromkeys(range(self.fragments), learner.cursor)
        joined = member(learner.name, learner.incarnation, run=RUN, shard=learner.shard)
        again = self.rng.choice((InnerState.WARM, InnerState.COLD))
        inner = InnerState.NEW if learner.incarnation == 1 else again
        self.records += [joined, replace(joined, cursor=learner.cursor, inner=inner)]

    def send(self, learner: Learner, fragment: int) -> None:
        """Train a few sequences and offer them."""
        learner.cursor += self.rng.randint(1, 9)
        origin = learner.origins[fragment]
        self.sequence += 1
        identity = learner.identities.get(fragment, 0) + 1
        learner.identities[fragment] = identity
        offered = Consumed(
            learner=learner.name,
            incarnation=learner.incarnation,
            identity=identity,
            sequence_first=self.sequence,
            sequence_last=self.sequence,
            base_version=self.versions[fragment],
            staleness=0,
            step=learner.cursor,
            steps=learner.cursor - origin,
            tokens=(learner.cursor - origin) * TOKENS,
            cursor_from=origin,
            cursor_to=learner.cursor,
            weight=0.0,
            loss=1.0,
        )
        learner.origins[fragment] = learner.known = learner.cursor
        learner.sent.setdefault(fragment, []).append(offered)

    def genesis(self, fragment: int) -> None:
        """Commit the first version from the first learner's offer."""
        first = self.learners[0]
        first.identities[fragment] = 1
        self.sequence += 1
        offered = Consumed(
            first.name, 1, 1, self.sequence, self.sequence, 0, 0, 0, 0, 0, 0, 0, 1.0, 0.0
        )
        self.rows[fragment] = {}
        self.versions[fragment] = 1
        self.write(fragment, (offered,), ())

    def commit(self, fragment: int) -> None:
        """Merge what waits; now and then something is refused or has to wait for a round."""
        consumed: list[Consumed] = []
        refused: list[Refused] = []
        version = self.versions[fragment]
        for learner in self.learners:
            waiting, learner.sent[fragment] = learner.sent.get(fragment, []), []
            for item in waiting:
                behind = version - item.base_version
                if behind > 4 or self.rng.random() < 0.1:
                    data = item.tokens, item.cursor_from, item.cursor_to
                    refused.append(Refused(RefusalCause.TOO_STALE, *id_of(item), *data))
                else:
                    consumed.append(replace(item, staleness=behind))
        work = [weighting.weight(c.tokens, c.steps) * DISCOUNT**c.staleness for c in consumed]
        shares = weighting.normalised(work)
        merged = tuple(replace(c, weight=w) for c, w in zip(consumed, shares, strict=True))
        self.versions[fragment] += 1
        self.write(fragment, merged, tuple(refused))

    def write(
        self,
        fragment: int,
        consumed: tuple[Consumed, ...],
        refused: tuple[Refused, ...],
    ) -> None:
        """Append a commit."""
        rows = self.rows[fragment] = progress_after(self.rows[fragment], consumed, genesis=False)
        self.records.append(
            commit(
                self.versions[fragment],
                fragment,
                run=RUN,
                fence=self.fences.setdefault(fragment % 2, 1),
                consumed=consumed,
                refused=refused,
                contrib_floor=self.sequence,
                progress=tuple(rows.values()),
            )
        )


def history(seed: int, turns: int = 60) -> list[Record]:
    """Return the ledger of a run in which every promise holds."""
    model = Model(random.Random(seed))
    model.learners = [Learner(f"l{number}", number) for number in range(3)]
    for learner in model.learners:
        model.start(learner)
    for fragment in range(model.fragments):
        model.genesis(fragment)
    for _ in range(turns):
        chance = model.rng.random()
        if chance < 0.05:
            model.start(model.rng.choice(model.learners))
        elif chance < 0.1:
            shard = model.rng.randrange(2)
            model.fences[shard] = model.fences.get(shard, 1) + 1
        for learner in model.learners:
            if model.rng.random() < 0.7:
                model.send(learner, model.rng.randrange(model.fragments))
        model.commit(model.rng.randrange(model.fragments))
    for fragment in range(model.fragments):
        model.commit(fragment)
    return model.records


def tabled(records: Sequence[Record]) -> list[Record]:
    """Return the records with the progress tables that fit what their commits consumed."""
    rows: dict[int, dict[str, LearnerProgress]] = {}
    found: list[Record] = []
    for record in records:
        if isinstance(record, Commit):
            genesis = record.origin is CommitOrigin.GENESIS
            held = rows.get(record.fragment, {})
            rows[record.fragment] = after = progress_after(held, record.consumed, genesis=genesis)
            found.append(replace(record, progress=tuple(after.values())))
        else:
            found.append(record)
    return found


def violations(
    records: Sequence[Record], rules: Rules = RULES, *, offers: Sequence[Contribution] = ()
) -> list[Violation]:
    """Return everything that is wrong with a ledger; record n was stored at nanosecond n."""
    checks = Checks(rules)
    for offer in offers:
        checks.offer(offer)
    found: list[Violation] = []
    for sequence, record in enumerate(records, 1):
        if isinstance(record, Commit):
            found += checks.commit(record, sequence, sequence)
        else:
            found += checks.member(record, sequence)
    return found + checks.finish()
