"""One end of a connection, a host's or a worker's: whole messages, and the beginnings of those with gradients."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from potluck.coded_numbers import Coding
from potluck.errors import TheirProtocolError
from potluck.fleet.description import BUFFERS, Description
from potluck.fleet.pipe import Pipe
from potluck.fleet.shared_memory import Receipts
from potluck.wire.codec import Bulk, decode, open_bulk
from potluck.wire.messages import Message
from potluck.wire.words import heard

HEAD_BYTES = 64
"""Enough of a payload to know what it is."""
CONTROL_BYTES = 16 << 20
"""The longest message without gradients that a worker sends."""


@dataclass(eq=False)
class Connection:
    pipe: Pipe
    codec: str = "bincode"
    receipts: Receipts | None = None
    """Receipts of a process of this machine, with which memory is shared."""

    def frames(self, limit_bytes: Callable[[], int]) -> Iterator[tuple[memoryview, int]]:
        """The first bytes of each payload, and its length, until the other end closes. The caller reads the rest."""
        prefix = bytearray(4)
        while self.pipe.receive_all(memoryview(prefix)):
            length, limit = int.from_bytes(prefix, "big"), limit_bytes()
            if length > limit:
                raise TheirProtocolError(f"A frame of {length:,} bytes is longer than {limit:,}, the most here.")
            yield self.fill_after(memoryview(b""), min(length, HEAD_BYTES)), length

    def read_message(self, head: memoryview, length: int) -> Message:
        return heard(decode(self.fill_after(head, length), self.codec))

    def read_bulk(self, head: memoryview, length: int) -> tuple[Bulk, memoryview]:
        """All that comes before the gradients, and those of them that came with it."""
        bulk = open_bulk(head, length, self.codec)
        while bulk is None:  # component_sizes come first in the other encoding, and may be many
            if len(head) >= min(length, CONTROL_BYTES):
                raise TheirProtocolError("A payload's head is longer than any that is taken.")
            head = self.fill_after(head, min(length, 2 * len(head)))
            bulk = open_bulk(head, length, self.codec)
        return bulk, head[bulk.start :]

    def fill(self, space: memoryview, over: memoryview) -> memoryview:
        """`over`: what has come already, and is the first of it. What is left of that."""
        have = min(len(over), len(space))
        space[:have] = over[:have]
        if have < len(space) and not self.pipe.receive_all(space[have:]):
            raise ConnectionResetError("it ended in the middle of a message")
        return over[have:]

    def fill_after(self, over: memoryview, length: int) -> memoryview:
        whole = memoryview(bytearray(length))
        self.fill(whole, over)
        return whole

    def close(self) -> None:
        self.pipe.close()
        if self.receipts is not None:
            self.receipts.close()


@dataclass(frozen=True)
class PayloadLayout:
    """How the gradients of a run lie in messages; of a run that nobody has described yet, there are none."""

    parts: dict[tuple[str, int], int] = field(default_factory=dict)
    """The name of a part in a message -> its place in the order of the backward."""
    forward: list[int] = field(default_factory=list)
    """A whole gradient comes in the order of the model's parameters; parts come in the order of the backward."""
    tails: list[np.ndarray] = field(default_factory=list)
    """For each part, the sizes of its parameters."""
    codings: list[Coding | None] = field(default_factory=list)
    """Form in which each part travels; none: as floats."""
    limit_bytes: int = CONTROL_BYTES
    plain_limit_bytes: int = CONTROL_BYTES

    @classmethod
    def of(cls, description: Description) -> "PayloadLayout":
        limit = max(CONTROL_BYTES, *(4 * part.floats + 4 * len(part.sizes) + 256 for part in description.parts))
        return cls(
            {part.key: index for index, part in enumerate(description.parts)},
            [i for i, part in reversed(list(enumerate(description.parts))) if part.component != BUFFERS],
            [np.array(part.sizes, "<u4") for part in description.parts],
            description.codings,
            limit,
            max(limit, 4 * description.floats + 256),
        )

    def check_coded(self, bulk: Bulk) -> tuple[int, Coding]:
        """Return the part that a coded payload is of, and its coding. Called before anything of it is read."""
        part, number = bulk.fields["part"], bulk.fields["coding"]
        coding = self.codings[part] if part < len(self.codings) else None
        if coding is None:
            raise TheirProtocolError(f"This run's model has no part {part} that is coded.")
        if number != coding.number:
            raise TheirProtocolError(f"Part {part} came in the coding {number}, and travels in {coding.number} here.")
        expected = coding.coded_bytes(int(self.tails[part].sum(dtype=np.uint64)))
        if bulk.count != expected:
            raise TheirProtocolError(f"The payload has {bulk.count:,} bytes, and part {part} takes {expected:,}.")
        return part, coding


def part_of(bulk: Bulk) -> tuple[str, int]:
    """Name the part as Part.key does; no part of a run has the name of a whole gradient."""
    for name, number in (("block", "block_idx"), ("component", "component")):
        if number in bulk.fields:
            return name, bulk.fields[number]
    return "whole", 0
