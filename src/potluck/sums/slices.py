"""The gradients of slices, added in the fixed tree and sent part by part while the backward still runs.

A part is a repeated block, or what lies outside the blocks; the backward completes them one after the other. When it
completes a part of a worker's last slice, the sums of all its nodes are ready for that part, and leave.
Knows nothing of sockets: `send` is handed in.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from potluck.coded_numbers import Coding
from potluck.coded_tensors import round_
from potluck.errors import ConfigError
from potluck.fleet.description import MAX_FLOATS, Part
from potluck.fleet.tree import Node, merges
from potluck.link.link import Link
from potluck.replica.buckets import Allocate, BucketQueue, GradBucket, find_units, split_like
from potluck.replica.buffers import SavedBuffers
from potluck.replica.replica import Replica
from potluck.sharding.blocks import find_blocks
from potluck.sharding.ranges import Spec

SMALL_BYTES = 1 << 20
"""Neighbouring layers outside the blocks travel together up to this size: each part costs a message."""
COMPONENTS = {"lm_head": 0, "final_norm": 1, "embedding": 2}
"""Published numbers for what lies outside the blocks of a model whose blocks have nine parts."""
NINE = ("w_q", "w_k", "w_v", "w_o", "gate", "up", "down", "input_norm", "post_attn_norm")
MOST_SPARE = 6
"""Sums of a part that are kept for later: as many as wait at once in a tree of some dozens of slices."""

Send = Callable[[int, Tensor], None]
"""(part, its gradients): they stay as they are until the step is over."""


class PartSums:
    """A part's gradient of the slice that is being computed, and the sums that wait for the rest of their node."""

    def __init__(
        self,
        part: Part,
        flat: Tensor,
        allocate: Allocate | None = None,
        round_: Callable[[Tensor], object] | None = None,
    ) -> None:
        """`flat`: what is here of the part; of a replica that is split over ranks, some of its numbers.

        `round_`: to what would arrive of it. Then each node is rounded before it is added to its sibling, as if it had
        travelled.
        """
        self.part = part
        self._round = round_ or (lambda sum_: None)
        self.flat = flat
        self._allocate = allocate
        self._stack: list[Tensor] = []
        self.done: list[Tensor] = []
        """The sums of whole nodes."""
        self._spare: list[Tensor] = []

    def add(self, merges: int, *, ends_node: bool, is_last: bool) -> None:
        """The slice's gradient into the sums of its node."""
        value = self.flat
        for _ in range(merges):
            self._round(value)
            left = self._stack.pop()
            left.add_(value)
            if value is not self.flat:
                self._spare.append(value)
            value = left
        if value is self.flat and not (ends_node and is_last):
            value = self._spare.pop() if self._spare else self._another()
            value.copy_(self.flat)
        if not ends_node:
            self._round(value)
        (self.done if ends_node else self._stack).append(value)

    def _another(self) -> Tensor:
        return self._allocate(len(self.flat), self.flat) if self._allocate else torch.empty_like(self.flat)

    def forget(self) -> None:
        self._spare += [kept for kept in self._stack + self.done if kept is not self.flat]
        self._stack, self.done = [], []
        del self._spare[MOST_SPARE:]


class Gradients(Protocol):
    """Gradients of one replica, in the parts in which they travel: where a slice's comes from, and where the mean
    goes."""

    parts: list[PartSums]
    """In the order in which the backward completes them."""
    on_part: Callable[[], None]
    """Called when the slice's gradient of the next part is whole, in their order."""
    is_idle: bool
    """Whether backwards are none of ours now: this worker steps by itself."""

    def start_work(self) -> None:
        """From here on used_bits() counts."""

    def start_slice(self) -> None: ...

    def arm(self, *, communicate: bool) -> None:
        """Before each backward: only a slice's last one moves its gradient on."""

    def finish(self) -> None:
        """After a slice's last backward: calls on_part for what is left."""

    def used_bits(self) -> bytes:
        """Return which parameters any slice of this work has used, in the model's order."""

    def collect(self, index: int, numbers: Tensor) -> Tensor | None:
        """Collect what is sent of a part, from what is here of it; None if another rank sends it."""

    def load(self, means: Sequence[Tensor], used: bytes) -> float:
        """The averages become the gradient that a step applies; what nobody used has none. Its norm."""


