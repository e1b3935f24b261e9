"""Store: checked objects of one run, in a folder or an object store that its workers share.

An object appears whole or not at all, and says which run, generation and key it belongs to; a reader checks
that before taking any memory. Keys are made by us. Knows nothing of tensors: datastore.py and link/store_link.py do.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from potluck.errors import PotluckError, StoreError, TheirProtocolError, WorkerLost
from potluck.store.folder import UNFINISHED, Folder
from potluck.store.place import (
    CHUNK_BYTES,
    HEAD_BYTES,
    Damaged,
    Head,
    Missing,
    ObjectWriter,
    Place,
    Source,
    Unreachable,
    bucket_of,
    folder_of,
)

KEY = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*(/[a-z0-9]+(-[a-z0-9]+)*){0,3}")
"""No dots, no empty parts: whatever it is joined to, it cannot leave."""
MOST_KEY_BYTES = 160
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
CHECK_EVERY_S = 1.0
"""How often one that waits asks whether it is still wanted."""
READS = 3
"""A store may need a moment until all its readers see the same; what is wrong three times is wrong."""
SMALL_BYTES = 1 << 16
_GENERATION = re.compile(r"g(\d{6})")

T = TypeVar("T")
Room = Callable[[bytes, int], memoryview]
"""Takes what an object says about itself and its number of bytes; gives the memory for them, or raises."""


class Closed(PotluckError):
    """Nobody waits for this any more."""


class Store:
    """One worker's door to it. Any thread may use it."""

    def __init__(self, url: str, *, run: str, generation: int, patience_s: float) -> None:
        if not RUN.fullmatch(run):
            raise StoreError(f"A run's name has letters, digits, - and _, at most 64 of them; {run!r} does not.")
        assert 0 <= generation < 10**6, generation
        self.url, self.run, self.generation, self.patience_s = url, run, generation, patience_s
        self._place = _place_of(url, patience_s)
        self._prefix = f"{run}/g{generation:06d}"
        self._stop = threading.Event()
        self._patiently("opening it", self._place.check)
        self.check_generation()

    def put(self, key: str, parts: Sequence[memoryview], about: bytes = b"", *, new: bool = False) -> None:
        """All at once, over whatever was there. `new`: only if nothing was, else Exists, where the place can tell."""
        name = self._name(key)
        writer = ObjectWriter(name, self.generation, about, parts)
        self._patiently(f"writing {key}", lambda: self._place.write(name, writer, new=new))

    def get(self, key: str, room: Room) -> bool:
        """Reads it straight into that memory; False if it is not there."""
        name = self._name(key)
        for attempt in range(READS):
            try:
                return self._patiently(f"reading {key}", lambda: self._read(name, room))
            except Damaged as damage:
                reason = str(damage)
            self._stop.wait(0.05 * (attempt + 1))
        raise TheirProtocolError(
            f"The object {name} in {self.url} cannot be used: {reason}. Something else has written there. Delete it,"
            " and start the worker again that made it."
        )

    def wait_for(self, key: str, room: Room, awaited: str, *, patience_s: float | None = None) -> None:
        """Wait until an object is there. WorkerLost names what is awaited."""
        limit_s = self.patience_s if patience_s is None else patience_s
        patience = Patience(self._place, self._stop)
        while not self.get(key, room):
            if patience.waited_s > limit_s:  # its writer may be dead, and then nobody would ever hear of it
                self.check_generation()  # or nobody writes to this one any more, which is the better sentence
                raise WorkerLost(f"Waited {limit_s:g} s in vain for {awaited}, in {self.url}.")
            patience.pause()

    def get_bytes(self, key: str) -> bytes | None:
        """A small object, as bytes."""
        data = bytearray()

        def room(about: bytes, size: int) -> memoryview:
            if size > SMALL_BYTES:
                raise Damaged(f"it has {size:,} bytes where a few were expected")
            data[:] = bytes(size)
            return memoryview(data)

        return bytes(data) if self.get(key, room) else None

    def put_bytes(self, key: str, data: bytes, *, new: bool = False) -> None:
        self.put(key, [memoryview(data)], new=new)

    def keys(self, under: str) -> list[str]:
        """List the keys of our generation. What has no name of ours is left alone, and out."""
        start = len(self._prefix) + 1
        return [name[start:] for name in self._names(under) if _is_key(name[start:])]

    def delete(self, keys: Iterable[str], *, recycle: bool = False) -> None:
        """`recycle`: they are as large as what will be put next."""
        names = [self._name(key) for key in keys]
        self._patiently("deleting", lambda: self._place.delete(names, recycle=recycle))

    def sweep(self, under: str, unwanted: Callable[[str], bool]) -> None:
        """Deletes all keys below that are unwanted, and what a dead writer left of them."""
        start = len(self._prefix) + 1
        names = [name for name in self._names(under) if unwanted(_finished(name[start:]) or "")]
        self._patiently("deleting", lambda: self._place.delete(names))

    def forget(self, keys: Sequence[str]) -> None:
        """Deletes them, and what a worker that was killed while it wrote one of them left."""
        for folder in {key.rpartition("/")[0] for key in keys}:
            self.sweep(folder, lambda key: key in keys)

    def tidy(self) -> None:
        """Removes empty folders, once this worker leaves."""
        self._place.tidy(self.run)

    def clear_older(self) -> None:
        """Everything of this run's earlier generations: nobody reads it any more."""
        for generation in self._generations():
            if generation < self.generation:
                self._clear(f"{self.run}/g{generation:06d}")

    def check_generation(self) -> None:
        newest = max(self._generations(), default=0)
        if newest > self.generation:
            raise StoreError(
                f"Run {self.run} is in its generation {newest}, and this worker still in {self.generation}: the others"
                " continued without it. Start it again to join them."
            )

    def close(self) -> None:
        """Ends every wait. What is being written is written, unless the store cannot be reached."""
        self._stop.set()

    def _read(self, name: str, room: Room) -> bool:
        try:
            with self._place.read(name) as source:
                raw = bytearray(HEAD_BYTES)
                head = Head.read(bytes(raw[: source.fill(memoryview(raw))]), source.size)
                if head.generation < self.generation:
                    return False
                if head.name != name or head.generation != self.generation:
                    raise Damaged(f"it is {head.name!r} of generation {head.generation}")
                _read_payload(source, head, room(head.about, head.payload_bytes))
        except Missing:
            return False
        return True

    def _name(self, key: str) -> str:
        assert _is_key(key), key
        return f"{self._prefix}/{key}"

    def _names(self, under: str) -> list[str]:
        name = self._name(under)
        return self._patiently("listing", lambda: self._place.names(name))

    def _generations(self) -> list[int]:
        rooms = self._patiently("listing", lambda: self._place.rooms(self.run))
        return [int(found[1]) for room in rooms if (found := _GENERATION.fullmatch(room))]

    def _clear(self, under: str) -> None:
        start = len(self.run) + len("/g000000/")
        names = self._patiently("listing", lambda: self._place.names(under))
        ours = [name for name in names if _finished(name[start:])]
        self._patiently("deleting", lambda: self._place.delete(ours))
        self._place.tidy(self.run)

    def _patiently(self, doing: str, action: Callable[[], T]) -> T:
        """Tries again while the place cannot be reached, for as long as our patience lasts."""
        patience = Patience(self._place, self._stop)
        while True:
            try:
                return action()
            except Unreachable as trouble:
                if patience.waited_s > self.patience_s:  # else one that is gone for good would be waited for, too
                    raise StoreError(
                        f"{self.url} could not be reached for {self.patience_s:g} s, while {doing}: {trouble}. Start"
                        " this worker again once it can; nothing is lost."
                    ) from None
            patience.pause()


