"""Decides whether a worker on a person's own machine is away now: paused, outside of its hours, or yielding. Pure.

The caller (join_session.py) has the clock, the wish and the measurements, and acts on the answer.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime

from potluck.launch.control import Control, Wish
from potluck.launch.hours import Hours, tell_length
from potluck.launch.yielding import Verdict, YieldWatch

LOOK_S = 0.25


@dataclass(frozen=True)
class Absence:
    reason: str
    """Reason that the host is told."""
    sentence: str
    """Sentence that its owner is told."""


def decide_absence(wish: Wish, hours: Hours | None, use: Verdict | None, now: float) -> Absence | None:
    """`now`: in seconds since 1970. `use`: of this machine by others; none: it does not yield."""
    if wish.pauses and (wish.until is None or now < wish.until):
        if wish.until is None:
            return Absence("paused by its owner", "Paused until potluck resume.")
        length = f" for {tell_length(wish.for_s)}" if wish.for_s else ""
        back = f"until {_clock(wish.until, now)}; potluck resume ends it sooner"
        return Absence(f"paused by its owner{length}", f"Paused{length}, {back}.")
    if hours is not None and not hours.is_open(at := datetime.fromtimestamp(now)):
        back = _clock(hours.opens_at(at).timestamp(), now)
        return Absence(f"outside of its hours, {hours.text}", f"Outside of its hours ({hours.text}), until {back}.")
    if use is not None and use.yields:
        return Absence("yields its machine, which others use", f"Yields: {use.reason}.")
    return None


def _clock(at: float, now: float) -> str:
    found, today = datetime.fromtimestamp(at), datetime.fromtimestamp(now)
    days = (found.date() - today.date()).days
    return found.strftime("%H:%M" if days == 0 else "%a %H:%M" if days < 7 else "%a %Y-%m-%d %H:%M")


@dataclass
class AbsenceWatch:
    """Looks now and then at what decides it."""

    control: Control
    hours: Hours | None = None
    yielding: YieldWatch | None = None
    found: Absence | None = None
    _next: float = 0.0

    def look(self, ours: Callable[[], Collection[int]]) -> Absence | None:
        """`ours`: our processes that compute, asked for only where others' use is measured."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LOOK_S
            use = self.yielding.look(now, ours) if self.yielding is not None else None
            self.found = decide_absence(self.control.wish(), self.hours, use, time.time())
        return self.found