class WholeGradients(BucketQueue):
    """Gradients of a replica that this process has all of. Parts leave one by one while the backward still runs."""

    def __init__(self, replica: Replica, allocate: Allocate | None = None, coding: Coding | None = None) -> None:
        """`allocate`: makes tensors in the memory that their sender prefers. `coding`: how parts travel."""
        model = replica.model
        self._replica = replica
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        check_float32(self._trained)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._index = {id(parameter): index for index, parameter in enumerate(self._trained)}
        self._used = [False] * len(self._trained)
        planned = plan_parts(model, find_blocks(model))
        buckets = [GradBucket(parameters, allocate) for _, parameters in planned]
        pairs = zip(planned, buckets, strict=True)
        rounds = partial(round_, coding) if coding is not None else None
        self.parts = [PartSums(part, bucket.flat, allocate, rounds) for (part, _), bucket in pairs]
        self.on_part: Callable[[], None] = lambda: None
        super().__init__(buckets, names, self._complete)
        replica.on_close.callback(self.close)

    def start_work(self) -> None:
        self._used = [False] * len(self._trained)

    def start_slice(self) -> None:
        self.reset()

    def finish(self) -> None:
        self.start_rest()

    def used_bits(self) -> bytes:
        return as_bits(self._used)

    def collect(self, index: int, numbers: Tensor) -> Tensor | None:
        return numbers

    def load(self, means: Sequence[Tensor], used: bytes) -> float:
        for bucket, mean in zip(self.buckets, means, strict=False):
            for parameter, piece in zip(
                bucket.parameters, split_like(mean.to(bucket.flat.device), bucket.parameters), strict=True
            ):
                is_used = is_set(used, self._index[id(parameter)]) and self._replica.adapter.steps_now(
                    self.names[id(parameter)]
                )
                parameter.grad = piece if is_used else None
        return float(self._replica.norm().item())

    def _complete(self, bucket: GradBucket) -> None:
        """The slice's gradient of the next part is whole. Parts are completed in their order."""
        for parameter, arrived in zip(bucket.parameters, bucket.arrived, strict=True):
            self._used[self._index[id(parameter)]] |= arrived
        self.on_part()


