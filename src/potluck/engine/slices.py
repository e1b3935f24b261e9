"""The gradients of slices, added in the fixed tree and sent part by part while the backward still runs.

A part is a repeated block, or what lies outside the blocks; the backward completes them one after the other. When it
completes a part of a worker's last slice, the sums of all its nodes are ready for that part, and leave.
Knows nothing of sockets: `send` is handed in.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from potluck.engine.buckets import Allocate, Bucket, find_units
from potluck.engine.buffers import SavedBuffers
from potluck.errors import ConfigError
from potluck.fleet.description import MAX_FLOATS, Part
from potluck.fleet.tree import Node, merges

SMALL_BYTES = 1 << 20
"""Neighbouring layers outside the blocks travel together up to this size: each part costs a message."""
COMPONENTS = {"lm_head": 0, "final_norm": 1, "embedding": 2}
"""Published numbers for what lies outside the blocks of a model whose blocks have nine parts."""
NINE = ("w_q", "w_k", "w_v", "w_o", "gate", "up", "down", "input_norm", "post_attn_norm")
MOST_SPARE = 6
"""Sums of a part that are kept for later: as many as wait at once in a tree of some dozens of slices."""

Send = Callable[[int, Tensor], None]
"""(part, its gradients): they stay as they are until the step is over."""


class PartBuffer(Bucket):
    """A part's bucket, and the sums that wait for the rest of their node."""

    def __init__(self, part: Part, parameters: list[nn.Parameter], allocate: Allocate | None) -> None:
        super().__init__(parameters, allocate)
        self._allocate = allocate
        self.part = part
        self.stack: list[Tensor] = []
        self.done: list[Tensor] = []
        """The sums of whole nodes."""
        self.spare: list[Tensor] = []

    def add(self, merges: int, *, ends_node: bool, is_last: bool) -> None:
        """The slice's gradient into the sums of its node."""
        value = self.flat
        for _ in range(merges):
            left = self.stack.pop()
            left.add_(value)
            if value is not self.flat:
                self.spare.append(value)
            value = left
        if value is self.flat and not (ends_node and is_last):
            value = self.spare.pop() if self.spare else self._another()
            value.copy_(self.flat)
        (self.done if ends_node else self.stack).append(value)

    def _another(self) -> Tensor:
        return self._allocate(len(self.flat), self.flat) if self._allocate else torch.empty_like(self.flat)

    def start_slice(self) -> None:
        self.reset()
        for parameter in self.parameters:
            parameter.grad = None

    def forget_sums(self) -> None:
        self.spare += [kept for kept in self.stack + self.done if kept is not self.flat]
        self.stack, self.done = [], []
        del self.spare[MOST_SPARE:]


