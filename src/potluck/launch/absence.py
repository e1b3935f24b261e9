"""Decides whether a worker on a person's own machine is away now: paused, outside of its hours, or yielding.

What decides is pure: the clock comes in as an argument. The caller (join_session.py) acts on the answer.
"""

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from potluck.errors import ConfigError
from potluck.launch.control import Control, Wish, tell_length
from potluck.launch.yielding import Verdict, YieldWatch

LOOK_S = 0.25
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MIN = 24 * 60
_RANGE = re.compile(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)")
EXAMPLE = "Write ranges of local time and whole days, such as 22:00-07:00 or 22:00-07:00,Sat,Sun."


@dataclass(frozen=True)
class Hours:
    """Ranges of minutes of each day, which may lead over midnight; and days of the week that are open as a whole."""

    text: str
    ranges: tuple[tuple[int, int], ...]
    days: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> "Hours":
        ranges, days = [], set()
        for item in text.split(","):
            word = item.strip()
            if word.lower() in DAYS:
                days.add(DAYS.index(word.lower()))
                continue
            found = _RANGE.fullmatch(word)
            numbers = [int(number) for number in found.groups()] if found is not None else [99] * 4
            start, end = 60 * numbers[0] + numbers[1], 60 * numbers[2] + numbers[3]
            if max(numbers[1], numbers[3]) > 59 or start >= DAY_MIN or end > DAY_MIN or start == end:
                raise ConfigError(f"{word!r} are no hours. {EXAMPLE}")
            ranges.append((start, end))
        return cls(text, tuple(ranges), frozenset(days))

    def is_open(self, now: datetime) -> bool:
        minute = 60 * now.hour + now.minute
        if now.weekday() in self.days:
            return True
        return any(a <= minute < b if a < b else minute >= a or minute < b for a, b in self.ranges)

    def opens_at(self, now: datetime) -> datetime:
        """The next minute at which it is open; `now` if it is. Found on the clock as a person reads it."""
        minute = now
        if not self.is_open(now):
            minute = now.replace(second=0, microsecond=0)
            while not self.is_open(minute):
                minute += timedelta(minutes=1)
        return minute


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
