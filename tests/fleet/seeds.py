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
def hurried(seconds: int) -> Iterator[None]:
    """Whatever takes longer has hung."""

    def hang(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it hangs: {seconds} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def soak(numbers: list[int], live: Callable[[int], object], hang_s: int) -> list[int]:
    """The seeds that end wrong, each told as it is found."""
    wrong: list[int] = []
    for done, seed in enumerate(numbers, 1):
        try:
            with hurried(hang_s):
                live(seed)
        except Exception:
            wrong.append(seed)
            print(f"SEED {seed} is wrong:\n{traceback.format_exc()[-3000:]}", flush=True)
        if done % 500 == 0:
            print(f"{done} schedules, {len(wrong)} wrong", flush=True)
    return wrong
