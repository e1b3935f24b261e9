"""Sockets, TLS and threads around coordinator.py.

Newcomers knock in the lobby. Whoever takes part gets two threads: one reads its messages and lets its gradients flow
into the mean, the other writes to it. All decisions are the coordinator's, made one at a time under one lock; the bytes
of gradients pass outside of it.
"""

import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from potluck.errors import ConfigError, PotluckError, TheirProtocolError
from potluck.events import Event
from potluck.fleet import effects
from potluck.fleet.coordinator import Coordinator
from potluck.fleet.description import BUFFERS, Description
from potluck.fleet.effects import Effect, StepRecord
from potluck.fleet.journal import Journal
from potluck.fleet.lobby import Guest, Lobby
from potluck.fleet.mean import Mean, Slot
from potluck.fleet.parcel import chunks, pack
from potluck.fleet.pipe import LOOPBACK, Pipe, listen_local
from potluck.fleet.run_state import Standing
from potluck.fleet.saving import SAVE
from potluck.fleet.shared import Memory, Receipts, Window
from potluck.fleet.tree import Node
from potluck.wire.codec import Bulk, decode, encode_parts, is_bulk, open_bulk, peek
from potluck.wire.messages import (
    AverageAt,
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    BlockGradientPayload,
    GradientPayload,
    Message,
    NonBlockGradientPayload,
    PartAt,
    ShareMemory,
    StateBegin,
    StateChunk,
)
from potluck.wire.words import heard

log = logging.getLogger("potluck.fleet")

HEAD_BYTES = 64
"""Enough of a payload to know what it is."""
CONTROL_BYTES = 16 << 20
"""The longest message without gradients."""
TICK_S = 0.1
LAST_WORDS_S = 1.0
PIECE_BYTES = 4 << 20
UNREAD = 4
"""Times `patience` in which a peer reads not even a piece of so many bytes: the averages that wait for it keep all
others waiting."""


OnSaved = Callable[[int, str, str, int, bool], None]
"""Hears of each checkpoint: its step, its folder or what is wrong, its bytes, and whether its sender is to blame."""


class Saver(Protocol):
    """What keeps checkpoints on the host's disk, and finds them again."""

    def begin(self, step: int, header: str, keep_last: int, on_saved: OnSaved) -> None: ...
    def feed(self, data: bytes | memoryview, taken: Callable[[], None]) -> None: ...
    def abort(self) -> None: ...
    def newest(self) -> tuple[Path, Standing] | None:
        """The newest whole checkpoint, and where the run stood."""
        ...


@dataclass
class _Expected:
    """Payloads that a peer was asked for: for each part in turn, each node."""

    step: int
    nodes: tuple[Node, ...]
    weights: tuple[float, ...]
    at: int = 0
    came: set[int] = field(default_factory=set)
    useless: set[Node] = field(default_factory=set)


@dataclass(eq=False)
class Seat:
    """One peer on the floor."""

    peer: int
    pipe: Pipe
    codec: str
    plain: bool
    since: int
    heard_at: float
    expected: deque[_Expected] = field(default_factory=deque)
    held: bool = False
    """Its bytes are not being read, on purpose."""
    slot: Slot | None = None
    blocks: bool | None = None
    """Whether it is sent averages part by part, or in one. A plain peer is sent what it sends itself; none: not known
    yet."""
    queue: deque["_Out"] = field(default_factory=deque)
    change: threading.Condition = field(default_factory=threading.Condition)
    closing_at: float | None = None
    gone: bool = False
    receipts: Receipts | None = None
    """Of a process of this machine, with which memory is shared."""
    window: Window | None = None
    owed: deque[int] = field(default_factory=deque)
    """Averages that it was told of and has not taken yet."""
    is_writing: bool = False
    pieces: int = 0
    """That have left, or were taken."""
    stuck: tuple[int, float] = (0, 0.0)
    """How many pieces had left when it was last looked at, and for how many seconds none has."""
    blamed: str = ""
    """Why it was closed here."""


