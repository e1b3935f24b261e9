"""A base model's folder, from a host that has it to a machine that has not: before that takes part in the run.

A worker asks for the list of files, and then for each piece, a few at a time; the host keeps nothing of where it is.
So a fetch that was interrupted resumes. Only weights and texts travel, and nothing that could run. No torch.
"""

import hashlib
import itertools
import json
import os
import queue
import shutil
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, TypeVar

from potluck.errors import ConfigError, TheirProtocolError, WorkerLost
from potluck.files import publish
from potluck.fleet.connection import Connection
from potluck.fleet.file_stream import stream_files
from potluck.fleet.host_connector import CONTROL_BYTES, HostConnector
from potluck.fleet.invite import Invite
from potluck.fleet.membership import FETCHER
from potluck.fleet.pipe import Pipe
from potluck.system import lock
from potluck.wire.codec import encode_parts
from potluck.wire.messages import BaseFiles, BasePiece, BaseWanted, Heartbeat, Message, Refusal
from potluck.words import say
from potluck.words import size as in_words

SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")
"""Suffixes of the files that are sent and taken: weights, settings, and what a tokenizer reads."""
PIECE_BYTES = 512 << 10
AHEAD = 4
"""Pieces that are asked for before the first has come: less than what a host queues for somebody in its lobby."""
MOST_ASKED = 4 * AHEAD
"""By one peer; what it asks for beyond that is not answered."""
MOST_FILES = 1000
TELL_S = 0.2
T = TypeVar("T", bound=Message)


class BaseFile(NamedTuple):
    name: str
    size: int
    sha256: str


# The host


class BaseFolder:
    """Serves the files of a base model in a folder."""

    def __init__(self, folder: Path) -> None:
        try:
            found = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
            self._files = [path for path in found if not path.name.startswith(".")]
            self._sizes = [path.stat().st_size for path in self._files]
        except OSError as error:
            raise ConfigError(f"Cannot read the base model in {folder}: {error.strerror}.") from None
        if not any(path.suffix == ".safetensors" for path in self._files):
            raise ConfigError(
                f"There are no .safetensors files in {folder}, and no others are sent to workers that lack the base"
                " model. Save it with save_pretrained(folder, safe_serialization=True)."
            )
        self._header = ""

    def header(self) -> str:
        """Reads all of it once."""
        if not self._header:
            sums = [_sha256(path) for path in self._files]
            named = [path.name for path in self._files]
            self._header = json.dumps(list(zip(named, self._sizes, sums, strict=True)))
        return self._header

    def piece(self, wanted: BaseWanted) -> BasePiece | None:
        """None: there is no such piece."""
        if wanted.file >= len(self._files) or wanted.start >= self._sizes[wanted.file]:
            return None
        with self._files[wanted.file].open("rb") as file:
            file.seek(wanted.start)
            return BasePiece(wanted.file, wanted.start, file.read(PIECE_BYTES))


class BaseSender:
    """Reads and sends in a thread of its own: neither a disk nor a hash may keep those who train waiting."""

    def __init__(self, folder: BaseFolder | None, send: Callable[[int, Message], None]) -> None:
        self._folder = folder
        self._send = send
        self._asked: queue.SimpleQueue[tuple[int, BaseFiles | BaseWanted] | None] = queue.SimpleQueue()
        self._waiting: Counter[int] = Counter()
        self._lock = threading.Lock()  # a reader counts up and the sender down: a lost count would shut a peer out

    def ask(self, peer: int, message: BaseFiles | BaseWanted) -> None:
        with self._lock:
            if self._waiting[peer] >= MOST_ASKED:
                return
            self._waiting[peer] += 1
        self._asked.put((peer, message))

    def end(self) -> None:
        self._asked.put(None)

    def run(self) -> None:
        while (asked := self._asked.get()) is not None:
            peer, message = asked
            with self._lock:
                self._waiting[peer] -= 1
                if not self._waiting[peer]:
                    del self._waiting[peer]
            try:
                answer = self._answer(message)
            except OSError:  # the disk fails, or the folder is gone: there is no base here any more
                answer = BaseFiles("")
            if answer is not None:
                self._send(peer, answer)

    def _answer(self, message: BaseFiles | BaseWanted) -> Message | None:
        if self._folder is None:
            return BaseFiles("")
        return BaseFiles(self._folder.header()) if isinstance(message, BaseFiles) else self._folder.piece(message)


# A worker that lacks it


def fetch_base(invite: Invite, cache: Path, *, on_progress: Callable[[int, int], None] | None = None) -> Path | None:
    """The base model's folder, below `cache`; none if the host serves none. What was fetched before is not again.

    `on_progress` hears how many bytes are here, and of how many.
    """
    connector = HostConnector(invite, name=f"{socket.gethostname()}-{os.getpid()}-base", kind=FETCHER, say=say)
    pipe, welcome = connector.connect(10.0, again=False)  # its patience, until the host tells its own
    with closing(_Asking(pipe, welcome.patience_ms / 1000)) as host:
        try:
            host.send(BaseFiles(""))
            header = host.hear(BaseFiles).header
            if not header:
                return None
            files = check_files(header)
            place = cache / hashlib.sha256(header.encode()).hexdigest()[:32]
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (cache / f".lock-{place.name}").open("ab") as held:
                lock(held, wait=True)  # another worker of this machine may be at it
                if not place.is_dir():
                    _fetch(host, files, place, _Progress(files, on_progress))
            return place
        except TheirProtocolError as error:
            raise ConfigError(f"The base model cannot be taken from the host: {error}") from None
        except ConnectionError as error:
            raise WorkerLost(
                f"The host was lost while it sent the base model: {error}. Join again to resume."
            ) from None
        except OSError as error:
            raise ConfigError(f"Cannot write the base model to {cache}: {error.strerror or error}.") from None