class Patience:
    """A wait by looking again and again: each pause is a tenth of the time waited so far, within the place's bounds."""

    def __init__(self, place: Place, stop: threading.Event) -> None:
        self._place, self._stop = place, stop
        self._since = time.monotonic()

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._since

    def pause(self) -> None:
        pause_s = min(max(self.waited_s / 10, self._place.first_pause_s), self._place.longest_pause_s)
        if self._stop.wait(pause_s):
            raise Closed("This end was closed.")


def _place_of(url: str, patience_s: float) -> Place:
    if url.startswith("file://"):
        return Folder(folder_of(url))
    if url.startswith("s3://"):
        try:
            from potluck.store.bucket import Bucket
        except ModuleNotFoundError:
            raise StoreError("A store at s3:// needs the library obstore: pip install './potluck[s3]'.") from None
        return Bucket(*bucket_of(url), patience_s=patience_s)
    raise StoreError(f"A store's url is file:///some/folder or s3://bucket/prefix, not {url!r}.")


def _read_payload(source: Source, head: Head, payload: memoryview) -> None:
    """Straight to where it belongs; each chunk's digest is taken while it is in the processor's cache."""
    digest = head.digest()
    for start in range(0, len(payload), CHUNK_BYTES):
        chunk = payload[start : start + CHUNK_BYTES]
        if source.fill(chunk) < len(chunk):
            raise Damaged("it is cut short")
        digest.update(chunk)
    head.check(digest)


def _is_key(text: str) -> bool:
    return len(text) <= MOST_KEY_BYTES and KEY.fullmatch(text) is not None


def _finished(text: str) -> str | None:
    """The key of a name, also of one that is still being written; none if it is not ours."""
    folder, slash, last = text.rpartition("/")
    found = UNFINISHED.fullmatch(last)
    key = f"{folder}{slash}{found['name']}" if found else text
    return key if _is_key(key) else None
