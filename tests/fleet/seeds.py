"""Which random runs are lived, for how long, and what is said of those that end wrong."""

import contextlib
import datetime
import os
import signal
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


@contextlib.contextmanager
def hurried(seconds: int, *, waits: bool = False) -> Iterator[None]:
    """Raises TimeoutError in a run that takes longer: it has hung. `waits`: it waits for processes, so that the time on
    the wall counts; else only what this process computes does, since a busy machine may give it little of that."""
    timer, alarm = (signal.ITIMER_REAL, signal.SIGALRM) if waits else (signal.ITIMER_PROF, signal.SIGPROF)

    def hang(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it hangs: {seconds} s")

    before = signal.signal(alarm, hang)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(alarm, before)


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
