"""StreamRows: a stream, which can only be read on, as a dataset of places.

Every worker reads the whole stream, in its own order, and uses the rows at its own places; so nothing depends on who
the others are. A place that lies before what is kept of the stream is found again from the nearest state of the stream
that is known, or from the beginning of its pass. That it is the same stream again, and the same for all workers, is
seen by the content of some rows.
"""

import copy
import inspect
import json
import os
import random
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from potluck.agree.terms import Fingerprint, Mark, differs
from potluck.data.content import mark_of
from potluck.data.order import Order
from potluck.data.rows import mix, random_numbers_kept, seed_everything
from potluck.errors import ConfigError
from potluck.words import plural

EVERY = 256
"""Rows between two marks."""
MOST_MARKS = 64
MOST_TURNS = 4
LOOKED_AT = 8
"""How many of the first rows workers compare before they train."""
LONG_S = 20.0
"""Seconds of counting after which a person hears how to avoid it."""


@dataclass(slots=True)
class StreamMark:
    """Where a stream stood before one of its rows."""

    place: int
    """Index of the row over all epochs."""
    turn: int
    """Index of the pass over the stream."""
    row: int
    """Index of the row in that pass."""
    content: Mark | None = None
    """Digest of the row that follows, once it was read."""
    state: Any = None
    """The stream's own state_dict, as JSON if that can hold it; None: it has none."""

    @property
    def can_be_begun_at(self) -> bool:
        return self.row == 0 or self.state is not None

    def told(self) -> list[Any]:
        state = self.state if isinstance(self.state, str) else None
        return [self.place, self.turn, self.row, self.content, state]


def is_stream(data: Any) -> bool:
    """Tell whether data can be iterated over again and again and has no rows to ask for, or is a function that makes
    iterators."""
    if isinstance(data, IterableDataset) or inspect.isgeneratorfunction(getattr(data, "func", data)):
        return True
    has_rows = hasattr(data, "__getitem__") or isinstance(data, Mapping | Tensor | set | frozenset)
    return hasattr(data, "__iter__") and not hasattr(data, "__next__") and not has_rows


