"""The thread that reads from one peer that takes part: messages for the coordinator, gradients into the mean.

Gradients are taken where they were asked for, in the order in which they were, and after the report of their slices.
"""

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from potluck.errors import TheirProtocolError
from potluck.fleet.connection import part_of
from potluck.fleet.exchange import Exchange, ExpectedPayloads, PeerConnection
from potluck.fleet.mean import PayloadMean, Slot
from potluck.fleet.shared_memory import SharedView
from potluck.wire.codec import Bulk, is_bulk, peek
from potluck.wire.messages import (
    BlockGradientPayload,
    CodedPart,
    GradientPayload,
    NonBlockGradientPayload,
    PartAt,
    SealKey,
    ShareMemory,
)


class PeerReader:
    def __init__(self, connection: PeerConnection, exchange: Exchange) -> None:
        self._connection = connection
        self._exchange = exchange
        self._core = exchange.core

    @property
    def _mean(self) -> PayloadMean:
        if self._exchange.mean is None:
            raise TheirProtocolError("A gradient came before the run was described.")
        return self._exchange.mean

    def run(self) -> None:
        why = "it closed the connection"
        np.seterr(over="ignore", invalid="ignore")  # of this thread: what is not finite is found, and told
        try:
            for head, length in self._connection.frames(self._limit_bytes):
                self._read(head, length)
        except TheirProtocolError as error:
            why = str(error)
            self._core.refused["malformed"] += 1
        except OSError as error:
            why = f"the connection broke: {error.strerror or error}"
        finally:  # also after a fault of ours: a peer without a reader would keep averages from being released
            self._exchange.lost(self._connection, self._connection.blamed or why)

    def _limit_bytes(self) -> int:
        layout = self._exchange.layout
        return layout.plain_limit_bytes if self._connection.plain else layout.limit_bytes

    def _read(self, head: memoryview, length: int) -> None:
        connection = self._connection
        if is_bulk(peek(head, connection.codec)):
            self._read_gradients(head, length)
            return
        message = connection.read_message(head, length)
        if isinstance(message, PartAt):
            self._read_part_at(message)
        elif isinstance(message, ShareMemory):
            self._look_in()
        elif isinstance(message, SealKey):
            connection.pipe.seal_receiving(message.key)
        elif connection.closing_at is None:
            self._exchange.act("message", connection.peer, message)

    # Gradients

    def _read_gradients(self, head: memoryview, length: int) -> None:
        mean = self._mean
        bulk, over = self._connection.read_bulk(head, length)
        if bulk.message is GradientPayload:
            self._read_whole(mean, bulk, over, length)
        elif bulk.message is CodedPart and not self._connection.plain:
            part, _ = self._exchange.layout.check_coded(bulk)
            self._connection.pipe.spared_received_bytes += 4 * mean.sizes[part] - bulk.nbytes
            self._read_part(part, mean.sizes[part], bulk, over, length)
        elif bulk.message in (BlockGradientPayload, NonBlockGradientPayload):
            name, number = part_of(bulk)
            found = self._exchange.layout.parts.get((name, number))
            if found is None:
                raise TheirProtocolError(f"This run's model has no {name} {number}.")
            self._read_part(found, bulk.count, bulk, over, length)
        else:
            raise TheirProtocolError(f"{bulk.message.__name__} is not for a worker to send.")

    def _read_part(self, part: int, count: int, bulk: Bulk, over: memoryview, length: int) -> None:
        """`count`: of its floats, which may travel as fewer bytes."""
        connection, layout = self._connection, self._exchange.layout
        if connection.blocks is None:
            with self._exchange.lock:  # else a part that is formed meanwhile would be sent twice, or never
                self._exchange.send_by_parts(connection)
        expected, slot = self._open_next(bulk.fields["step"], part, count, coded=bulk.message is CodedPart)
        try:
            over = self._pour(slot, over)
            tail = connection.fill_after(over, length - bulk.start - bulk.nbytes)
            sizes = (bulk.fields | bulk.finish(tail)).get("component_sizes")
            if sizes is not None and not np.array_equal(sizes, layout.tails[part]):
                raise TheirProtocolError("component_sizes are not those of this run's model.")
        finally:
            self._shut(slot)
        self._part_done(expected, slot)

    def _read_whole(self, mean: PayloadMean, bulk: Bulk, over: memoryview, length: int) -> None:
        """A plain peer's whole gradient, in the order of the model's parameters."""
        connection, forward = self._connection, self._exchange.layout.forward
        total = sum(mean.sizes[part] for part in forward)
        if bulk.count != total:
            raise TheirProtocolError(f"The payload has {bulk.count:,} gradients, and the model has {total:,}.")
        connection.blocks = False
        with self._exchange.lock:
            expected = self._next_expected(bulk.fields["step"], None)
        left = length - bulk.start - bulk.nbytes

        def note_loss(over: memoryview) -> None:
            tail = bulk.finish(connection.fill_after(over, left))
            if expected is not None:
                step, node, loss = expected.step, expected.nodes[0], float(tail["loss"])
                self._exchange.act("loss", connection.peer, step, node, loss)

        for index, part in enumerate(forward):
            is_last = index == len(forward) - 1
            with self._exchange.lock:
                slot = self._open(expected, part, mean.sizes[part])
            try:
                over = self._pour(slot, over, before_last=note_loss if is_last else None)
            finally:
                self._shut(slot)
            if slot.revoked and expected is not None:
                expected.useless.add(expected.nodes[0])
        if expected is not None:
            self._payload_done(expected, slot)

    def _pour(
        self, slot: Slot, over: memoryview, before_last: Callable[[memoryview], None] | None = None
    ) -> memoryview:
        """Gradients from the socket into the mean. `over`: those that came with the head; what is left of them.

        `before_last` is called with what is left before the last of them reach the mean.
        """
        connection = self._connection
        while not slot.is_full:
            connection.held = True
            space = slot.space()
            connection.held = False
            over = connection.fill(space, over)
            if before_last is not None and slot.is_last_chunk:
                before_last(over)
            connection.held = True  # it may wait for a slow receiver of the step before
            slot.filled()
            connection.held = False
        return over

    # Gradients of a process of this machine, where they lie

    def _look_in(self) -> None:
        """A worker of this machine shows where its gradients will lie."""
        connection = self._connection
        descriptors = connection.pipe.take_descriptors()
        if connection.receipts is None or connection.window is not None or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise TheirProtocolError("It shares memory that it was not asked for.")
        connection.window = SharedView(descriptors[0])

    def _read_part_at(self, at: PartAt) -> None:
        connection, mean, last = self._connection, self._exchange.mean, len(self._exchange.layout.tails) - 1
        if connection.window is None or connection.receipts is None or mean is None or at.part > last:
            raise TheirProtocolError("It tells of a part that it does not share.")
        count = mean.sizes[at.part]
        values = connection.window.floats(at.offset, count)
        expected, slot = self._open_next(at.step, at.part, count)
        try:
            connection.held = True
            slot.take(values)
        finally:
            connection.held = False
            self._shut(slot)
        connection.receipts.give()  # only now: the worker may write there again once it has it
        self._part_done(expected, slot)

    # Which of those that it was asked for

    def _open_next(
        self, step: int, part: int, count: int, *, coded: bool = False
    ) -> tuple[ExpectedPayloads | None, Slot]:
        """Both in one: a peer that is closed in between would have nothing to be revoked."""
        with self._exchange.lock:
            expected = self._next_expected(step, part)
            return expected, self._open(expected, part, count, coded=coded)

    def _next_expected(self, step: int, part: int | None) -> ExpectedPayloads | None:
        """Find which of the payloads that it was asked for this is, as if only its node had been asked for; None if it
        was not. Under the lock."""
        connection, core = self._connection, self._core
        if not connection.expected or connection.expected[0].step != step:
            core.refused["stale payload"] += 1
            return None
        first = connection.expected[0]
        if part is None:
            connection.expected.popleft()
            return first
        wanted, index = divmod(first.at, len(first.nodes))
        node = first.nodes[index if not connection.plain else 0]
        if part in first.came if connection.plain else part != first.parts[wanted]:
            core.refused["foreign payload"] += 1
            return None
        if node not in first.useless and not core.has_reported(connection.peer, node):
            core.refused["payload before its report"] += 1
            return None
        first.at += 1
        first.came.add(part)
        if first.is_over:
            connection.expected.popleft()
        return replace(first, nodes=(node,), at=wanted + 1)

    def _open(self, expected: ExpectedPayloads | None, part: int, count: int, *, coded: bool = False) -> Slot:
        peer, mean = self._connection.peer, self._mean
        if expected is None or expected.nodes[0] in expected.useless:
            return mean.open(peer, -1, part, (0, 1), count, coded=coded)
        slot = mean.open(peer, expected.step, part, expected.nodes[0], count, expected.weight, coded=coded)
        self._connection.slot = slot
        return slot

    def _shut(self, slot: Slot) -> None:
        self._connection.slot = None
        slot.close()

    def _part_done(self, expected: ExpectedPayloads | None, slot: Slot) -> None:
        if expected is not None and expected.is_over and not slot.revoked:
            self._payload_done(expected, slot)

    def _payload_done(self, expected: ExpectedPayloads, slot: Slot) -> None:
        node = expected.nodes[0]
        if node in expected.useless:
            return
        with self._exchange.lock:  # of a step that was begun anew it would be taken for the next attempt's
            if slot.is_current:
                self._exchange.act("payload", self._connection.peer, expected.step, node)
