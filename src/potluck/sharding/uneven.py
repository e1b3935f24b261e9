"""UnevenShards: parameters, gradients and optimizer state split in proportion to weights; ZeRO-3 on unequal machines.

    sharded = UnevenShards(SplitRequest(model, AdamW(model.parameters()), device, list(model.blocks)), weights=(3, 1))
    loss_of(model, batch).backward()      # block by block: gathered, used, freed; gradients go to their owners
    sharded.step()                        # each rank steps what it owns

The order of events, for blocks 1 to n and the root unit (units.py says what those are):

    forward        gather root; at each block: start the next one, wait for its own, compute, release
    backward       at each block, from n to 1: release the one after it and send its gradients, start the one before,
                   wait for its own; in the end the root's gradients leave, and everything is released
    step           what is on its way arrives, and the optimizer steps this rank's homes

Each collective begins at a place in this order, and never because a gradient has arrived: a rank whose rows leave a
parameter unused would else begin them in another order than the rest, and hang. Where its rows leave out whole blocks,
or run them in another order, passes.py keeps the ranks together.
Why this is not torch's fully_shard: docs/decisions/0012-uneven-shards-have-their-own-engine.md.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from potluck.sharding.absent import SplitPlace, quiet, refuse_replacements
from potluck.sharding.collectives import Collectives
from potluck.sharding.optimizer_shard import weights_for
from potluck.sharding.outputs import cast_floats, kept_by, later, tensors_of
from potluck.sharding.passes import Passes
from potluck.sharding.ranges import Spec
from potluck.sharding.runs import FlatRun, check_holds_some, claim, homes, run_of, stays_whole
from potluck.sharding.sharded import Sharded, SplitRequest
from potluck.sharding.units import FlatParam, FlatParamMember, OwnedShard, ParamGroup, Placement, Sum

MOST_ON_THEIR_WAY = 1
"""Sums of gradients: further ones wait for it. One lasts as long as a block's backward, and costs a block's memory."""
UNSTEPPED = -1
"""Stands for a group's number, for trained parameters that the optimizer does not hold."""


