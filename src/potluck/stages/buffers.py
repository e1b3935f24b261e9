"""Buffers: memory for what is received, used again once nobody holds the tensor that was in it.

Fresh memory costs a page fault for every 4 kB, which is more than reading them from the page cache.
"""

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from potluck.store.tensors import Header

KEPT = 16
"""Buffers without a tensor that are kept, of whatever sizes."""
SMALL_BYTES = 1 << 17
"""What is smaller is not worth it."""


class Buffers:
    """Any thread may take, and drop. There is no lock: a tensor may be dropped at any point of any thread."""

    def __init__(self) -> None:
        self._free: deque[Any] = deque(maxlen=KEPT)

    def take(self, header: Header) -> Tensor:
        if header.nbytes < SMALL_BYTES:
            return header.empty()
        memory = self._find(header.nbytes)
        lent = memory[:]  # an array of its own over the same memory, which ends with the last tensor over it
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return torch.from_numpy(lent).view(header.dtype).view(header.shape)

    def _find(self, size: int) -> Any:
        for _ in range(len(self._free)):
            try:
                memory = self._free.pop()  # the last one dropped is the likeliest to be in the processor's cache
            except IndexError:
                break  # another thread took it
            if memory.nbytes == size:
                return memory
            self._free.appendleft(memory)
        return torch.empty(size, dtype=torch.uint8).numpy()
