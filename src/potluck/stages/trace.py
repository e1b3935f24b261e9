"""Traces one run of the whole model: from what each layer, and each operation around the layers, was made.

Crossings: where the model can be cut between two layers, and what would go from one stage to the next. A cut lies
behind a layer, or behind one of the operations that the model's own forward does after it: wherever all that is still
needed was made by them. `x = x + block(x)` is cut behind the sum, since there only x is needed. What was made from
parameters alone, by no layer, need not travel: every stage that uses it computes it again.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from potluck.errors import ConfigError
from potluck.stages.chain import BufferAccess, Chain, buffers_outside
from potluck.stages.forms import (
    Inputs,
    OpListener,
    all_tensors,
    arguments,
    describe,
    has_form,
    map_tensors,
    narrow,
    tensors_in,
)
from potluck.stages.plan import Form
from potluck.stages.recomputing import (
    check_keeps_buffers,
    check_not_for_gradient,
    check_not_reentrant,
    close_checkpoints,
)
from potluck.stages.seats import generators_of, seed_of
from potluck.words import plural

SEED = 0
"""Seed of a survey's random numbers, which have to be the same whole and cut."""

Mark = tuple[int, int]
"""A tensor: the number of its event, and which of the event's tensors it is."""


@dataclass(frozen=True, slots=True)
class TracedEvent:
    """A layer, or an operation or a part of the model around its layers, has given something."""

    name: str
    place: int
    """How many layers had ended by then: of a layer, its own number, from 1 on."""
    is_layer: bool
    form: Form
    behind: set[Mark]
    """Marks of the tensors that it was directly made from."""
    parameters: set[int]
    """Ids of the parameters that it was directly made from."""
    counted: set[int] = field(default_factory=set)
    """Indices of its tensors that are integers or truth values: no graph tells who uses them."""