def check_files(header: str) -> list[BaseFile]:
    """Every file's name, size and checksum, before anything is made of them."""
    try:
        files = [BaseFile(str(name), int(size), str(sha256)) for name, size, sha256 in json.loads(header)]
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise TheirProtocolError("BaseFiles.header is not a list of files.") from None
    stream_files(json.dumps([[file.name, file.size] for file in files]), MOST_FILES)
    for file in files:
        if not file.name.endswith(SUFFIXES):
            raise TheirProtocolError(f"{file.name!a} is no kind of file that is taken from a host.")
    return files


def _fetch(host: "_Asking", files: list[BaseFile], place: Path, progress: "_Progress") -> None:
    aside = place.with_name(f".fetching-{place.name}")
    aside.mkdir(exist_ok=True)
    total = sum(file.size for file in files)
    have = sum(path.stat().st_size for path in aside.iterdir())
    if (free := shutil.disk_usage(aside).free) < total - have:
        raise ConfigError(
            f"The base model has {in_words(total)}, and {place.parent} has room for {in_words(free)}. Free some space,"
            " or name another folder."
        )
    for number, file in enumerate(files):
        _fetch_file(host, number, file, aside / file.name, progress)
    progress.end()
    publish(aside, place)


def _fetch_file(host: "_Asking", number: int, file: BaseFile, path: Path, progress: "_Progress") -> None:
    with path.open("ab") as out:
        start = out.tell() if out.tell() <= file.size else out.truncate(0)
        progress.add(start)
        ahead: deque[int] = deque()
        places = iter(range(start, file.size, PIECE_BYTES))

        def ask(count: int) -> None:
            for at in itertools.islice(places, count):
                host.send(BaseWanted(number, at))
                ahead.append(at)

        ask(AHEAD)
        while ahead:
            at, piece = ahead.popleft(), host.hear(BasePiece)
            wanted = min(PIECE_BYTES, file.size - at)
            if (piece.file, piece.start, len(piece.data)) != (number, at, wanted):
                raise TheirProtocolError(f"{file.name} is no longer what the host said it was.")
            out.write(piece.data)
            progress.add(wanted)
            ask(1)
    if _sha256(path) != file.sha256:
        path.unlink()
        raise TheirProtocolError(f"{file.name} does not have the checksum that the host told. Join again to fetch it.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Asking:
    """A connection over which one asks and hears the answers; a thread lets the host know that it is alive."""

    def __init__(self, pipe: Pipe, patience_s: float) -> None:
        self._connection = Connection(pipe)
        self._frames = self._connection.frames(lambda: CONTROL_BYTES)
        self._lock = threading.Lock()  # else a heartbeat could leave in the middle of another message
        self._over = threading.Event()
        pipe.give_up_link(patience_s)
        # A thread: while this worker hashes what it has, the host would take it for gone.
        threading.Thread(target=self._beat, args=(patience_s / 4,), name="base heartbeat", daemon=True).start()

    def send(self, message: Message) -> None:
        with self._lock:
            self._connection.pipe.send(encode_parts(message))

    def hear(self, kind: type[T]) -> T:
        begun = next(self._frames, None)
        if begun is None:
            raise ConnectionResetError("it closed the connection")
        message = self._connection.read_message(*begun)
        if isinstance(message, Refusal):
            raise TheirProtocolError(message.sentence)
        if not isinstance(message, kind):
            raise TheirProtocolError(f"the host sent a {type(message).__name__}.")
        return message

    def close(self) -> None:
        self._over.set()
        self._connection.close()

    def _beat(self, every_s: float) -> None:
        while not self._over.wait(every_s):
            try:
                self.send(Heartbeat("", int(time.time() * 1000)))
            except OSError:  # the one who reads will know why
                return


class _Progress:
    def __init__(self, files: list[BaseFile], on_progress: Callable[[int, int], None] | None) -> None:
        self._total = sum(file.size for file in files)
        self._done, self._told_at = 0, time.monotonic()
        self._tell, self._every_s = on_progress or self._say, TELL_S if on_progress else 5.0
        say(f"The host sends the base model: {in_words(self._total)}.")

    def add(self, count: int) -> None:
        self._done += count
        if (now := time.monotonic()) - self._told_at >= self._every_s:
            self._told_at = now
            self._tell(self._done, self._total)

    def end(self) -> None:
        self._tell(self._done, self._total)

    def _say(self, done: int, total: int) -> None:
        say(f"The base model: {in_words(done)} of {in_words(total)} are here.")
