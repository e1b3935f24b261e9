"""Ctrl-C while a run is under way: the first asks for a polite stop, the next one has its usual effect."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def on_interrupt(request_stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C, or the system's SIGTERM, asks for a stop; the next one has its usual effect."""
    usual: dict[int, Any] = {}

    def on_signal(number: int, frame: FrameType | None) -> None:
        request_stop()
        restore()

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    if threading.current_thread() is not threading.main_thread():  # whoever owns that one decides
        yield
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        usual[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        restore()