@dataclass
class _Out:
    """Something to be written: a message, or the average of a part."""

    message: Message | None
    step: int = 0
    part: int = -1
    credit: tuple[int, int] | None = None
    raw: bytes = b""
    """What the lobby had yet to send."""


class Server:
    def __init__(
        self,
        coordinator: Coordinator,
        *,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        journal: Journal | None = None,
        saver: Saver | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
        on_step: Callable[[StepRecord, float, float, str], None] = lambda record, lr, norm, fault: None,
    ) -> None:
        self.core = coordinator
        self.journal = journal
        self.saver = saver
        self.on_event = on_event
        self.on_step = on_step
        self.on_described: Callable[[Description], None] = lambda description: None
        self.on_completed: Callable[[Description], None] = lambda description: None
        """Hears of a run that was known in part, as from a journal: what its workers bring now."""
        self.finished: effects.Finish | None = None
        self.mean: Mean | None = None
        self._loss = 0.0
        self._formed: tuple[int, list[int]] = (0, [])
        """The step under way, and which of its parts are averaged."""
        self._seats: dict[int, Seat] = {}
        self._next_peer = 0
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._restored: tuple[Path, int] | None = None
        self._limit = self._plain_limit = CONTROL_BYTES
        self._parts: dict[tuple[str, int], int] = {}
        self._forward: list[int] = []
        self._tails: list[np.ndarray] = []
        self._memory: Memory | None = None
        """Where the averages are, if others may look."""
        listener = _listen(host, port)
        self.port: int = listener.getsockname()[1]
        local = listen_local(self.port) if listener.getsockname()[0] in LOOPBACK else None
        self._is_local = local is not None
        self._lobby = Lobby(
            [listener] if local is None else [listener, local],
            tls,
            stranger_s=min(10.0, coordinator.patience_s),
            on_payload=self._on_lobby_payload,
            on_closed=lambda guest, why: self._act(lambda now: self.core.on_closed(now, guest.peer, why)),
            new_peer=self._new_peer,
        )
        if saver is not None and coordinator.standing.step and (newest := saver.newest()) is not None:
            coordinator.found(newest[1].step, str(newest[0]))
        coordinator.admission.most_floats = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
        if coordinator.description is not None:
            self._describe(coordinator.description)

    def start(self) -> None:
        self._lobby.start()
        self._spawn(self._tick, "ticker")

    def wait(self, timeout_s: float | None = None) -> effects.Finish | None:
        """Until the run is over; none if it is not by then."""
        self._ended.wait(timeout_s)
        return self.finished

    def stop(self) -> None:
        """Closes everything, once what is queued has left."""
        self._ended.set()
        deadline = time.monotonic() + 2.0
        for seat in list(self._seats.values()):
            with seat.change:
                seat.closing_at = time.monotonic()
                seat.change.notify_all()
        while self._seats and time.monotonic() < deadline:
            time.sleep(0.01)
        for seat in list(self._seats.values()):
            _close_pipe(seat)
        if self.mean is not None:
            self.mean.abort()
        self._lobby.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2.0)

    def request_stop(self) -> None:
        self._act(self.core.request_stop)

    # Deciding and doing

    def _act(self, decide: Callable[[float], list[Effect]]) -> None:
        with self._lock:
            try:
                for effect in decide(time.monotonic()):
                    self._do(effect)
            except PotluckError as error:  # a sentence: a disk that is full, say
                self._do(effects.Finish(str(error), failed=True))
            except Exception as error:  # of a thread of ours: nobody would hear of it, and everybody would wait
                log.exception("the coordinator failed")
                self._do(effects.Finish(str(error) or type(error).__name__, failed=True))

    def _do(self, effect: Effect) -> None:
        match effect:
            case effects.Send():
                self._send(effect)
            case effects.Close():
                log.info("peer %d is closed: %s", effect.peer, effect.why)
                self._close(effect.peer)
            case effects.Describe():
                if self.journal is not None:
                    self.journal.keep("description", effect.description.to_json())
                if effect.is_new:
                    self._describe(effect.description)
                else:
                    self.on_completed(effect.description)
            case effects.BeginStep():
                for seat in self._seats.values():
                    # Of a step that is begun anew, what was asked for before may still come, and comes first.
                    seat.expected = deque(asked for asked in seat.expected if asked.step == effect.step)
                    for asked in seat.expected:
                        asked.useless.update(asked.nodes)
                self._formed = effect.step, []
                assert self.mean is not None
                self.mean.begin(effect.step, effect.slices, nodes=effect.nodes, several=effect.several)
            case effects.Widen() if self.mean is not None:
                self.mean.widen(effect.step)
            case effects.Expect() if effect.peer in self._seats:
                self._seats[effect.peer].expected.append(_Expected(effect.step, effect.nodes, effect.weights))
            case effects.Discard() if effect.peer in self._seats:
                seat = self._seats[effect.peer]
                for expected in seat.expected:
                    expected.useless.add(effect.node)
                if seat.slot is not None and seat.slot.node == effect.node:
                    seat.slot.revoked = True
            case effects.SetScale() if self.mean is not None:
                self._loss = effect.loss
                self.mean.set_scale(effect.step, effect.scale)
            case effects.AbandonStep() if self.mean is not None:
                self.mean.abort()
                self._formed = 0, []
            case effects.Subscribe():
                self._subscribe(effect)
            case effects.Record() if self.journal is not None:
                self.journal.record(effect.step)
            case effects.Agreed() if self.journal is not None:
                self.journal.agree(effect.step, effect.kind, effect.digest)
            case effects.Emit():
                _tell(lambda: self.on_event(effect.event))
            case effects.StepApplied():
                _tell(lambda: self.on_step(effect.record, effect.lr, effect.norm, effect.fault))
            case effects.SaveBegin():
                self._save_begin(effect)
            case effects.SaveChunk() if self.saver is not None:
                peer = effect.peer
                self.saver.feed(effect.data, lambda: self._taken(peer, SAVE))
            case effects.SaveAbort() if self.saver is not None:
                self.saver.abort()
            case effects.Restore():
                self._restore()
            case effects.SendCheckpoint():
                self._spawn(lambda: self._send_checkpoint(effect.peer, effect.transfer), "checkpoint sender")
            case effects.Finish():
                self.finished = self.finished or effect
                self._ended.set()

    def _describe(self, description: Description) -> None:
        total = sum(part.floats for part in description.parts)
        if self._is_local:
            self._memory = Memory(total)
        self.mean = Mean(
            [part.floats for part in description.parts],
            flat=self._memory.floats[:total] if self._memory is not None else None,
            buffers=next((i for i, part in enumerate(description.parts) if part.component == BUFFERS), None),
        )
        self.mean.on_part = self._on_part
        self.mean.on_done = self._on_mean
        self.mean.on_bad = lambda peer, step, node, why: self._act(
            lambda now: self.core.on_bad(now, peer, step, node, why)
        )
        self._parts = {part.key: index for index, part in enumerate(description.parts)}
        # A whole gradient comes in the order of the model's parameters; parts come in the order of the backward.
        self._forward = [i for i, part in reversed(list(enumerate(description.parts))) if part.component != BUFFERS]
        self._tails = [np.array(part.sizes, "<u4") for part in description.parts]
        largest = max(description.parts, key=lambda part: part.floats)
        self._limit = max(CONTROL_BYTES, 4 * largest.floats + 4 * len(largest.sizes) + 256)
        self._plain_limit = max(self._limit, 4 * description.floats + 256)
        self.on_described(description)

    def _restore(self) -> None:
        """Back to the newest checkpoint, which the ledger then ends with."""
        found = self.saver.newest() if self.saver is not None else None
        standing = found[1] if found is not None else None
        if standing is not None and self.journal is not None:  # it knows who computed what, unless it was removed
            standing = self.journal.standing(standing.step) or standing
        self._restored = (found[0], found[1].step) if found is not None else None
        if self.journal is not None:
            self.journal.rewind(standing.step if standing is not None else 0)
        self._act(lambda now: self.core.restored(now, standing))

    def _send_checkpoint(self, peer: int, transfer: int) -> None:
        assert self._restored is not None
        folder, step = self._restored
        try:
            header = pack(folder)
            self._send_now(peer, StateBegin(transfer, step, header))
            for data in chunks(folder, header):
                seat = self._seats.get(peer)
                while seat is not None and len(seat.queue) > 8 and not seat.gone:
                    time.sleep(0.005)
                self._send_now(peer, StateChunk(transfer, data))
        except OSError as error:  # it was removed meanwhile: the newcomer comes again, and gets a newer one
            log.warning("the checkpoint in %s cannot be sent: %s", folder, error)
            with self._lock:
                self._close(peer)

    def _save_begin(self, effect: effects.SaveBegin) -> None:
        def on_saved(step: int, folder: str, error: str, size: int, theirs: bool) -> None:
            self._act(lambda now: self.core.on_saved(now, step, folder, error, size, theirs=theirs))

        if self.saver is None:
            on_saved(effect.step, "", "This host keeps no checkpoints.", 0, False)
            return
        self.saver.begin(effect.step, effect.header, effect.keep_last, on_saved)

    def _taken(self, peer: int, transfer: int) -> None:
        self._act(lambda now: self.core.on_taken(now, peer, transfer))

    # Peers

    def _new_peer(self) -> int:
        with self._lock:
            self._next_peer += 1
            return self._next_peer

    def _on_lobby_payload(self, guest: Guest, payload: memoryview) -> None:
        assert guest.codec is not None
        message = heard(decode(payload, guest.codec))
        self._act(lambda now: self.core.on_message(now, guest.peer, message, guest.address))
        if guest.peer in self.core.membership.members:
            self._lobby.know(guest.peer)

    def _subscribe(self, effect: effects.Subscribe) -> None:
        seat = self._seats.get(effect.peer)
        if seat is not None:
            seat.since = effect.since
            return
        guest = self._lobby.take_out(effect.peer)
        if guest is None or guest.codec is None:
            return
        plain = self.core.membership.members[effect.peer].plain
        seat = Seat(guest.peer, Pipe(guest.socket), guest.codec, plain, effect.since, time.monotonic())
        seat.pipe.give_up_link(self.core.patience_s)
        self._seats[guest.peer] = seat
        if seat.pipe.is_local and not plain:
            _put(seat, _Out(ShareMemory()))
        if not plain:
            self._send_by_parts(seat)
        if guest.out:
            seat.queue.appendleft(_Out(None, raw=bytes(guest.out)))
        self._spawn(lambda: self._read(seat), f"reader {seat.peer}")
        self._spawn(lambda: self._write(seat), f"writer {seat.peer}")

    def _send_by_parts(self, seat: Seat) -> None:
        """From now on each average by itself; first those that the others have got already."""
        seat.blocks = True
        step, parts = self._formed
        for part in parts if seat.since <= step else ():
            self._send_average(seat, step, part)

    def _send(self, effect: effects.Send) -> None:
        seat = self._seats.get(effect.peer)
        if seat is None:
            codec = "bincode"
            with contextlib.suppress(KeyError):
                codec = self._lobby._guests[effect.peer].codec or codec
            self._lobby.send(effect.peer, b"".join(encode_parts(effect.message, codec)))
            return
        _put(seat, _Out(effect.message, credit=effect.credit))

    def _send_now(self, peer: int, message: Message) -> None:
        with self._lock:
            self._send(effects.Send(peer, message))

    def _close(self, peer: int) -> None:
        seat = self._seats.get(peer)
        if seat is None:
            self._lobby.close(peer)
            return
        _revoke(seat)
        with seat.change:
            seat.closing_at = seat.closing_at or time.monotonic()
            seat.change.notify_all()

    def _lost(self, seat: Seat, why: str) -> None:
        with self._lock:
            if self._seats.pop(seat.peer, None) is None:
                return
            seat.gone = True
            _revoke(seat)
            with seat.change:
                unsent = [out.part for out in seat.queue if out.part >= 0]
                seat.queue.clear()
                seat.change.notify_all()
            for part in unsent:
                if self.mean is not None:
                    self.mean.release(part)
            _close_pipe(seat)
            self._act(lambda now: self.core.on_closed(now, seat.peer, why))

    # Reading

    def _read(self, seat: Seat) -> None:
        why = "it closed the connection"
        np.seterr(over="ignore", invalid="ignore")  # of this thread: what is not finite is found, and told
        try:
            while self._read_message(seat):
                pass
        except TheirProtocolError as error:
            why = str(error)
            self.core.refused["malformed"] += 1
        except OSError as error:
            why = f"the connection broke: {error.strerror or error}"
        finally:  # also after a fault of ours: a seat without a reader would keep averages from being released
            self._lost(seat, seat.blamed or why)

    def _read_message(self, seat: Seat) -> bool:
        prefix = bytearray(4)
        if not seat.pipe.receive_all(memoryview(prefix)):
            return False
        seat.heard_at = time.monotonic()
        length = int.from_bytes(prefix, "big")
        limit = self._plain_limit if seat.plain else self._limit
        if length > limit:
            raise TheirProtocolError(f"A frame of {length:,} bytes is longer than {limit:,}, the most here.")
        head = memoryview(bytearray(min(length, HEAD_BYTES)))
        self._fill(seat, head)
        if is_bulk(peek(head, seat.codec)):
            self._read_bulk(seat, head, length)
            return True
        payload = memoryview(bytearray(length))
        payload[: len(head)] = head
        self._fill(seat, payload[len(head) :])
        message = heard(decode(payload, seat.codec))
        if isinstance(message, PartAt):
            self._read_part_at(seat, message)
            return True
        if isinstance(message, ShareMemory):
            self._look_in(seat)
            return True
        if seat.closing_at is None:
            self._act(lambda now: self.core.on_message(now, seat.peer, message))
        return True

    def _fill(self, seat: Seat, space: memoryview) -> None:
        while space:
            count = seat.pipe.receive(space)
            if not count:
                raise ConnectionResetError("it ended in the middle of a message")
            seat.heard_at = time.monotonic()
            space = space[count:]

    def _read_bulk(self, seat: Seat, head: memoryview, length: int) -> None:
        if self.mean is None:
            raise TheirProtocolError("A gradient came before the run was described.")
        bulk = open_bulk(head, length, seat.codec)
        while bulk is None:  # component_sizes come first in the other encoding, and may be many
            if len(head) >= min(length, CONTROL_BYTES):
                raise TheirProtocolError("A payload's head is longer than any that is taken.")
            more = memoryview(bytearray(min(length, 2 * len(head))))
            more[: len(head)] = head
            self._fill(seat, more[len(head) :])
            head = more
            bulk = open_bulk(head, length, seat.codec)
        over = head[bulk.start :]
        if bulk.message is GradientPayload:
            self._read_whole(seat, bulk, over, length)
        elif bulk.message in (BlockGradientPayload, NonBlockGradientPayload):
            self._read_part(seat, bulk, over, length)
        else:
            raise TheirProtocolError(f"{bulk.message.__name__} is not for a worker to send.")

    def _read_part(self, seat: Seat, bulk: Bulk, over: memoryview, length: int) -> None:
        key = (
            ("block", bulk.fields["block_idx"])
            if bulk.message is BlockGradientPayload
            else ("component", bulk.fields["component"])
        )
        part = self._parts.get(key)
        if part is None:
            raise TheirProtocolError(f"This run's model has no {key[0]} {key[1]}.")
        if seat.blocks is None:
            with self._lock:
                self._send_by_parts(seat)
        expected, slot = self._open_next(seat, bulk.fields["step"], part, bulk.count)
        try:
            over = self._pour(seat, slot, over)
            tail = self._tail(seat, over, length - bulk.start - 4 * bulk.count)
            sizes = (bulk.fields | bulk.finish(tail)).get("component_sizes")
            if sizes is not None and not np.array_equal(sizes, self._tails[part]):
                raise TheirProtocolError("component_sizes are not those of this run's model.")
        finally:
            self._shut(seat, slot)
        is_last = expected is not None and (
            expected.at == len(self._tails) if seat.plain else part == len(self._tails) - 1
        )
        if expected is not None and is_last and not slot.revoked:
            self._payload_done(seat, expected, slot)

    def _look_in(self, seat: Seat) -> None:
        """A worker of this machine shows where its gradients will lie."""
        descriptors = seat.pipe.take_descriptors()
        if seat.receipts is None or seat.window is not None or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise TheirProtocolError("It shares memory that it was not asked for.")
        seat.window = Window(descriptors[0])

    def _read_part_at(self, seat: Seat, at: PartAt) -> None:
        if seat.window is None or seat.receipts is None or self.mean is None or at.part >= len(self._tails):
            raise TheirProtocolError("It tells of a part that it does not share.")
        count = self.mean.sizes[at.part]
        values = seat.window.floats(at.offset, count)
        expected, slot = self._open_next(seat, at.step, at.part, count)
        try:
            seat.held = True
            slot.take(values)
        finally:
            seat.held = False
            self._shut(seat, slot)
        seat.receipts.give()
        if expected is not None and at.part == len(self._tails) - 1 and not slot.revoked:
            self._payload_done(seat, expected, slot)

    def _read_whole(self, seat: Seat, bulk: Bulk, over: memoryview, length: int) -> None:
        """A plain peer's whole gradient, in the order of the model's parameters."""
        assert self.mean is not None
        total = sum(self.mean.sizes[part] for part in self._forward)
        if bulk.count != total:
            raise TheirProtocolError(f"The payload has {bulk.count:,} gradients, and the model has {total:,}.")
        seat.blocks = False
        with self._lock:
            expected = self._next_expected(seat, bulk.fields["step"], None)
        left = length - bulk.start - 4 * bulk.count

        def note_loss(over: memoryview) -> None:
            tail = bulk.finish(self._tail(seat, over, left))
            if expected is not None:
                step, node, loss = expected.step, expected.nodes[0], float(tail["loss"])
                self._act(lambda now: self.core.on_plain_loss(now, seat.peer, step, node, loss))

        for index, part in enumerate(self._forward):
            is_last = index == len(self._forward) - 1
            with self._lock:
                slot = self._open(seat, expected, part, self.mean.sizes[part])
            try:
                over = self._pour(seat, slot, over, before_last=note_loss if is_last else None)
            finally:
                self._shut(seat, slot)
            if slot.revoked and expected is not None:
                expected.useless.add(expected.nodes[0])
        if expected is not None:
            self._payload_done(seat, expected, slot)

    def _open_next(self, seat: Seat, step: int, part: int, count: int) -> tuple[_Expected | None, Slot]:
        """Both in one: a seat that is closed in between would have nothing to be revoked."""
        with self._lock:
            expected = self._next_expected(seat, step, part)
            return expected, self._open(seat, expected, part, count)

    def _next_expected(self, seat: Seat, step: int, part: int | None) -> _Expected | None:
        """Which of the payloads that it was asked for this is; none if it was not asked for it. Under the lock."""
        if not seat.expected or seat.expected[0].step != step:
            self.core.refused["stale payload"] += 1
            return None
        first = seat.expected[0]
        if part is None:
            seat.expected.popleft()
            return first
        wanted, index = divmod(first.at, len(first.nodes))
        node = first.nodes[index if not seat.plain else 0]
        if part in first.came if seat.plain else part != wanted:
            self.core.refused["foreign payload"] += 1
            return None
        if node not in first.useless and not self.core.has_reported(seat.peer, node):
            self.core.refused["payload before its report"] += 1
            return None
        first.at += 1
        first.came.add(part)
        if first.at == len(first.nodes) * len(self._tails):
            seat.expected.popleft()
        return _Expected(step, (node,), (first.weights[0],), first.at, useless=first.useless)

    def _open(self, seat: Seat, expected: _Expected | None, part: int, count: int) -> Slot:
        assert self.mean is not None
        if expected is None or expected.nodes[0] in expected.useless:
            return self.mean.open(seat.peer, -1, part, (0, 1), count)
        slot = self.mean.open(seat.peer, expected.step, part, expected.nodes[0], count, expected.weights[0])
        seat.slot = slot
        return slot

    def _shut(self, seat: Seat, slot: Slot) -> None:
        seat.slot = None
        slot.close()

    def _pour(
        self, seat: Seat, slot: Slot, over: memoryview, before_last: Callable[[memoryview], None] | None = None
    ) -> memoryview:
        """Gradients from the socket into the mean. `over`: those that came with the head; what is left of them.

        `before_last` is called with what is left before the last of them reach the mean.
        """
        while not slot.is_full:
            seat.held = True
            space = slot.space()
            seat.held = False
            have = min(len(over), len(space))
            space[:have] = over[:have]
            over = over[have:]
            self._fill(seat, space[have:])
            if before_last is not None and slot.is_last_chunk:
                before_last(over)
            seat.held = True  # it may wait for a slow receiver of the step before
            slot.filled()
            seat.held = False
        return over

    def _tail(self, seat: Seat, over: memoryview, length: int) -> memoryview:
        tail = memoryview(bytearray(length))
        tail[: len(over)] = over
        self._fill(seat, tail[len(over) :])
        return tail

    def _payload_done(self, seat: Seat, expected: _Expected, slot: Slot) -> None:
        node = expected.nodes[0]

        def tell(now: float) -> list[Effect]:  # of a step that was begun anew it would be taken for the next attempt's
            return self.core.on_payload(now, seat.peer, expected.step, node) if slot.is_current else []

        if node not in expected.useless:
            self._act(tell)

    # Writing

    def _on_part(self, step: int, part: int) -> None:
        """An average is formed: to everybody who takes part, while others are still arriving."""
        assert self.mean is not None
        with self._lock:
            if step == self._formed[0]:  # else another thread has already begun the next one
                self._formed[1].append(part)
            for seat in self._seats.values():
                if seat.since <= step and seat.blocks:
                    self._send_average(seat, step, part)

    def _send_average(self, seat: Seat, step: int, part: int) -> None:
        assert self.mean is not None
        self.mean.hold(part, 1)
        _put(seat, _Out(None, step, part))

    def _on_mean(self, step: int) -> None:
        assert self.mean is not None
        with self._lock:
            for seat in self._seats.values():
                if seat.since <= step and not seat.blocks:
                    _put(seat, _Out(self._whole(step)))
            self._act(lambda now: self.core.on_mean(now, step))

    def _whole(self, step: int) -> Message:
        assert self.mean is not None
        flat = np.concatenate([self.mean.results[part] for part in self._forward])
        return AveragedGradient(step, flat, np.float32(self._loss))

    def _write(self, seat: Seat) -> None:
        try:
            while True:
                while seat.owed and not seat.queue:
                    seat.is_writing = True
                    self._settle(seat)
                seat.is_writing = False
                with seat.change:
                    while not seat.queue and seat.closing_at is None and not seat.gone:
                        seat.change.wait()
                    if not seat.queue:
                        break
                    out = seat.queue.popleft()
                seat.is_writing = True
                self._write_out(seat, out)
        except OSError:
            pass  # the reader tells why
        finally:
            _close_pipe(seat)
            while seat.owed and self.mean is not None:
                self.mean.release(seat.owed.popleft())

    def _settle(self, seat: Seat) -> None:
        """Averages that the peer has taken may be written over."""
        assert seat.receipts is not None and self.mean is not None
        for _ in range(seat.receipts.wait(len(seat.owed))):
            seat.pieces += 1
            self.mean.release(seat.owed.popleft())

    def _share(self, seat: Seat, message: ShareMemory) -> None:
        assert self._memory is not None
        seat.receipts, theirs = Receipts.pair()  # there before the peer can answer
        try:
            seat.pipe.send_descriptors(encode_parts(message, seat.codec), [self._memory.descriptor, theirs])
        finally:
            os.close(theirs)
        if seat.gone:
            seat.receipts.close()

    def _write_out(self, seat: Seat, out: _Out) -> None:
        if out.raw:
            seat.pipe.send([out.raw])
            return
        if out.part < 0:
            assert out.message is not None
            if isinstance(out.message, ShareMemory):
                self._share(seat, out.message)
                return
            _send_pieces(seat, encode_parts(out.message, seat.codec))
            if out.credit is not None:
                self._taken(*out.credit)
            return
        if seat.receipts is not None:
            seat.owed.append(out.part)
            seat.pipe.send(encode_parts(AverageAt(out.step, out.part), seat.codec))
            return
        assert self.mean is not None and self.core.description is not None
        try:
            part = self.core.description.parts[out.part]
            values = self.mean.results[out.part]
            message: Message
            if part.block is not None:
                message = AveragedBlockGradient(out.step, part.block, values, self._tails[out.part])
            else:
                message = AveragedNonBlockGradient(out.step, part.component or 0, values)
            if seat.plain and part.component == BUFFERS:
                return
            _send_pieces(seat, encode_parts(message, seat.codec))
        finally:
            self.mean.release(out.part)

    # Time

    def _tick(self) -> None:
        while not self._ended.wait(TICK_S):
            self._act(self._on_tick)

    def _on_tick(self, now: float) -> list[Effect]:
        for seat in self._seats.values():
            if seat.closing_at is not None and now - seat.closing_at > LAST_WORDS_S:
                _close_pipe(seat)  # it does not read, and averages that wait for it keep the others waiting
            self._tire_of_unread(seat)
            self.core.on_heard(now if seat.held else seat.heard_at, seat.peer)
        return self.core.on_tick(now)

    def _tire_of_unread(self, seat: Seat) -> None:
        """Counted in ticks, and not by the clock: while this process is stopped nobody is late."""
        before, seconds = seat.stuck
        seat.stuck = seat.pieces, seconds + TICK_S if seat.is_writing and seat.pieces == before else 0.0
        limit_s = UNREAD * self.core.patience_s
        if seat.stuck[1] > limit_s and not seat.blamed:
            seat.blamed = f"it has not read what it was sent for {limit_s:g} s"
            _close_pipe(seat)

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads = [t for t in self._threads if t.is_alive() or t.ident is None]
        self._threads.append(thread)
        thread.start()


