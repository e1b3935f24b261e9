"""Memory that two processes of one machine have mapped, so that gradients need not travel between them.

Each end tells where its numbers lie, and may write there again once the other has told that it took them. Over a
loopback socket the kernel would copy every byte twice, in small portions.
"""

import contextlib
import mmap
import os
import socket

import numpy as np

from potluck.coded_numbers import Floats
from potluck.errors import TheirProtocolError
from potluck.system import can_shrink, seal_memory

PAGE = mmap.PAGESIZE


class SharedMemory:
    """Numbers that another process can be shown. Pages that are never written cost nothing."""

    def __init__(self, floats: int) -> None:
        self.size = max(PAGE, -(-4 * floats // PAGE) * PAGE)
        self.descriptor = os.memfd_create("potluck", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, self.size)
        seal_memory(self.descriptor)
        self.floats: Floats = np.frombuffer(mmap.mmap(self.descriptor, self.size), np.float32)
        self._start = self.floats.ctypes.data
        self._used = 0

    def take(self, floats: int) -> Floats | None:
        """Some of it that nobody has taken yet, from the start of a page on; none if so much is not left."""
        start, end = self._used, self._used + -(-4 * floats // PAGE) * PAGE
        if end > self.size:
            return None
        self._used = end
        return self.floats[start // 4 : start // 4 + floats]

    def offset_of(self, values: Floats) -> int | None:
        """Where these lie, in bytes; none if it is elsewhere."""
        offset = values.ctypes.data - self._start
        return offset if 0 <= offset <= self.size - values.nbytes and values.flags.c_contiguous else None

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # __init__ may have failed before there was one
            os.close(self.descriptor)


class SharedView:
    """Another process's Memory, to read. Its pages are the other's: looking at them takes no memory."""

    def __init__(self, descriptor: int) -> None:
        """The descriptor is closed here."""
        try:
            # If it could be made shorter, reading what is gone would end this process.
            if can_shrink(descriptor):
                raise TheirProtocolError("The memory that it shares could become shorter.")
            self.size = os.fstat(descriptor).st_size
            self._mapped = mmap.mmap(descriptor, self.size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise TheirProtocolError(f"What it shares is not memory: {error}.") from None
        finally:
            os.close(descriptor)

    def floats(self, offset: int, count: int) -> Floats:
        if offset % 4 or offset + 4 * count > self.size:
            raise TheirProtocolError(f"There are no {count:,} numbers at byte {offset:,} of what it shares.")
        return np.frombuffer(self._mapped, np.float32, count, offset)


class Receipts:
    """Each side tells the other how many of its numbers it has taken."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple["Receipts", int]:
        """One end, and the descriptor of the other, which is the caller's to close."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs.detach()

    def give(self) -> None:
        self._end.sendall(b"1")

    def wait(self, most: int) -> int:
        """Waits for receipts, and takes at most `most` of them."""
        count = len(self._end.recv(most))
        if not count:
            raise ConnectionResetError("the other end is gone")
        return count

    def close(self) -> None:
        """A thread that waits, here or there, is woken."""
        with contextlib.suppress(OSError):  # the other end has ended it
            self._end.shutdown(socket.SHUT_RDWR)
