"""What a syncer computes for one commit, stage by stage: ``python tests/bench/bench_commit.py``.

Four int4 contributions to one fragment, as messages, become the messages of a delta. Each stage is
in CPU seconds for 1 B parameters, beside its limit: zstd alone over the same bytes, or a memcpy of
as many bytes as the stage reads and writes. What a broker's client does is bench_exchange's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import xxhash
from harness import Case, Goal, compare, memcpy, one_core, options, write

from skerry.algorithm import closed_loop
from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.merge import slice_norms
from skerry.algorithm.outer import make_outer, merge_and_apply
from skerry.algorithm.planes import Planes
from skerry.protocol.chunks import PlaneAssembler, VectorHash, seal_chunk, unseal, vector_digest
from skerry.protocol.codec import pack
from skerry.protocol.containment import ContainmentRules, containment_rules, examine
from skerry.protocol.contribution import Contribution
from skerry.protocol.lossless import Packing, compress, decompress
from skerry.protocol.messages import ContributionHeader
from skerry.settings.models import ContainConfig, SyncConfig
from tests.support.builders import header

RUN = "commit"
LEARNERS = 4
SLICES = 8
GOAL_S = 6.0
CHUNK_BYTES = SyncConfig().chunk_bytes


class Stage(NamedTuple):
    """A stage, and what bounds it, in CPU seconds for 1 B parameters."""

    stage: str
    took_s: float
    limit_s: float
    limit: str


class Commit:
    """A fragment of ``size`` parameters, and what its learners sent towards version 3."""

    def __init__(self, size: int) -> None:
        self.plan = plan([LeafSpec(f"w{i}", (size // SLICES,)) for i in range(SLICES)], 1)
        (self.fragment,) = self.plan.fragments
        rng = np.random.default_rng(0)
        self.master = rng.standard_normal(self.fragment.padded_size, np.float32)
        self.master *= np.float32(0.02)
        self.held = closed_loop.begin("bf16", self.master)
        self.outer = make_outer("direct", lr=None, momentum=None, h_steps=24)
        self.spare = (np.ones_like(self.master),)
        self.rules: ContainmentRules = containment_rules(ContainConfig())
        self.sent = [self._sent(f"l{i}", rng) for i in range(LEARNERS)]
        self.waiting = [self._received(messages) for messages in self.sent]
        self.stepped = self.merge().copy()
        self.spare = (np.ones_like(self.master),)
        self.delta = self.follow().delta
        assert self.delta is not None

    def _sent(self, name: str, rng: np.random.Generator) -> list[bytes]:
        x = rng.standard_normal(self.fragment.padded_size, np.float32) * np.float32(1e-4)
        planes = cpu().quantise("int4", x)
        norms = slice_norms(self.fragment, cpu().dequantise("int4", planes, x))
        said = header(1, name, fragment=0, base_version=2, norms=norms)
        return self._sealed(planes, "int4", name, said)

    def _sealed(
        self, planes: Planes, scheme: str, sender: str, said: ContributionHeader | None = None
    ) -> list[bytes]:
        seal = partial(seal_chunk, run=RUN, plan=self.plan, fragment=0, version=2)
        chunks = pack(scheme, planes, CHUNK_BYTES)
        return [seal(c, sender=sender, incarnation=1, contribution=said) for c in chunks]

    def _received(self, messages: Sequence[bytes]) -> Contribution:
        assembler, said = PlaneAssembler("int4", self.fragment.blocks), None
        for message in messages:
            chunk, packed = unseal(message, run=RUN, plan=self.plan)
            said = said or chunk.contribution
            assembler.add(chunk, packed)
        assert said is not None
        return Contribution(said, "int4", assembler.planes, 1, 2)

    def decode(self) -> None:
        for messages in self.sent:
            self._received(messages)

    def examine(self) -> None:
        scale, moved = self.master, None
        found = examine(self.waiting, self.fragment, 3, self.rules, scale=scale, moved=moved)
        assert all(one.refusal is None for one in found.values())

    def merge(self) -> np.ndarray:
        inputs = [c.gradient for c in self.waiting]
        weights, averaged = [1 / LEARNERS] * LEARNERS, (False,) * SLICES
        given = inputs, weights, "rda", self.fragment, averaged, self.spare
        return merge_and_apply(self.outer, self.master, None, *given)[0]

    def hash(self) -> None:
        vector_digest(self.stepped)

    def follow(self) -> closed_loop.Version:
        return closed_loop.follow("bf16", "auto", self.held, self.stepped, VectorHash)

    def encode(self) -> None:
        assert self.delta is not None
        self._sealed(self.delta.planes, self.delta.scheme, "s")

    def codes(self) -> Iterator[np.ndarray]:
        """Yield the codes of each chunk of one contribution."""
        planes = self.waiting[0].planes
        for chunk in pack("int4", planes, CHUNK_BYTES):
            yield planes.codes[chunk.first_block : chunk.first_block + chunk.blocks]


def zstd(codes: Sequence[np.ndarray]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return zstd over some codes by itself, unpacking and packing."""
    packed = [memoryview(compress(part, Packing.ENTROPY)) for part in codes]
    out = np.empty_like(codes[0])

    def unpack() -> None:
        for data, part in zip(packed, codes, strict=True):
            decompress(data, Packing.ENTROPY, out[: len(part)])

    def repack() -> None:
        for part in codes:
            compress(part, Packing.ENTROPY)

    return unpack, repack