def _revoke(seat: Seat) -> None:
    """Under the server's lock, with the decision to part from it: what it was asked for, others are asked for now, and
    what it still sends must not reach the sums, where nobody would know what it weighs."""
    seat.expected.clear()
    if seat.slot is not None:
        seat.slot.revoked = True


def _close_pipe(seat: Seat) -> None:
    seat.pipe.close()
    if seat.receipts is not None:
        seat.receipts.close()


def _send_pieces(seat: Seat, parts: Sequence[bytes | memoryview]) -> None:
    """In pieces, so that a peer that reads slowly is told from one that does not read."""
    together: list[bytes | memoryview] = []
    for part in parts:
        rest = memoryview(part).cast("B")
        while len(rest) > PIECE_BYTES:
            seat.pipe.send([*together, rest[:PIECE_BYTES]])
            seat.pieces += 1
            together, rest = [], rest[PIECE_BYTES:]
        together.append(rest)
    seat.pipe.send(together)
    seat.pieces += 1


def _tell(call: Callable[[], None]) -> None:
    """What a person is shown must not end the run, whatever text or figure a peer has sent; a full disk may."""
    try:
        call()
    except (ValueError, TypeError, ArithmeticError, LookupError):
        log.exception("an event could not be told")


def _put(seat: Seat, out: _Out) -> None:
    with seat.change:
        if not seat.gone:
            seat.queue.append(out)
            seat.change.notify()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {host} port {port}: {error.strerror}. Choose another with --host or --port."
        ) from None
    return listener
