"""Connections that are not workers yet: one thread serves all of them.

However many there are, and whatever they send, each costs a socket and a few kilobytes, and those who are still unknown
after a while are closed. Knows frames, and nothing of what a message means.
"""

import contextlib
import errno
import itertools
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from potluck.errors import TheirProtocolError
from potluck.fleet.pipe import LOOPBACK
from potluck.wire.codec import codec_of, encode
from potluck.wire.frames import FrameReader
from potluck.wire.messages import Message

UNKNOWN_BYTES = 4096
"""The longest message of a peer that has not said who it is."""
KNOWN_BYTES = 4 << 20
"""The longest of one that has: a description of a model."""
CROWD, BREATH_S = 32, 0.02
"""With more guests than this, they are looked after this many seconds apart: each waking of this thread costs those who
train more than what it does for one guest."""
MOST_UNKNOWN = 512
"""More strangers than this at once: the oldest goes."""


@dataclass(eq=False)
class Guest:
    """One connection in the lobby."""

    peer: int
    socket: socket.socket
    came_at: float
    reader: FrameReader
    codec: str | None = None
    shaking: bool = False
    """In the middle of its TLS handshake."""
    address: str = ""
    """The address of its machine; empty for this machine."""
    out: bytearray = field(default_factory=bytearray)
    closing: bool = False


