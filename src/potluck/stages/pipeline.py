"""The stages of one worker at work: micro-batches forward and backward in the order of a schedule.

Knows no model and no data: `StageCompute` computes, a Channel sends. The backward that is cut in two is torch's own.

Channel: what the stages of one replica say to each other. Named tensors, whichever way they travel: direct.py and
datastore.py know how. Every tensor is announced by a Header, which the receiver checks before it takes any memory;
Buffers are the memory for what is received.
"""

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from potluck.stages.schedule import Action, Order
from potluck.store.tensors import Header

WHAT = ("activation", "gradient", "tied", "told")
"""An activation goes to the next stage and its gradient back; tied: a gradient that stages add up; told: bytes."""


@dataclass(frozen=True, slots=True)
class Label:
    """The name of one tensor of a run: equal on both sides, and used once."""

    step: int
    what: str
    source: int
    """The stage that sends it."""
    target: int
    micro: int = 0
    part: int = 0

    def __post_init__(self) -> None:
        assert self.what in WHAT, self.what
        assert min(self.step, self.source, self.target, self.micro, self.part) >= 0, self

    def __str__(self) -> str:
        return f"{self.what} {self.micro} of step {self.step} from stage {self.source} for stage {self.target}"


class Channel(Protocol):
    """One stage's end. Stages of one replica are numbered from 0; both sides use the same labels."""

    def expect(self, labels: Sequence[Label]) -> None:
        """Announce what will be received, each source's in the order in which it sends them: they may come early."""

    def send(self, label: Label, tensor: Tensor) -> None:
        """Begins to send. Nobody changes the tensor until flush() has returned."""

    def receive(self, label: Label) -> Tensor:
        """Wait for a tensor, and return it on the channel's device. WorkerLost names what is awaited, and from whom."""

    def flush(self) -> None:
        """Wait until all that was sent is out of our hands."""

    def close(self) -> None: ...


KEPT = 16
"""Buffers without a tensor that are kept, of whatever sizes."""
SMALL_BYTES = 1 << 17
"""Smaller buffers are not worth keeping."""


class Buffers:
    """Any thread may take, and drop. There is no lock: a tensor may be dropped at any point of any thread."""

    def __init__(self) -> None:
        self._free: deque[Any] = deque(maxlen=KEPT)

    def take(self, header: Header) -> Tensor:
        if header.nbytes < SMALL_BYTES:
            return header.empty()
        memory = self._find(header.nbytes)
        lent = memory[:]  # an array of its own over the same memory, which ends with the last tensor over it
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return torch.from_numpy(lent).view(header.dtype).view(header.shape)

    def _find(self, size: int) -> Any:
        for _ in range(len(self._free)):
            try:
                memory = self._free.pop()  # the last one dropped is the likeliest to be in the processor's cache
            except IndexError:
                break  # another thread took it
            if memory.nbytes == size:
                return memory
            self._free.appendleft(memory)
        return torch.empty(size, dtype=torch.uint8).numpy()