class SliceSums:
    """For each piece of work: begin; then for each slice start_slice, backward (many times), finish_slice."""

    def __init__(self, model: nn.Module, gradients: Gradients, link: Link, send: Send) -> None:
        """`link`: of the ranks that compute each slice together, each some of its rows."""
        self._gradients = gradients
        self._link = link
        self._send = send
        self._buffers = SavedBuffers(model)
        self.buffers_at = len(gradients.parts)
        """Which part they are: others may lie between, which travel with windows alone."""
        gradients.on_part = self._on_part
        self.scale = 1.0
        """What the slice's gradient was multiplied by: it is taken out before anything is added, as every worker may
        compute any slice, and some know of no scale."""
        self.may_overflow = False
        """Whether the scale may have been too high for a gradient that is not finite: zeros take its place then."""
        self.has_overflowed = False
        """Whether any slice of this work has."""
        self._next = 0
        """The part that is completed next."""
        self._schedule: list[tuple[int, int, bool]] = []
        self.at = 0
        """The slice that is computed, by its place among those of this work; -1: none was begun."""
        self._before: list[Tensor] = []
        self._changes: list[Tensor] = []
        self._changes_done: list[Tensor] = []
        self.before_last_part: Callable[[], None] = lambda: None
        self.send_exact: Callable[[bytes], None] = lambda exact: None
        """What the first slice changed in buffers that have no mean; before the last of its payloads."""

    @property
    def described(self) -> tuple[Part, ...]:
        return tuple(sums.part for sums in self._gradients.parts) + self._buffers.parts

    @property
    def is_last_slice(self) -> bool:
        """Whether it is the last, or there is none to compute."""
        return self.at == len(self._schedule) - 1

    def begin(self, nodes: Sequence[Node]) -> list[int]:
        """The slices to compute, in order."""
        self.reset()
        self._schedule = [
            (number, count, number == node[1] - 1)
            for node in nodes
            for number, count in zip(range(*node), merges(node), strict=True)
        ]
        self.at = -1
        self.has_overflowed = False
        self._gradients.start_work()
        return [number for number, _, _ in self._schedule]

    def start_slice(self) -> None:
        self.at += 1
        self._next = 0
        self._gradients.start_slice()
        if not self._before:
            self._before = self._buffers.copy()
        else:  # each slice of a step starts from the same buffers, no matter who computes it
            self._buffers.put(self._before)

    def finish_slice(self, samples: float, unit: float) -> None:
        """After its last backward. `samples`: of this rank's rows, which weigh `unit` each in its gradient."""
        self._keep_buffers(samples, unit)
        self._gradients.finish()
        if self.is_last_slice:
            for change in self._changes_done:
                self._send(self.buffers_at, change)
            self._buffers.put(self._before)  # as the weights: not yet of this step

    def apply_buffers(self, means: Sequence[Tensor], exact: bytes) -> None:
        """Apply what the whole step changed in the buffers: the mean over its samples, where it has one."""
        if len(self._buffers):
            self._buffers.apply_from_host(self._before or self._buffers.copy(), means[-1], exact)
        self._before = []

    @property
    def agreed_buffers(self) -> list[Tensor]:
        """Return the buffers as of the last step, also while slices move those of the model."""
        return self._before or self._buffers.now()

    def restore_buffers(self) -> None:
        if self._before:
            self._buffers.put(self._before)
        self._before = []

    def start_anew(self) -> None:
        """The model's state has been replaced: what was computed from the old one is of no use."""
        self.reset()
        self._before = []

    def reset(self) -> None:
        """Forgets what was computed."""
        for sums in self._gradients.parts:
            sums.forget()
        self._gradients.start_slice()
        self._changes, self._changes_done = [], []

    def _keep_buffers(self, samples: float, unit: float) -> None:
        if not len(self._buffers):
            return
        total = sum(row[0] for row in self._link.gather_rows([samples]))
        self._buffers.average(self._link, samples / total if total else 0.0, self._before)
        number, count, ends_node = self._schedule[self.at]
        value, exact = self._buffers.for_host(self._before, total * unit)
        if number == 0 and exact:
            self.send_exact(exact)
        for _ in range(count):
            value = self._changes.pop().add_(value)
        (self._changes_done if ends_node else self._changes).append(value)

    def _on_part(self) -> None:
        index, sums = self._next, self._gradients.parts[self._next]
        self._next += 1
        if self.scale != 1.0:
            sums.flat.mul_(1 / self.scale)
        if self.may_overflow and not sums.flat.isfinite().all():
            sums.flat.zero_()
            self.has_overflowed = True
        _, count, ends_node = self._schedule[self.at]
        sums.add(count, ends_node=ends_node, is_last=self.is_last_slice)
        if self.is_last_slice:
            if self._next == len(self._gradients.parts):
                self.before_last_part()
            for value in sums.done:
                if (whole := self._gradients.collect(index, value)) is not None:
                    self._send(index, whole)


def as_bits(flags: Sequence[bool]) -> bytes:
    return np.packbits(np.array(flags, np.uint8), bitorder="little").tobytes()


def is_set(bits: bytes, index: int) -> bool:
    """Tell whether a bit is set; one that nobody told of is."""
    return index // 8 >= len(bits) or bool(bits[index // 8] >> (index % 8) & 1)


def check_float32(trained: Sequence[Tensor | Spec]) -> None:
    """Check that trained parameters are float32. For bf16 there are masters, unless the model is split over ranks
    (precision.py)."""
    wrong = next((p.dtype for p in trained if p.dtype != torch.float32), None)
    if wrong is not None:
        what = f"{wrong}".removeprefix("torch.")
        if wrong.is_complex:
            raise ConfigError(
                f"A trained parameter is {what}, and what is trained travels to a host as float32. Keep it as pairs of"
                " real numbers, with torch.view_as_real(), and use torch.view_as_complex() in forward()."
            )
        split = " in a model that is split over ranks" if wrong == torch.bfloat16 else ""
        raise ConfigError(
            f"A trained parameter is {what}{split}, and what is trained travels to a host as float32. Keep it in"
            " float32, as peft does with adapters, and use step.precision = bf16 or fp16 to compute in less. Frozen"
            " parameters may have any type."
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
            if grouped and sum(4 * p.numel() for p in [*grouped[-1], *unit]) <= SMALL_BYTES:
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
