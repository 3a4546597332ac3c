"""What a run's ledger adds up to, learner by learner, for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skerry.protocol.messages import Commit
    from skerry_tools.audit.checks import Checks


@dataclass(frozen=True, slots=True)
class LearnerReport:
    """One learner over all its incarnations.

    ``tokens`` are those of the fragment that is furthest along, as in ``skerry status``;
    ``discarded`` are tokens it trained on and never offered, of the fragment with most of them.
    ``cursor`` is how far its data is counted. ``starts`` counts what became of the inner
    optimizer's state: new, warm or cold. ``refused`` counts by cause, over all fragments.
    """

    learner: str
    incarnation: int
    tokens: int
    cursor: int
    contributions: int
    discarded: int
    refused: dict[str, int]
    starts: dict[str, int]


@dataclass(slots=True)
class Tally:
    """Counts what ``Checks`` has no need to keep."""

    refused: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])

    def commit(self, commit: Commit) -> None:
        """Count a commit's refusals."""
        for item in commit.refused:
            causes = self.refused.setdefault(item.learner, {})
            causes[item.cause.value] = causes.get(item.cause.value, 0) + 1

    def learners(self, checks: Checks) -> tuple[LearnerReport, ...]:
        """Return a row for each learner that the ledger knows, by name."""
        names = {*checks.starts, *self.refused}
        return tuple(self._learner(checks, name) for name in sorted(names))

    def _learner(self, checks: Checks, name: str) -> LearnerReport:
        starts = checks.starts.get(name)
        accounts = [b.accounts[name] for b in checks.books.values() if name in b.accounts]
        return LearnerReport(
            learner=name,
            incarnation=max(0, starts.incarnation) if starts else 0,
            tokens=max((a.tokens for a in accounts), default=0),
            cursor=max((a.cursor for a in accounts), default=0),
            contributions=sum(a.contributions for a in accounts),
            discarded=max((a.discarded for a in accounts), default=0)
            * (checks.rules.sequence_tokens or 1),
            refused=self.refused.get(name, {}),
            starts=dict(starts.inner) if starts else {},
        )
