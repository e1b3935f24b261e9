"""Where the ranks of a group are: a call that needs all of them, made by some alone, ends in a sentence.

Every rank of a group makes the same collective calls in the same order. Each rank keeps that order for itself, which
costs a step next to nothing. A rank that has made no such call for some seconds writes it down in the group's store,
where the others compare it with their own: where two ranks differ, no waiting helps. That a rank is merely slow shows
as an order that is the beginning of the others', and is said, but is never taken for a mistake.
"""

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from torch._C._distributed_c10d import Store

from potluck.account import TELL_S, Told, tell_with
from potluck.environment import LAST_WORDS
from potluck.errors import ConfigError
from potluck.waiting import wait_until
from potluck.words import duration, plural, say

STEP = "fleet.step()"
END = "the end of its script"
LEFT = "the end of its loop"
"""A loop ends by break, return or fleet.close(), or since all epochs are done: all workers leave theirs alike."""
LOOK_S = 1.0
"""Seconds between two looks at whether this rank has made a further call."""
QUIET_S = 2.0
"""Seconds in one call after which a rank tells the others where it is, and compares."""
WAITING_S = 10.0
"""How long a call may wait for other ranks before a person hears of it."""
RUNS = 16
"""How many changes from one call to another are kept."""
OURS = f"{Path(__file__).parents[1]}{os.sep}"
LIBRARIES = (OURS, f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", f"{sys.base_prefix}{os.sep}lib")
COLLECTIVES = (f"{OURS}link{os.sep}", f"{os.sep}torch{os.sep}distributed{os.sep}")


class Whereabouts(NamedTuple):
    """A rank's report of where its script is."""

    made: int
    """Collective calls that it has begun."""
    runs: Sequence[tuple[int, str]]
    """The last calls of the person's script in which they were: from which number on, and its name."""
    after_step: int
    place: str
    """The line of the script where it is; empty if that is not known."""
    waits: bool = False
    """Whether it is within a collective call."""

    def name_of(self, number: int) -> str | None:
        """The call within which a collective call was; None if that is no longer, or not yet, known."""
        if number >= self.made:
            return None
        return next((name for first, name in reversed(self.runs) if first <= number), None)


class CallLog:
    """The collective calls of this rank, in order."""

    def __init__(self, on_new: Callable[[], object] = lambda: None) -> None:
        """`on_new`: called when a call of this name is made for the first time, before it asks others for anything."""
        self.count = 0
        self.after_step = 0
        self.name = STEP
        self._runs: deque[tuple[int, str]] = deque(maxlen=RUNS)
        self._last = ""
        self._names = {STEP}
        self._on_new = on_new

    def note(self) -> None:
        if self.name != self._last:
            self._runs.append((self.count, self.name))
            self._last = self.name
        self.count += 1
        if self.name not in self._names:
            self._names.add(self.name)
            self._on_new()

    @contextmanager
    def within(self, name: str, after_step: int) -> Iterator[None]:
        outer, self.name, self.after_step = self.name, name, after_step
        try:
            yield
        finally:
            self.name = outer

    def now(self, place: str = "", *, waits: bool = False) -> Whereabouts:
        count = self.count  # before the runs: one that is noted meanwhile is then none too many
        return Whereabouts(count, list(self._runs), self.after_step, place, waits)


def find_mistake(ranks: Mapping[int, Whereabouts]) -> str | None:
    """Return a sentence if two ranks have made different calls where all must make the same one. Pure."""
    bounds = sorted({first for each in ranks.values() for first, _ in each.runs})
    for number in bounds:
        names = {rank: name for rank, each in sorted(ranks.items()) if (name := each.name_of(number)) is not None}
        if len(set(names.values())) > 1:
            return _tell_mistake(ranks, names)
    return None


def _tell_mistake(ranks: Mapping[int, Whereabouts], names: Mapping[int, str]) -> str:
    calls = [name for name in names.values() if name not in (STEP, END)]
    call = LEFT if LEFT in calls else (calls or [STEP])[0]
    callers = [rank for rank, name in names.items() if name == call]
    others = [rank for rank in names if rank not in callers]
    first = ranks[callers[0]]
    when = f" after step {first.after_step}" if call != STEP and first.after_step else ""
    elsewhere = " and ".join(f"worker {rank} is at {names[rank]}{_at(ranks[rank])}" for rank in others)
    if call == LEFT:
        return (
            f"The loop of {_workers(callers)} has ended{when}{_at(first)}, and that of {_workers(others)} has not:"
            f" {elsewhere}. All workers leave their loops after the same step: let `break` depend"
            " on what is the same for all, as fleet.mean() and fleet.evaluate() are, or call fleet.finish(), which ends"
            " the run for all though one worker alone calls it."
        )
    return (
        f"{call} was called on {_workers(callers)}{when}{_at(first)}, and not on {_workers(others)}: {elsewhere}. It"
        " needs all workers, so each would wait for the other. Call it on every worker, and not on rank 0 alone: where"
        " one of them writes or speaks, fleet sees to that."
    )


def tell_waiting(own: int, ranks: Mapping[int, Whereabouts], world: int) -> str | None:
    """Return a sentence that names the ranks which have not come yet; None if all are here. Pure."""
    here = ranks[own]
    call = here.name_of(here.made - 1) or STEP
    if call == STEP:
        return _tell_standstill(ranks, world)
    late, known = _late(here, ranks, world)
    if not late:
        return None
    return (
        f"{call} on worker {own} has waited {WAITING_S:g} s for {_workers(late)}"
        + (f"; {', '.join(known)}" if known else "")
        + ". It may be slow; if it never calls this, call it on every worker."
    )


def tell_now(own: int, ranks: Mapping[int, Whereabouts], world: int, seconds: float) -> str:
    """Return a sentence that says for whom this rank waits, or where it is. Pure."""
    here = ranks[own]
    call = here.name_of(here.made - 1) or STEP
    if not here.waits:
        return f"Worker {own} computes, and has made no call that needs all workers for {duration(seconds)}{_at(here)}."
    late, known = _late(here, ranks, world)
    silent = [f"worker {rank} has told nothing" for rank in late if rank not in ranks]
    where = f"; {', '.join(known + silent)}" if late else ", which are in the same call"
    others = late or [rank for rank in range(world) if rank != own]
    return f"Worker {own} waits in {call} for {_workers(others)}, for {duration(seconds)}{where}."


def _late(here: Whereabouts, ranks: Mapping[int, Whereabouts], world: int) -> tuple[list[int], list[str]]:
    """List the ranks that have not made the call of this one yet, and say where those were that have told."""
    late = [rank for rank in range(world) if rank not in ranks or ranks[rank].made < here.made]
    return late, [f"worker {n} was last at {ranks[n].place}" for n in late if n in ranks and ranks[n].place]


def _tell_standstill(ranks: Mapping[int, Whereabouts], world: int) -> str | None:
    """Within a step that a slow rank has not reached yet, others wait in silence: that is usual. All of them do not."""
    alike = len({each.made for each in ranks.values()}) == 1 and all(each.waits for each in ranks.values())
    if len(ranks) < world or not alike or len({each.place for each in ranks.values()}) == 1:
        return None
    places = ", ".join(f"worker {rank} at {each.place}" for rank, each in sorted(ranks.items()))
    return (
        f"All workers have waited {WAITING_S:g} s for each other within a step: {places}. If one of them calls a model"
        " that is split, or a collective of its own, every worker has to. Ctrl-C twice ends the run."
    )


def _at(where: Whereabouts) -> str:
    return f" ({where.place})" if where.place else ""


def _workers(ranks: Sequence[int]) -> str:
    return f"worker {', '.join(map(str, ranks))}"


class GroupWatch:
    """Compares where the ranks of the default group are, in a thread of its own."""

    def __init__(self, store: Store, rank: int, world: int, number: int = 0) -> None:
        self.calls = CallLog(on_new=self._tell_here)  # bytes that do not fit may end a peer elsewhere
        self.number = number
        self._store, self._rank, self._world = store, rank, world
        self._over = threading.Event()
        self._told: Whereabouts | None = None
        self._said: set[tuple[str | None, int]] = set()
        self._main = threading.main_thread().ident
        self._since = time.monotonic()
        """Since when it has made no other call."""
        tell_with("group", self._account)
        # A thread, since the main one is what waits in a collective for ever where ranks have made different calls.
        self._thread = threading.Thread(target=self._look_on, name="whereabouts", daemon=True)
        self._thread.start()

    def _look_on(self) -> None:
        seen = -1
        while not self._over.wait(LOOK_S):
            if self.calls.count != seen:
                seen, self._since = self.calls.count, time.monotonic()
            elif (quiet_s := time.monotonic() - self._since) >= QUIET_S:
                try:
                    self._compare(quiet_s)
                except RuntimeError:  # the store is gone, and with it the group: others say so
                    return

    def _compare(self, quiet_s: float) -> None:
        frame = sys._current_frames().get(self._main or 0)
        waits = _is_in_collective(frame)
        if not waits and quiet_s < WAITING_S / 2:
            return  # it computes, and nobody has waited for long: a store need not know of every step
        here = self.tell(_place(frame), waits=waits)
        ranks = self._others() | {self._rank: here}
        if (sentence := find_mistake(ranks)) is not None:
            end_process(sentence)
        elif quiet_s >= WAITING_S and waits:
            call = here.name_of(here.made - 1)
            first = min(rank for rank, each in ranks.items() if each.made == here.made)
            sentence = tell_waiting(self._rank, ranks, self._world) if first == self._rank else None
            if sentence is not None and (call, here.made) not in self._said:
                self._said.add((call, here.made))
                say(sentence)

    def tell(self, place: str = "", *, waits: bool = False) -> Whereabouts:
        """Write down where this rank is: once for each of its calls, and once more when it waits there."""
        here = self.calls.now(place, waits=waits)
        if self._told is None or (here.made, here.waits) != (self._told.made, self._told.waits):
            self._store.set(self._key(self._rank), json.dumps(here))
            self._told = here
        return here

    def _tell_here(self) -> Whereabouts:
        """Tell where this rank is; call it in the main thread."""
        return self.tell(_place(sys._getframe()), waits=True)

    def _account(self) -> Told:
        """Who waits for whom, as far as the others have told, who may be asked now as well."""
        frame = sys._current_frames().get(self._main or 0)
        here = self.tell(_place(frame), waits=_is_in_collective(frame))
        time.sleep(TELL_S / 2)
        ranks = self._others() | {self._rank: here}
        lines = [
            f"Worker {rank} has made {plural(each.made, 'call')} that need all workers, the last in"
            f" {each.name_of(each.made - 1) or 'none'}{_at(each)}."
            for rank, each in sorted(ranks.items())
        ]
        return tell_now(self._rank, ranks, self._world, time.monotonic() - self._since), lines

    def _others(self) -> dict[int, Whereabouts]:
        """Read what other ranks have told last. It may be old, but an order of calls does not change any more."""
        keys = {rank: self._key(rank) for rank in range(self._world) if rank != self._rank}
        return {
            rank: Whereabouts(*json.loads(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def hint(self) -> str:
        """Suggest what may be behind the loss of a peer, if this rank is in a call that needs all of them."""
        name, step = self.calls.name, self.calls.after_step
        if name == STEP or not name.startswith("fleet."):
            return ""
        return f" This worker was in {name} after step {step}, which must be called on every worker."

    def explain(self, wait_s: float = 0.0) -> str | None:
        """Return a sentence if what went wrong between ranks was such a mistake; others may still have to tell."""
        sentences: list[str] = []

        def is_found() -> bool:
            if (sentence := find_mistake(self._others() | {self._rank: self._tell_here()})) is not None:
                sentences.append(sentence)
            return bool(sentences)

        with suppress(RuntimeError):  # of a store that is gone
            wait_until(is_found, wait_s)
        return sentences[0] if sentences else None

    def close(self, *, is_well: bool = True) -> None:
        """This rank makes no further call. The others can see that, if it is not because something failed."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(LOOK_S)  # no longer: it may wait for a store that went with rank 0
        if is_well:
            # A store that is gone went with rank 0: then nobody is left to be told.
            with suppress(RuntimeError), self.calls.within(END, self.calls.after_step):
                self.calls.note()
                self.tell()

    def close_at_exit(self) -> None:
        """Close for a script that closes nothing. One that failed says so itself."""
        self.close(is_well=getattr(sys, "last_value", None) is None)

    def _key(self, rank: int) -> str:
        return f"whereabouts/{rank}"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType | None) -> str:
    """The innermost line that is the person's own."""
    for each in _frames(frame):
        name = each.f_code.co_filename
        if not name.startswith("<") and not any(part in name for part in LIBRARIES):
            return f"{Path(name).name}, line {each.f_lineno}"
    return ""


def _is_in_collective(frame: FrameType | None) -> bool:
    return any(part in each.f_code.co_filename for each in _frames(frame) for part in COLLECTIVES)


def end_process(sentence: str) -> NoReturn:
    """End this process with a sentence: its main thread waits within a library, and no exception would reach it."""
    words = f"potluck: {sentence}"
    if (path := os.environ.get(LAST_WORDS)) is not None:
        Path(path).write_text(words, encoding="utf-8")
    else:
        print(words, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ConfigError.exit_code)
