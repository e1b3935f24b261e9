"""Keeps on the host's disk the checkpoints that workers send. Imports no torch: it checks files, and reads none.

A checkpoint is unpacked beside its place, compared with its own checksums, and renamed into it.
"""

import os
import queue
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from potluck.agree.records import Position
from potluck.errors import CheckpointError, PotluckError
from potluck.files import publish
from potluck.fleet.file_stream import FileStreamReceiver
from potluck.fleet.server import OnSaved
from potluck.save import checkpoint_folder
from potluck.save.export import write_best
from potluck.save.run_folder import make_private
from potluck.system import sync

MOST_BYTES = 1 << 44


class CheckpointReceiver:
    """One checkpoint at a time arrives; a thread of its own writes it."""

    def __init__(self, folder: Path, pass_over: Callable[[Path, str], None]) -> None:
        self.folder = folder
        self._pass_over = pass_over
        self._generation = 0
        self._queue: queue.Queue[tuple[bytes | memoryview, Callable[[], None]] | None] | None = None

    def begin(self, step: int, header: str, keep_last: int, on_saved: OnSaved) -> None:
        self.abort()
        self._queue = queue.Queue()
        arguments = (self._queue, step, header, keep_last, on_saved)
        # A thread, so that a slow disk stops neither the reader of the connection nor the coordinator.
        threading.Thread(target=self._write, args=arguments, name="checkpoint receiver", daemon=True).start()

    def feed(self, data: bytes | memoryview, taken: Callable[[], None]) -> None:
        if self._queue is not None:
            self._queue.put((data, taken))

    def abort(self) -> None:
        """The sender is gone: what has arrived is of no use."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None

    def newest(self) -> tuple[Path, Position] | None:
        return checkpoint_folder.newest(
            checkpoint_folder.found(self.folder),
            lambda path: standing_of(path, checkpoint_folder.check(path)),
            lambda path, error: self._pass_over(path, str(error)),
        )

    def _write(
        self,
        chunks: "queue.Queue[tuple[bytes | memoryview, Callable[[], None]] | None]",
        step: int,
        header: str,
        keep_last: int,
        on_saved: OnSaved,
    ) -> None:
        self._generation += 1
        aside = self.folder / f"{checkpoint_folder.WRITING}{step:08d}-{os.getpid()}-{self._generation}"
        try:
            make_private(self.folder)
            sync(self.folder.parent)  # else a power cut could leave checkpoints in a folder that has no name
            unpacker = FileStreamReceiver(aside, header, MOST_BYTES)
            checkpoint_folder.check_space(self.folder, unpacker.total)
            while not unpacker.is_complete:
                chunk = chunks.get()
                if chunk is None:
                    unpacker.close()
                    shutil.rmtree(aside, ignore_errors=True)
                    return
                unpacker.feed(chunk[0])
                chunk[1]()
            body = checkpoint_folder.check(aside)
            if standing_of(aside, body).version != step:
                raise CheckpointError(f"its manifest is of step {body['step']}")
            place = checkpoint_folder.free_place(self.folder, body["step"])  # for people; `step` counts agreements
            publish(aside, place)
            # After it has its name: a host that is killed in between must find a whole one.
            checkpoint_folder.prune(self.folder, keep_last, place)
            if checkpoint_folder.best_loss(place) is not None:
                write_best(place)
        except Exception as error:  # whatever it is: without an answer everybody would wait for this checkpoint
            shutil.rmtree(aside, ignore_errors=True)
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            theirs = isinstance(error, PotluckError)
            on_saved(step, "", f"The host cannot keep the checkpoint of step {step}: {reason}", 0, theirs)
            return
        on_saved(step, str(place), "", unpacker.total, False)


def standing_of(path: Path, body: dict[str, Any]) -> Position:
    """Where the run stood; CheckpointError if the manifest, whose checksum anybody can make, does not say so."""
    try:
        stood, rows = Position.from_dict(body), body["rows_in_epoch"]
        if type(rows) is not int:
            raise TypeError(f"{rows!r} is no number of rows")
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path} is damaged: its manifest does not say where the run stood.") from None
    if stood.row and stood.row == rows:
        return stood.next_epoch()
    return replace(stood, left=(), ranges=((0, stood.row),) if stood.row else ())
