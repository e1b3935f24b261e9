"""Events on their way to somebody who may be slow or stand still: a terminal, a file, a tracker.

An Outlet makes its calls in a thread of its own, in order, so that an emitter never waits for a terminal or
a disk. What waits is bounded: the oldest events are left out where there are too many. Knows nothing of what becomes of
an event.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from potluck.events import Event, Noticed, RunEnded, RunStarted, StepDone
from potluck.words import plural

log = logging.getLogger("potluck.events")

Item = Event | Callable[[], None]
"""An event, or a call that belongs between two of them: such a call is never left out."""

_abandoned: list[str] = []
"""Outlets whose threads still stand in a write, and will until the process ends."""


def _weight(item: Item) -> int:
    return 1 + len(item.workers) if isinstance(item, StepDone) else 1


class Outlet:
    """A listener that passes events on to another one, in a thread of its own."""

    def __init__(
        self,
        name: str,
        listener: Callable[[Event, float], None],
        *,
        most: int,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """`listener` gets each event with the time at which it happened. Where it fails, nothing more is passed on.
        `most`: how many records may wait; each worker of a step counts as one too."""
        self.name = name
        self.error: BaseException | None = None
        self._listener, self._on_failure = listener, on_failure
        self._changed = threading.Condition()  # reentrant: a signal's handler may say something at any moment
        self._waiting: deque[tuple[float, Item]] = deque()
        self._most, self._weight, self._left_out = most, 0, 0
        self._done = 0
        self._is_busy = self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"to {name}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        self._put(event)

    def call(self, function: Callable[[], None]) -> None:
        """Calls the function after the events so far, and before those that follow."""
        self._put(function)

    def _put(self, item: Item) -> None:
        with self._changed:
            if self.error is None and not self._is_closing:
                self._waiting.append((time.time(), item))
                self._weight += _weight(item)
                while self._weight > self._most and self._leave_one_out():
                    pass
                self._changed.notify_all()

    def _leave_one_out(self) -> bool:
        """Drops the oldest; but everybody must hear of the beginning and of the end."""
        for place, (_, item) in enumerate(self._waiting):
            if isinstance(item, Event) and not isinstance(item, RunStarted | RunEnded):
                del self._waiting[place]
                self._weight -= _weight(item)
                self._left_out += 1
                return True
        return False

    def drain(self, still_s: float) -> bool:
        """Waits until all is passed on; False once nothing was for this long, as where a terminal is stopped."""
        with self._changed:
            done, until = self._done, time.monotonic() + still_s
            while self._waiting or self._is_busy:
                if not self._changed.wait(until - time.monotonic()) and time.monotonic() >= until:
                    return False
                if self._done != done:
                    done, until = self._done, time.monotonic() + still_s
        return True

    def close(self, still_s: float) -> bool:
        """Passes on what waits, and ends. False where it stood still: its thread is then left behind."""
        is_drained = self.drain(still_s)
        with self._changed:
            self._is_closing = True
            self._waiting.clear()
            self._changed.notify_all()
        if not is_drained:
            _abandoned.append(self.name)
        return is_drained

    def _run(self) -> None:
        left_out_before = 0
        while (taken := self._next()) is not None:
            try:
                if (left_out := self._left_out) > left_out_before:
                    left_out_before, missing = left_out, left_out - left_out_before
                    why = f"{self.name} stood still, and {plural(missing, 'event')} before this one were left out."
                    self._listener(Noticed(sentence=why), taken[0])
                at, item = taken
                if isinstance(item, Event):
                    self._listener(item, at)
                else:
                    item()
            except (ValueError, TypeError, ArithmeticError, LookupError):
                # Whatever text or figure a peer has sent, showing it must not end the run.
                log.exception("an event could not be told")
            except (Exception, SystemExit) as error:  # SystemExit: rich's answer to a pipe that nobody reads any more
                with self._changed:
                    self.error = error
                    self._waiting.clear()
                self._on_failure(error)
            with self._changed:
                self._is_busy = False
                self._done += 1
                self._changed.notify_all()

    def _next(self) -> tuple[float, Item] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if not self._waiting:
                return None
            self._is_busy = True
            at, item = self._waiting.popleft()
            self._weight -= _weight(item)
            return at, item


def end_process(code: int) -> NoReturn:
    """Ends the process. A thread that stands in a write to the terminal holds what the interpreter flushes at its end,
    which would abort or hang: then this ends without that."""
    if _abandoned:
        os._exit(code)
    sys.exit(code)
