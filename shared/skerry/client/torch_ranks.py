"""The processes that train one sharded torch module together: the first one talks to the log.

Before each thing that it does to fragments it says so to the others, which do the same to what lies
with them. Words go through gloo on the host; vectors through the default group, where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import distributed

from skerry.algorithm.fragments import Plan
from skerry.client.processes import Deed
from skerry.client.torch_fragments import TorchFragments, handed_over
from skerry.errors import SkerryError
from skerry.settings import loading
from skerry.settings.models import RunConfig

if TYPE_CHECKING:
    import numpy as np

    from skerry.client.joined import JoinedIsland

PATIENCE = timedelta(days=30)
"""The first process may wait that long for a broker; the others wait with it."""
WORDS = 8
"""Numbers in what the first process says: what it does, and where this learner is then."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a learner is, as all of its processes know it after a boundary."""

    over: bool = False
    fell_back: bool = False
    start: int = 0
    shard: int = 0
    cursor: int = 0
    progress: float = 0.0

    @classmethod
    def of(cls, lead: JoinedIsland) -> Standing:
        """Return where the first process stands."""
        place = lead.start, lead.shard, lead.cursor
        return cls(lead.done, lead.fell_back, *place, lead.progress)


class Ranks:
    """The processes of one learner."""

    def __init__(self) -> None:
        self.rank: int = distributed.get_rank()
        self._control: Any = distributed.new_group(backend="gloo", timeout=PATIENCE)

    def say(self, deed: Deed, *values: float) -> None:
        """Tell the others what comes next."""
        words = torch.zeros(WORDS, dtype=torch.float64)  # which holds any cursor exactly
        words[: 1 + len(values)] = torch.tensor([deed, *values], dtype=torch.float64)
        distributed.broadcast(words, src=0, group=self._control)

    def hear(self) -> tuple[Deed, list[float]]:
        """Wait for what the first process does next."""
        words = torch.zeros(WORDS, dtype=torch.float64)
        distributed.broadcast(words, src=0, group=self._control)
        deed, *values = words.tolist()
        return Deed(int(deed)), values

    def share(self, text: str = "") -> str:
        """Return the first process's text."""
        held = [text]
        distributed.broadcast_object_list(held, src=0, group=self._control)
        return held[0]


class LeadFragments:
    """What a session of the first process does to the parameters of all."""

    def __init__(self, held: TorchFragments, ranks: Ranks) -> None:
        self._held = held
        self._ranks = ranks

    def genesis(self, fragment: int) -> Any:
        """Return the outer gradient of the parameters relative to zero: f32 (padded_size,)."""
        self._ranks.say(Deed.GENESIS, fragment)
        return handed_over(_summed(self._held.initial(fragment)))

    def capture(self, fragment: int) -> Any:
        """Return ``anchor - local``, f32 (padded_size,), and remember local for the adoption."""
        self._ranks.say(Deed.CAPTURE, fragment)
        return handed_over(_summed(self._held.progress(fragment)))

    def release(self, fragment: int) -> None:
        """Forget what was captured, everywhere."""
        self._ranks.say(Deed.RELEASE, fragment)
        self._held.release(fragment)

    def adopt(self, fragment: int, vector: NDArray[np.float32]) -> None:
        """Take in a decoded global fragment, each process what lies with it."""
        self._ranks.say(Deed.ADOPT, fragment)
        whole = self._held.to_device(vector)
        distributed.broadcast(whole, src=0)
        self._held.take(fragment, whole)

    def reset(self) -> None:
        """Fall back to the anchors, everywhere."""
        self._ranks.say(Deed.RESET)
        self._held.reset()


class Follower:
    """Any other process: it does what the first one says, until that is done."""

    def __init__(
        self, ranks: Ranks, hold: Callable[[RunConfig, int], tuple[Plan, TorchFragments]]
    ) -> None:
        self._ranks = ranks
        self._hold = hold
        self.config = RunConfig()

    def follow(self) -> Standing:
        """Do what the first process does; SkerryError once it has failed."""
        while True:
            deed, values = self._ranks.hear()
            if deed is Deed.DONE:
                over, fell_back, start, shard, cursor, progress, *_ = values
                place = int(start), int(shard), int(cursor)
                return Standing(bool(over), bool(fell_back), *place, progress)
            if deed is Deed.FAIL:
                msg = "The first process of this learner has failed: its output says why."
                raise SkerryError(msg)
            if deed is Deed.HOLD:
                self.config = loading.run_config_from_json(self._ranks.share(), "this release")
                self._plan, self._held = self._hold(self.config, self._ranks.rank)
            else:
                self._do(deed, int(values[0]))

    def _do(self, deed: Deed, fragment: int) -> None:
        if deed is Deed.GENESIS:
            _summed(self._held.initial(fragment))
        elif deed is Deed.CAPTURE:
            _summed(self._held.progress(fragment))
        elif deed is Deed.RELEASE:
            self._held.release(fragment)
        elif deed is Deed.RESET:
            self._held.reset()
        else:
            size = self._plan.fragments[fragment].padded_size
            whole = torch.empty(size, dtype=torch.float32, device=self._held.device)
            distributed.broadcast(whole, src=0)
            self._held.take(fragment, whole)


def _summed(vector: Any) -> Any:
    """Return the sum over all processes, at the first one."""
    distributed.reduce(vector, dst=0)
    return vector