class SliceSums:
    """For each piece of work: begin; then for each slice start_slice, backward (many times), finish_slice."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], send: Send, allocate: Allocate | None = None
    ) -> None:
        """`allocate`: for tensors that `send` prefers."""
        self._send = send
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        insist_on_float32(self.trained)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._buffers = SavedBuffers(model)
        self.parts = [PartBuffer(part, parameters, allocate) for part, parameters in plan_parts(model, blocks)]
        """In the order in which the backward completes them."""
        self.used = [False] * len(self.trained)
        self._index = {id(parameter): index for index, parameter in enumerate(self.trained)}
        self._communicate = False
        self._completed = 0
        self._schedule: list[tuple[int, int, bool]] = []
        self._at = 0
        self._before: list[Tensor] = []
        self._changes: list[Tensor] = []
        self._changes_done: list[Tensor] = []
        self.before_last_part: Callable[[], None] = lambda: None
        self.send_exact: Callable[[bytes], None] = lambda exact: None
        """What the first slice changed in buffers that have no mean; before the last of its payloads."""
        for buffer in self.parts:
            for index, parameter in enumerate(buffer.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(buffer, index))  # type: ignore[no-untyped-call]

    @property
    def described(self) -> tuple[Part, ...]:
        return tuple(buffer.part for buffer in self.parts) + self._buffers.parts

    @property
    def is_last_slice(self) -> bool:
        return self._at == len(self._schedule) - 1

    def begin(self, nodes: Sequence[Node]) -> list[int]:
        """The slices to compute, in order."""
        self.reset()
        self._schedule = [
            (number, count, number == node[1] - 1)
            for node in nodes
            for number, count in zip(range(*node), merges(node), strict=True)
        ]
        self._at = -1
        self.used = [False] * len(self.trained)
        return [number for number, _, _ in self._schedule]

    def start_slice(self) -> None:
        self._at += 1
        self._completed = 0
        self._communicate = False
        for part in self.parts:
            part.start_slice()
        if not self._before:
            self._before = self._buffers.copy()
        else:  # each slice of a step starts from the same buffers, whoever computes it
            self._buffers.put(self._before)

    def arm(self, *, communicate: bool) -> None:
        """Before each backward: only a slice's last one moves its gradient on."""
        self._communicate = communicate

    def finish_slice(self, weight: float) -> None:
        """After its last backward. `weight`: what the slice's samples weigh in its gradient."""
        self._keep_buffers(weight)
        while self._completed < len(self.parts):
            self._complete(self.parts[self._completed])
        if self.is_last_slice:
            for change in self._changes_done:
                self._send(len(self.parts), change)
            self._buffers.put(self._before)  # as the weights: not yet of this step

    def load(self, means: Sequence[Tensor], used: bytes) -> None:
        """The averages become the parameters' gradients; what nobody used has none."""
        for buffer, mean in zip(self.parts, means, strict=False):
            pieces = torch.split(mean.to(buffer.flat.device), list(buffer.part.sizes))
            for parameter, piece in zip(buffer.parameters, pieces, strict=True):
                index = self._index[id(parameter)]
                was_used = used[index // 8] >> (index % 8) & 1 if index // 8 < len(used) else 1
                parameter.grad = piece.view_as(parameter) if was_used else None

    def apply_buffers(self, means: Sequence[Tensor], exact: bytes) -> None:
        """What the whole step changed in the buffers: the mean over its samples, where it has one."""
        if len(self._buffers):
            self._buffers.apply_from_host(self._before or self._buffers.copy(), means[-1], exact)
        self._before = []

    @property
    def agreed_buffers(self) -> list[Tensor]:
        """As of the last step, also while slices move those of the model."""
        return self._before or self._buffers.now()

    def restore_buffers(self) -> None:
        if self._before:
            self._buffers.put(self._before)
        self._before = []

    def start_anew(self) -> None:
        """The model's state has been replaced: what was computed from the old one is of no use."""
        self.reset()
        self._before = []

    def used_bits(self) -> bytes:
        return np.packbits(np.array(self.used, np.uint8), bitorder="little").tobytes()

    def reset(self) -> None:
        """Forgets what was computed."""
        for part in self.parts:
            part.forget_sums()
            part.start_slice()
        self._changes, self._changes_done = [], []

    def _keep_buffers(self, weight: float) -> None:
        if not len(self._buffers):
            return
        number, count, ends_node = self._schedule[self._at]
        value, exact = self._buffers.for_host(self._before, weight)
        if number == 0 and exact:
            self.send_exact(exact)
        for _ in range(count):
            value = self._changes.pop().add_(value)
        (self._changes_done if ends_node else self._changes).append(value)

    def _hook(self, buffer: PartBuffer, index: int) -> Callable[[Tensor], None]:
        def on_gradient(parameter: Tensor) -> None:
            buffer.on_gradient(index, self._names[id(parameter)], is_last=self._communicate)
            if self._communicate:
                while self._completed < len(self.parts) and not self.parts[self._completed].missing:
                    self._complete(self.parts[self._completed])

        return on_gradient

    def _complete(self, buffer: PartBuffer) -> None:
        """The slice's gradient of a part is whole. Parts are completed in their order."""
        buffer.complete()
        for parameter, arrived in zip(buffer.parameters, buffer.arrived, strict=True):
            self.used[self._index[id(parameter)]] |= arrived
        _, count, ends_node = self._schedule[self._at]
        buffer.add(count, ends_node=ends_node, is_last=self.is_last_slice)
        index = self._completed
        self._completed += 1
        if self.is_last_slice:
            if self._completed == len(self.parts):
                self.before_last_part()
            for value in buffer.done:
                self._send(index, value)


def insist_on_float32(trained: Sequence[nn.Parameter]) -> None:
    wrong = next((p.dtype for p in trained if p.dtype != torch.float32), None)
    if wrong is not None:
        raise ConfigError(
            f"Gradients travel to a host as float32, and a parameter is {wrong}. Keep parameters in float32, and"
            " use step.precision = bf16 to compute in bf16."
        )


def plan_parts(model: nn.Module, blocks: Sequence[nn.Module]) -> list[tuple[Part, list[nn.Parameter]]]:
    """Every trained parameter's part, in the order in which the backward completes them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    units = list(reversed(find_units(model, blocks)))
    if all(_is_published(unit, names, blocks) for unit in units):
        inside = [{id(p) for p in block.parameters()} for block in blocks]
        found = []
        for unit in units:
            sizes = tuple(parameter.numel() for parameter in unit)
            block = next((i for i, ids in enumerate(inside) if id(unit[0]) in ids), None)
            component = None if block is not None else COMPONENTS[names[id(unit[0])].split(".")[0]]
            found.append((Part(block, component, sizes), unit))
    else:
        grouped: list[list[nn.Parameter]] = []
        for unit in units:
            if grouped and sum(p.nbytes for p in [*grouped[-1], *unit]) <= SMALL_BYTES:
                grouped[-1] = unit + grouped[-1]
            else:
                grouped.append(list(unit))
        last = len(grouped) - 1
        found = [(Part(last - i, None, tuple(p.numel() for p in unit)), unit) for i, unit in enumerate(grouped)]
    for part, unit in found:
        if part.floats > MAX_FLOATS:
            raise ConfigError(
                f"{names[id(unit[0])]} and its layer have {part.floats:,} numbers, more than one message can carry"
                f" ({MAX_FLOATS:,})."
            )
    return found


def _is_published(unit: list[nn.Parameter], names: dict[int, str], blocks: Sequence[nn.Module]) -> bool:
    """Whether a unit is a block of nine parts, or one of the three components outside them."""
    own = [names[id(parameter)].removesuffix(".weight").split(".")[-1] for parameter in unit]
    return (len(blocks) > 0 and tuple(own) == NINE) or (
        len(unit) == 1 and names[id(unit[0])].removesuffix(".weight") in COMPONENTS
    )


def describe_model(model: nn.Module) -> str:
    """A hash of every parameter's and buffer's name, shape and type."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    lines = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype}{' frozen' if name in frozen else ''}"
        for name, tensor in model.state_dict().items()
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
