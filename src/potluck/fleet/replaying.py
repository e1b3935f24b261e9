"""Replays what the flight recorder wrote: the same inputs, at the same times, to a coordinator as it was then.

It comes to the same decisions, or the first one that differs is named; and it ends where the run stood.
"""

import json
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck.errors import PotluckError
from potluck.fleet.coordinator import Coordinator, feed
from potluck.fleet.flight import FULL, START, segments
from potluck.fleet.flight_lines import digest, input_in_words, summary, thaw, unpack
from potluck.wire.words import clean

DAMAGED = (PotluckError, ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError)
"""Errors that a line may raise which no recorder wrote."""
MOST_UNPACKED = 512 << 20
"""Bytes of one file: a recorder's has far fewer."""


@dataclass
class Replay:
    """A coordinator that is led through recorded inputs, and how far it has come."""

    core: Coordinator | None = None
    inputs: int = 0
    first_step: int = 0
    began: float = 0.0
    """Seconds since 1970."""
    clock: float = 0.0
    """The coordinator's, at the last input."""
    version: str = ""
    difference: str = ""
    """The first decision that is another one than it was; empty: there is none."""
    notes: list[str] = field(default_factory=list)
    """Sentences on inputs that are missing, and on what happened to the recorder."""
    _place: int = 0
    """How many inputs the recorder had written."""
    _base: float = 0.0
    """Seconds since 1970 when the clock was 0."""
    _heard: dict[int, float] = field(default_factory=dict)

    @property
    def ended(self) -> float:
        return self._base + self.clock

    def begin(self, state: dict[str, Any]) -> None:
        """Take the coordinator as it was when a file began, unless the files so far have led to it."""
        if state["after"] == FULL and state["inputs"] == self._place and self.core is not None:
            return
        if self.core is not None:
            did = "The host was started again" if state["after"] == START else "Some inputs are missing"
            self.notes.append(f"{did} after step {self.core.steps_done:,}.")
        core = thaw(state["core"])
        if not isinstance(core, Coordinator):
            raise ValueError("no coordinator")
        self._base, self._place = state["time"] - state["clock"], state["inputs"]
        if not self.inputs:
            self.began, self.first_step = state["time"], core.standing.version
        self.core, self.clock, self._heard = core, state["clock"], thaw(state["heard"])
        self.version = str(state["potluck"])

    def feed(self, now: float, name: str, packed: list[Any], told: str = "", mark: int = 0) -> bool:
        """Repeat one input, and return whether it leads to the same decision as it did."""
        assert self.core is not None
        what = unpack(packed)
        if name == "tick":
            self._heard |= {int(peer): at for peer, at in what[0].items()}
            self._heard = {peer: at for peer, at in self._heard.items() if at >= 0}
            what = (self._heard, *what[1:])
        decided = feed(self.core, now, name, *what)
        self.clock, self.inputs, self._place = now, self.inputs + 1, self._place + 1
        if (summary(decided), digest(decided) if decided else 0) == (told, mark):
            return True
        at = time.strftime("%H:%M:%S", time.localtime(self.ended))
        now_is, was = summary(decided) or "nothing", told or "nothing"
        differs = f"to {now_is} now, and to {was} then" if now_is != was else f"to {was}, with other figures than then"
        self.difference = clean(f"Input {self.inputs:,} ({input_in_words(name, what)}, at {at}) leads {differs}.")
        return False


def replay(folder: Path) -> Replay:
    """Replay all that is in the recorder's folder."""
    done = Replay()
    for _, path in segments(folder):
        for place, line in enumerate(_lines(path)):
            try:
                found = json.loads(line)
                if isinstance(found, dict):
                    done.begin(found["begins"])
                elif done.core is not None and not done.feed(*found):
                    return done
            except DAMAGED as error:
                done.notes.append(f"Line {place + 1:,} of {path.name} cannot be read ({type(error).__name__}).")
                done.core = None
                break
    return done


def _lines(path: Path) -> Iterator[bytes]:
    """Unpack the lines as far as they were written: the end of the last file may be missing."""
    unpacker, rest, total = zlib.decompressobj(wbits=31), b"", 0
    with path.open("rb") as file:
        while packed := file.read(1 << 16):
            try:
                piece = unpacker.decompress(packed)
            except zlib.error:
                break
            total += len(piece)
            if total > MOST_UNPACKED:
                break
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines
