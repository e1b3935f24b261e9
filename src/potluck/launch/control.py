"""Where a joiner on this machine can be found by its owner: a folder for each, with what it does and what is wished.

`potluck join` makes one, holds its lock, writes its state and looks at the wish; `potluck pause` and `potluck resume`
write the wish and look at the state. Both are small JSON files that appear whole. Folders are the user's alone; no
secret is in them. Knows nothing of workers. Imports no torch.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from potluck.environment import runtime_folder
from potluck.errors import ConfigError
from potluck.files import kept_by, make_own_anew, read_table, write_whole
from potluck.system import lock
from potluck.waiting import wait_until
from potluck.words import say

LOCK, STATE, WISH = "lock", "state.json", "wish.json"
MOST_BYTES = 4096
"""The most bytes of a file that is read here."""
WAIT_S = 30.0
"""How long `potluck pause` stays to see what becomes of it: a step may take minutes. The joiner does it in any case."""
ALL = "all"
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)(s|m|min|h|d)")
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
MOST_S = 366 * 86_400.0


def control_folder() -> Path:
    """Return this user's folder of joiners on this machine."""
    return runtime_folder("workers")


@dataclass(frozen=True)
class Wish:
    """The owner's wish: that it pauses, until a time or until resume; or that it works."""

    pauses: bool
    until: float | None = None
    """Seconds since 1970."""
    for_s: float | None = None
    """Seconds that were asked for, to be shown."""


@dataclass(frozen=True)
class State:
    """`doing`: working, leaving or paused. `sentence`: what a person is told."""

    doing: str
    sentence: str
    run: str = ""
    """Address of its host."""


@dataclass(frozen=True)
class Joiner:
    """A joiner by its folder: its process tells there what it does, and its owner what is wished."""

    folder: Path
    run: str = ""
    """Address of its host, which its process knows."""

    @property
    def name(self) -> str:
        return self.folder.name

    def tell(self, doing: str, sentence: str) -> None:
        with suppress(OSError):  # a full disk must not end a worker
            write_whole(self.folder / STATE, json.dumps(vars(State(doing, sentence, self.run))), 0o600)

    def state(self) -> State:
        found = read_table(self.folder / STATE, MOST_BYTES)
        return State(*(str(found.get(name, "")) for name in ("doing", "sentence", "run")))

    def ask(self, wish: Wish) -> None:
        try:
            write_whole(self.folder / WISH, json.dumps(vars(wish)), 0o600)
        except OSError as error:
            raise ConfigError(f"Cannot tell {self.name}: {error.strerror}.") from None

    def wish(self) -> Wish:
        found = read_table(self.folder / WISH, MOST_BYTES)
        until, for_s = found.get("until"), found.get("for_s")
        return Wish(
            found.get("pauses") is True,
            float(until) if isinstance(until, int | float) else None,
            float(for_s) if isinstance(for_s, int | float) else None,
        )

    @property
    def is_alive(self) -> bool:
        """Tell whether its process holds the lock, which it loses however it ends."""
        try:
            with (self.folder / LOCK).open("r+") as file:
                lock(file)
        except FileNotFoundError:
            return False
        except OSError:  # somebody holds it
            return True
        return False


@contextmanager
def controlled(name: str, run: str) -> Iterator[Joiner]:
    """A folder that others of this user find while this process lives. `run`: where its host is, without a secret."""
    folder = control_folder() / name
    try:
        make_own_anew(folder.parent, name)
        file: IO[Any] = (folder / LOCK).open("w")
        # A process number is another's soon, and a lock is let go of however its holder ends: so nobody asks a dead one
        # to pause. A process that looks for joiners holds it for a moment.
        lock(file, wait=True)
    except OSError as error:  # in a container, say, without a home; or on a file system without locks
        say(f"potluck pause will not find this worker: cannot write {folder}: {error.strerror}.")
        shutil.rmtree(folder, ignore_errors=True)  # what it tells goes nowhere, and nothing is wished
        yield Joiner(folder, run)
        return
    with file:
        try:
            yield Joiner(folder, run)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


# From outside


def find_joiners() -> list[Joiner]:
    """List this user's joiners on this machine; what killed ones have left behind is cleared away."""
    return [Joiner(folder) for folder in kept_by(control_folder(), lambda folder: Joiner(folder).is_alive)]


def pause(name: str | None, length: str | None) -> int:
    seconds = parse_length(length) if length is not None else None
    joiners = [(joiner, joiner.state()) for joiner in choose(find_joiners(), name, "pause")]
    for joiner, _ in joiners:  # all of them hear it now, however long one takes to go
        joiner.ask(Wish(True, time.time() + seconds if seconds is not None else None, seconds))
    for joiner, before in joiners:
        if before.doing == "paused":  # then it has only another time to come back
            state = _next_state(joiner, before)
        else:
            state = _await_pause(joiner)
        is_away = state.doing == "paused"
        sentence = state.sentence if is_away else "It finishes what it holds, and is away then."
        say(f"{joiner.name}: {sentence if joiner.is_alive else 'It has ended.'}")
    return 0


def resume(name: str | None) -> int:
    for joiner in choose(find_joiners(), name, "resume"):
        before = joiner.state()
        joiner.ask(Wish(False))
        say(f"{joiner.name}: {_next_state(joiner, before).sentence}")
    return 0


def _next_state(joiner: Joiner, before: State) -> State:
    """One that has another reason to be away says so again, and one that works says that."""
    wait_until(lambda: joiner.state() != before, 2.0)  # the new state may be the old one, which is then shown
    return joiner.state()


def _await_pause(joiner: Joiner) -> State:
    wait_until(lambda: joiner.state().doing == "paused" or not joiner.is_alive, WAIT_S)
    return joiner.state()


def choose(joiners: list[Joiner], name: str | None, command: str) -> list[Joiner]:
    """The one that is meant, or all of them; a ConfigError lists them where it is not clear."""
    if not joiners:
        raise ConfigError("No worker of yours has joined a run from this machine: start one with potluck join INVITE.")
    if name == ALL:
        return joiners
    chosen = [joiner for joiner in joiners if name is None or joiner.name == name]
    if len(chosen) == 1:
        return chosen
    states = [(joiner.name, joiner.state()) for joiner in joiners]
    listed = "".join(f"\n  {each}  {state.run}: {state.sentence}" for each, state in states)
    if name is not None:
        raise ConfigError(f"No worker of yours on this machine is called {name!r}. There are:{listed}")
    raise ConfigError(f"Say which: potluck {command} NAME, or potluck {command} {ALL}. There are:{listed}")


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
