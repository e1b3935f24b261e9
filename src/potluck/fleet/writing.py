"""The thread that writes to one peer that takes part: messages, and averages from where they were formed."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from potluck.fleet.connection import Connection, Out
from potluck.fleet.exchange import Exchange
from potluck.fleet.phases import reach
from potluck.fleet.shared import Receipts
from potluck.wire.codec import encode_parts
from potluck.wire.messages import AverageAt, ShareMemory


@dataclass
class Writer:
    connection: Connection
    exchange: Exchange
    on_taken: Callable[[int, int], None]
    """Hears of each chunk of a state that has left: which peer it came from, and of which transfer it is."""

    def run(self) -> None:
        connection = self.connection
        try:
            while True:
                while connection.owed and not connection.queue:
                    connection.is_writing = True
                    self._settle()
                connection.is_writing = False
                with connection.change:
                    while not connection.queue and connection.closing_at is None and not connection.gone:
                        connection.change.wait()
                    if not connection.queue:
                        break
                    out = connection.queue.popleft()
                connection.is_writing = True
                self.write(out)
        except OSError:
            pass  # the reader tells why
        finally:
            connection.close()
            while connection.owed:
                self.exchange.release(connection.owed.popleft())

    def _settle(self) -> None:
        """Averages that the peer has taken may be written over."""
        connection = self.connection
        assert connection.receipts is not None
        for _ in range(connection.receipts.wait(len(connection.owed))):
            connection.pieces += 1
            self.exchange.release(connection.owed.popleft())

    def write(self, out: Out) -> None:
        connection = self.connection
        if out.raw:
            connection.pipe.send([out.raw])
        elif out.part >= 0:
            self._write_average(out)
        elif isinstance(out.message, ShareMemory):
            self._share(out.message)
        else:
            assert out.message is not None
            connection.send_pieces(encode_parts(out.message, connection.codec))
            if out.credit is not None:
                self.on_taken(*out.credit)

    def _write_average(self, out: Out) -> None:
        connection = self.connection
        reach("average leaves", out.step, part=out.part)
        if connection.receipts is not None:
            connection.owed.append(out.part)
            connection.pipe.send(encode_parts(AverageAt(out.step, out.part), connection.codec))
            return
        try:
            message = self.exchange.average(out.step, out.part, plain=connection.plain)
            if message is not None:
                connection.send_pieces(encode_parts(message, connection.codec))
        finally:
            self.exchange.release(out.part)

    def _share(self, message: ShareMemory) -> None:
        connection, memory = self.connection, self.exchange.memory
        assert memory is not None
        connection.receipts, theirs = Receipts.pair()  # there before the peer can answer
        try:
            connection.pipe.send_descriptors(encode_parts(message, connection.codec), [memory.descriptor, theirs])
        finally:
            os.close(theirs)
        if connection.gone:
            connection.receipts.close()
