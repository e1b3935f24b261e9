"""StoreSession: one worker at work in a store. Its claim, its threads, and the first thing that went wrong in them.

Tenant: whose store it is. The first worker of a run says so there, and those of another run leave it alone. What is
compared is what makes a run: its name, model, data, settings, and how many workers it has. A worker that was killed
and started again brings the same, and is at home.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Any, TypeVar

from potluck.agree.terms import Fingerprint, check_fingerprint, differing_data, differing_settings
from potluck.errors import PotluckError, StoreError, WorkerLost
from potluck.store.place import Exists
from potluck.store.store import CHECK_EVERY_S, Store

T = TypeVar("T")
IN_FLIGHT = 4
"""Objects that are put at once."""
_MOST_GETS = 256
"""Threads are made as they are needed, and most of those that get only wait."""


class StoreSession:
    """Makes a store its own, and closes it. An error in the background is raised by the next call of the owner."""

    def __init__(self, store: Store, place: str, who: str, *, in_flight: int = IN_FLIGHT) -> None:
        self.store = store
        self.claim = Claim(store, place, who)
        self._failed: Future[Any] = Future()
        """Holds the first error; every wait waits for this too."""
        self.puts = Background(in_flight, "potluck-put", self._failed)
        self.gets = Background(_MOST_GETS, "potluck-get")
        """An error of these is raised where the result is waited for."""
        # One thread: else the mark of an earlier step could be written over that of a later one, and a sender that
        # starts again would send what is consumed.
        self.clears = Background(1, "potluck-clear", self._failed)
        self.clears.start(store.clear_older)

    def wait(self, done: "Future[T]", lost: Callable[[], str], look: Callable[[], None] | None = None) -> T:
        """Wait for a result and return it. WorkerLost, with that sentence, once our patience is at its end. Meanwhile
        asks whether our place is still ours, and `look`s."""
        deadline = time.monotonic() + self.store.patience_s  # else one that waits for a dead worker would wait for ever
        while not done.done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise WorkerLost(lost())
            wait([done, self._failed], min(left_s, CHECK_EVERY_S), FIRST_COMPLETED)
            self.raise_failure()
            if not done.done():
                self.claim.check()
                if look is not None:
                    look()
        return done.result()

    def raise_failure(self) -> None:
        if self._failed.done():
            error = self._failed.exception()
            assert error is not None
            # A new one each time: frames would pile up in one that is raised again and again.
            raise type(error)(*error.args) if isinstance(error, PotluckError) else error

    def fail(self, error: BaseException) -> None:
        fail_first(self._failed, error)

    def close(self) -> None:
        """Finish what was begun, unless the store cannot be reached; what is awaited is given up."""
        self.store.close()  # first, since a thread that waits for an object ends by that alone
        for background in (self.puts, self.gets, self.clears):
            background.close()


def fail_first(failed: Future[Any], error: BaseException) -> None:
    """Note an error, if none was noted before."""
    with suppress(InvalidStateError):
        failed.set_exception(error)


class Background:
    """At most `count` threads, made as they are needed, which take work in order.

    They are daemons, unlike a ThreadPoolExecutor's: one that waits for a dead worker's object would else hold up the
    end of a program that forgot to close its channel.
    """

    def __init__(self, count: int, name: str, failed: Future[Any] | None = None) -> None:
        """`failed`: gets the first error, beside whoever waits for the work that ended with it."""
        self._count, self._name, self._failed = count, name, failed
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._lock = threading.Lock()  # work is started from several threads: else there would be more than `count`

    def start(self, work: Callable[[], T]) -> "Future[T]":
        done: Future[T] = Future()
        with self._lock:
            self._busy += 1
            if self._busy > len(self._threads) and len(self._threads) < self._count:
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._work.put((done, work))
        return done

    def close(self, limit_s: float | None = None) -> None:
        """Waits until all that was started is done; or for no longer than that."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._work.put(None)
        until_s = None if limit_s is None else time.monotonic() + limit_s
        for thread in threads:
            thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))

    def _serve(self) -> None:
        while (taken := self._work.get()) is not None:
            done, work = taken
            try:
                done.set_result(work())
            except BaseException as error:  # raised where the result is waited for: here it would end the thread alone
                done.set_exception(error)
                if self._failed is not None:
                    fail_first(self._failed, error)
            del taken, done, work  # otherwise a thread without work would hold the last tensor
            with self._lock:
                self._busy -= 1


