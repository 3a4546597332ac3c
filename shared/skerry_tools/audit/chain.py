"""The chain of a fragment's commit records: each names the digest of the one before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from skerry.protocol.messages import begins_history
from skerry_tools.audit.violations import Violation, What

if TYPE_CHECKING:
    from skerry.protocol.messages import Commit


class _Link(NamedTuple):
    """The newest record of a fragment: its version, and the digest of its bytes."""

    version: int
    digest: int


@dataclass(slots=True)
class Chain:
    """Checks the records of all fragments in ledger order.

    A record that is changed after the next one was written no longer has the digest that the next
    one names. The newest has none after it: it is compared with its manifest, byte for byte. Where
    a version is missing, that alone is a violation.
    """

    _newest: dict[int, _Link] = field(default_factory=dict[int, _Link])

    def commit(self, commit: Commit, payload: bytes, sequence: int) -> list[Violation]:
        """Take the next record of the ledger, and return what is wrong with its link."""
        before = self._newest.get(commit.fragment)
        digest = xxhash.xxh3_64_intdigest(payload)
        self._newest[commit.fragment] = _Link(commit.version, digest)
        if before is None:
            first = commit.version == 1 or begins_history(commit)
            broken = commit.previous != 0 and first
            what = "the first of its fragment, names a record before it"
        else:
            broken = commit.previous != before.digest and commit.version == before.version + 1
            what = f"does not follow the record of version {before.version} that the ledger holds"
        if not broken:
            return []
        text = (
            f"Fragment {commit.fragment}, version {commit.version}: its record {what}"
            f" ({commit.previous:016x}): one of the two was changed after it was written."
        )
        return [Violation(What.CHAIN, text, commit.fragment, commit.version, sequence=sequence)]
