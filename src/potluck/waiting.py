"""Waiting for what can only be looked at, again and again, until a deadline."""

import time
from collections.abc import Callable

POLL_S = 0.02


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether it held before the deadline. Looks at once, and after each short pause."""
    deadline = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return found
