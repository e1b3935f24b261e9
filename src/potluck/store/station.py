"""Station: one worker's standing in a store. Its claim, its threads, and the first thing that went wrong in them."""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any, TypeVar

from potluck.errors import PotluckError, WorkerLost
from potluck.store.background import Background
from potluck.store.store import CHECK_EVERY_S, Claim, Store

T = TypeVar("T")
IN_FLIGHT = 4
"""Objects that are put at once."""
_MOST_GETS = 256
"""Threads are made as they are needed, and most of those that get only wait."""


class Station:
    """It makes the store its own, and closes it. An error in the background is raised by the next call of the owner."""

    def __init__(self, store: Store, place: str, who: str, *, in_flight: int = IN_FLIGHT) -> None:
        self.store = store
        self.claim = Claim(store, place, who)
        self._puts = Background(in_flight, "potluck-put")
        self._gets = Background(_MOST_GETS, "potluck-get")
        self._clears = Background(1, "potluck-clear")
        self._failed: Future[Any] = Future()
        """Holds the first error; whoever waits for anything waits for this too."""
        self.start_clear(store.clear_older)

    def start_put(self, work: Callable[[], T]) -> "Future[T]":
        return self._watched(self._puts.start(work))

    def start_get(self, work: Callable[[], T]) -> "Future[T]":
        """Its error is for whoever waits for it."""
        return self._gets.start(work)

    def start_clear(self, work: Callable[[], None]) -> None:
        """One after another."""
        self._watched(self._clears.start(work))

    def wait(self, done: "Future[T]", lost: Callable[[], str], look: Callable[[], None] | None = None) -> T:
        """Its result. WorkerLost, with that sentence, once our patience is at its end.

        Meanwhile asks whether our place is still ours, and `look`s.
        """
        deadline = time.monotonic() + self.store.patience_s
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
        with suppress(InvalidStateError):  # another was first
            self._failed.set_exception(error)

    def finish_clears(self) -> None:
        self._clears.close()

    def close(self) -> None:
        """What was begun is finished, unless the store cannot be reached; what is awaited is not."""
        self.store.close()
        for background in (self._puts, self._gets, self._clears):
            background.close()

    def _watched(self, done: "Future[T]") -> "Future[T]":
        done.add_done_callback(self._note_failure)
        return done

    def _note_failure(self, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            self.fail(error)