class Claim:
    """Who has a place in a run, such as stage 1: the worker that said so last. The one before finds out, and stops."""

    def __init__(self, store: Store, place: str, who: str) -> None:
        self._store, self._key, self._who = store, f"claims/{place}", who
        self._id = secrets.token_hex(16).encode()
        # Looked up before ours is there: after that the claim would always be held, and a first worker would list all
        # that a successor has to.
        self.was_held = store.get_bytes(self._key) is not None
        """Somebody had it before us: we are its successor, and what it was sent may lie there still."""
        try:
            store.put_bytes(self._key, self._id, new=not self.was_held)
        except Exists:
            raise StoreError(
                f"Two workers began as {who} of run {store.run} at the same time. The other continues; start this one"
                " only if that one ends."
            ) from None

    def check(self) -> None:
        claimed_by = self._store.get_bytes(self._key)
        if claimed_by is not None and claimed_by != self._id:
            raise StoreError(
                f"Another worker has become {self._who} of run {self._store.run}, so this one stops. If that was not"
                " meant, see that each has a place of its own."
            )
        if claimed_by is None:
            self._store.check_generation()

    def release(self) -> None:
        self._store.forget([self._key])


ABOUT = "about"
"""Below this lies what says whose the store is; it goes with the last of the run's workers (link/store_link.py)."""
_RUN = f"{ABOUT}/run"
_WORDS = ("id", "name", "begun")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """A run, as one of its workers knows it."""

    name: str
    settings: dict[str, Any]
    data: Fingerprint
    out: str | None = None
    """The run folder, if this worker was given one."""


def move_in(store: Store, tenant: Tenant, rank: int) -> str:
    """The id of this run; StoreError, and nothing is changed, if another is there."""
    about_run = store.get_bytes(_RUN)
    if about_run is None:
        told = {"name": tenant.name, "settings": tenant.settings, "data": tenant.data}
        begun = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        with suppress(Exists):  # another worker of ours, or a run that began at the same moment
            store.put_bytes(_RUN, json.dumps(told | {"id": secrets.token_hex(4), "begun": begun}).encode(), new=True)
        about_run = store.get_bytes(_RUN)
    if about_run is None:
        raise StoreError(f"{store.url} does not keep what is put there. Something else empties it.")
    run = _read(store, about_run)
    _check_same(store, run, tenant)  # before anything else is written: the store may be another run's
    _check_folder(store, run, tenant, f"{ABOUT}/out-{rank}")
    return str(run["id"])


def _read(store: Store, found: bytes) -> dict[str, Any]:
    try:
        run = json.loads(found)
        check_fingerprint(run["data"])
        if not isinstance(run["settings"], dict) or not all(isinstance(run[name], str) for name in _WORDS):
            raise ValueError("it has other fields")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StoreError(
            f"What {store.url} says of its run cannot be read. Give this run a place of its own, with"
            " stages.protocol.url."
        ) from None
    return dict(run)


def _check_same(store: Store, run: dict[str, Any], tenant: Tenant) -> None:
    mine, theirs = tenant.settings | {"name": tenant.name}, run["settings"] | {"name": run["name"]}
    for name, (there, here) in differing_settings(theirs, mine).items():
        what = "its model has other parameters" if name == "model" else f"it has {name} = {there}, and this one {here}"
        raise _another(store, run, tenant, what)
    where = differing_data(run["data"], tenant.data, ("there", "here"))
    if where is not None:
        raise _another(store, run, tenant, f"its data have as many rows, but {where}")


def _check_folder(store: Store, run: dict[str, Any], tenant: Tenant, key: str) -> None:
    if tenant.out is None:
        return
    out = store.get_bytes(key)
    if out is not None and out.decode() != tenant.out:
        raise _another(store, run, tenant, f"its folder is {out.decode()}, and this one's {tenant.out}")
    if out is None:
        store.put_bytes(key, tenant.out.encode())


def _another(store: Store, run: dict[str, Any], tenant: Tenant, what: str) -> StoreError:
    sentence = (
        f"{store.url} is where another run meets: {run['name']} ({run['id']}, begun {run['begun']}), and this is"
        f" {tenant.name}: {what}. Nothing of it was touched. Give this run a place of its own with stages.protocol.url;"
        " or continue the other one by starting it just as it was. If that is over for good, set"
        f" stages.protocol.generation to {store.generation + 1}: it ends the other, and clears away what it left."
    )
    return StoreError("".join(character if character.isprintable() else "?" for character in sentence))
