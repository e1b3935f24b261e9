"""The weighted mean of a step's payloads, formed while their bytes still arrive.

Payloads are taken in chunks. A chunk of a node waits for the same chunk of its sibling, is added to it, and the sum
continues as the parent's; the root's is the mean. The second of two to come adds, and the additions, like the sockets'
reads, run outside the interpreter lock. A worker that is lost in the middle of a payload leaves its finished chunks:
the one that computes its slices again sends the same bits, of which the first part is passed over.
Knows nothing of sockets: bytes are written into space(), and taken by filled().
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from potluck.coded_numbers import Coding, Floats, Octets
from potluck.errors import TheirProtocolError
from potluck.fleet.description import BAD_BUFFERS
from potluck.fleet.tree import Node, children, path

CHUNK = 1 << 18
"""Floats: a megabyte. Less costs more turns of the interpreter, more leaves the processor's caches."""
MOST_FREE = 64
"""The most free chunks that are kept for reuse: new memory costs the system as much as adding the chunk."""
WILD = 1e6
"""A gradient this many times larger than any before it is taken for a fault."""
NO_ROOM = 1e36
"""A gradient larger than this is a fault too: in float32, a sum of slices could overflow."""


@dataclass
class _Step:
    step: int
    slices: int
    left: list[int]
    """Chunks of each part that are not done."""
    done: bytearray
    """For each chunk of all parts: whether its mean is there."""
    window: int
    """How many chunks beyond the first unfinished one may be on their way."""
    untold: int
    """Parts that on_part has not told of yet."""
    scale: float = math.nan
    low: int = 0
    """The first chunk that is not done."""
    waiting: dict[tuple[int, Node], Floats] = field(default_factory=dict)
    """Chunks whose sibling has not come yet."""
    given: dict[tuple[int, Node], int] = field(default_factory=dict)
    """For each (part, node): how many of its chunks, from the first on, are in the sums."""
    is_window: bool = False
    largest: float = 0.0


