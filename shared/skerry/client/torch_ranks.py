"""The processes that train one sharded torch module together: the first one talks to the log.

The others repeat what it does to fragments, each on its own part. Vectors go through the default
group, on the devices that hold them.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from skerry.algorithm.fragments import Plan
from skerry.client.meeting import meet
from skerry.client.peer import Deed
from skerry.client.processes import FollowingProcess, LeadProcess
from skerry.client.torch_fragments import TorchFragments, handed_over


def met(run: str, name: str | None) -> LeadProcess | FollowingProcess | None:
    """Meet the other processes of the default group; None if there is no group or no other."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    place = distributed.get_rank(), distributed.get_world_size()
    if place[1] == 1:
        return None
    control: Any = distributed.new_group(backend="gloo")

    def share(text: str) -> str:
        held = [text]
        distributed.broadcast_object_list(held, src=0, group=control)
        return held[0]

    host = socket.gethostname()
    at = os.environ.get("MASTER_ADDR") or host  # where torch's own processes meet
    return meet(share, at, place, run, name or ("" if place[0] else host.partition(".")[0]))


class LeadFragments:
    """The first process's ``Fragments``, which act on the parameters of all processes."""

    def __init__(self, held: TorchFragments, lead: LeadProcess) -> None:
        self._held = held
        self._lead = lead

    def genesis(self, fragment: int) -> Any:
        """Return the outer gradient of the parameters relative to zero: f32 (padded_size,)."""
        self._lead.post(Deed.GENESIS, fragment)
        return handed_over(_summed(self._held.initial(fragment)))

    def capture(self, fragment: int) -> Any:
        """Return ``anchor - local``, f32 (padded_size,), and remember local for the adoption."""
        self._lead.post(Deed.CAPTURE, fragment)
        return handed_over(_summed(self._held.progress(fragment)))

    def release(self, fragment: int) -> None:
        """Forget what was captured, everywhere."""
        self._lead.post(Deed.RELEASE, fragment)
        self._held.release(fragment)

    def adopt(self, fragment: int, vector: NDArray[np.float32]) -> None:
        """Take in a decoded global fragment, f32 (padded_size,); each process adopts its part."""
        self._lead.post(Deed.ADOPT, fragment)
        whole = self._held.to_device(vector)
        distributed.broadcast(whole, src=0)
        self._held.take(fragment, whole)

    def reset(self) -> None:
        """Fall back to the anchors, everywhere."""
        self._lead.post(Deed.RESET)
        self._held.reset()


class FollowerFragments:
    """Another process's part of the parameters, on which it repeats the first one's deeds."""

    def __init__(self, held: TorchFragments, plan: Plan) -> None:
        self._held = held
        self._plan = plan

    def do(self, deed: Deed, fragment: int = 0) -> None:
        """Do what the first process does."""
        if deed is Deed.GENESIS:
            _summed(self._held.initial(fragment))
        elif deed is Deed.CAPTURE:
            _summed(self._held.progress(fragment))
        elif deed is Deed.RELEASE:
            self._held.release(fragment)
        elif deed is Deed.RESET:
            self._held.reset()
        elif deed is Deed.ADOPT:
            size = self._plan.fragments[fragment].padded_size
            whole = torch.empty(size, dtype=torch.float32, device=self._held.device)
            distributed.broadcast(whole, src=0)
            self._held.take(fragment, whole)


def _summed(vector: Any) -> Any:
    """Return the sum over all processes, at the first one."""
    distributed.reduce(vector, dst=0)
    return vector
