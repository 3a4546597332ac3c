"""The global state against the ledger: the newest manifests, and every byte that they name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.errors import Overtaken, StateLost, WireError
from skerry.log.state import read_manifest, read_part
from skerry.protocol.messages import Manifest
from skerry.protocol.records import decode, encode
from skerry_tools.audit import parts
from skerry_tools.audit.violations import Violation, What

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.algorithm.fragments import Fragment
    from skerry_tools.audit.log import Log

ATTEMPTS = 50


@dataclass(slots=True)
class Ends:
    """The manifests as they were before the ledger was read, and what the ledger told of them.

    A run may go on meanwhile: a manifest is compared with the commit of its own version, wherever
    in the ledger that lies.
    """

    before: dict[int, Manifest]
    unreadable: list[Violation]
    told: dict[int, bytes] = field(default_factory=dict[int, bytes])

    @classmethod
    async def read(cls, log: Log) -> Ends:
        """Read every fragment's manifest."""
        found, bad = dict[int, Manifest](), list[Violation]()
        for record in await log.bus.last_each(log.subjects.manifests()):
            fragment = int(record.subject.split(".")[-2])
            try:
                manifest = decode(
                    Manifest, record.payload, run=log.run, plan_digest=log.plan.digest
                )
            except WireError as error:
                bad.append(_state(fragment, -1, f"the manifest cannot be read ({error})"))
            else:
                found[fragment] = manifest
        return cls(found, bad)

    def commit(self, fragment: int, version: int, payload: bytes) -> None:
        """Take a record of the ledger."""
        held = self.before.get(fragment)
        if held is not None and held.commit.version == version:
            self.told[fragment] = payload

    def compare(self, versions: dict[int, int]) -> tuple[list[Violation], list[str]]:
        """Compare with a ledger that ends at ``versions``: what is wrong, and what will mend."""
        wrong, notes = list(self.unreadable), list[str]()
        for fragment, manifest in sorted(self.before.items()):
            version, end = manifest.commit.version, versions.get(fragment, 0)
            if fragment in self.told:
                if self.told[fragment] != encode(manifest.commit):
                    text = f"the ledger tells of version {version} otherwise than the manifest"
                    wrong.append(_state(fragment, version, text))
            elif version == end + 1:
                notes.append(
                    f"Fragment {fragment}, version {version} is committed and not in the ledger"
                    " yet: the next syncer appends it."
                )
            else:
                text = f"the manifest is of version {version}, the ledger ends at {end}"
                wrong.append(_state(fragment, version, text))
        return wrong, notes


async def check_parts(
    log: Log, versions: dict[int, int], *, on_bytes: Callable[[int], None] | None = None
) -> list[Violation]:
    """Read all of the global state, part by part; it must be no older than ``versions``.

    Its parts must be those that the run's settings need, and the vectors that its commits tell of.
    """
    found: list[Violation] = []
    for fragment in log.plan.fragments:
        wanted = versions.get(fragment.index, 0)
        if problem := await _check_fragment(log, fragment, wanted, on_bytes):
            found.append(problem)
    return found


async def _check_fragment(
    log: Log, fragment: Fragment, wanted: int, on_bytes: Callable[[int], None] | None
) -> Violation | None:
    index, seen, held = fragment.index, -1, 0
    blocks = parts.wanted(log.config, log.plan, fragment)
    for _ in range(ATTEMPTS):
        try:
            manifest = await read_manifest(log.bus, log.run, log.plan, index)
            held = manifest.commit.version if manifest else 0
            if held < wanted:
                there = f"is at version {held}" if held else "is not there at all"
                return _state(index, wanted, f"the state {there}, the ledger at {wanted}")
            if manifest is None:
                return None
            gone = "a chunk that its manifest names is gone" if held == seen else ""
            if text := gone or parts.contradiction(manifest, blocks):
                return _state(index, held, text)
            await _read_parts(log, manifest, on_bytes)
        except Overtaken:
            seen = held
        except StateLost as error:
            return Violation(What.STATE, str(error), index, held)
        except WireError as error:
            return _state(index, wanted, f"the state cannot be read ({error})")
        else:
            break
    return None


async def _read_parts(log: Log, manifest: Manifest, on_bytes: Callable[[int], None] | None) -> None:
    for part in manifest.parts:
        await read_part(log.bus, log.run, log.plan, manifest, part.name, on_bytes=on_bytes)


def _state(fragment: int, version: int, text: str) -> Violation:
    at = f", version {version}" if version >= 0 else ""
    sentence = (
        f"Fragment {fragment}{at}: {text}: restore the run from a checkpoint with"
        " `skerry checkpoints restore`."
    )
    return Violation(What.STATE, sentence, fragment, version)
