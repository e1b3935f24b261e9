"""Channel: what the stages of one replica say to each other. Named tensors, whichever way they travel.

Every tensor is announced by a Header, which the receiver checks before it takes any memory. Knows no way to travel:
direct.py and datastore.py do. Buffers are the memory for what is received.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from potluck.store.tensors import Header

WHAT = ("activation", "gradient", "tied", "told")
"""An activation goes to the next stage and its gradient back; tied: a gradient that stages add up; told: bytes."""


@dataclass(frozen=True, slots=True)
class Label:
    """The name of one tensor of a run: equal on both sides, and used once."""

    step: int
    what: str
    source: int
    """The stage that sends it."""
    target: int
    micro: int = 0
    part: int = 0

    def __post_init__(self) -> None:
        assert self.what in WHAT, self.what
        assert min(self.step, self.source, self.target, self.micro, self.part) >= 0, self

    def __str__(self) -> str:
        return f"{self.what} {self.micro} of step {self.step} from stage {self.source} for stage {self.target}"


class Channel(Protocol):
    """One stage's end. Stages of one replica are numbered from 0; both sides use the same labels."""

    def expect(self, labels: Sequence[Label]) -> None:
        """Announce what will be received, each source's in the order in which it sends them: they may come early."""

    def send(self, label: Label, tensor: Tensor) -> None:
        """Begins to send. Nobody changes the tensor until flush() has returned."""

    def receive(self, label: Label) -> Tensor:
        """Wait for a tensor, and return it on the channel's device. WorkerLost names what is awaited, and from whom."""

    def flush(self) -> None:
        """Wait until all that was sent is out of our hands."""

    def close(self) -> None: ...


KEPT = 16
"""Buffers without a tensor that are kept, of whatever sizes."""
SMALL_BYTES = 1 << 17
"""Smaller buffers are not worth keeping."""


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