def stages(commit: Commit) -> list[tuple[Case, float, str]]:
    """Return each stage with the times that its limit is of the case named last."""
    size = 4 * commit.master.size
    made = [
        (commit.decode, "decode, 4 contributions", LEARNERS, "zstd, unpack"),
        (commit.examine, "examine, 4 contributions", LEARNERS, "xxh3"),
        (commit.merge, "merge and step", (LEARNERS * 0.5 + 8) / 8, "memcpy"),
        (commit.hash, "hash the master", 4 / 8, "memcpy"),
        (commit.follow, "delta: difference, codes, digest", (4 + 2 + 2 + 0.5) / 8, "memcpy"),
        (commit.encode, "pack the delta", 1.0, "zstd, pack"),
    ]
    return [(Case(name, run, size), times, of) for run, name, times, of in made]


def main() -> None:
    """Run the bench on one core and print it."""
    chosen = options(__doc__ or "")
    one_core()
    commit = Commit(chosen.mib * 1024 * 256)
    size, codes = 4 * commit.master.size, list(commit.codes())
    unpack, repack = zstd(codes)
    whole = commit.waiting[0].planes.codes
    limits = [
        memcpy(size),
        Case("zstd, unpack", unpack, size),
        Case("zstd, pack", repack, size),
        Case("xxh3", partial(xxhash.xxh3_64_intdigest, whole.data), size),
    ]
    made = stages(commit)
    results = compare([*limits, *(case for case, *_ in made)], chosen.rounds)
    spent = {result.name: 4 / result.gb_s for result in results}
    print(f"commit: {commit.master.size:,} parameters, {LEARNERS} learners, int4")
    print(f"  {'CPU s for 1 B parameters, one core':<40} {'took':>6} {'limit':>6}")
    rows = [Stage(c.name, spent[c.name], times * spent[of], of) for c, times, of in made]
    for row in rows:
        print(f"  {row.stage:<40} {row.took_s:6.2f} {row.limit_s:6.2f}  {row.limit}")
    total = sum(row.took_s for row in rows)
    print(f"  {'all':<40} {total:6.2f} {sum(row.limit_s for row in rows):6.2f}")
    goal = Goal("commit: CPU s for 1 B parameters", GOAL_S, total, "s", at_most=True)
    write("commit", [row._asdict() for row in rows], [goal], chosen.json)


if __name__ == "__main__":
    main()
