"""Decides whether a worker on a person's own machine is away now: paused, outside of its hours, or yielding.

What decides is pure: the clock comes in as an argument, and others' use of the machine as samples: the share of the
processor, or of a card, that processes have which are not ours. Cards are looked at through nvidia-smi, and the
processor through psutil. The caller (join.py) acts on the answer. Imports no torch: whoever looks is not the worker.
"""

import contextlib
import os
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import psutil

from potluck.errors import ConfigError
from potluck.launch.control import Wish, tell_length

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MIN = 24 * 60
_RANGE = re.compile(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)")
EXAMPLE = "Write ranges of local time and whole days, such as 22:00-07:00 or 22:00-07:00,Sat,Sun."
SAMPLE_S = 2.0
BUSY, FREE = 0.25, 0.1
"""Shares of use by others: busy from the first on, free below the second; between them nothing changes."""
BUSY_S, FREE_S = 6.0, 60.0
"""Seconds for which it must be so: a worker that comes back costs the others more than one that stays away a little
longer."""
CARD_BYTES = 1 << 30
"""A process of somebody else that holds more of a card than a desktop does has it in use, whatever it computes now."""


@dataclass(frozen=True)
class Verdict:
    yields: bool
    reason: str


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
        while not self.is_open(now):
            now = now.replace(second=0, microsecond=0) + timedelta(minutes=1)
        return now


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


# Yielding


@dataclass(frozen=True)
class Sample:
    at: float
    share: float
    """Share of the whole that others use."""
    what: str
    """The thing that is used, as in "the processor is in use"."""


def decide_yield(samples: Sequence[Sample], *, is_away: bool) -> Verdict:
    """Decide from the last samples, in order. It goes when all of BUSY_S were busy, and comes when all of FREE_S were
    free."""
    if not samples:
        return Verdict(is_away, "nothing was measured yet")
    last, for_s = samples[-1], FREE_S if is_away else BUSY_S
    recent = [sample.share for sample in samples if sample.at > last.at - for_s]
    is_long = last.at - samples[0].at >= for_s
    if is_away:
        if is_long and max(recent) < FREE:
            return Verdict(False, f"{last.what} is free: others have used {max(recent):.0%} at most for {for_s:g} s")
        return Verdict(True, f"{last.what} is in use by others, who have used up to {max(recent):.0%} of it")
    if is_long and min(recent) >= BUSY:
        used = f"{min(recent):.0%} of it or more for {for_s:g} s"
        return Verdict(True, f"{last.what} is in use by others, who have used {used}")
    return Verdict(False, f"{last.what} is not in use by others")


# Measuring


@dataclass
class ProcessorUse:
    """Measures the processor use of all processes but ours, from one look to the next."""

    cores: int
    _before: tuple[float, float, dict[int, float]] | None = None

    def look(self, now: float, ours: Collection[int]) -> Sample | None:
        """`ours`: processes whose use is not others'. None with the first look."""
        busy_s = busy_of(psutil.cpu_times())
        own = {pid: seconds for pid in ours if (seconds := seconds_of(pid)) is not None}
        before, self._before = self._before, (now, busy_s, own)
        if before is None or now <= before[0]:
            return None
        used_s = sum(seconds - before[2].get(pid, 0.0) for pid, seconds in own.items())
        whole_s = (now - before[0]) * self.cores
        return Sample(now, min(1.0, max(0.0, (busy_s - before[1] - used_s) / whole_s)), "the processor of this machine")


def busy_of(times: Any) -> float:
    """Seconds that all processors together were not idle. What a virtual machine's host took is nobody's here."""
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))


def seconds_of(pid: int) -> float | None:
    """Seconds that a process has computed; None where it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


@dataclass
class CardUse:
    """Measures others' use of the cards that these workers compute on, through nvidia-smi."""

    program: str
    cards: tuple[str, ...]
    """The cards' names for nvidia-smi: numbers, or UUIDs."""

    def look(self, now: float, ours: Collection[int]) -> Sample | None:
        """None where it cannot be told."""
        seen = self._ask("--query-gpu=uuid,utilization.gpu,memory.used", self.cards)
        held = self._ask("--query-compute-apps=gpu_uuid,pid,used_memory", self.cards)
        if seen is None or held is None:
            return None
        # In a container nvidia-smi may name processes by numbers that mean nothing here, our own among them.
        here = [",".join(words) for words in _rows(held) if psutil.pid_exists(int(_number(words[1])))]
        return Sample(now, share_of_cards(seen, "\n".join(here), ours), "the card of this machine")

    def _ask(self, query: str, cards: tuple[str, ...]) -> str | None:
        command = [self.program, query, "--format=csv,noheader,nounits", f"--id={','.join(cards)}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):  # a driver that hangs must not stop the workers' parent
            return None
        return done.stdout if done.returncode == 0 else None


def _rows(text: str) -> list[list[str]]:
    """The lines of nvidia-smi that have three words."""
    rows = ([word.strip() for word in line.split(",")] for line in text.splitlines())
    return [words for words in rows if len(words) == 3]


def share_of_cards(seen: str, held: str, ours: Collection[int]) -> float:
    """Return the share of the card that others use most. `seen` has a line for each card: UUID, % busy, MiB in use;
    `held` a line for each process: UUID of the card, process, MiB.

    How busy a card is can be told apart by process nowhere, so while ours computes on it, others count by their memory.
    """
    most = 0.0
    for card, busy, used in _rows(seen):
        others = [_number(mib) for uuid, pid, mib in _rows(held) if uuid == card and int(_number(pid)) not in ours]
        if any(mib * 2**20 >= CARD_BYTES for mib in others):
            most = max(most, 1.0)
        elif not ours:  # all of it is others', also where nvidia-smi names no process, as in containers
            most = max(most, 1.0 if _number(used) * 2**20 >= CARD_BYTES else _number(busy) / 100)
    return most


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:  # [N/A]
        return 0.0


def find_use(count: int, cores: int) -> ProcessorUse | CardUse:
    """Find what `count` workers here compute on: cards where there are some, and else the processor."""
    program = shutil.which("nvidia-smi")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is not None and visible != "":
        cards = visible.split(",") if visible else [str(number) for number in range(count)]
        use = CardUse(program, tuple(cards[:count]))
        if use.look(0.0, ()) is not None:
            return use
    return ProcessorUse(cores)


@dataclass
class YieldWatch:
    """Looks now and then, and says whether this machine is to be left to others."""

    use: ProcessorUse | CardUse
    verdict: Verdict = Verdict(False, "nothing was measured yet")
    _samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=1024))
    _next: float = 0.0

    def look(self, now: float, ours: Callable[[], Collection[int]]) -> Verdict:
        if now < self._next:
            return self.verdict
        self._next = now + SAMPLE_S
        sample = self.use.look(now, ours())
        if sample is not None:
            self._samples.append(sample)
        verdict = decide_yield(self._samples, is_away=self.verdict.yields)
        if verdict.yields != self.verdict.yields:
            self._samples.clear()  # what comes next is counted from here
        self.verdict = verdict
        return verdict


def family(roots: Collection[int]) -> set[int]:
    """These processes and all that they have started."""
    pids = set(roots)
    for root in roots:
        with contextlib.suppress(psutil.Error):  # it has ended
            pids.update(each.pid for each in psutil.Process(root).children(recursive=True))
    return pids