class StreamRows(Dataset[Any]):
    def __init__(self, stream: Any, rows: int, *, is_endless: bool, seed: int = 0, keep: int = EVERY) -> None:
        """`rows`: places of an epoch. `is_endless`: an epoch is any number of rows, and what follows them is the next
        one's; else it is one pass. `keep`: how many of the rows that were read last are kept."""
        self.stream = stream
        self.rows = rows
        self.seed = seed
        self._is_endless = is_endless
        self._keep = keep
        self._first_state = _known_of(stream).first_state
        self._has_state = self._trusts_states = callable(getattr(stream, "load_state_dict", None))
        self.notice: Callable[[str], None] = lambda sentence: None
        self._marks: dict[int, StreamMark] = {}
        self._news: list[StreamMark] = []
        self._forget_reading()

    def _forget_reading(self) -> None:
        self._iterator: Iterator[Any] | None = None
        self._process = os.getpid()
        self._at = self._turn = self._row = 0
        self._begun_by_state: StreamMark | None = None
        self._recent: OrderedDict[int, Any] = OrderedDict()
        self._randoms: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what another process makes for itself: it reads on its own."""
        own: dict[str, Any] = {"notice": str, "_iterator": None, "_recent": OrderedDict(), "_process": -1}
        return self.__dict__ | own

    def __len__(self) -> int:
        return self.rows

    @property
    def looked_at(self) -> range:
        """Rows that two workers compare before they train."""
        return range(min(LOOKED_AT, self.rows))

    def __getitems__(self, places: list[int]) -> list[Any]:
        if self._process != os.getpid():  # a copy in a process that fetches: the files that are open are the other's
            self._forget_reading()
        with self._own_random_numbers():
            return [self._row_at(place) for place in places]

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Give reading random numbers that depend on the stream's position alone, and that the model's do not depend
        on."""
        with random_numbers_kept():
            if self._randoms is not None:
                python, numpy, own = self._randoms
                random.setstate(python)
                np.random.set_state(numpy)
                torch.set_rng_state(own)
            yield
            self._randoms = random.getstate(), np.random.get_state(), torch.get_rng_state()

    # Reading

    def _row_at(self, place: int) -> Any:
        if place in self._recent:
            return self._recent[place]
        is_ahead = self._iterator is not None and place >= self._at
        if not is_ahead or not (self._is_endless or place // self.rows == self._turn):
            self._go_to(place)
        while self._at < place:
            self._read()
        return self._read()

    def _go_to(self, place: int) -> None:
        """Go to the nearest known place before this one."""
        turn = place // self.rows
        near = [
            mark
            for mark in self._marks.values()
            if mark.can_be_begun_at and mark.place <= place and (self._is_endless or mark.turn == turn)
        ]
        first = StreamMark(0, 0, 0) if self._is_endless else StreamMark(turn * self.rows, turn, 0)
        self._begin(max(near, key=lambda mark: mark.place, default=first))

    def _begin(self, mark: StreamMark) -> None:
        stream = self.stream
        self._at, self._turn, self._row = mark.place, mark.turn, mark.row
        self._begun_by_state = mark if mark.row else None
        state = self._first_state if mark.row == 0 else mark.state
        if self._has_state:
            stream.load_state_dict(json.loads(state) if isinstance(state, str) else copy.deepcopy(state))
        if callable(getattr(stream, "set_epoch", None)):
            stream.set_epoch(mark.turn)
        seed_everything(mix(self.seed, mark.turn, mark.row))
        self._iterator = iter(stream() if inspect.isgeneratorfunction(getattr(stream, "func", stream)) else stream)

    def _read(self) -> Any:
        assert self._iterator is not None
        mark = None
        if self._row % EVERY == 0:
            seed_everything(mix(self.seed, self._turn, self._row))
            state = _state_of(self.stream) if self._row and self._trusts_states else None
            mark = StreamMark(self._at, self._turn, self._row, state=state)
        try:
            row = next(self._iterator)
        except StopIteration:
            self._end_of_pass()
            return self._read()
        if mark is not None and not self._is_as_it_was(mark, mark_of(row)):
            self._go_to(mark.place)
            return self._read()
        self._recent[self._at] = row
        while len(self._recent) > self._keep:
            self._recent.popitem(last=False)
        self._at, self._row = self._at + 1, self._row + 1
        return row

    def _end_of_pass(self) -> None:
        if not self._row:
            raise ConfigError("The stream gives no row at all.")
        if not self._is_endless:
            raise ConfigError(
                f"The stream has ended after {plural(self._row, 'row')} of epoch {self._turn + 1}, and an epoch has"
                f" {self.rows:,}. A stream that is not the same each time needs rows=, the rows of one epoch."
            )
        self._begin(StreamMark(self._at, self._turn + 1, 0))

    def _is_as_it_was(self, mark: StreamMark, content: Mark | None) -> bool:
        """Notes the content of a row; or compares it with what it was before. False: a state has led elsewhere."""
        known = self._marks.get(mark.place)
        if known is not None and known.content is not None and content is not None and differs(known.content, content):
            if self._begun_by_state is None:
                raise ConfigError(
                    f"The stream gave another row at place {mark.place % self.rows:,} of epoch"
                    f" {mark.place // self.rows + 1} than when that was read before. It must give the same rows each"
                    " time it is read: seed what it shuffles by, or give it set_epoch(), or a state_dict()."
                )
            # Such as those of a stream that fills its buffer of shuffled rows again.
            self._trusts_states, self._begun_by_state = False, None
            self.notice(
                "The state of the stream does not lead back to the same rows, as where it fills a buffer anew. It is"
                " read from the beginning of its pass instead."
            )
            for each in self._marks.values():
                each.state = None
            return False
        mark.content = content
        if known is None or known.content is None:
            self._learn(mark)
            self._news.append(mark)
        return True

    # What is known of it

    def _learn(self, mark: StreamMark) -> None:
        self._marks[mark.place] = mark
        for turns, most in ((True, MOST_TURNS), (False, MOST_MARKS)):
            kind = sorted(place for place, each in self._marks.items() if (each.row == 0) == turns)
            for place in kind[:-most]:
                del self._marks[place]

    def take_news(self) -> list[list[Any]]:
        """Marks since the last call, for the process that this one reads for."""
        news, self._news = self._news, []
        return [mark.told() for mark in news]

    def learn(self, news: list[list[Any]]) -> None:
        for told in news:
            mark = _checked_mark(told)
            self._learn(mark)

    def saved(self, place: int) -> list[list[Any]]:
        """Return the marks that a checkpoint keeps for a run that has used all places before this one."""
        before = sorted((mark for mark in self._marks.values() if mark.place <= place), key=lambda mark: mark.place)
        begun = [mark for mark in before if mark.row == 0 or isinstance(mark.state, str)]
        return [mark.told() for mark in {mark.place: mark for mark in (*begun[-2:], *before[-2:])}.values()]

    def restore(self, saved: list[list[Any]]) -> None:
        """The run continues where this was saved."""
        self._marks = {}
        self._forget_reading()
        self.learn(saved)

    def seen(self, epoch: int) -> Fingerprint:
        """The content of some rows of an epoch, for workers to compare."""
        first = epoch * self.rows
        marks = {
            str(place - first): mark.content
            for place, mark in self._marks.items()
            if first <= place < first + self.rows and mark.content is not None
        }
        return {"origin": "", "marks": marks} if marks else {}


class StreamOrder(Order):
    """The stream's own."""

    counted = "places of the stream"

    def __init__(self, stream: Any, rows: int) -> None:
        self.rows = rows
        self._name = type(stream).__name__ if not inspect.isfunction(stream) else stream.__name__

    def of(self, epoch: int, seed: int) -> Tensor:
        return torch.arange(epoch * self.rows, (epoch + 1) * self.rows)

    def tell(self, seed: int) -> str:
        return f"in the order of the stream {self._name}"


@dataclass(slots=True)
class KnownStream:
    """Facts about a stream, found out before anything was read of it."""

    first_state: Any
    """The stream's state at first; any later state is where it was last read to."""
    rows: int | None = None


_known: "weakref.WeakKeyDictionary[Any, KnownStream]" = weakref.WeakKeyDictionary()


def _known_of(stream: Any) -> KnownStream:
    try:
        if stream not in _known:
            _known[stream] = KnownStream(_state_of(stream))
        return _known[stream]
    except TypeError:  # it has no hash
        return KnownStream(_state_of(stream))


def length_of(stream: Any, notice: Callable[[str], None]) -> int:
    """How many rows one pass has: as it says, or by counting them."""
    try:
        return len(stream)
    except TypeError:  # it has no length, and is counted
        pass
    known = _known_of(stream)
    if known.rows is None:
        notice("The stream does not say how many rows it has: it is read once to count them. rows= would say so.")
        known.rows = _count(stream, notice)
    return known.rows


def _count(stream: Any, notice: Callable[[str], None]) -> int:
    reader = StreamRows(stream, 1, is_endless=False, keep=1)
    rows, told_at = 0, time.monotonic()
    with random_numbers_kept():
        reader._begin(StreamMark(0, 0, 0))
        assert reader._iterator is not None
        for _ in reader._iterator:
            rows += 1
            if time.monotonic() - told_at > LONG_S:
                told_at = time.monotonic()
                notice(f"Counting the rows of the stream: {rows:,} so far. rows= of prepare() would say how many.")
    return rows


def _state_of(stream: Any) -> Any:
    """Return a stream's state: as JSON if that can hold it, else a copy of it."""
    if not callable(getattr(stream, "state_dict", None)) or not callable(getattr(stream, "load_state_dict", None)):
        return None
    try:
        state = stream.state_dict()
    except Exception:  # some have none before they were begun
        return None
    try:
        text = json.dumps(state)
        if json.loads(text) == state:
            return text
    except (TypeError, ValueError):
        pass
    return copy.deepcopy(state)


def _checked_mark(told: Any) -> StreamMark:
    """Check a mark from a checkpoint, or from a process that fetches."""
    place, turn, row, content, state = told
    whole = all(isinstance(number, int) and number >= 0 for number in (place, turn, row))
    if not whole or not isinstance(content, list | None) or not isinstance(state, str | None):
        raise ValueError("what is kept of a stream is a list of places, contents and states")
    return StreamMark(place, turn, row, content, state)
