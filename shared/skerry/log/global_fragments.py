"""Reading the global fragments that learners start from: by deltas, or a keyframe where needed.

A reader keeps each fragment as it was read last, in the run's global scheme, and adds the deltas
since (``skerry.algorithm.closed_loop``). The result must have the digest that was committed; if it
has not, the reader begins again with the keyframe.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import structlog

from skerry.algorithm import closed_loop
from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.schemes import CHUNK_BYTES, scheme_of
from skerry.errors import Corrupt, Diverged, Overtaken
from skerry.log.client import together
from skerry.log.state import (
    NO_METERS,
    Meters,
    OwnBlocks,
    PushedChunks,
    read_manifest,
    read_part,
)
from skerry.log.streams import AHEAD_BYTES, vectors_ahead
from skerry.protocol.chunks import VectorHash, vector_digest
from skerry.protocol.parts import DELTA, KEYFRAME, path
from skerry.tasks import now_s

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Fragment, Plan
    from skerry.algorithm.planes import Planes
    from skerry.log.base import Bus
    from skerry.protocol.messages import Manifest, Part

    Vector = NDArray[np.float32]

log = structlog.get_logger()


class Held(NamedTuple):
    """A fragment as it was read last: its planes in ``scheme``, and the digest of that version.

    ``checked`` is the newest version that was compared with its digest.
    """

    version: int
    digest: int
    scheme: str
    planes: Planes
    checked: int = 0


OVERTAKEN_ATTEMPTS = 50
LEAST_BYTES, UNDERWAY_S = 1024**2, 2.0


@dataclass(slots=True)
class Underway:
    """Bounds the bytes of small parts that are read at once to what the link brings in UNDERWAY_S.

    If more were asked for, a slow link would bring none in time, and each would be asked for again.
    """

    most: float = LEAST_BYTES
    _bytes: int = 0
    _freed: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def room(self, size: int) -> AsyncGenerator[None]:
        """Wait until there is room to read ``size`` bytes, which happens within the context."""
        while self._bytes and self._bytes + size > self.most:
            self._freed.clear()
            await self._freed.wait()
        self._bytes += size
        coming, began_s = self._bytes, now_s()
        try:
            yield
        finally:
            self._bytes -= size
            self._freed.set()
        bytes_s = coming / max(1e-3, now_s() - began_s)
        self.most = max(LEAST_BYTES, min(AHEAD_BYTES, UNDERWAY_S * bytes_s))


@dataclass(slots=True)
class GlobalReader:
    """Reads the global fragments of one run, each as often as it is committed.

    ``own`` returns the blocks of a fragment that are wanted; None: all. The rest of a vector is
    undefined then, and the digest of the whole is not compared. ``chunk_bytes`` are the run's.
    ``mismatches`` counts reads that did not give what was committed; after one of them the keyframe
    is read. ``pushed`` holds chunks that have come without being asked for.
    """

    bus: Bus
    run: str
    plan: Plan
    own: Callable[[int], Sequence[range]] | None = None
    chunk_bytes: int = CHUNK_BYTES
    held: dict[int, Held] = field(default_factory=dict[int, Held])
    mismatches: int = 0
    pushed: PushedChunks = field(default_factory=PushedChunks)
    _underway: Underway = field(default_factory=Underway)
    _turns: dict[int, asyncio.Lock] = field(default_factory=dict[int, asyncio.Lock])

    async def read(self, manifest: Manifest, meters: Meters = NO_METERS) -> Vector:
        """Return the global fragment of a manifest, f32 (padded_size,).

        One read of a fragment waits for another: both would change what is held. Raises as
        ``read_part``.
        """
        fragment = manifest.commit.fragment
        async with self._turns.setdefault(fragment, asyncio.Lock()):
            held = self.held.get(fragment)
            if held is not None and self.own is not None and not _is_named(held, manifest):
                held = None
            while True:
                try:
                    return await self._follow(manifest, held, meters)
                except Corrupt as error:
                    self.held.pop(fragment, None)
                    self.mismatches += 1
                    about = {"fragment": fragment, "version": manifest.commit.version}
                    version = held.version if held else 0
                    log.warning("global_fragment_differs", **about, held=version, cause=str(error))
                    if held is None:
                        raise
                    held = None

    async def hold(self, manifest: Manifest, vector: Vector) -> None:
        """Hold a vector f32 (padded_size,) if it is a manifest's keyframe: then none is read."""
        fragment = self.plan.fragments[manifest.commit.fragment]
        part = next((part for part in manifest.parts if part.name == KEYFRAME), None)
        if part is None:
            return
        _check(part, fragment)
        with suppress(Diverged):  # not finite, so no parameters that were committed
            rules = part.scheme, "none", None
            made = await asyncio.to_thread(closed_loop.follow, *rules, vector, VectorHash)
            if made.digest == part.digest:
                held = Held(part.version, part.digest, part.scheme, made.held, part.version)
                self.held[fragment.index] = held
            else:
                about = {"fragment": fragment.index, "version": part.version}
                log.info("initial_parameters_differ", **about)

    async def latest(self, fragment: int) -> tuple[Manifest, Vector] | None:
        """Return a fragment's newest manifest and its global fragment, f32 (padded_size,).

        Reads the manifest again when a commit overtakes it; None before the first commit.
        """
        for _ in range(OVERTAKEN_ATTEMPTS):
            manifest = await read_manifest(self.bus, self.run, self.plan, fragment)
            if manifest is None:
                return None
            try:
                return manifest, await self.read(manifest)
            except Overtaken:
                continue
        msg = f"Fragment {fragment} is committed faster than this link can read it."
        raise Overtaken(msg)

    async def _part(
        self,
        manifest: Manifest,
        part: Part,
        own: OwnBlocks | None,
        meters: Meters,
        *,
        waits: bool,
    ) -> Vector:
        """Read a part; with ``waits`` once the link has room for it."""
        async with AsyncExitStack() as stack:
            if waits:
                size = sum(chunk.size for chunk in part.chunks)
                await stack.enter_async_context(self._underway.room(size))
            where = self.bus, self.run, self.plan
            return await read_part(
                *where, manifest, part, own=own, pushed=self.pushed, meters=meters
            )

    async def _follow(self, manifest: Manifest, held: Held | None, meters: Meters) -> Vector:
        """Apply the parts that lead to the manifest's version, and hold each version on the way.

        Several small parts are read at once: otherwise each takes a round trip to the broker.
        """
        commit, index = manifest.commit, manifest.commit.fragment
        own = OwnBlocks(self.own(index), self.chunk_bytes) if self.own else None
        vector: Vector | None = None
        digest: int | None = None
        parts = path(manifest, held.version if held else None)
        small = vectors_ahead(self.plan.fragments[index].padded_size) > 0
        waits = small and [part.name for part in parts] != [DELTA]  # in step: one delta, no wait
        ahead = max(1, vectors_ahead(self.plan.parameters))  # all fragments may be read together
        for first in range(0, len(parts), ahead):
            some = parts[first : first + ahead]
            for part in some:
                _check(part, self.plan.fragments[index])
            reads = (self._part(manifest, part, own, meters, waits=waits) for part in some)
            for part, read in zip(some, await together(reads), strict=True):
                vector = read
                self.held.pop(index, None)  # cancelled half way, it would be neither version
                after, digest = await asyncio.to_thread(_apply, part, vector, held, own)
                held = self.held[index] = after
        assert held is not None
        if vector is None:  # nothing has changed
            vector = await asyncio.to_thread(cpu().dequantise, held.scheme, held.planes)
        same = held.digest == commit.params_digest
        if own is None and held.version > held.checked:
            if digest is None:
                digest = await asyncio.to_thread(vector_digest, vector)
            same = same and digest == commit.params_digest
        if not same:
            msg = f"What deltas make of fragment {index} is not its version {commit.version}."
            raise Corrupt(msg)
        self.held[index] = held._replace(checked=held.version)
        return vector


