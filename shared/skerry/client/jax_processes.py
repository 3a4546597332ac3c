"""JAX parameters that several processes hold together: all repeat what the first one does.

Every process captures, quantises, sends, reads and adopts the blocks that lie on its own devices.
Programs that communicate between devices must run in the same order everywhere, so the first
process announces each before it runs it; devices are a step behind what is dispatched, so no device
waits for these messages.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # JAX's public API does not name its coordinator
from numpy.typing import NDArray

from skerry.algorithm import quantise_jax
from skerry.algorithm.fragments import BLOCK, Fragment, Plan, padded
from skerry.algorithm.planes import Planes, allocate
from skerry.algorithm.schemes import scheme_of
from skerry.client.jax_cuts import Cut, Piece
from skerry.client.jax_fragments import DeviceVector, JaxFragments
from skerry.client.meeting import Group, come, gather, meet, own
from skerry.client.peer import Deed
from skerry.client.processes import FollowingProcess, LeadProcess
from skerry.errors import Diverged
from skerry.models.mesh import in_turn
from skerry.protocol.codec import Shares
from skerry.protocol.contribution import GENESIS_SCHEME
from skerry.settings.models import SyncConfig

END_S = 20
"""Most seconds that a process waits at its end for the others."""
PATIENCE_MS = 24 * 3600 * 1000
"""Most seconds that a process waits for the first one to join."""


@dataclass(frozen=True, slots=True)
class Crew:
    """All processes of a learner, once they have found each other."""

    group: Group
    address: str
    lead: LeadProcess | None
    follower: FollowingProcess | None

    @classmethod
    def of(cls, group: Group, run: str, learner: str) -> Crew:
        """Wait until all processes have come; call it before JAX looks at its devices."""
        if group.process:
            connection, address = come(group, run, learner)
            return cls(group, address, None, FollowingProcess(connection, number=group.process))
        connections, address = gather(group, run, learner)
        return cls(group, address, LeadProcess(connections), None)

    @contextmanager
    def computing(self) -> Generator[None]:
        """Have JAX see the devices of all processes, until all of them end."""
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        preemption = "jax_enable_preemption_service"  # it takes SIGTERM for itself
        jax.config.update(preemption, False)  # noqa: FBT003 - its signature
        jax.distributed.initialize(
            self.address,
            self.group.processes,
            self.group.process,
            # JAX would ask the scheduler for what is missing: on Slurm, for one device per process.
            cluster_detection_method="deactivate",
            coordinator_bind_address=self.address if self.lead and own(self.address) else None,
            shutdown_timeout_seconds=END_S,
        )
        jax.devices()  # each waits for the devices of all
        try:
            yield
        except SystemExit as end:  # its sentence is said
            _leave(end.code)
        except BaseException:  # noqa: BLE001 - said here, for this process ends
            traceback.print_exc()
            _leave(1)
        if self.lead is None or not self.lead.abandoned:  # else none is left to wait for
            jax.distributed.shutdown()


_meetings = count()


def met(run: str, name: str | None) -> LeadProcess | FollowingProcess:
    """Meet the other processes of a learner after they have initialised JAX themselves.

    They find each other through JAX's own coordinator.
    """
    world, key = distributed.global_state, f"skerry/{next(_meetings)}"
    store: Any = world.client

    def share(text: str) -> str:
        if text:
            store.key_value_set(key, text)
            return text
        found: str = store.blocking_key_value_get(key, PATIENCE_MS)
        return found

    host = str(world.coordinator_address).rpartition(":")[0].strip("[]")
    place = jax.process_index(), jax.process_count()
    learner = name or ("" if place[0] else socket.gethostname().partition(".")[0])
    return meet(share, host, place, run, learner)


def _leave(code: object) -> None:
    """End at once: JAX would wait for the other processes, which end as well, and then abort."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def shares_of(cuts: Sequence[tuple[Piece, Cut]]) -> Shares:
    """Return the blocks of a fragment that each process holds."""
    ranges: dict[Any, list[range]] = {n: [] for n in range(jax.process_count())}
    for piece, cut in cuts:
        blocks, before = padded(piece.size) // BLOCK, piece.offset // BLOCK
        places: Mapping[Any, Any] = cut.flat.devices_indices_map((cut.length,))
        for device, index in places.items():
            start, stop, _ = index[0].indices(cut.length)
            mine = range(before + start // BLOCK, before + min(stop // BLOCK, blocks))
            if mine:
                ranges[device.process_index].append(mine)
    return Shares(tuple(map(_joined, ranges.values())), jax.process_index())


def _joined(ranges: list[range]) -> tuple[range, ...]:
    """Return ranges in order, neighbours as one."""
    found: list[range] = []
    for one in sorted(ranges, key=lambda blocks: blocks.start):
        if found and found[-1].stop == one.start:
            found[-1] = range(found[-1].start, one.stop)
        else:
            found.append(one)
    return tuple(found)


class SharedGradient:
    """A captured fragment, quantised where it lies as soon as all processes have captured it.

    With error feedback each quantises its own blocks on the host. ``number`` counts captures; it is
    the same in all processes.
    """

    def __init__(self, vector: DeviceVector, scheme: str, shares: Shares, number: int) -> None:
        self.shares = shares
        self.number = number
        self.scheme = scheme
        self._fragment = vector.fragment
        self._pieces = [piece for piece, _ in vector.pieces]
        feedback = scheme_of(scheme).feedback
        self._values = [values for _, values in vector.pieces] if feedback else []
        self._made = [
            in_turn(quantise_jax.encode(scheme, tuple(p.size for p in piece.slices), values))
            for piece, values in (() if feedback else vector.pieces)
        ]
        self._fetched: tuple[Planes, tuple[float, ...]] | None = None

    def __array__(self) -> NDArray[np.float32]:
        msg = "no process holds all of this gradient"
        raise TypeError(msg)

    def own(self) -> NDArray[np.float32]:
        """Return this process's blocks, one after the other."""
        whole = np.zeros(self._fragment.padded_size, np.float32)
        for piece, values in zip(self._pieces, self._values, strict=True):
            for shard in values.addressable_shards:
                start, _, _ = shard.index[0].indices(values.shape[0])
                held = np.asarray(shard.data)[: max(0, padded(piece.size) - start)]
                whole[piece.offset + start : piece.offset + start + len(held)] = held
        blocks = [n for ranges in self.shares.ranges[self.shares.mine] for n in ranges]
        return whole.reshape(-1, BLOCK)[blocks].reshape(-1)

    def release(self) -> None:
        """Free the values on the devices, once they are quantised."""
        self._values.clear()

    def quantise(self, scheme: str, fragment: Fragment) -> tuple[Planes, tuple[float, ...]]:
        """Fetch this process's codes and scales, each in its place, and the norms of all.

        They are then on the host alone. Raises Diverged if anything is not finite, on any device.
        """
        held_here = self._made  # two threads may ask at once
        if self._fetched is not None:
            return self._fetched
        planes, norms = allocate(scheme, fragment.blocks), list[float]()
        for piece, (made, measured) in zip(self._pieces, held_here, strict=True):
            if not made.finite:
                msg = f"The outer gradient of fragment {fragment.index} is not finite: not sent."
                raise Diverged(msg)
            before, blocks = piece.offset // BLOCK, padded(piece.size) // BLOCK
            for target, source in ((planes.codes, made.codes), (planes.scales, made.scales)):
                for shard in source.addressable_shards if source.size else ():
                    start, stop, _ = shard.index[0].indices(source.shape[0])
                    held = np.asarray(shard.data)[: max(0, blocks - start)]
                    target[before + start : before + min(stop, blocks)] = held
            norms += np.asarray(measured).tolist()
        fetched = planes, tuple(norms)
        self._fetched, self._made = fetched, []
        return fetched


class SharedFragments:
    """The ``Fragments`` of a learner of several processes, in the first one and in the others.

    ``lead`` is None in all but the first: there ``adopt`` takes what that process has read of the
    version, and ``gradients`` are the newest captures, by fragment.
    """

    def __init__(
        self, held: JaxFragments, plan: Plan, sync: SyncConfig, lead: LeadProcess | None = None
    ) -> None:
        self.gradients: dict[int, SharedGradient] = {}
        self._held = held
        self._count = 0
        self._scheme = sync.contribution_scheme
        self._lead = lead
        self._shares = {f.index: shares_of(held.cuts[f.index]) for f in plan.fragments}

    def own_blocks(self, fragment: int) -> tuple[range, ...]:
        """Return the blocks of a fragment that lie with this process."""
        shares = self._shares[fragment]
        return shares.ranges[shares.mine]

    def genesis(self, fragment: int) -> SharedGradient:
        """Return the outer gradient of the parameters relative to zero."""
        self._say(Deed.GENESIS, fragment)
        return self._quantised(fragment, self._held.genesis(fragment), GENESIS_SCHEME)

    def capture(self, fragment: int) -> SharedGradient:
        """Return ``anchor - local``, and remember local for the adoption."""
        self._say(Deed.CAPTURE, fragment)
        return self._quantised(fragment, self._held.capture(fragment), self._scheme)

    def release(self, fragment: int) -> None:
        """Forget what was captured, everywhere."""
        self._say(Deed.RELEASE, fragment)
        self._held.release(fragment)

    def adopt(self, fragment: int, vector: NDArray[np.float32]) -> None:
        """Take in a decoded global fragment, f32 [padded_size]; each process adopts its part."""
        if self._lead is not None:
            self._say(Deed.ADOPT, fragment, self._lead.others.version_of(fragment, vector))
        self._held.adopt(fragment, vector)

    def reset(self) -> None:
        """Fall back to the anchors, everywhere."""
        self._say(Deed.RESET)
        self._held.reset()

    def _quantised(self, fragment: int, vector: DeviceVector, scheme: str) -> SharedGradient:
        self._count += 1
        shares = self._shares[fragment]
        made = SharedGradient(vector, scheme, shares, self._count)
        if self._lead is None:
            self.gradients[fragment] = made
        return made

    def _say(self, deed: Deed, *values: int) -> None:
        if self._lead is not None:
            self._lead.post(deed, *values)
