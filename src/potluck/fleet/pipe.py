"""A connection that one thread reads while another writes, encrypted or not. Knows nothing of messages."""

import array
import contextlib
import os
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence

from potluck.errors import TheirProtocolError
from potluck.fleet.sealing import PROTOCOL, Opener, Sealer
from potluck.system import CAN_SHARE, is_ready, send_some

LOOPBACK = ("127.0.0.1", "::1")
_CREDENTIALS = struct.Struct("3i")
"""Process, user, group."""
_RTT_AT = 68
"""Where in Linux's tcp_info the round trip is, in microseconds."""
_MOST_DESCRIPTORS = 4
_MOST_PARTS = 64
"""The most parts of one sendmsg; the system takes 1,024."""
_MOST_LINK_S = 4 * 32_767
"""The system takes no more than a quarter of it before the first question."""
LOOPBACK_BYTES = 256 << 10
"""The send buffer between processes of one machine: with a larger one, what is sent has left the processor's caches
before it is received, and a round takes half as long again. Other connections are the system's to tune."""
AHEAD_BYTES = 4 << 10
"""Less than this is asked of the system with what comes after it: a message's length, its beginning, and the rest."""
SLICE_BYTES = 1 << 20
"""The most bytes of one wait, so that progress of a slow peer is noticed."""
PIECE_BYTES = 128 << 10
"""The most bytes at once within a sealed record, which is opened only when all of it is there."""
LINK_TIMES, LEAST_LINK_S = 2, 10.0
"""A link is dead once the peer's machine has not answered for LINK_TIMES `patience`, and at least LEAST_LINK_S. More
than once: the system counts a peer that is alive and does not read as one that does not answer."""


