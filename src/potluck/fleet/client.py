"""A worker's side of the coordinator's protocol: join, heartbeat, work, payloads, averages, catching up.

One thread reads, one writes; the training thread calls what is here and never touches a socket. A connection that is
lost is made again by the thread that waits for the next message. What is sent without a connection is dropped: so the
later ranks of a node have a client, too. Knows nothing of torch: gradients are numpy arrays.
"""

import logging
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from potluck.account import Told, know, short_stack, tell_with
from potluck.coded_numbers import Coding, Floats, Octets
from potluck.errors import PotluckError, TheirProtocolError
from potluck.fleet.connection import Connection, PayloadLayout, part_of
from potluck.fleet.description import Description
from potluck.fleet.holder import ConnectionLost
from potluck.fleet.host_connector import CONTROL_BYTES, HostConnector
from potluck.fleet.invite import Invite
from potluck.fleet.mean import CHUNK
from potluck.fleet.membership import beat_s
from potluck.fleet.outbox import Outbox
from potluck.fleet.phases import enter_phase
from potluck.fleet.sealing import new_key
from potluck.fleet.shared_memory import Receipts, SharedMemory, SharedView
from potluck.wire.codec import Bulk, is_bulk, peek
from potluck.wire.messages import (
    AverageAt,
    AveragedBlockGradient,
    AveragedNonBlockGradient,
    BlockGradientPayload,
    CodedAverage,
    CodedPart,
    Heartbeat,
    Message,
    NonBlockGradientPayload,
    PartAt,
    SealKey,
    ShareMemory,
    StateMore,
    Welcome,
)
from potluck.words import duration, plural

log = logging.getLogger("potluck.client")

SHARED_TIMES = 8
"""How many gradients a worker's shared memory has room for: sums of nodes wait there too. Unused pages cost nothing."""


MOST_SPARE = 2
"""How many averages of each part are kept for reuse: new memory costs the system as much as reading into it."""


@dataclass
class Average:
    """A part's mean of a step, among the messages. It lies here until release()."""

    step: int
    part: int
    floats: Floats


@dataclass(eq=False)
class _Session(Connection):
    """One connection's queues."""

    inbox: deque[Message | Average] = field(default_factory=deque)
    out: Outbox = field(init=False)
    lost: str | None = None
    is_broken: bool = False
    """Nothing can be sent any more: the reader will know why, and must not wait for anything else."""
    averages: list[Floats] = field(default_factory=list)
    """Where the host forms them."""
    unreleased: int = 0
    """Where averages are taken one by one: how many have come and were not released. More than one only if broken."""
    shows: bool = False
    """Whether the host has been shown this worker's memory."""


