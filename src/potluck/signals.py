"""Signals while something is under way. Whatever handled them before handles them again afterwards."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

END = [signal.SIGINT, signal.SIGTERM, *([signal.SIGBREAK] if hasattr(signal, "SIGBREAK") else [])]
"""Ctrl-C, and what the system sends when it wants a process to end."""


def leave_ending_to_parent() -> None:
    """From now on SIGTERM is nothing to this process: its parent hears it too, and says with SIGINT what is to be done.

    Otherwise a signal to all processes of a job would reach a worker twice, and the second means at once.
    """
    if signal.SIGTERM in END:
        END.remove(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def handling(numbers: Sequence[int], on_signal: Callable[[int], None]) -> Iterator[None]:
    """Within it, these signals call `on_signal`. In another thread than the main one, whose owner decides, nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = {number: signal.signal(number, lambda number, frame: on_signal(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


@contextmanager
def on_interrupt(request_stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks for a stop; the next one has its usual effect."""
    with ExitStack() as ours:

        def stop(number: int) -> None:
            request_stop()
            ours.close()

        ours.enter_context(handling(END, stop))
        yield


class Interrupts:
    """Counts Ctrl-C and SIGTERM, and passes on the first. What the second means is up to the caller."""

    def __init__(self, on_first: Callable[[int], None]) -> None:
        self.count = 0
        self._on_first = on_first

    def handled(self) -> AbstractContextManager[None]:
        return handling(END, self._hear)

    def _hear(self, number: int) -> None:
        self.count += 1
        if self.count == 1:
            self._on_first(number)