class ModelTrace:
    """Traces one run of the whole model: the result of each event continues as a copy that is marked in the graph.

    So the graph behind anything says from which marks and which parameters it was made, and from no further back.
    Places count as those of seeds do: 0 before the chain, its links from 1 on, the last what follows.
    """

    def __init__(self, model: nn.Module, chain: Chain) -> None:
        self._model, self._chain = model, chain
        self.links = list(chain.modules)
        self.events: list[TracedEvent] = []
        """In order. The last is what the loss function returned."""
        self.layers: list[int] = []
        """Which events are those of the links."""
        self.met: list[tuple[int, str]] = []
        """The parts that ran, each with the number of events before it."""
        self.opening: Form = {"dict": {}}
        """Those arguments of the first link that were computed."""
        self.opened: tuple[set[Mark], set[int]] = (set(), set())
        """What they were made from."""
        self.buffer_access = BufferAccess(buffers_outside(model, chain))
        self._is_inside = self._is_open = False
        self._versions: list[int] = []
        """Of the buffers of the link that runs, as it began."""
        self._listener = OpListener(self._on_operation)
        self._calls = 0
        """How often the model itself was run."""
        self._marks: dict[Any, Mark] = {}
        """By their nodes in the graph."""
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))

    @property
    def done(self) -> int:
        """The place that ran last."""
        return len(self.layers)

    def sow(self, place: int) -> None:
        for generator in generators_of(self._device):
            generator.manual_seed(seed_of(SEED, place))

    def run(self, loss_of: Callable[[nn.Module, Any], Any], batch: Any) -> None:
        parameters = list(self._model.parameters())
        trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
        with torch.enable_grad(), self._hooked():
            try:
                # Every parameter has to show in the graph; what was frozen is so again afterwards.
                for parameter in parameters:
                    parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
                self.sow(0)
                with self._listener:
                    result = _run(loss_of, self._model, batch)
                self._touch(())
                self._end(result)
            finally:
                for parameter in parameters:
                    parameter.requires_grad_(id(parameter) in trained)
        self._marks.clear()

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        # The forward of the model itself is where counting begins: a loss function may do more before it, or less.
        handles = [self._model.register_forward_pre_hook(self._open)]
        for place, link in enumerate(self._chain.modules.values(), start=1):
            handles.append(link.register_forward_pre_hook(partial(self._begin, place), with_kwargs=True, prepend=True))
            handles.append(link.register_forward_hook(self._finish))
        parts = {id(part): (name, part) for name, part in reversed(self._chain.parts.items())}
        for name, part in parts.values():
            if isinstance(part, nn.Module):
                handles.append(part.register_forward_pre_hook(partial(self._meet, name), prepend=True))
                handles.append(part.register_forward_hook(partial(self._part, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _open(self, *unused: Any) -> None:
        self._is_open = True
        self._calls += 1

    def _begin(self, place: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self.links[place - 1]
        if self._calls > 1:
            raise ConfigError(
                "The loss function runs the model twice, and cut into stages a model runs once for each batch. Run"
                " it once on the rows of both, as in a, b = model(torch.cat([x, y])).chunk(2); where they are of"
                " different shapes, let one forward of the model take both."
            )
        if place != self.done + 1 or self._is_inside:
            check_not_for_gradient()
            raise ConfigError(
                f"Layer {name} runs out of turn: the layers of a model that is cut into stages run once each, in"
                " the order in which the model has them. To use one several times, let the list have it as often,"
                " as in nn.ModuleList([a, b, a]), and run all that the list has; or make one layer of those that"
                " are run again."
            )
        check_not_reentrant(name)
        self._touch((args, kwargs))
        self._is_inside = True
        if place == 1:
            given = arguments(args, kwargs)
            coming = {key: one for key, one in given.items() if any(t.requires_grad for t in tensors_in(one))}
            self.opened = self._behind(tensors_in(coming))
            self.opening = describe(coming, f"What {name} gets")
        self._versions = [buffer._version for buffer in module.buffers()]
        self.sow(place)

    def _finish(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self.layers.append(len(self.events))
        if self._versions != [buffer._version for buffer in module.buffers()]:
            check_keeps_buffers(self.links[self.done - 1])
        output = self._record(self.links[self.done - 1], output, is_layer=True)
        self._is_inside, self._is_open = False, True
        is_last = self.done == len(self.links)
        self.sow(self.done + 1 if is_last else len(self.links) + 1 + self.done)
        return output

    def _meet(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._is_inside:
            raise ConfigError(
                f"{name} runs within layer {self.links[self.done]}, and is not a part of it. Cut into stages, a"
                " layer has its parameters in itself."
            )
        self.met.append((len(self.events), name))
        self._touch((args, list(module.buffers())))
        self._is_inside = True

    def _part(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self._touch(())
        if self._is_open and has_form(output):
            output = self._record(name, output)
        self._is_inside = False  # not before: marking is no operation of the model's
        return output

    def _on_operation(self, name: str, inputs: Inputs, output: Any) -> Any:
        if self._is_inside:
            return output
        self._touch(inputs)
        return self._record(name, output) if self._is_open and has_form(output) else output

    def _touch(self, inputs: Any) -> None:
        with self._listener.closed():
            self.buffer_access.hear(len(self.events), inputs)
            self.buffer_access.look(len(self.events))

    def _record(self, name: str, output: Any, *, is_layer: bool = False) -> Any:
        form = describe(output, f"What layer {name} gives")
        behind, parameters = self._behind(tensors_in(output))
        number = len(self.events)
        tensors = tensors_in(output)
        counted = {index for index, one in enumerate(tensors) if not one.is_floating_point()} if is_layer else set()
        self.events.append(TracedEvent(name, self.done, is_layer, form, behind, parameters, counted))
        numbers = iter(range(len(tensors)))

        def mark(one: Tensor) -> Tensor:
            index = next(numbers)
            # A view must stay one, and one without a graph has no node; but a layer's is used by what follows.
            if not one.is_floating_point() or not (is_layer or (one.requires_grad and not one._is_view())):
                return one
            # A copy has a node of its own in the graph; a loss function may take gradients through it.
            marked = (one if one.requires_grad else one.detach().requires_grad_()).clone()
            self._marks[marked.grad_fn] = (number, index)
            return marked

        return map_tensors(mark, output)

    def _end(self, result: Any) -> None:
        """The loss function has returned."""
        if self.done != len(self.links):
            raise ConfigError(
                f"The loss function ran {self.done} of the model's {plural(len(self.links), 'layer')}"
                f" ({self.links[0]} to {self.links[-1]}), and each has to run once. It has to run the model that it"
                " gets as its argument, and no other."
            )
        self.events.append(TracedEvent("", self.done, False, {"value": None}, *self._behind(all_tensors(result))))

    def _behind(self, tensors: Iterable[Tensor]) -> tuple[set[Mark], set[int]]:
        """The marks and the leaves of the graph, by id, from which these were computed; from no further back."""
        marks: set[Mark] = set()
        leaves: set[int] = set()
        waiting: list[Any] = []
        for tensor in tensors:
            if tensor.grad_fn is not None:
                waiting.append(tensor.grad_fn)
            elif tensor.requires_grad:
                leaves.add(id(tensor))
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            if node in self._marks:
                marks.add(self._marks[node])
                continue
            if hasattr(node, "variable"):
                leaves.add(id(node.variable))
            for behind, _ in node.next_functions:
                if behind is not None and behind not in seen:
                    seen.add(behind)
                    waiting.append(behind)
        return marks, leaves


def _run(loss_of: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> Any:
    try:
        return loss_of(model, batch)
    except ConfigError as error:
        close_checkpoints(error)
        raise


@dataclass(frozen=True, slots=True)
class End:
    """The end of a place: what runs before the chain, or a link of it."""

    last: int
    """The event after which the next one begins."""
    output: Form
    sent: frozenset[Mark]
    operations: tuple[str, ...] = ()
    numbers: dict[Mark, int] = field(default_factory=dict)
    """Numbers among what is sent, of the tensors that were made there."""
    carried: tuple[Mark, ...] = ()
    """Tensors that are sent and that earlier places made."""


class Crossings:
    def __init__(self, trace: ModelTrace) -> None:
        self._trace, self._events = trace, trace.events
        self._last_use: dict[Mark, int] = {}
        for number, event in enumerate(self._events):
            self._last_use |= dict.fromkeys(event.behind, number)
        self.is_anew = cache(self._is_anew)
        self.made_from = cache(self._made_from)
        self._carries = False
        ends = self._find_all()
        if None in ends:  # something is used past the layers between, so that these hand it on
            self._carries = True
            ends = self._find_all()
        self.ends: list[End] = [end for end in ends if end is not None]
        """Of place 0 and of each link."""

    def _find_all(self) -> list[End | None]:
        return [self._find_opening(), *(self._find(place + 1) for place in range(len(self._trace.links)))]

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
            if number == self._trace.layers[0] and not self.ends[0].operations:  # it is sent its arguments
                behind, found = behind - self._trace.opened[0], found - self._trace.opened[1]
            yield from found
            for mark in behind:
                yield from self.made_from(mark[0])

    def _find_opening(self) -> End:
        """The arguments of the first link, if later ones need nothing else; or behind an operation before it."""
        first = self._trace.layers[0]
        later = {mark for event in self._events[first + 1 :] for mark in event.behind if mark[0] < first}
        plain = End(first - 1, self._trace.opening, frozenset())
        counts = {number: count for number in range(first) if later and (count := len(self._live(number)))}
        counts = {number: count for number, count in counts.items() if not self._leaves_a_gap(number, first)}
        if not counts:
            return plain
        return self._end_behind(-1, min(counts, key=lambda number: (counts[number], -number)))

    def carries(self, place: int, first: int) -> tuple[tuple[int, int], ...]:
        """List the carried tensors as Layer.carries has them. `first`: the place that is layer 0."""
        carried = self.ends[place].carried if place < len(self.ends) else ()
        origins = [(self.place_of(mark[0]), mark) for mark in carried]
        return tuple((origin - first, self.ends[origin].numbers[mark]) for origin, mark in origins)

    def _find(self, place: int) -> End | None:
        layers = self._trace.layers
        start = layers[place - 1]
        stop = layers[place] if place < len(layers) else len(self._events) - 1
        candidates: list[tuple[int, int, int]] = []
        for last in range(start, stop):
            old = [mark for mark in self._live(last) if mark[0] < start]
            carried = [mark for mark in old if not self.is_anew(mark[0])]
            if (carried and not self._carries) or self._leaves_a_gap(last, stop):
                continue
            candidates.append((len(carried), len(old), last))
            if not old:
                break
        if candidates:  # the fewest to carry and to compute again, and the earliest of those
            return self._end_behind(start, min(candidates)[-1])
        if place == len(layers):  # all that follows belongs to the last layer
            return End(len(self._events) - 1, narrow(self._events[start].form, set()), frozenset())
        return None

    def _leaves_a_gap(self, last: int, stop: int) -> bool:
        """Whether something is made behind the cut and before the next layer, and used behind that layer.

        Then no layer would have sent it, and none could carry it.
        """
        uses = self._last_use.items() if self._carries else ()
        return any(last < mark[0] < stop < use and not self.is_anew(mark[0]) for mark, use in uses)

    def _live(self, last: int) -> list[Mark]:
        """List the tensors that were made by then and are used after it."""
        return [mark for mark, use in self._last_use.items() if mark[0] <= last < use]

    def _end_behind(self, start: int, last: int) -> End:
        """`start`: the event of the link, or -1 before the first."""
        live = self._live(last)
        sent = {mark for mark in live if mark[0] >= start}
        carried = tuple(sorted(mark for mark in live if mark[0] < start and not self.is_anew(mark[0])))
        numbers: dict[Mark, int] = {}
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
            numbers |= {(number, index): place for place, index in enumerate(sorted(chosen), start=first)}
            first += len(chosen)
        names = tuple(self._events[number].name for number in sorted(needed) if number > start)
        output = {"list": forms} if names else forms[0]
        return End(max(needed), output, frozenset(sent.union(carried)), names, numbers, carried)

    def _is_anew(self, number: int) -> bool:
        """Whether it was made from parameters alone."""
        event = self._events[number]
        return not event.is_layer and all(self.is_anew(mark[0]) for mark in event.behind)

    def _made_from(self, number: int) -> frozenset[int]:
        """The parameters behind it, however far."""
        event = self._events[number]
        return frozenset(event.parameters).union(*(self.made_from(mark[0]) for mark in event.behind))