class Client:
    def __init__(self, invite: Invite, *, name: str, kind: str, say: Callable[[str], None]) -> None:
        self.name = name
        self.say = say
        self.welcome: Welcome | None = None
        self._description: Description | None = None
        self._layout = PayloadLayout()
        self._session: _Session | None = None
        # Of inbox and outbox: with one for each, flush() could miss that the last message has left, and wait for ever.
        # Reentrant: the outbox, which takes it too, is called with it held.
        self._lock = threading.RLock()
        self._change = threading.Condition(self._lock)
        self._spare: defaultdict[int, list[Floats]] = defaultdict(list)
        """Memory for averages, by their part."""
        self._one: Floats | None = None
        """Where averages lie that are taken one by one; none: they are not."""
        self.is_closed = False
        self._door = HostConnector(invite, name=name, kind=kind, say=say)
        self._patience_before_s = 10.0
        self._memory: SharedMemory | None = None
        self._waits_since: float | None = None
        """Since when the training thread waits for the host; none: it computes."""
        self._moved_at = time.monotonic()
        """When the training thread was last here."""
        self._trainer = threading.get_ident()
        self._told_stuck = 0.0
        self._address = f"{invite.host} port {invite.port}"

    def _account(self) -> Told:
        now, session = time.monotonic(), self._session
        lines = []
        if session is not None:
            unsent, heard = plural(session.out.unsent, "message"), duration(now - session.pipe.heard_at)
            unread = plural(len(session.inbox), "message")
            lines.append(f"{unsent} to be sent, {unread} to be taken in, heard {heard} ago from the host.")
            lines += [f"The connection is lost: {session.lost}."] if session.lost is not None else []
        if (since := self._waits_since) is not None:
            return f"{self.name} waits for the host at {self._address}, for {duration(now - since)}.", lines
        here = short_stack(self._trainer, 1)
        return f"{self.name} computes, for {duration(now - self._moved_at)}{f', at {here}' if here else ''}.", lines

    def return_to(self, patience_s: float) -> None:
        """This machine was away, and its host has this patience: wait for it as one that has lost it."""
        self._patience_before_s, self._door.returns = patience_s, True

    def make_room(self, floats: int) -> None:
        """Allocates memory for this many numbers that a host on this machine can read. Call it before ready()."""
        if self._door.is_here:
            self._memory = SharedMemory(SHARED_TIMES * floats)

    def allocate(self, floats: int) -> Floats:
        """Zeros, where send_part() need not copy them if that can be."""
        taken = self._memory.take(floats) if self._memory is not None else None
        return np.zeros(floats, np.float32) if taken is None else taken

    def take_averages_one_by_one(self, floats: int) -> None:
        """From now on the next is read when one is released: never all of a step. `floats`: of the largest."""
        self._one = np.empty(floats, np.float32)

    @property
    def description(self) -> Description | None:
        """The description of what this worker trains, by which averages are read."""
        return self._description

    @description.setter
    def description(self, described: Description) -> None:
        self._description, self._layout = described, PayloadLayout.of(described)

    @property
    def patience_s(self) -> float:
        return self.welcome.patience_ms / 1000 if self.welcome is not None else self._patience_before_s

    @property
    def worker_id(self) -> int:
        return self.welcome.worker_id if self.welcome is not None else 0

    # Connecting

    def connect(self, *, again: bool = False) -> Welcome:
        """Joins, or joins again: after a loss, or where this worker wants to be asked anew what it holds."""
        know(host=f"{self._door.invite.port} {self._door.invite.pin or ''}", name=self.name)
        tell_with("worker", self._account)
        if (before := self._session) is not None:
            before.close()
            with self._change:  # else what it has read would be taken for the next one's
                self._change.wait_for(lambda: before.lost is not None, self.patience_s)
        pipe, self.welcome = self._door.connect(self.patience_s, again=again)
        log.info("worker %d of the host at %s, with a patience of %g s", self.worker_id, self._address, self.patience_s)
        pipe.give_up_link(self.patience_s)
        with self._change:
            self._session = session = _Session(pipe)
            session.out = Outbox(session, self._change, self._lock, self._beat)
        for target, name in ((self._read, "client reader"), (self._write, "client writer")):
            threading.Thread(target=target, args=(session,), name=name, daemon=True).start()
        return self.welcome

    def close(self) -> None:
        """Closes the connection once everything queued has been sent."""
        self.is_closed = True
        session = self._session
        if session is None:
            return
        deadline = time.monotonic() + 2.0  # else a host that reads nothing would keep this worker from ending
        with self._change:
            session.out.end()
            while session.out.queued and session.lost is None and time.monotonic() < deadline:
                self._change.wait(0.1)
            self._change.notify_all()
        session.close()

    # Sending

    def send(self, message: Message, before: Callable[[], None] | None = None) -> None:
        """Queues a message; arrays in it must not change until flush(). `before` is called first."""
        self._moved_at = time.monotonic()
        with self._change:
            session = self._session
            if session is None or session.lost is not None:
                return  # the thread that waits for an answer will hear of it
            session.out.put(message, before)

    def send_part(self, step: int, part: int, gradients: Floats, before: Callable[[], None] | None = None) -> None:
        assert self.description is not None
        session = self._session
        seen = self._memory if session is not None and session.shows else None
        offset = seen.offset_of(gradients) if seen is not None else None
        if offset is not None:
            self.send(PartAt(step, part, offset), before)
            return
        found = self.description.parts[part]
        if found.block is None:
            self.send(NonBlockGradientPayload(step, self.worker_id, found.component or 0, gradients), before)
        else:
            sizes = np.array(found.sizes, "<u4")
            message = BlockGradientPayload(step, self.worker_id, found.block, self.description.blocks, gradients, sizes)
            self.send(message, before)

    def send_coded(self, step: int, part: int, coded: Octets, before: Callable[[], None] | None = None) -> None:
        """Send a part in its coding."""
        coding = self._layout.codings[part]
        assert coding is not None
        self.send(CodedPart(step, part, coding.number, coded), before)

    @property
    def session(self) -> object:
        """Changes with each connection: what was asked for over one of them is of no use over the next."""
        return self._session

    def send_parcel(
        self, session: object, begin: Message, transfer: int, chunks: Iterator[bytes], done: Callable[[], None]
    ) -> None:
        """Sends chunk by chunk, as the other end takes them, and only while nothing else is queued."""
        with self._change:
            if not isinstance(session, _Session) or session is not self._session or session.lost is not None:
                done()
                return
            session.out.put_parcel(transfer, begin, chunks, done)

    def flush(self) -> None:
        """Waits until everything queued has been sent, or the connection is lost."""
        with self._change:
            session = self._session
            while session is not None and session.out.unsent and session.lost is None and session is self._session:
                self._change.wait(1.0)  # and look again: nobody tells that another connection is in its place

    # Receiving

    def receive(self, timeout_s: float | None = None) -> Message | Average | ConnectionLost | None:
        """The next message or average, or that the connection is lost; none if nothing came in time."""
        with self._change, self._waiting():
            session = self._session
            assert session is not None
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while not session.inbox:
                if session.lost is not None:
                    return ConnectionLost(session.lost)
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._change.wait(left)
            return session.inbox.popleft()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waits_since, self._trainer = time.monotonic(), threading.get_ident()
        try:
            yield
        finally:
            self._waits_since, self._moved_at = None, time.monotonic()

    def release(self, average: Average) -> None:
        """Gives its memory back, to be overwritten."""
        with self._change:
            if self._one is None:
                self._spare[average.part] = [average.floats, *self._spare[average.part]][:MOST_SPARE]
                return
            assert self._session is not None
            self._session.unreleased -= 1
            self._change.notify_all()

    # Threads

    def _read(self, session: _Session) -> None:
        why = "the host closed the connection"
        try:
            for head, length in session.frames(lambda: max(CONTROL_BYTES, self._layout.limit_bytes)):
                if is_bulk(peek(head, session.codec)):
                    self._read_average(session, head, length)
                else:
                    self._take_in(session, session.read_message(head, length))
        except (OSError, PotluckError) as error:
            why = str(error)
        log.info("the connection to the host is lost: %s", why)
        with self._change:
            session.lost = why
            session.out.drop()
            self._change.notify_all()
        session.close()

    def _take_in(self, session: _Session, message: Message) -> None:
        log.debug("heard %s of step %s", type(message).__name__, getattr(message, "step", "none"))
        match message:
            case AverageAt():
                self._take_average(session, message)
            case ShareMemory():
                self._share(session, message)
            case SealKey():
                session.pipe.seal_receiving(message.key)
                self.send(SealKey(new_key()))
            case StateMore():
                with self._change:
                    session.out.on_more(message)
            case Heartbeat():
                pass  # that it came is noted with its bytes
            case _:
                self._arrived(session, message)

    def _read_average(self, session: _Session, head: memoryview, length: int) -> None:
        bulk, over = session.read_bulk(head, length)
        index, coding = self._check_average(bulk)
        enter_phase("average", bulk.fields["step"], part=index)
        floats = self._room(session, index)
        if coding is None:
            over = session.fill(floats.view(np.uint8).data, over)
        else:
            for first in range(0, len(floats), CHUNK):
                chunk = floats[first : first + CHUNK]
                coded = np.empty(coding.coded_bytes(len(chunk)), np.uint8)
                over = session.fill(coded.data, over)
                coding.decode(coded, chunk)
        bulk.finish(session.fill_after(over, length - bulk.start - bulk.nbytes))
        self._arrived(session, Average(bulk.fields["step"], index, floats))

    def _check_average(self, bulk: Bulk) -> tuple[int, Coding | None]:
        """Return which part the host sends, and its coding, before anything of it is read."""
        assert self.description is not None
        if bulk.message is CodedAverage:
            return self._layout.check_coded(bulk)
        if bulk.message not in (AveragedBlockGradient, AveragedNonBlockGradient):
            raise TheirProtocolError(f"The host sent a {bulk.message.__name__}.")
        name, number = part_of(bulk)
        index = self._layout.parts.get((name, number))
        if index is None or bulk.count != self.description.parts[index].floats:
            raise TheirProtocolError(f"The host sent {bulk.count:,} averages for {name} {number}.")
        return index, None

    def _share(self, session: _Session, message: ShareMemory) -> None:
        """The host is on this machine: its averages are seen from now on, and this worker's gradients shown."""
        descriptors = session.pipe.take_descriptors()
        if len(descriptors) != 2 or session.receipts is not None or self.description is None:
            raise TheirProtocolError("The host shares memory at a time when it should not.")
        window, session.receipts = SharedView(descriptors[0]), Receipts(socket.socket(fileno=descriptors[1]))
        offset = 0
        for part in self.description.parts:
            session.averages.append(window.floats(offset, part.floats))
            offset += 4 * part.floats
        if self._memory is not None:
            with self._change:
                session.out.put(message, descriptors=(self._memory.descriptor,))
                session.shows = True  # what is put behind it is sent after it

    def _take_average(self, session: _Session, at: AverageAt) -> None:
        if at.part >= len(session.averages) or session.receipts is None:
            raise TheirProtocolError("The host tells of an average that it does not share.")
        enter_phase("average seen", at.step, part=at.part)
        floats = self._room(session, at.part)
        np.copyto(floats, session.averages[at.part])
        session.receipts.give()  # only now: the host may write there again once it has it
        self._arrived(session, Average(at.step, at.part, floats))

    def _room(self, session: _Session, part: int) -> Floats:
        """Where an average is put that begins to arrive. Waits for the one before, where they are taken one by one.
        There is one reader at a time: a lost session's has ended before the next begins."""
        assert self.description is not None
        size = self.description.parts[part].floats
        with self._change:
            if self._one is None:
                return self._spare[part].pop() if self._spare[part] else np.empty(size, np.float32)
            while session.unreleased and not session.is_broken and not self.is_closed:
                self._change.wait()
            if session.unreleased:  # they keep their memory: of a broken connection, too, what has come is applied
                self._one = np.empty_like(self._one)
            session.unreleased += 1
            return self._one[:size]

    def _arrived(self, session: _Session, message: Message | Average) -> None:
        with self._change:
            session.inbox.append(message)
            self._change.notify_all()

    def _write(self, session: _Session) -> None:
        try:
            session.out.run(beat_s(self.patience_s), lambda: session.lost is not None or session is not self._session)
        except OSError:
            with self._change:
                session.is_broken = True
                self._change.notify_all()
            session.close()  # the reader says why

    def _beat(self) -> Message:
        return Heartbeat(f"{self.name}{self._tell_stuck()}", int(time.time() * 1000))

    def _tell_stuck(self) -> str:
        """Behind a line break, which a host of before this does not look at: where the training thread is, once it has
        asked for nothing and sent nothing for half of patience."""
        is_stuck = self._waits_since is None and time.monotonic() - self._moved_at > self.patience_s / 2
        if not is_stuck or self._told_stuck == self._moved_at:
            return ""
        self._told_stuck = self._moved_at
        return "\n" + short_stack(self._trainer)