class Lobby:
    def __init__(
        self,
        listeners: Sequence[socket.socket],
        tls: ssl.SSLContext | None,
        *,
        stranger_s: float,
        on_payload: Callable[[Guest, memoryview], None],
        on_closed: Callable[[Guest, str], None],
    ) -> None:
        self._listeners = listeners
        self._tls = tls
        self._stranger_s = stranger_s
        self._on_payload = on_payload
        self._on_closed = on_closed
        self._numbers = itertools.count(1)
        self._guests: dict[int, Guest] = {}
        self._strangers: dict[int, Guest] = {}
        """Strangers, in order of arrival."""
        self._selector = selectors.DefaultSelector()
        self._waker, self._wake = socket.socketpair()
        self._lock = threading.RLock()  # the server's threads send to guests, take them out and close them meanwhile
        self._stopped = False
        for end in (self._waker, self._wake, *listeners):
            end.setblocking(False)
        for listener in listeners:
            self._selector.register(listener, selectors.EVENT_READ, listener)
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="lobby", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        with contextlib.suppress(OSError):  # it wakes twice a second anyway
            self._wake.send(b"x")
        if self._thread.ident is not None:  # a host may fail before it starts, and must be able to say why
            self._thread.join(timeout=5)  # it may stand in a decision, as where a disk hangs
        with self._lock:
            for guest in list(self._guests.values()):
                self._flush(guest)
                self._drop(guest)
        for end in (self._waker, self._wake, *self._listeners):
            end.close()
        self._selector.close()

    def send(self, peer: int, message: Message) -> None:
        with self._lock:
            if (guest := self._guests.get(peer)) is None:
                return
            data = encode(message, guest.codec or "bincode")
            if len(guest.out) + len(data) <= KNOWN_BYTES:
                guest.out += data
                self._flush(guest)

    def close(self, peer: int) -> None:
        """Closes a guest once everything queued for it has been sent."""
        with self._lock:
            guest = self._guests.get(peer)
            if guest is not None:
                guest.closing = True
                self._flush(guest)

    def know(self, peer: int) -> None:
        with self._lock:
            if (guest := self._strangers.pop(peer, None)) is not None:
                guest.reader.limit_bytes = KNOWN_BYTES

    def take_out(self, peer: int) -> Guest | None:
        """It takes part from now on: its socket is somebody else's."""
        with self._lock:
            guest = self._guests.pop(peer, None)
            if guest is not None:
                self._strangers.pop(peer, None)
                self._selector.unregister(guest.socket)
            return guest

    def _run(self) -> None:
        while not self._stopped:
            for key, events in self._selector.select(timeout=0.5):
                if isinstance(key.data, Guest):
                    self._serve(key.data, events)
                elif key.fileobj is self._waker:
                    with contextlib.suppress(OSError):  # another turn has read it: it does not block
                        self._waker.recv(4096)
                else:
                    self._accept(key.data)
            self._tire_of_strangers()
            if len(self._guests) > CROWD:
                time.sleep(BREATH_S)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(64):  # then somebody else has a turn
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away_oldest()
                return
            connection.setblocking(False)
            guest = Guest(next(self._numbers), connection, time.monotonic(), FrameReader(UNKNOWN_BYTES))
            if isinstance(address, tuple) and address[0] not in LOOPBACK:
                guest.address = address[0]
            # On a Unix socket the system tells each end whose process the other is, and nobody can listen in.
            if self._tls is not None and listener.family != socket.AF_UNIX:
                try:
                    guest.socket = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                except (OSError, ValueError):  # it has gone already
                    connection.close()
                    continue
                guest.shaking = True
            with self._lock:
                self._guests[guest.peer] = self._strangers[guest.peer] = guest
                self._selector.register(guest.socket, selectors.EVENT_READ, guest)
                if len(self._strangers) > MOST_UNKNOWN:
                    self._turn_away_oldest()

    def _serve(self, guest: Guest, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                with self._lock:
                    self._flush(guest)
            if events & selectors.EVENT_READ:
                self._read(guest)
        except TheirProtocolError as error:
            self._end(guest, str(error))
        except (OSError, ValueError):
            self._end(guest, "the connection broke")

    def _read(self, guest: Guest) -> None:
        turns = 16  # then somebody else has a turn; what TLS has already taken in would not wake us again
        while turns > 0 or (isinstance(guest.socket, ssl.SSLSocket) and not guest.shaking and guest.socket.pending()):
            turns -= 1
            count = self._receive(guest)
            if count is None:
                return
            if not count:
                self._end(guest, "it closed the connection")
                return
            payload = guest.reader.filled(count)
            if payload is not None:
                if guest.codec is None:
                    guest.codec = codec_of(payload)
                self._on_payload(guest, payload)

    def _receive(self, guest: Guest) -> int | None:
        """How many bytes are new in its reader; none: no more for now.

        Under the lock. Another thread could close the guest meanwhile, after which Python would read from an encrypted
        socket in plain text, or take it out, after which its bytes are for another reader.
        """
        with self._lock:
            if guest.peer not in self._guests or guest.closing:
                return None
            try:
                if guest.shaking:
                    assert isinstance(guest.socket, ssl.SSLSocket)
                    guest.socket.do_handshake()
                    guest.shaking = False
                return guest.socket.recv_into(guest.reader.space())
            except (BlockingIOError, ssl.SSLWantReadError):
                return None
            except ssl.SSLWantWriteError:
                self._selector.modify(guest.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, guest)
                return None

    def _flush(self, guest: Guest) -> None:
        try:
            while guest.out:
                sent = guest.socket.send(guest.out)
                del guest.out[:sent]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except (OSError, ValueError):
            guest.out.clear()
            guest.closing = True
        if guest.closing and not guest.out:
            self._drop(guest)
        elif guest.peer in self._guests and not self._stopped:
            wanted = 0 if guest.closing else selectors.EVENT_READ
            wanted |= selectors.EVENT_WRITE if guest.out else 0
            self._selector.modify(guest.socket, wanted, guest)

    def _end(self, guest: Guest, why: str) -> None:
        with self._lock:
            is_here = guest.peer in self._guests
            self._drop(guest)
        if is_here:
            self._on_closed(guest, why)

    def _drop(self, guest: Guest) -> None:
        self._strangers.pop(guest.peer, None)
        if self._guests.pop(guest.peer, None) is not None:
            with contextlib.suppress(KeyError, ValueError, OSError):  # not registered any more, or closed by its peer
                self._selector.unregister(guest.socket)
            guest.socket.close()

    def _turn_away_oldest(self) -> None:
        with self._lock:
            if self._strangers:
                self._drop(next(iter(self._strangers.values())))

    def _tire_of_strangers(self) -> None:
        until = time.monotonic() - self._stranger_s
        with self._lock:
            while self._strangers and next(iter(self._strangers.values())).came_at < until:
                self._turn_away_oldest()