class StageCompute(Protocol):
    """The computation of one stage, as the pipeline calls it."""

    def forward(self, micro: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute what goes to the next stage; in the last stage, what the backward starts from: one number, or nothing
        where the micro-batch has no samples."""

    def weights(self) -> Sequence[nn.Parameter]: ...


@dataclass(slots=True)
class Times:
    """Seconds that a step spent on each kind of work."""

    busy_s: float = 0.0
    wait_s: float = 0.0
    send_s: float = 0.0


@dataclass(slots=True)
class _Kept:
    """Holds one micro-batch on one stage, from its forward to its backward."""

    received: tuple[Tensor, ...]
    given: tuple[Tensor, ...]
    groups: Any = None
    """State that torch's stage_backward_input left for stage_backward_weight."""


class PipelineRunner:
    """One worker's place among those who hold one replica together."""

    def __init__(self, stages: Mapping[int, StageCompute], widths: Sequence[int], channel: Channel) -> None:
        """`stages`: this worker's own, by number. `widths`: how many tensors each stage but the last gives the next."""
        self._stages = stages
        self._widths = widths
        self._last = len(widths)
        self.channel = channel
        self._kept: dict[tuple[int, int], _Kept] = {}
        self.times = Times()
        """Of the step that was run last."""

    def run(
        self,
        step: int,
        orders: Sequence[Order],
        worker: int,
        *,
        before_backward: Callable[[bool], None] = lambda last: None,
        after_backward: Callable[[], None] = lambda: None,
    ) -> None:
        """All that this worker does in a step. `before_backward` hears whether it is the last one of the step.

        Both are also called where a micro-batch has no samples, and so no backward.
        """
        self.times = Times()
        self.channel.expect(list(self._coming(step, orders, worker)))
        mine = orders[worker]
        ends = [number for number, action in enumerate(mine) if action.kind in "BW"]
        with torch.set_grad_enabled(bool(ends)):
            for number, action in enumerate(mine):
                if action.kind in "BIW":
                    before_backward(number == ends[-1])
                self._do(step, action)
                if action.kind in "BIW":
                    after_backward()
        with self._timed("send_s"):
            self.channel.flush()
        assert not self._kept or not ends
        self._kept.clear()

    def _coming(self, step: int, orders: Sequence[Order], worker: int) -> "list[Label]":
        """List what the other workers will send, each worker's in the order in which it computes them."""
        labels = []
        for other, order in enumerate(orders):
            if other != worker:
                for action in order:
                    labels += [label for label in self._given(step, action) if label.target % len(orders) == worker]
        return labels

    def _given(self, step: int, action: Action) -> list[Label]:
        """List what an action gives other stages."""
        stage, micro = action.stage, action.micro
        if action.kind == "F" and stage < self._last:
            return self._labels(step, "activation", stage, stage + 1, micro)
        if action.kind in "BI" and stage > 0:
            return self._labels(step, "gradient", stage, stage - 1, micro)
        return []

    def _labels(self, step: int, what: str, source: int, target: int, micro: int) -> list[Label]:
        width = self._widths[min(source, target)]
        return [Label(step, what, source, target, micro, part) for part in range(width)]

    def _do(self, step: int, action: Action) -> None:
        match action.kind:
            case "F":
                results = self._forward(step, action)
            case "B":
                results = self._backward(step, action)
            case "I":
                results = self._backward_inputs(step, action)
            case "W":
                results = self._backward_weights(action)
        labels = self._given(step, action)
        with self._timed("send_s"):
            for label, tensor in zip(labels, results if labels else (), strict=True):
                self.channel.send(label, tensor)

    def _forward(self, step: int, action: Action) -> tuple[Tensor, ...]:
        received: tuple[Tensor, ...] = ()
        if action.stage > 0:
            labels = self._labels(step, "activation", action.stage - 1, action.stage, action.micro)
            received = self._receive(labels)
            if torch.is_grad_enabled():
                for tensor in received:
                    tensor.requires_grad_(tensor.is_floating_point())
        with self._timed("busy_s"):
            given = self._stages[action.stage].forward(action.micro, received)
        if torch.is_grad_enabled():
            self._kept[action.stage, action.micro] = _Kept(received, given)
        return given

    def _backward(self, step: int, action: Action) -> tuple[Tensor, ...]:
        kept = self._kept.pop((action.stage, action.micro))
        pairs = self._with_gradients(step, action, kept)
        if pairs is None:
            return _pass_over(kept)
        with self._timed("busy_s"):
            _backward(pairs)
        return _gradients_of(kept.received)

    def _backward_inputs(self, step: int, action: Action) -> tuple[Tensor, ...]:
        kept = self._kept[action.stage, action.micro]
        pairs = self._with_gradients(step, action, kept)
        if pairs is None:
            kept.groups = []
            return _pass_over(kept)
        if action.stage == 0:  # nobody waits for it: all of it comes with the weights
            kept.groups = pairs
            return ()
        outputs = [tensor for tensor, _ in pairs]
        weights = self._stages[action.stage].weights()
        if any(map(_calls_others, weights)) or not can_come_apart(outputs, kept.received):
            with self._timed("busy_s"):
                _backward(pairs)
            kept.groups = []
            return _gradients_of(kept.received)
        from torch.distributed.pipelining._backward import stage_backward_input

        gradients = [gradient for _, gradient in pairs]
        with self._timed("busy_s"):
            _, kept.groups = stage_backward_input(outputs, gradients, list(kept.received), iter(weights))
        return _gradients_of(kept.received)

    def _backward_weights(self, action: Action) -> tuple[Tensor, ...]:
        kept = self._kept.pop((action.stage, action.micro))
        if action.stage == 0:
            with self._timed("busy_s"):
                _backward(kept.groups)
            return ()
        from torch.distributed.pipelining._backward import stage_backward_weight

        weights = iter(self._stages[action.stage].weights())
        groups = [group for group in kept.groups if group.get("grads") is not None]
        with self._timed("busy_s"):
            stage_backward_weight(weights, groups)
            for weight in self._stages[action.stage].weights():
                if weight.grad is not None and 0 in weight.grad.stride():  # torch would add to it as is
                    weight.grad = weight.grad.clone(memory_format=torch.contiguous_format)
        return ()

    def _with_gradients(self, step: int, action: Action, kept: _Kept) -> list[tuple[Tensor, Tensor]] | None:
        """Pair each tensor that the stage gave with its gradient; None where the micro-batch has no samples."""
        if action.stage == self._last:
            pairs = [(tensor, torch.ones_like(tensor)) for tensor in kept.given]
            return [(a, b) for a, b in pairs if a.requires_grad] if pairs else None
        labels = self._labels(step, "gradient", action.stage + 1, action.stage, action.micro)
        pairs = list(zip(kept.given, self._receive(labels), strict=True))
        if pairs and all(a.shape != b.shape for a, b in pairs):
            return None
        return [(a, b) for a, b in pairs if a.requires_grad]

    def _receive(self, labels: Sequence[Label]) -> tuple[Tensor, ...]:
        with self._timed("wait_s"):
            return tuple(self.channel.receive(label) for label in labels)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        setattr(self.times, name, getattr(self.times, name) + time.perf_counter() - started)


def _pass_over(kept: _Kept) -> tuple[Tensor, ...]:
    """Return tensors without numbers in place of gradients, since a micro-batch without samples has none: they tell the
    stage before. Its backward is left out on every stage: 0 times what is not finite would not be 0."""
    return tuple(tensor.new_empty(0) for tensor in kept.received)


def can_come_apart(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether the gradients of the weights can come later than those of the inputs, with each computed once.

    Not where a weight is used twice: what one use adds would be added again on the way through the other. Not where a
    piece of the graph is compiled, or has hooks on a module, which can run backward only once. And not where an output
    is a view, since torch cuts the graph at the outputs themselves, which it cannot do to a view.
    """
    if any(tensor._is_view() for tensor in outputs):
        return False
    ends = {_node(tensor) for tensor in inputs if tensor.requires_grad}
    carries: dict[Any, bool] = dict.fromkeys(ends, True)  # whether a node leads to an input
    uses: Counter[Any] = Counter()
    waiting = [_node(tensor) for tensor in outputs]
    while waiting:
        node = waiting[-1]
        following = [] if node in ends else [child for child, _ in node.next_functions if child is not None]
        if node not in carries:
            if type(node).__name__.startswith(("CompiledFunction", "BackwardHookFunction")):
                return False
            carries[node] = False
            uses.update(following)
            waiting += [child for child in following if child not in carries]
        else:
            waiting.pop()
            carries[node] |= any(carries[child] for child in following)
    return all(carries[node] or many == 1 for node, many in uses.items())


def _calls_others(weight: nn.Parameter) -> bool:
    """Whether somebody else's hook awaits its gradient: torch's backward of weights alone would not call it."""
    hooks = weight._post_accumulate_grad_hooks or {}
    return any(not (getattr(hook, "__module__", None) or "").startswith("potluck.") for hook in hooks.values())


def _node(tensor: Tensor) -> Any:
    return tensor.grad_fn or torch.autograd.graph.get_gradient_edge(tensor).node


def _backward(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def _gradients_of(received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One for each; zeros where nothing depends on it."""
    found = tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in received)
    for tensor in received:
        tensor.grad = None
    return found
