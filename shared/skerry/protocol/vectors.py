"""Memory for decoded vectors that is used again once the vector that lay in it is let go.

A page that a process touches for the first time has to be cleared, and where the host of a virtual
machine takes back what is free, to be found first: 88 MB took 240 ms there, and 6 ms when they had
been in use a moment before. Who reads fragment after fragment would pay that for each.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST_ELEMENTS = 256 * 1024
"""What is smaller comes from malloc, which keeps it by itself."""
MOST_IDLE = 2
"""A learner reads two fragments at a time."""
ALIGNED_BYTES = 64
"""Where a vector may begin: JAX takes memory that is aligned so as it is, and copies any other."""


class Vectors:
    """Hands out vectors; the memory of ``MOST_IDLE`` of them waits for the next.

    Any thread may ask, and the last holder of a vector may be anywhere.
    """

    def __init__(self) -> None:
        self._idle: deque[NDArray[np.uint8]] = deque(maxlen=MOST_IDLE)

    def empty(self, size: int) -> NDArray[np.float32]:
        """Return an f32 vector (size,) that holds anything."""
        if size < LEAST_ELEMENTS:
            return np.empty(size, np.float32)
        memory = self._idle_for(4 * size)
        if memory is None:
            memory = np.empty(4 * size + ALIGNED_BYTES, np.uint8)
        start = -memory.ctypes.data % ALIGNED_BYTES
        # Through a memoryview: numpy would make views of views hold the memory, and not the vector.
        vector = np.frombuffer(memory.data, np.float32, size, start)
        weakref.finalize(vector, self._idle.append, memory).atexit = False
        return vector

    def _idle_for(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Take the memory last used that is large enough, and not more than twice that."""
        for _ in range(MOST_IDLE):
            try:
                memory = self._idle.pop()
            except IndexError:
                return None
            if nbytes <= memory.nbytes - ALIGNED_BYTES <= 2 * nbytes:
                return memory
            self._idle.appendleft(memory)
        return None


VECTORS = Vectors()
"""Of this process, as its heap is."""
