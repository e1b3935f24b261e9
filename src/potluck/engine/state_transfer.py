"""StateTransfer: a worker's state, sent to others while it trains on, and received from them, in folders of its own."""

import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from potluck.fleet.client import Client
from potluck.fleet.file_stream import FileStreamReceiver, most_bytes, stream_chunks, stream_header
from potluck.link.link import Link
from potluck.wire.messages import StateBegin


class StateTransfer:
    def __init__(self, client: Client, link: Link) -> None:
        """`link`: of the ranks that are this worker together, of which the first writes and sends."""
        self._client = client
        self._link = link
        self.arriving: Path | None = None
        """Where a state is put that is on its way here."""
        self._unpacker: FileStreamReceiver | None = None
        self._senders: list[threading.Thread] = []
        self._leaving: list[Path] = []
        """Folders that are being sent."""

    def receive(self, step: int, header: str) -> None:
        """A state begins to arrive, in place of whatever has arrived of another."""
        self.arriving = self.arriving or self._new_folder()
        if self._link.rank == 0:
            assert self._client.description is not None
            self._close_unpacker()
            place = self.arriving / f"step-{step:08d}"
            shutil.rmtree(place, ignore_errors=True)
            limit = most_bytes(self._client.description.state_bytes)
            self._unpacker = FileStreamReceiver(place, header, limit)

    def take_chunk(self, data: bytes | memoryview) -> None:
        if self._unpacker is not None:
            self._unpacker.feed(data)

    def arrived(self) -> Path:
        """All of it is here. The folder stays until drop()."""
        assert self.arriving is not None
        self._close_unpacker()
        return self.arriving

    def drop(self) -> None:
        self._close_unpacker()
        if self.arriving is not None and self._link.rank == 0:
            shutil.rmtree(self.arriving, ignore_errors=True)
        self.arriving = None

    def _close_unpacker(self) -> None:
        if self._unpacker is not None:
            self._unpacker.close()
            self._unpacker = None

    def _new_folder(self) -> Path:
        """A temporary folder of this worker. Of several ranks, the first makes and removes it."""
        folder = tempfile.mkdtemp(prefix="potluck-state-") if self._link.rank == 0 else ""
        return Path(self._link.gather_bytes(folder.encode())[0].decode())

    def serve(
        self, transfer: int, version: int, snapshot: Callable[[Path], Callable[[], Path | None]], *, is_best: bool
    ) -> None:
        """A copy in host memory now; written aside and sent while training continues. `snapshot(folder)` takes it, and
        returns what writes it there and says where, if that is this rank's to send."""
        folder = self._new_folder()
        write = snapshot(folder)
        if self._link.rank == 0:
            self._leaving = [place for place in self._leaving if place.exists()] + [folder]
        session = self._client.session

        def remove() -> None:
            shutil.rmtree(folder, ignore_errors=True)

        def send() -> None:
            try:
                place = write()
                if place is None:
                    return
                header = stream_header(place)
                begin = StateBegin(transfer, version, header, int(is_best))
                self._client.send_parcel(session, begin, transfer, stream_chunks(place, header), done=remove)
            except Exception as error:
                self._client.say(f"Could not send the state of step {version}: {error}")
                remove()

        # A thread, since this worker trains on while its state is written to disk and read from there.
        thread = threading.Thread(target=send, name="state sender")
        thread.start()
        self._senders = [sender for sender in self._senders if sender.is_alive()] + [thread]

    def close(self) -> None:
        """Call it once the connection may be closed."""
        for sender in self._senders:
            sender.join(timeout=1.0)

    def remove(self) -> None:
        """After the connection is closed: nothing reads the folders any more."""
        self.drop()
        for folder in self._leaving:
            shutil.rmtree(folder, ignore_errors=True)
