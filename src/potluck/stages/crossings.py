"""Where a model can be cut between two of its layers, and what would go from one stage to the next. Pure.

A cut lies behind a layer, or behind one of the operations that the model's own forward does after it: wherever all that
is still needed was made by them. `x = x + block(x)` is cut behind the sum, since there only x is needed. What was made
from parameters alone, by no layer, need not travel: every stage that uses it computes it anew.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from potluck.errors import ConfigError
from potluck.stages.forms import narrow
from potluck.stages.plan import Form
from potluck.stages.watch import Mark, Watch


@dataclass(frozen=True, slots=True)
class End:
    """The end of a place: what runs before the chain, or a link of it."""

    last: int
    """The event after which the next one begins."""
    output: Form
    sent: frozenset[Mark]
    operations: tuple[str, ...] = ()


class Crossings:
    def __init__(self, watch: Watch) -> None:
        self._watch, self._events = watch, watch.events
        self._last_use: dict[Mark, int] = {}
        for number, event in enumerate(self._events):
            self._last_use |= dict.fromkeys(event.behind, number)
        self.is_anew = cache(self._is_anew)
        self.made_from = cache(self._made_from)
        self.ends: list[End] = []
        """Of place 0 and of each link."""
        for place in range(len(watch.links) + 1):
            self.ends.append(self._find(place) if place else self._find_opening())

    def place_of(self, event: int) -> int:
        return sum(end.last < event for end in self.ends)

    def parameters(self, place: int) -> Iterator[int]:
        """All that a place uses, by id; but not those behind what it is sent."""
        first = self.ends[place - 1].last + 1 if place else 0
        last = self.ends[place].last if place < len(self.ends) else len(self._events) - 1
        sent: frozenset[Mark] = self.ends[place - 1].sent if place else frozenset()
        for number in range(first, last + 1):
            event = self._events[number]
            behind = {mark for mark in event.behind if mark[0] < first and mark not in sent}
            found = set(event.parameters)
            if number == self._watch.layers[0] and not self.ends[0].operations:  # it is sent its arguments
                behind, found = behind - self._watch.opened[0], found - self._watch.opened[1]
            yield from found
            for mark in behind:
                yield from self.made_from(mark[0])

    def _find_opening(self) -> End:
        """The arguments of the first link, if later ones need nothing else; or behind an operation before it."""
        first = self._watch.layers[0]
        later = {mark for event in self._events[first + 1 :] for mark in event.behind if mark[0] < first}
        plain = End(first - 1, self._watch.opening, frozenset())
        counts = {number: count for number in range(first) if later and (count := len(self._live(number)))}
        if not counts:
            return plain
        return self._end_behind(-1, min(counts, key=lambda number: (counts[number], -number)))

    def _find(self, place: int) -> End:
        layers = self._watch.layers
        start = layers[place - 1]
        stop = layers[place] if place < len(layers) else len(self._events) - 1
        found: list[tuple[int, int]] = []
        for last in range(start, stop):
            old = [mark for mark in self._live(last) if mark[0] < start]
            if all(self.is_anew(mark[0]) for mark in old):
                found.append((len(old), last))
                if not old:
                    break
        if found:  # the fewest to compute anew, and the earliest of those
            return self._end_behind(start, min(found)[1])
        if place == len(layers):  # all that follows belongs to the last layer
            return End(len(self._events) - 1, narrow(self._events[start].form, set()), frozenset())
        raise self._refusal(start, stop)

    def _live(self, last: int) -> list[Mark]:
        """What was made by then and is used after it."""
        return [mark for mark, use in self._last_use.items() if mark[0] <= last < use]

    def _end_behind(self, start: int, last: int) -> End:
        """`start`: the event of the link, or -1 before the first."""
        sent = {mark for mark in self._live(last) if mark[0] >= start}
        # Whatever else the model does there, such as what it does in training alone, does not matter.
        needed = {start} if start >= 0 else set()
        waiting = {mark[0] for mark in sent}
        while waiting := {number for number in waiting if number > start} - needed:
            needed |= waiting
            waiting = {mark[0] for number in waiting for mark in self._events[number].behind}
        forms: list[Form] = [] if start >= 0 else [{"value": None}]
        first = 0
        for number in sorted(needed):
            event = self._events[number]
            chosen = {index for each, index in sent if each == number} | event.counted
            forms.append(narrow(event.form, chosen, first))
            first += len(chosen)
        names = tuple(self._events[number].name for number in sorted(needed) if number > start)
        return End(max(needed), {"list": forms} if names else forms[0], frozenset(sent), names)

    def _is_anew(self, number: int) -> bool:
        """Whether it was made from parameters alone."""
        event = self._events[number]
        return not event.is_layer and all(self.is_anew(mark[0]) for mark in event.behind)

    def _made_from(self, number: int) -> frozenset[int]:
        """The parameters behind it, however far."""
        event = self._events[number]
        return frozenset(event.parameters).union(*(self.made_from(mark[0]) for mark in event.behind))

    def _refusal(self, start: int, stop: int) -> ConfigError:
        links = self._watch.links
        old = [mark for mark in self._live(start) if mark[0] < start and not self.is_anew(mark[0])]
        mark = min(old, key=lambda mark: (-self._last_use[mark], mark))
        user = next((event for event in self._events[stop:] if mark in event.behind), self._events[stop])
        place = user.place - user.is_layer
        what = f"Layer {links[place]}" if place < len(links) else "What runs after the layers"
        return ConfigError(
            f"{what} uses what layer {links[self._events[mark[0]].place - 1]} gave, past the layers between them."
            " Between stages goes only what a layer gives to the next, such as the sum x of x = x + block(x): hand on"
            " what later layers need as one more output of each."
        )