def _is_named(held: Held, manifest: Manifest) -> bool:
    """Return True if a manifest names the version that is held, and so is of the same history.

    A reader of some blocks of a fragment cannot compare the digest of the whole afterwards.
    """
    return any(
        (part.version, part.digest) == (held.version, held.digest)
        for part in manifest.parts
        if part.name in {DELTA, KEYFRAME}
    )


def _check(part: Part, fragment: Fragment) -> None:
    """Raise Corrupt for a part that is no global fragment, or no change of one."""
    scheme = scheme_of(part.scheme)
    fits = scheme.for_global if part.name == KEYFRAME else scheme.for_delta
    if not fits or part.blocks * BLOCK != fragment.padded_size:
        msg = (
            f"A {part.name} of {part.blocks} blocks in {part.scheme} cannot be of fragment"
            f" {fragment.index}."
        )
        raise Corrupt(msg)


def _apply(
    part: Part, vector: Vector, held: Held | None, own: OwnBlocks | None
) -> tuple[Held, int]:
    """Return what is held after a part, and the digest of the global fragment.

    The decoded ``vector`` becomes the global fragment; with ``own`` its digest means nothing.
    """
    ranges = own.ranges if own else None
    try:
        if part.name == KEYFRAME:
            planes = closed_loop.begin(part.scheme, vector, ranges)
            held = Held(part.version, part.digest, part.scheme, planes, checked=part.version)
            return held, part.digest
        if held is None:
            msg = f"A delta to version {part.version} came before what it changes."
            raise Corrupt(msg)
        closed_loop.advance(held.scheme, held.planes, vector, ranges, found := VectorHash())
    except Diverged as error:
        msg = f"A {part.name} makes a version {part.version} that is not finite."
        raise Corrupt(msg) from error
    return held._replace(version=part.version, digest=part.digest), found.digest()
