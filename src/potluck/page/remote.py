"""RemoteRun: a run that is led elsewhere, as files here: what its host tells a watcher, kept for the page to read.

Knows nothing of how it is shown. What comes is written down as it comes, within bounds, and never run.
"""

import contextlib
import shutil
import threading
from pathlib import Path

from potluck.errors import PotluckError, TheirProtocolError
from potluck.files import written_aside
from potluck.fleet.connection import Connection
from potluck.fleet.host_connector import HostConnector
from potluck.fleet.invite import Invite
from potluck.fleet.pipe import Pipe
from potluck.fleet.watchers import EVENTS as EVENTS_TOLD
from potluck.fleet.watchers import NOW as NOW_TOLD
from potluck.page.reader import EVENTS, NOW
from potluck.wire.messages import PROTOCOL, LookOn, Message, Refusal, Watched
from potluck.words import say, size

FRAME_BYTES = 8 << 20
"""The longest message that is taken."""
MOST_BYTES = 1 << 30
"""The most bytes of a run's events: a million steps have less. And never more than a quarter of what is free."""
PATIENCE_S = 30.0
"""How long the host may be out of reach: after that the page says that what it shows is old."""
ENDED = b'"event": "run_ended"'


class _WatchConnector(HostConnector):
    """Opens as a watcher does, and is answered as a worker is."""

    def opening(self) -> Message:
        return LookOn(PROTOCOL, self.invite.secret)


class RemoteRun:
    def __init__(self, invite: Invite, folder: Path) -> None:
        self._connector = _WatchConnector(invite, name="", kind="", say=say)
        self._folder = folder
        self._pipe: Pipe | None = None
        self._is_over = False
        self._has_ended = False
        """The host has told of the run's end."""

    def start(self) -> None:
        """Begin once the host has answered. ConfigError: it will not."""
        pipe, _ = self._connector.connect(PATIENCE_S, again=False)
        self._begin(pipe)
        # A thread: the page must answer while the host is silent, or is looked for again.
        threading.Thread(target=self._run, name="remote run", daemon=True).start()

    def close(self) -> None:
        self._is_over = True
        if self._pipe is not None:
            self._pipe.close()

    def _begin(self, pipe: Pipe) -> None:
        """A host tells all from the beginning, each time: into another file, by which the page knows."""
        self._pipe = pipe
        (self._folder / EVENTS).unlink(missing_ok=True)
        (self._folder / EVENTS).touch(mode=0o600)

    def _run(self) -> None:
        try:
            while True:
                assert self._pipe is not None
                with contextlib.suppress(ConnectionError):  # what follows says so, and tries again
                    self._hear(self._pipe)
                self._pipe.close()
                if self._is_over:
                    return
                if self._has_ended:
                    say("The run has ended. The page stays until Ctrl-C.")
                    return
                say("The connection to the host is lost; trying again.")
                self._begin(self._connector.connect(PATIENCE_S, again=True)[0])
        except (PotluckError, OSError) as error:
            if not self._is_over:
                say(f"{str(error).removesuffix('.')}. The page shows the run as it was, until Ctrl-C.")

    def _hear(self, pipe: Pipe) -> None:
        connection, taken = Connection(pipe), 0
        most = min(MOST_BYTES, shutil.disk_usage(self._folder).free // 4)
        with (self._folder / EVENTS).open("ab", buffering=0) as file:
            for head, length in connection.frames(lambda: FRAME_BYTES):
                message = connection.read_message(head, length)
                match message:
                    case Watched(what=what) if what == EVENTS_TOLD:
                        taken += len(message.data)
                        if taken > most:
                            raise TheirProtocolError(f"The host tells more than {size(most)} of events.")
                        file.write(message.data)
                        # In two pieces it would be missed: then it is looked for again, in vain, until it gives up.
                        self._has_ended = ENDED in bytes(message.data)
                    case Watched(what=what) if what == NOW_TOLD:
                        with written_aside(self._folder / NOW, 0o600) as aside:
                            aside.write(message.data)
                    case Refusal():
                        raise TheirProtocolError(message.sentence)
                    case _:
                        raise TheirProtocolError(f"The host sent a {type(message).__name__} to one who watches.")