class Pipe:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.is_closed = False
        self.heard_at = time.monotonic()
        self.sent_bytes = 0
        self.received_bytes = 0
        """Bytes of messages, before they are encrypted; sent_bytes too."""
        self.spared_sent_bytes = self.spared_received_bytes = 0
        """How many more they would have been, had what was coded travelled as floats."""
        self._tls = connection if isinstance(connection, ssl.SSLSocket) else None
        self.is_local = CAN_SHARE and self._tls is None and connection.family == socket.AF_UNIX
        """Whether the peer is a process of this machine with which memory can be shared."""
        # An SSL object is not for two threads at once: each call holds this lock, and none of them waits inside.
        self._lock = threading.Lock()
        self.can_seal = self._tls is not None and self._tls.selected_alpn_protocol() == PROTOCOL
        """Whether both ends of an encrypted connection have said that they can."""
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        self._descriptors: list[int] = []
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._rest = self._ahead[:0]
        """What has been received and not been taken yet, of a connection that is not encrypted."""
        connection.setblocking(self._tls is None)
        _tune(connection)

    @property
    def travelled_bytes(self) -> tuple[int, int, int]:
        """Bytes that were sent, received, and spared by codings. Numbers in shared memory do not travel."""
        return self.sent_bytes, self.received_bytes, self.spared_sent_bytes + self.spared_received_bytes

    @property
    def user(self) -> int:
        """Whose process a local peer is."""
        told = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(told)[1])

    @property
    def rtt_s(self) -> float | None:
        """How long the system finds that a byte takes to the other machine and back; None: it does not say."""
        try:
            told = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_AT + 4)
            return int.from_bytes(told[_RTT_AT:], sys.byteorder) / 1e6 if len(told) == _RTT_AT + 4 else None
        except (OSError, AttributeError):
            return None

    def seal_sending(self, key: bytes | memoryview) -> None:
        """Seal from here on: what was sent so far was the last inside TLS. Call it from the thread that sends."""
        assert self.can_seal and self._sealer is None
        self._sealer = Sealer(key)
        self._leave_tls()

    def seal_receiving(self, key: bytes | memoryview) -> None:
        """Expect sealed records from here on: what was received so far was the last inside TLS. Call it from the thread
        that receives."""
        if not self.can_seal or self._opener is not None or self._tls is None or self._tls.pending():
            raise TheirProtocolError("It seals a connection at a time when it should not.")
        self._opener = Opener(key)
        self._leave_tls()

    def _leave_tls(self) -> None:
        """One direction has. The other, if it has not yet, has the SSL object to itself, and may wait inside it."""
        self._socket.setblocking(True)

    def give_up_link(self, patience_s: float) -> None:
        """From now on a peer whose machine does not answer any more, though nothing says so, ends the connection.

        Without this, sent bytes that nobody acknowledges are tried again for a quarter of an hour, and a connection on
        which nothing is sent is never asked for.
        """
        link_s = int(min(max(LEAST_LINK_S, LINK_TIMES * patience_s), _MOST_LINK_S))
        with contextlib.suppress(OSError, AttributeError):  # not every kind of socket and system has these
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, link_s // 4))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, link_s // 8))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * link_s)

    def send_descriptors(self, parts: Sequence[bytes | memoryview], descriptors: Sequence[int]) -> None:
        """A short message, and open files with it."""
        socket.send_fds(self._socket, [b"".join(parts)], descriptors)

    def take_descriptors(self) -> list[int]:
        """Return the descriptors that came with what was received so far; they are the caller's to close."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def receive(self, space: memoryview) -> int:
        """Waits for bytes and puts some into `space`, or all of it if that is short. 0: the peer has ended."""
        if self._opener is not None:
            return self._receive_sealed(self._opener, space)
        if self._tls is not None:
            return self._encrypted(self._tls.recv_into, space)
        if not self._rest:
            if len(space) >= AHEAD_BYTES:
                return self._receive_plain(space)
            self._rest = self._ahead[: self._receive_plain(self._ahead)]
        count = min(len(space), len(self._rest))
        space[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def receive_all(self, space: memoryview) -> bool:
        """Until `space` is full. False: the peer ended before its first byte."""
        have = 0
        while have < len(space):
            count = self.receive(space[have:])
            if not count:
                if have:
                    raise ConnectionResetError("it ended in the middle of a message")
                return False
            self.heard_at = time.monotonic()
            have += count
        self.received_bytes += have
        return True

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """All of the parts, one after the other, without joining them."""
        self.sent_bytes += sum(memoryview(part).nbytes for part in parts)
        if self._sealer is not None:
            for records in self._sealer.seal(parts):
                self._send_plain([records])
        elif self._tls is not None:
            for part in parts:
                left = memoryview(part).cast("B")
                while left:
                    left = left[self._encrypted(self._tls.send, left) :]
        else:
            self._send_plain(parts)

    @property
    def can_send_now(self) -> bool:
        return self._tls is None and hasattr(socket, "MSG_DONTWAIT")

    def send_now(self, parts: Sequence[bytes | memoryview]) -> bytes:
        """Send as much as the system takes without waiting, and return the rest."""
        data = b"".join(parts)
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
            self.sent_bytes += sent
            return data[sent:]
        except OSError:  # it is full, or broken: the thread that waits will know
            return data

    def close(self) -> None:
        """Ends both directions; a thread that waits in either is woken.

        By the plain socket's shutdown: an SSLSocket's own forgets its encryption before it ends the connection, and
        what another thread sends in between would leave in plain text.
        """
        self.is_closed = True
        with contextlib.suppress(OSError):  # the peer has ended it
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    # By the plain socket's own methods: an SSLSocket's would encrypt once more.

    def _send_plain(self, parts: Sequence[bytes | memoryview]) -> None:
        rest = [memoryview(part).cast("B") for part in parts if len(part)]
        while rest:
            sent = send_some(self._socket, rest[:_MOST_PARTS])
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = rest[0][sent:]

    def _receive_sealed(self, opener: Opener, space: memoryview) -> int:
        if opener.has_rest:
            return opener.take_rest(space)
        if not self._fill(opener.head):
            return 0
        body = opener.body()
        if not self._fill(body):
            raise ConnectionResetError("it ended in the middle of a record")
        return opener.open(body, space)

    def _fill(self, space: memoryview) -> bool:
        """Until it is full. False: the peer has ended before that."""
        have = 0
        while have < len(space):
            piece = space[have : have + PIECE_BYTES]
            count = socket.socket.recv_into(self._socket, piece, flags=socket.MSG_WAITALL)
            if not count:
                return False
            self.heard_at = time.monotonic()
            have += count
        return True

    def _receive_plain(self, space: memoryview) -> int:
        """From a process of this machine descriptors may come with the bytes."""
        if not self.is_local:
            is_long = len(space) > AHEAD_BYTES
            return self._socket.recv_into(space[:SLICE_BYTES], flags=socket.MSG_WAITALL if is_long else 0)
        room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
        count, control, _, _ = self._socket.recvmsg_into([space], room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                came = array.array("i")
                came.frombytes(data[: len(data) - len(data) % came.itemsize])
                self._descriptors += came
        while len(self._descriptors) > _MOST_DESCRIPTORS:
            os.close(self._descriptors.pop())
        return count

    def _encrypted(self, call: Callable[[memoryview], int], data: memoryview) -> int:
        """How many bytes it took or gave, once it could."""
        while True:
            try:
                with self._lock:
                    return call(data)
            except ssl.SSLWantReadError:
                self._wait(to_write=False)
            except ssl.SSLWantWriteError:
                self._wait(to_write=True)

    def _wait(self, *, to_write: bool) -> None:
        while not self.is_closed:
            if is_ready(self._socket, to_write=to_write, timeout_s=1.0):  # then looks whether it was closed here
                return
        raise ConnectionAbortedError("closed here")


def _tune(connection: socket.socket) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not every kind of socket and system has these
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if connection.getpeername()[0] in LOOPBACK:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BYTES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # paces nothing


def local_name(port: int) -> str:
    """Where a server that listens on this port of the loopback interface is found by processes of its machine.

    The name is the kernel's (it begins with a zero byte): no file is left behind, and other network namespaces do not
    see it.
    """
    return f"\0potluck {port}"


def connect_local(port: int) -> socket.socket | None:
    """To the server on this port of this machine, if it is ours or the system's: anybody could have taken the name."""
    if not CAN_SHARE:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(10.0)  # a server that is stopped, and whose queue is full, would keep this one for ever
        connection.connect(local_name(port))
        if Pipe(connection).user in (0, os.getuid()):
            return connection
    except OSError:
        pass
    connection.close()
    return None


def listen_local(port: int) -> socket.socket | None:
    if not CAN_SHARE:
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(local_name(port))
        listener.listen(1024)
    except OSError:  # somebody has taken the name: it is only a short cut
        listener.close()
        return None
    return listener