class UnevenShards(Sharded):
    in_step = gathers = True

    def __init__(self, wanted: SplitRequest, weights: Sequence[float] | None = None) -> None:
        """`weights`: each rank's part, in proportion; none: equal. Nodes have equal weights, so that the same places of
        theirs own the same numbers."""
        super().__init__(wanted.model, wanted.optimizer, wanted.group)
        self.device = wanted.device
        self._weights = weights_for(weights, self.collectives.world)
        self._nodes = Collectives(wanted.nodes) if wanted.nodes is not None else None
        self._sum_over_nodes = self._how_nodes_sum(wanted)
        ranks = self.collectives.world * (self._nodes.world if self._nodes is not None else 1)
        self._share = 1 / ranks if wanted.mean else 1.0
        self._computes_in = torch.bfloat16 if wanted.bf16 else None
        self._in_backward = self._makes_graph = False
        """Whether a backward runs; and whether one has made a graph, of which the next will take gradients."""
        self._current: ParamGroup | None = None
        """The block whose backward runs."""
        self._sums: list[Sum] = []
        distinct = list(dict.fromkeys(wanted.blocks))
        members = self._members()
        claim({member.name: member.parameter for member in members.values() if member.is_trained}, self)
        self.split = {member.name: Spec(member.shape, member.dtype) for member in members.values()}
        self._plan(distinct, members)
        self._move()
        self._passes = Passes(
            len(self._blocks),
            begin=self._begin,
            skip=self._skip,
            may_begin_early=lambda each: each < len(self._blocks) and self._blocks[each].placement is Placement.SPLIT,
            agree=self._agree,
        )
        self._hook(distinct)
        for unit in self._units:
            unit.hide()

    # A step

    def arm(self, *, last: bool) -> None:
        self.end_backward()
        self._root.check_unwritten()
        self._passes.announced = last
        with torch.no_grad():
            self._gather(self._root)  # another backward may have let go of it, and a loss may have used it by itself
            if self._makes_graph:
                # The gradient of a gradient reads parameters before any block says that its backward begins.
                self._start_backward()
                for unit in reversed(self._blocks):
                    self._gather(unit)

    @torch.no_grad()
    def end_backward(self) -> None:
        if self._passes.announced is not None:
            if not self._in_backward:
                self._start_backward()
            self._end_backward()
        self._passes.check_lasts()

    @torch.no_grad()
    def finish(self) -> None:
        self.end_backward()
        while self._sums:
            self._sums.pop(0).take_in(self._share, self._sum_over_nodes)

    def gradients(self) -> list[Tensor]:
        homes = self._homes.items()
        return [home.gradient for (_, group), home in homes if home.gradient is not None and group != UNSTEPPED]

    def share(self) -> None:
        """Release every unit: what was gathered before the runs were written is out of date."""
        for unit in self._units:
            unit.release()

    def _forget(self) -> None:
        for unit in self._units:
            unit.release()
            unit.forget()
        for gradient in (*self.gradients(), *self.unstepped()):
            gradient.zero_()
        self.used.clear()
        self._idle = frozenset()
        self._in_backward = self._makes_graph = False
        self._current = None

    def _agree(self, told: Tensor) -> None:
        for over in (self.collectives, self._nodes):
            if over is not None:
                over.maximum(told)

    # How it is made

    def _how_nodes_sum(self, wanted: SplitRequest) -> Callable[[Tensor], None] | None:
        nodes = self._nodes
        if nodes is None or nodes.group is None or nodes.world == 1:
            return None
        return wanted.sum_over(nodes.group) if wanted.sum_over is not None else nodes.sum

    def _members(self) -> dict[int, FlatParamMember]:
        """Return the members by their parameter's id, so that a tied one is there once."""
        home = homes(self.optimizer)
        members = {}
        for name, parameter in self.model.named_parameters():
            if stays_whole(parameter):
                continue
            group = home.get(id(parameter), UNSTEPPED) if parameter.requires_grad else None
            members[id(parameter)] = FlatParamMember(name, parameter, group, tuple(parameter.shape), parameter.dtype)
        check_holds_some(self.optimizer, self.model.parameters())
        return members

    def _plan(self, blocks: list[nn.Module], members: dict[int, FlatParamMember]) -> None:
        """A unit for each block, and the root for whatever is in no block, or is tied to something outside its own."""
        inside = [{id(parameter) for parameter in block.parameters()} for block in blocks]
        within = {module for block in blocks for module in block.modules()}
        outside = {id(p) for m in self.model.modules() if m not in within for p in m.parameters(recurse=False)}
        shared = {key for key in members if sum(key in block for block in inside) != 1 or key in outside}
        self._blocks = [self._unit([members[key] for key in members if key in block - shared]) for block in inside]
        self._root = self._unit([members[key] for key in members if key in shared])
        self._root_ids = shared
        self._units = [*self._blocks, self._root]

    def _unit(self, members: list[FlatParamMember]) -> ParamGroup:
        kinds: dict[tuple[torch.dtype, bool], list[FlatParamMember]] = {}
        for member in members:
            kinds.setdefault((member.dtype, member.is_trained), []).append(member)
        stretches = []
        for (dtype, _), alike in kinds.items():
            gathered = self._computes_in if self._computes_in and dtype.is_floating_point else dtype
            stretches.append(FlatParam(alike, self.collectives.rank, self._weights, gathered, self.device))
        return ParamGroup(stretches)

    @torch.no_grad()
    def _move(self) -> None:
        """Unit by unit, so that a model that is not yet on the device is never all there."""
        stretches = [stretch for unit in self._units for stretch in unit.stretches]
        sizes: dict[tuple[torch.dtype, int | None], int] = {}
        for stretch in stretches:
            for index, span in stretch.own_spans():
                key = stretch.members[index].dtype, stretch.members[index].group
                sizes[key] = sizes.get(key, 0) + span.size
        self._homes = {
            (dtype, group): OwnedShard(size, dtype, self.device, is_trained=group is not None)
            for (dtype, group), size in sizes.items()
        }
        trained = {m.name: m.parameter for stretch in stretches if stretch.is_trained for m in stretch.members}
        self._trained = list(trained)
        for stretch in stretches:
            stretch.move_into(self._homes)
        self.model.to(self.device)  # its buffers
        numbered: list[tuple[int, FlatRun]] = []
        self.rest = []
        for (_, group), home in self._homes.items():
            runs = [run_of(home.flat, home.gradient, at, span) for at, span in home.spans.items()]
            if group in (None, UNSTEPPED):
                self.rest += runs
            else:
                numbered += [(group, run) for run in runs]
        self.runs = [run for _, run in numbered]
        self._point(numbered, trained)

    def _hook(self, blocks: list[nn.Module]) -> None:
        for unit, module in zip(self._units, [*blocks, self.model], strict=True):
            module.register_forward_pre_hook(quiet(partial(self._before_forward, unit)), prepend=True, with_kwargs=True)
            module.register_forward_hook(quiet(partial(self._after_forward, unit)))
            refuse_replacements(module, self._places(unit))
        for module in self.model.modules():
            # Also where somebody calls a part of the model without the model.
            if module is not self.model and any(id(p) in self._root_ids for p in module.parameters(recurse=False)):
                module.register_forward_pre_hook(quiet(self._before_part_of_root), prepend=True)
        for unit in self._units:
            for stretch in unit.stretches:
                for index, member in enumerate(stretch.members):
                    if member.parameter.requires_grad:
                        on_gradient = partial(self._on_gradient, unit, stretch, index)
                        member.parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]

    def _places(self, unit: ParamGroup) -> list[SplitPlace]:
        names = {id(member.parameter): member.name for stretch in unit.stretches for member in stretch.members}
        return [
            SplitPlace(module, attribute, names[id(parameter)], partial(operator.is_, parameter))
            for module in self.model.modules()
            for attribute, parameter in module._parameters.items()
            if id(parameter) in names
        ]

    # While it computes

    def _before_forward(self, unit: ParamGroup, module: nn.Module, args: Any, kwargs: Any) -> Any:
        with torch.no_grad():
            self._gather(unit)
            if unit is self._root and not self._in_backward:
                self._passes.start("forward")
        cast = None if self._computes_in is None else cast_floats((args, kwargs), self._computes_in)
        unit.began = torch._C._autograd._get_sequence_nr()
        return cast

    def _gather(self, unit: ParamGroup) -> None:
        unit.in_use = True
        if unit is not self._root and unit.placement is not Placement.WHOLE and self._passes.kind is not None:
            self._passes.want(self._passes.gather(self._blocks.index(unit)))
        unit.gather(self.collectives)

    def _begin(self, operation: int, wanted: bool) -> None:
        """Begin an operation that passes.py has all ranks begin now."""
        unit = self._blocks[operation % len(self._blocks)]
        if operation >= len(self._blocks):
            self._start_sums_of(unit)
        elif unit.placement is Placement.SPLIT:
            unit.start_gather(self.collectives)
        else:
            unit.gather_aside(self.collectives)

    def _skip(self, operation: int) -> None:
        if operation < len(self._blocks) and not self._blocks[operation].in_use:
            self._blocks[operation].release()

    @torch.no_grad()
    def _before_part_of_root(self, module: nn.Module, args: Any) -> None:
        self._root.gather(self.collectives)

    def _after_forward(self, unit: ParamGroup, module: nn.Module, args: Any, output: Any) -> None:
        if self._in_backward:
            return  # computed again: its backward comes at once
        tensors, hides = tensors_of(output)
        tensors += kept_by(module) if unit is not self._root else []
        # One that it only hands on is of a block before it, whose backward comes when this block's is over.
        own = later(tensors, unit.began)
        nothing_to_come = bool(tensors) and not hides and not any(each.requires_grad for each in tensors)
        ends_here = not torch.is_grad_enabled() or nothing_to_come
        if unit is self._root:
            self._passes.end("forward")
        if not ends_here:
            self._hook_outputs(unit, own)
        # Tensors that we cannot find we cannot hook: then nothing would gather the unit again before its backward.
        if (ends_here and not (unit is self._root and self._in_loss)) or (own and not hides and unit is not self._root):
            unit.release()
        elif unit is self._root:
            unit.watch()

    def _hook_outputs(self, unit: ParamGroup, tensors: list[Tensor]) -> None:
        unit.uses += 1
        is_first = True

        def before_backward(gradient: Tensor) -> None:
            nonlocal is_first
            unit.uses -= is_first
            is_first = False
            self._makes_graph |= torch.is_grad_enabled()
            self._before_backward(unit)

        for tensor in tensors:
            tensor.register_hook(before_backward)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _before_backward(self, unit: ParamGroup) -> None:
        self._begin_backward()
        unit.owes_sums = True
        if unit is not self._root and unit is not self._current:
            # Autograd runs what was computed later first, so nothing of the other block is left to run.
            self._leave_current()
            self._current = unit
        self._gather(unit)

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._start_backward()
            Variable._execution_engine.queue_callback(self._end_backward)

    def _start_backward(self) -> None:
        self._in_backward = True
        self._passes.start("backward")
        self._gather(self._root)
        self._passes.begin_early()

    def _leave_current(self) -> None:
        unit, self._current = self._current, None
        if unit is not None:
            unit.release()
            if unit.uses <= 0:  # else its gradients come with the first of its uses
                self._passes.want(self._passes.sum(self._blocks.index(unit)))

    @torch.no_grad()
    def _end_backward(self) -> None:
        self._leave_current()
        for number in reversed(range(len(self._blocks))):
            unit = self._blocks[number]
            unit.uses, unit.in_use = 0, False
            if unit.owes_sums:
                self._passes.want(self._passes.sum(number))
        self._makes_graph &= self._passes.announced is None
        self._passes.end("backward")
        for unit in self._units:
            unit.release()
        self._start_sums_of(self._root)
        self._in_backward = False

    def _start_sums_of(self, unit: ParamGroup) -> None:
        unit.owes_sums = False
        for stretch in unit.stretches:
            if stretch.is_trained:
                while len(self._sums) >= MOST_ON_THEIR_WAY:
                    self._sums.pop(0).take_in(self._share, self._sum_over_nodes)
                self._sums.append(stretch.start_reduce(self.collectives))

    @torch.no_grad()
    def _on_gradient(self, unit: ParamGroup, stretch: FlatParam, index: int, parameter: Tensor) -> None:
        self._begin_backward()
        if not stretch.is_trained:
            parameter.grad = None
            return
        unit.owes_sums = True
        self.used.add(stretch.members[index].name)
        stretch.add_gradient(index)
