"""Which random runs are lived, for how long, and what is said of those that end wrong."""

import contextlib
import datetime
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

POLICIES = ("sync", "cadence", "async", "auto")


def seeds(count: int) -> list[int]:
    """Others each day; or the one that POTLUCK_SEED names."""
    if named := os.environ.get("POTLUCK_SEED"):
        return [int(named)]
    first = int(datetime.date.today().strftime("%y%m%d0000"))
    return list(range(first, first + count))


STILL_S, LEAST_S = 10, 0.05
"""A run that computes less than LEAST_S in STILL_S stands still: a busy machine gives it more than that."""


@contextlib.contextmanager
def hurried(seconds: int, *, waits: bool = False) -> Iterator[None]:
    """Raises TimeoutError in a run that takes longer: it has hung. `waits`: it waits for processes, so that the time on
    the wall counts; else what this process computes does, since a busy machine may give it little of that, or that it
    computes nothing at all."""

    def hang(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it hangs: {seconds} s")

    over, main = threading.Event(), threading.get_ident()

    def watch() -> None:
        used = [time.process_time()]
        while not over.wait(1.0):
            used.append(time.process_time())
            is_still = len(used) > STILL_S and used[-1] - used[-1 - STILL_S] < LEAST_S
            if len(used) > seconds if waits else used[-1] - used[0] > seconds or is_still:
                signal.pthread_kill(main, signal.SIGPROF)
                return

    before = signal.signal(signal.SIGPROF, hang)
    watcher = threading.Thread(target=watch, name="hurried", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGPROF, before)


def soak(numbers: list[int], live: Callable[[int], object], hang_s: int) -> list[int]:
    """The seeds that end wrong, each told as it is found."""
    wrong: list[int] = []
    for done, seed in enumerate(numbers, 1):
        try:
            with hurried(hang_s, waits=True):
                live(seed)
        except Exception:
            wrong.append(seed)
            print(f"SEED {seed} is wrong:\n{traceback.format_exc()[-3000:]}", flush=True)
        if done % 500 == 0:
            print(f"{done} schedules, {len(wrong)} wrong", flush=True)
    return wrong
