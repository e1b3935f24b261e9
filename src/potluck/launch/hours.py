"""Hours in which a worker may work, and how long it is to be away: read from words, in local time. Pure.

Knows nothing of processes, nor what time it is: that comes in as an argument.
"""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from potluck.errors import ConfigError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MIN = 24 * 60
_RANGE = re.compile(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)")
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)(s|m|min|h|d)")
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
MOST_S = 366 * 86_400.0
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


def parse_length(text: str) -> float:
    """Seconds, of words such as 90s, 45min, 1h or 1.5h."""
    found = _LENGTH.fullmatch(text.strip().lower())
    seconds = float(found[1]) * _UNITS[found[2]] if found is not None else 0.0
    if not 0 < seconds <= MOST_S:
        raise ConfigError(f"{text!r} is no length of time. Write 45min, 1h or 2d; a year at most.")
    return seconds


def tell_length(seconds: float) -> str:
    """Write a length of time as a person would: 1 h, 1.5 h, 45 min, 90 s."""
    for unit_s, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= unit_s and (seconds / unit_s * 4).is_integer():
            return f"{seconds / unit_s:g} {unit}"
    return f"{seconds:g} s"