class PayloadMean:
    """Adds up the payloads of one step at a time. `on_part`, `on_done` and `on_bad` are called from whichever thread
    brought it about."""

    def __init__(
        self,
        parts: Sequence[int],
        *,
        chunk: int = CHUNK,
        flat: Floats | None = None,
        buffers: int | None = None,
        codings: Sequence[Coding | None] = (),
    ) -> None:
        """`buffers`: the part that holds what changed in buffers, which may be of any size, if there is one.

        `codings`: how each part travels; none: as floats. With one, every node is rounded before it is added to its
        sibling, also where no node of its own has travelled, so that the sum does not depend on which did; and so is
        the mean.
        """
        self._codings = list(codings) or [None] * len(parts)
        assert all(chunk % each.block == 0 for each in self._codings if each is not None), "a block is of one chunk"
        self.chunk = chunk
        self.sizes = list(parts)
        self.flat: Floats = np.zeros(sum(parts), np.float32) if flat is None else flat
        ends = np.cumsum(self.sizes)
        self.results: list[Floats] = [self.flat[end - size : end] for size, end in zip(self.sizes, ends, strict=True)]
        """The mean of each part, once on_part has told of it, until begin() of the next step."""
        self.buffers = buffers
        self.coded: list[Octets] = [
            np.zeros(each.coded_bytes(size) if each is not None else 0, np.uint8)
            for each, size in zip(self._codings, self.sizes, strict=True)
        ]
        """The same as results, as it travels; empty where floats do."""
        self._chunks = [-(-size // chunk) for size in self.sizes]
        self._base = [sum(self._chunks[:part]) for part in range(len(parts))]
        # Each connection's reader adds its own payloads, and one that comes early waits here for its turn.
        self._change = threading.Condition()
        self._now: _Step | None = None
        self._free: list[Floats] = []
        self._unsent: list[set[int]] = [set() for _ in parts]
        self._awaited: list[int] = []
        """Parts whose next mean waits to take the place of this one."""
        self._largest = {False: 0.0, True: 0.0}
        """The largest of any step before, and of any window: gradients are of another size than changes."""
        self.on_part: Callable[[int, int], None] = lambda step, part: None
        self.on_done: Callable[[int], None] = lambda step: None
        self.on_bad: Callable[[int, int, Node, str], None] = lambda peer, step, node, why: None

    def begin(
        self,
        step: int,
        slices: int,
        *,
        nodes: int,
        several: bool,
        is_window: bool = False,
        without: frozenset[int] = frozenset(),
    ) -> None:
        """`nodes`: how many will be sent of each part; `several`: whether some worker sends more than one. `without`:
        parts of which nothing will be."""
        total = sum(self._chunks)
        least = max(self._chunks) if several else 1
        window = max(least, total // max(1, math.ceil(nodes / 2)))
        done, left = bytearray(total), list(self._chunks)
        for part in without:
            done[self._base[part] : self._base[part] + left[part]] = b"\1" * left[part]
            left[part] = 0
        with self._change:
            self._forget()
            self._now = _Step(step, slices, left, done, window, sum(map(bool, left)), is_window=is_window)
            self._change.notify_all()

    def abort(self) -> None:
        """The step under way will not be finished."""
        with self._change:
            self._forget()
            self._change.notify_all()

    def set_scale(self, step: int, scale: float) -> None:
        """Set the factor that turns the sum into the mean. Told before the last of the payloads begins."""
        with self._change:
            if self._now is not None and self._now.step == step:
                self._now.scale = scale
                self._change.notify_all()

    def widen(self, step: int) -> None:
        """A node is computed again, by somebody who first sends all parts of another: these must be able to wait."""
        with self._change:
            if self._now is not None and self._now.step == step:
                self._now.window = sum(self._chunks)
                self._change.notify_all()

    def hold(self, part: int, receiver: int) -> None:
        """The receiver has yet to be sent this part's mean; it is not overwritten before release() by each."""
        with self._change:
            self._unsent[part].add(receiver)

    def release(self, part: int, receiver: int) -> None:
        with self._change:
            self._unsent[part].discard(receiver)
            if not self._unsent[part]:
                self._change.notify_all()

    @property
    def waits_for(self) -> set[int]:
        """Receivers who keep the step under way from being finished: they have not been sent the step before."""
        with self._change:
            return {receiver for part in self._awaited for receiver in self._unsent[part]}

    def open(
        self, peer: int, step: int, part: int, node: Node, count: int, weight: float = 1.0, *, coded: bool = False
    ) -> "Slot":
        """Where the gradients of one payload go. A payload of a step that is not under way goes nowhere.

        `coded`: its bytes are not those of floats.
        """
        if count != self.sizes[part]:
            raise TheirProtocolError(f"The payload has {count:,} gradients, and this part has {self.sizes[part]:,}.")
        with self._change:
            now = self._now if self._now is not None and self._now.step == step else None
        return Slot(self, now, peer, part, node, weight, coded=coded)

    # From here on: for slots

    def _forget(self) -> None:
        if self._now is not None:
            self._free += self._now.waiting.values()
            self._now.waiting.clear()
            del self._free[MOST_FREE:]
            kind = self._now.is_window
            self._largest[kind] = max(self._largest[kind], self._now.largest)
            self._now = None

    def _take_buffer(self) -> Floats:
        try:
            return self._free.pop()  # one operation of the interpreter: no lock
        except IndexError:
            return np.empty(self.chunk, np.float32)

    def _give_buffer(self, buffer: Floats) -> None:
        if len(self._free) < MOST_FREE:
            self._free.append(buffer)

    def _wait_for_turn(self, slot: "Slot") -> None:
        """Until the chunk is near enough to the first unfinished one: so memory has a bound, however many send."""
        if slot.has_turn:
            return
        with self._change:
            while not slot.has_turn:
                self._change.wait(1.0)  # and look again: nobody tells here that a slot is revoked

    def _add(self, slot: "Slot", number: int, values: Floats, own: Floats) -> bool:
        """One chunk of a node into the sums. Whether `own`, the slot's buffer, was kept; `values` may lie in it."""
        now, part, count = slot.step, slot.part, len(values)
        assert now is not None
        with self._change:
            if not self._accept(slot, part, number):
                return False
        index = self._base[part] + number
        buffer, node, other = own, slot.node, None
        is_copied = values.base is own
        depth = len(slot.above) - 1
        while depth > 0:
            left, right = children(slot.above[depth - 1])
            with self._change:
                if now is not self._now:
                    return False
                other = now.waiting.pop((index, right if node == left else left), None)
                if other is None and is_copied:
                    now.waiting[index, node] = buffer
                    return buffer is own
            if other is None:  # the sibling may come while this is copied
                np.copyto(own[:count], values)
                values, is_copied = own[:count], True
                continue
            if depth == 1:
                break
            np.add(other[:count], values, out=other[:count])
            self._round(part, other[:count])
            if buffer is not own:
                self._give_buffer(buffer)
            buffer, values, is_copied = other, other[:count], True
            node, other, depth = slot.above[depth - 1], None, depth - 1
        self._finish(now, part, number, index, values, other)
        if buffer is not own:
            self._give_buffer(buffer)
        return False

    def _accept(self, slot: "Slot", part: int, number: int) -> bool:
        """Whether this chunk is the next of its node, and nobody has given it before, also as part of a larger node."""
        now = slot.step
        if now is None or not slot.is_current:
            return False
        if number != max(now.given.get((part, above), 0) for above in slot.above):
            return False
        now.given[part, slot.node] = number + 1
        return True

    def _round(self, part: int, sum_: Floats) -> None:
        if (coding := self._codings[part]) is not None:
            coding.round(sum_)

    def _finish(self, now: _Step, part: int, number: int, index: int, values: Floats, other: Floats | None) -> None:
        """The root's chunk: the mean, in its place."""
        # Not written before all have been sent the last mean, which lies there, and before the last report has come.
        if self._unsent[part] or math.isnan(now.scale):
            with self._change:
                self._awaited.append(part)
                while (self._unsent[part] or math.isnan(now.scale)) and self._now is now:
                    self._change.wait(1.0)
                self._awaited.remove(part)
        if self._now is not now:
            return
        result = self.results[part][number * self.chunk : number * self.chunk + len(values)]
        if other is not None:
            np.add(other[: len(values)], values, out=result)
            self._give_buffer(other)
            self._round(part, result)
            np.multiply(result, np.float32(now.scale), out=result)
        else:
            np.multiply(values, np.float32(now.scale), out=result)
        if (coding := self._codings[part]) is not None:
            coded = self.coded[part][coding.coded_bytes(number * self.chunk) :]
            coding.decode(coding.encode(result, coded), result)
        with self._change:
            if self._now is not now:
                return
            now.done[index] = 1
            now.left[part] -= 1
            if index == now.low:
                while now.low < len(now.done) and now.done[now.low]:
                    now.low += 1
                self._change.notify_all()
            if now.left[part]:
                return
        self.on_part(now.step, part)
        with self._change:  # the step is done once every part has been told, whichever thread tells the last
            now.untold -= 1
            if now.untold or self._now is not now:
                return
        self.on_done(now.step)


class Slot:
    """One payload on its way: for each of its chunks, fill space() and call filled()."""

    def __init__(
        self,
        mean: PayloadMean,
        step: _Step | None,
        peer: int,
        part: int,
        node: Node,
        weight: float,
        *,
        coded: bool = False,
    ) -> None:
        self.step = step
        self.part = part
        self.node = node
        self.peer = peer
        self.revoked = False
        self.above: list[Node] = path(step.slices, node) if step is not None else []
        self._mean = mean
        self._weight = weight
        self._number = 0
        self._left = mean.sizes[part]
        self._buffer = mean._take_buffer()
        self._coding = mean._codings[part]
        self._octets: Octets | None = None
        """A chunk as it travels, where it is coded."""
        if coded and self._coding is not None:
            self._octets = np.empty(self._coding.coded_bytes(self.count), np.uint8)

    @property
    def is_current(self) -> bool:
        """Whether its step is still under way, and was not begun anew since."""
        return self.step is not None and self.step is self._mean._now and not self.revoked

    @property
    def has_turn(self) -> bool:
        """Whether space() returns at once."""
        step = self.step
        if step is None or self._mean._base[self.part] + self._number < step.low + step.window:
            return True
        return not self.is_current

    @property
    def is_full(self) -> bool:
        return self._left == 0

    @property
    def count(self) -> int:
        """Floats of the chunk that is arriving."""
        return min(self._left, self._mean.chunk)

    @property
    def is_last_chunk(self) -> bool:
        """Whether no other comes after the one that is arriving."""
        return self._left <= self._mean.chunk

    def space(self) -> memoryview:
        """Where the next chunk's bytes go. May wait until there is room for it."""
        self._mean._wait_for_turn(self)
        if self._octets is not None and self._coding is not None:
            return self._octets[: self._coding.coded_bytes(self.count)].data
        return self._buffer[: self.count].view(np.uint8).data

    def filled(self) -> None:
        chunk = self._buffer[: self.count]
        if self._octets is not None and self._coding is not None:
            self._coding.decode(self._octets[: self._coding.coded_bytes(self.count)], chunk)
        self._take_in(chunk)

    def take(self, values: Floats) -> None:
        """The whole payload, from where it lies; it stays as it is meanwhile."""
        while not self.is_full:
            self._mean._wait_for_turn(self)
            start = self._number * self._mean.chunk
            self._take_in(values[start : start + self.count])

    def _take_in(self, chunk: Floats) -> None:
        if self.step is not None and not self.revoked and self._is_sane(chunk):
            if self._weight != 1.0:
                chunk = np.multiply(chunk, np.float32(self._weight), out=self._buffer[: len(chunk)])
            if self._coding is not None and self._octets is None:  # floats, of a peer that knows no coding
                np.copyto(self._buffer[: len(chunk)], chunk)
                chunk = self._coding.round(self._buffer[: len(chunk)])
            if self._mean._add(self, self._number, chunk, self._buffer):
                self._buffer = self._mean._take_buffer()
        self._number += 1
        self._left -= len(chunk)

    def close(self) -> None:
        """Gives its memory back; call it however the payload ended."""
        self._mean._give_buffer(self._buffer)

    def _is_sane(self, chunk: Floats) -> bool:
        """Else it is told, and nothing more of this payload is taken."""
        assert self.step is not None
        why = self._fault_of(chunk, self.step)
        if why:
            self.revoked = True
            self._mean.on_bad(self.peer, self.step.step, self.node, why)
        return not why

    def _fault_of(self, chunk: Floats, step: _Step) -> str:
        if self.part == self._mean.buffers:
            return "" if np.isfinite(chunk).all() else BAD_BUFFERS
        energy = float(np.dot(chunk, chunk))
        if not math.isfinite(energy):  # above 1.8e19, squares have no room in float32
            wide = chunk.astype(np.float64)
            energy = float(np.dot(wide, wide))
        size = math.sqrt(energy) if math.isfinite(energy) else math.inf
        limit = WILD * self._mean._largest[step.is_window]
        if size > NO_ROOM or (limit and size > limit):
            return "is not finite" if not np.isfinite(chunk).all() else "is wildly large"
        step.largest = max(step.largest, size)
        return ""
