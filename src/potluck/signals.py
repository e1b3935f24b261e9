"""Signals while something is under way. Whatever handled them before handles them again afterwards."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from potluck.errors import Interrupted

END = (signal.SIGINT, signal.SIGTERM, *([signal.SIGBREAK] if hasattr(signal, "SIGBREAK") else []))
"""Ctrl-C, and what the system sends when it wants a process to end."""


@contextmanager
def handling(numbers: Sequence[int], on_signal: Callable[[int], None]) -> Iterator[None]:
    """Let these signals call `on_signal` within. In another thread than the main one, whose owner decides, nothing
    changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = {number: signal.signal(number, lambda number, frame: on_signal(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def end_on_sigterm() -> AbstractContextManager[None]:
    """Let SIGTERM end this process with a sentence within, wherever nothing else answers it."""

    def end(number: int) -> None:
        raise Interrupted("Stopped by SIGTERM.")

    return handling((signal.SIGTERM,), end)


@contextmanager
def held_back() -> Iterator[None]:
    """A program that is started within it gets Ctrl-C and SIGTERM once it calls let_through(), and not before: while
    Python starts and imports, they would end it without a word, or with a stack of frames."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)


def let_through() -> None:
    """Call it as soon as there is somebody to answer signals."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END)


_asked: set[int] = set()


def is_taken_back() -> bool:
    """Whether this process was asked to stop by SIGTERM: by something that wants the machine, and by no person."""
    return signal.SIGTERM in _asked


ECHO_S = 1.0
"""A SIGTERM this soon after a signal is the same request: a scheduler sends it, and so does its launcher."""


@contextmanager
def on_interrupt(request_stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks for a stop; the same one again has its usual effect.

    A scheduler's SIGTERM reaches all processes of a machine, and a worker's parent passes its own on, as Ctrl-C, or as
    torchrun does, as it is: together they are one request, by which nothing must be lost.
    """
    heard: dict[int, float] = {}
    with ExitStack() as ours:
        each = {number: ours.enter_context(ExitStack()) for number in END}

        def stop(number: int) -> None:
            now = time.monotonic()
            if number not in heard:
                heard[number] = now
                _asked.add(number)
                request_stop()
            elif number != signal.SIGTERM or now - heard[number] >= ECHO_S:
                each[number].close()
                signal.raise_signal(number)

        for number, stack in each.items():
            stack.enter_context(handling((number,), stop))
        yield


class Interrupts:
    """Counts Ctrl-C and SIGTERM, and passes on the first. What the second means is up to the caller."""

    def __init__(self, on_first: Callable[[int], None]) -> None:
        self.count = 0
        self.heard: set[int] = set()
        self._on_first = on_first
        self._heard_at = 0.0

    def handled(self) -> AbstractContextManager[None]:
        return handling(END, self._hear)

    def _hear(self, number: int) -> None:
        now = time.monotonic()
        self.heard.add(number)
        if self.count and number == signal.SIGTERM and now - self._heard_at < ECHO_S:
            return
        self._heard_at = now
        self.count += 1
        if self.count == 1:
            self._on_first(number)
