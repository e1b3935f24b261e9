"""FullShard and HybridShard on torch's fully_shard: parameters, gradients and optimizer state split within a node.

The optimizer is pointed at this rank's own memory, as plain tensors: it need not know of shards, and steps without
DTensor's overhead. Between ranks of Gloo our own collectives are used (fsdp_collectives.py), on all others torch's.

By itself fully_shard begins a gather when this rank's forward comes to a module, and sums the gradients that this rank
has; where ranks run other modules than the rest, it adds up what does not belong together. FullyShardedUnits makes it
begin its collectives in an order that all ranks share (passes.py). This is the one place that knows its insides,
beside what outputs.py does with outputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from potluck.coded_numbers import Coding
from potluck.errors import ConfigError
from potluck.sharding.absent import (
    SplitPlace,
    check_unwritten,
    name_of,
    name_parameter,
    quiet,
    refuse_copy,
    refuse_replacements,
    watch,
)
from potluck.sharding.blocks import untied
from potluck.sharding.collectives import Collectives
from potluck.sharding.fsdp_collectives import CodedScatter, GlooGather, GlooReduce, local_part, sum_gradients
from potluck.sharding.outputs import hook_fully_sharded
from potluck.sharding.passes import Passes
from potluck.sharding.ranges import Spec
from potluck.sharding.runs import FlatRun, Span, claim, homes, sparse_gradient, stays_whole
from potluck.sharding.sharded import Sharded, SplitRequest
from potluck.sharding.split_parameter import mark_split

AS_DTENSORS = torch._C.DisableTorchFunctionSubclass
"""Turns off what absent.py says of a loop's uses, which takes time for each attribute."""
IN_USE = (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)


class FullyShardedUnits:
    """Keeps the ranks' collectives for blocks in one order, and for the root, which every forward gathers first and
    every backward sums last."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        over: Sequence[Collectives],
        *,
        before_sum: Callable[[object], None],
        gathers_ahead: bool,
    ) -> None:
        """`over`: all ranks that sum with each other, in one dimension or two. `before_sum`: is called with the unit.

        `gathers_ahead`: in a forward, begin a block's gather while the one before it computes.
        """
        self._over, self._before_sum, self._gathers_ahead = over, before_sum, gathers_ahead
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._state, self._roots = _state(model), _groups(model)
        self._groups = [group for block in dict.fromkeys(blocks) for group in _groups(block)]
        self._own_unshard = [group.unshard for group in self._groups]
        self._sum_of = {id(group): group.post_backward for group in (*self._groups, *self._roots)}
        trained = [each for group in (*self._groups, *self._roots) for each in group.fsdp_params]
        self._parameters = {id(each): self._names[id(each.sharded_param)] for each in trained}
        self._trained = next((each for each in trained if each.sharded_param.requires_grad), None)
        self._used: set[int] = set()
        self.used: set[str] = set()
        """The parameters that got a gradient on any rank, in the backwards since somebody emptied it."""
        self._is_ending = self._makes_graph = self._is_aside = False
        """Whether a backward ends; whether one has made a graph, of which the next takes gradients; and whether this
        one is no backward of the step, such as autograd.grad() in a loss."""
        self._passes = Passes(
            len(self._groups),
            begin=self._begin,
            skip=self._skip,
            may_begin_early=self._may_begin_early,
            agree=self._agree,
            used=lambda: [each in self._used for each in self._parameters],
        )
        self._put_in_place(model)

    def _put_in_place(self, model: nn.Module) -> None:
        for number, group in enumerate(self._groups):
            group.unshard = partial(self._want_gather, number)  # type: ignore[method-assign]
            group.post_backward = partial(self._want_sum, number)  # type: ignore[method-assign]
            group._backward_prefetch = lambda: None  # type: ignore[method-assign]
        for root in self._roots:
            root.post_backward = lambda *unused: None  # type: ignore[method-assign]
            root._backward_prefetch = self._before_backward  # type: ignore[method-assign]
        self._end = self._state._root_post_backward_final_callback
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state = _state(module)
                state._root_post_backward_final_callback = partial(
                    self._at_end_of_backward, state._root_post_backward_final_callback
                )
        if self._groups:
            model.register_forward_pre_hook(quiet(self._before_forward), prepend=True)
            model.register_forward_hook(quiet(self._after_forward))

    # What torch calls

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._passes.kind != "backward":  # in which a forward is computed again
            self._passes.start("forward")

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._passes.end("forward")

    def _before_backward(self) -> None:
        if self._passes.kind != "backward":
            self._start_backward()
            self._passes.begin_early()

    def _want_gather(self, number: int, async_op: bool = False) -> None:
        if torch._C._current_graph_task_id() != -1:
            self._before_backward()
            self._makes_graph |= torch.is_grad_enabled()
        if self._groups[number].is_unsharded:
            return
        if self._passes.kind is None:  # somebody runs a block without the model
            self._own_unshard[number](async_op)
        else:
            self._passes.want(self._passes.gather(number))

    def _want_sum(self, number: int, *unused: Any) -> None:
        if self._passes.kind == "backward":
            self._passes.want(self._passes.sum(number))

    def _at_end_of_backward(self, then: Callable[[], None]) -> None:
        self._end_backward()
        then()

    def take_part(self) -> None:
        """End the backward that was announced, if it has not: this rank may have nothing that autograd could run."""
        if self._passes.announced is not None:
            self._end_backward()
            self._end()
        self._passes.check_lasts()

    def _gather_roots(self) -> None:
        for root in self._roots:
            if not root.is_unsharded:
                with root.use_training_state(TrainingState.PRE_BACKWARD):
                    root.unshard(root.unshard_async_op)
                    root.wait_for_unshard()

    def _start_backward(self) -> None:
        self._gather_roots()
        gradient = self._trained.sharded_param.grad if self._trained is not None else None
        self._is_aside = gradient is not None and not isinstance(gradient, DTensor)  # it is sealed: replica/seal.py
        self._passes.start("backward")

    @torch.no_grad()
    def announce(self, *, last: bool) -> None:
        """Announce a backward of the step."""
        self._passes.announced = last
        # Another backward may have come since this one's forward, and let go of the root, of which a loss may have
        # used something by itself: every rank gathers it again, also one that has no backward of its own.
        if self._state._is_root is not None:  # torch sets it in the first forward
            self._gather_roots()
        if self._makes_graph:
            # The gradient of a gradient reads parameters before any block says that its backward begins.
            self._start_backward()
            for number in reversed(range(len(self._groups))):
                self._want_gather(number)
                self._groups[number].wait_for_unshard()
                self._groups[number]._training_state = TrainingState.PRE_BACKWARD

    def _end_backward(self) -> None:
        if self._passes.kind != "backward":
            self._start_backward()
        self._is_ending, self._makes_graph = True, self._makes_graph and self._passes.announced is None
        for number in reversed(range(len(self._groups))):
            # Where no input of a block needs a gradient, nothing has said that its own are complete.
            if any(_gradient(each) is not None for each in self._groups[number].fsdp_params):
                self._want_sum(number)
        for root in self._roots:
            self._fill(root)
        self._passes.end("backward")
        self._is_ending = False
        for root in self._roots:
            self._sum(root)
        for group in self._groups:
            _release(group)
        told = zip(self._parameters.values(), self._passes.used_by_any, strict=True)
        self.used |= {name for name, is_used in told if is_used}
        self._used.clear()

    # What all ranks do alike

    def _begin(self, operation: int, wanted: bool) -> None:
        group = self._groups[operation % len(self._groups)]
        if operation >= len(self._groups):
            self._fill(group)
            self._sum(group, in_use=not wanted and not self._is_ending and group._training_state in IN_USE)
        elif group.is_unsharded or group._all_gather_result is not None:
            _gather_aside(group, self._own_unshard[operation])
        else:
            state = TrainingState.FORWARD if self._passes.kind == "forward" else TrainingState.PRE_BACKWARD
            with group.use_training_state(state):
                self._own_unshard[operation](group.unshard_async_op)

    def _skip(self, operation: int) -> None:
        if operation < len(self._groups):
            group = self._groups[operation]
            if self._is_ending or group._training_state not in IN_USE:
                _release(group)

    def _may_begin_early(self, operation: int) -> bool:
        if operation >= len(self._groups) or (self._passes.kind == "forward" and not self._gathers_ahead):
            return False
        group = self._groups[operation]
        return not group.is_unsharded and group._all_gather_result is None

    def _fill(self, group: FSDPParamGroup) -> None:
        """Zeros for what no backward of this rank has used, so that all ranks sum the same parameters."""
        for each in () if self._is_aside else group.fsdp_params:
            if _gradient(each) is not None:
                self._used.add(id(each))
            elif hasattr(each, "_unsharded_param") and each._unsharded_param.requires_grad:
                each._unsharded_param.grad = torch.zeros_like(each._unsharded_param)

    def _sum(self, group: FSDPParamGroup, *, in_use: bool = False) -> None:
        """`in_use`: its backward is not over, so that the rest of its gradients are summed once more later on."""
        if self._is_aside:
            if not in_use:
                _release(group)
            return
        for each in group.fsdp_params:
            # A function may have made it sparse, which no check of the model's layers sees before.
            if (gradient := _gradient(each)) is not None and gradient.is_sparse:
                raise ConfigError(sparse_gradient(name_of(each.sharded_param)))
        self._before_sum(group)
        state, group.reshard_after_backward = group._training_state, not in_use
        with AS_DTENSORS():
            self._sum_of[id(group)]()
        group.reshard_after_backward = True
        if in_use:
            group._training_state = state

    def _agree(self, told: torch.Tensor) -> None:
        for over in self._over:
            over.maximum(told)


def _state(module: Any) -> Any:
    return module._get_fsdp_state()


def _groups(module: nn.Module) -> list[FSDPParamGroup]:
    """None for a module all of whose parameters are of other units."""
    state = _state(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _places(group: FSDPParamGroup) -> Iterator[SplitPlace]:
    for each in group.fsdp_params:
        info, name = each._module_info, name_of(each.sharded_param)

        def holds(found: object, each: FSDPParam = each) -> bool:
            return found is each.sharded_param or found is getattr(each, "_unsharded_param", None)

        yield SplitPlace(info.module, info.param_name, name, holds)
        for module, attribute in zip(info.shared_modules, info.shared_param_names, strict=True):
            yield SplitPlace(module, attribute, name, holds)


def _gradient(parameter: FSDPParam) -> torch.Tensor | None:
    """One that was never gathered has none."""
    whole = getattr(parameter, "_unsharded_param", None)
    return None if whole is None else whole.grad


def _release(group: FSDPParamGroup) -> None:
    group.wait_for_unshard()
    if group.is_unsharded:
        with group.use_training_state(TrainingState.IDLE):
            group.reshard()


def _gather_aside(group: FSDPParamGroup, unshard: Callable[[], None]) -> None:
    """Sends this rank's part to others that gather it now, while this rank has all of it already."""
    states: list[ShardedState] = [each.sharded_state for each in group.fsdp_params]
    result, state = group._all_gather_result, group._sharded_state
    group._all_gather_result, group._sharded_state = None, ShardedState.SHARDED
    _set_states(group.fsdp_params, [ShardedState.SHARDED] * len(states))
    unshard()
    got = group._all_gather_result
    assert got is not None
    if got.all_gather_event is not None and group.device.type != "cpu":
        group.device_handle.current_stream().wait_event(got.all_gather_event)
    if got.all_gather_work is not None:
        got.all_gather_work.wait()
    group._all_gather_result, group._sharded_state = result, state
    _set_states(group.fsdp_params, states)


def _set_states(parameters: Sequence[FSDPParam], states: Sequence[ShardedState]) -> None:
    for each, state in zip(parameters, states, strict=True):
        each.sharded_state = state


class FullySharded(Sharded):
    in_step = gathers = cuts_alike = True

    def __init__(self, wanted: SplitRequest, mesh: DeviceMesh) -> None:
        """`mesh`: of one dimension, or of two: nodes, and the ranks of each."""
        model, optimizer = wanted.model, wanted.optimizer
        super().__init__(model, optimizer, mesh.get_group(mesh.ndim - 1))
        blocks = untied(model, wanted.blocks)
        self._lent = GlooReduce(self.collectives) if _is_gloo(self.collectives.group, mesh.device_type) else None
        # What a reduction gives is read at once: summed over nodes, copied to a GPU on a stream of its own, or rounded
        # to the type of its parameters.
        is_rounded = wanted.bf16 and any(each.dtype != torch.float32 for each in model.parameters())
        self._must_wait = mesh.device_type == "cuda" or (mesh.ndim == 2 and mesh.size(0) > 1) or is_rounded
        whole = dict(model.named_parameters())
        home = homes(optimizer)
        held = {name: parameter for name, parameter in whole.items() if id(parameter) in home}
        claim(held, self)
        number = {name: home[id(parameter)] for name, parameter in held.items()}
        shapes = {name: tuple(parameter.shape) for name, parameter in whole.items()}
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sums_itself = wanted.sum_over is not None and mesh.ndim == 2
        self._split(
            blocks,
            mesh=mesh["ranks"] if sums_itself else mesh,
            mp_policy=policy if wanted.bf16 else MixedPrecisionPolicy(),
            offload_policy=CPUOffloadPolicy() if wanted.offload and mesh.device_type == "cuda" else OffloadPolicy(),
        )
        if sums_itself and wanted.sum_over is not None:
            over_nodes = wanted.sum_over(mesh.get_group(0))
            for module in self._modules:
                module.set_all_reduce_hook(over_nodes)
        if not wanted.mean and mesh.size() > 1:  # of one, the sum is the mean, and dividing it by 1 takes time
            for module in self._modules:
                sum_gradients(module)
        self._units = self._in_order(blocks, mesh)
        self.used = self._units.used
        self._summed: set[object] = set()
        """Units whose gradients of this step are under way already, or have arrived."""
        parts = {name: part for name, part in model.named_parameters() if isinstance(part, DTensor)}
        self.split = {name: Spec(shapes[name], part.dtype) for name, part in parts.items()}
        for name, part in parts.items():
            mark_split(part, name)
        for module in self._modules:
            vars(module)["__deepcopy__"] = refuse_copy
            hook_fully_sharded(module, _state(module), _groups(module))
            refuse_replacements(module, [place for group in _groups(module) for place in _places(group)])
        self._point_optimizer(parts, number, held)
        self._whole: list[tuple[Tensor, int]] = []
        """The root's parameters while they are gathered after a forward, with their versions then."""
        model.register_forward_hook(quiet(self._after_forward))
        self._scatter: CodedScatter | None = None
        self._is_loaded = False
        """Whether the gradient came from elsewhere, and not from backwards."""

    def code(self, coding: Coding | None) -> None:
        super().code(coding)
        if self._lent is None and self._scatter is None:
            self._scatter = CodedScatter(self.collectives)
            for module in self._modules:
                module.set_custom_reduce_scatter(self._scatter)

    def _split(self, blocks: Sequence[nn.Module], **options: Any) -> None:
        for module in self.model.modules():
            if any(map(stays_whole, module.parameters(recurse=False))):
                module.to(options["mesh"].device_type)
        # One of no numbers stays as it is: torch cannot sum it.
        ignored = {each for each in self.model.parameters() if not each.numel() or stays_whole(each)}
        for module in (*blocks, self.model):
            whole = [each for each in module.parameters() if not isinstance(each, DTensor) and each not in ignored]
            fully_shard(module, ignored_params=ignored, **options)
            for parameter in whole:  # the optimizer still has it: else all of the model would be on the device at once
                parameter.data = parameter.data.new_empty(1).expand(parameter.shape)
        self._modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        if self._lent is not None:
            for module in self._modules:
                module.set_custom_all_gather(GlooGather())
                module.set_custom_reduce_scatter(self._lent)

    def _in_order(self, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> FullyShardedUnits:
        over = [Collectives(mesh.get_group(dimension)) for dimension in range(mesh.ndim)]
        # Gloo's collectives run beside the CPU's work only if they begin early; on a GPU, streams see to that.
        ahead = self._lent is not None
        return FullyShardedUnits(self.model, blocks, over, before_sum=self._before_sum, gathers_ahead=ahead)

    def _before_sum(self, unit: object) -> None:
        """Wait for a sum of this unit that is still under way, since the next one adds to the same gradient."""
        if unit in self._summed and self._lent is not None:
            self._lent.finish()
            self._lent.waits = True
        self._summed.add(unit)

    def _point_optimizer(
        self, parts: Mapping[str, DTensor], number: Mapping[str, int], whole: Mapping[str, nn.Parameter]
    ) -> None:
        """`number`: of a trained parameter's group, by name."""
        self.runs, self.rest, self._sources, self._unstepped = [], [], [], []
        numbered = []
        for name, part in parts.items():
            if not local_part(part).numel():
                continue
            parameter = nn.Parameter(_flat(part), requires_grad=name in number)
            run = FlatRun(parameter, self._span(name, self.split[name].shape))
            if name not in number:
                self.rest.append(run)
                if part.requires_grad:
                    self._unstepped.append((run, part))
            else:
                self.runs.append(run)
                self._sources.append(part)
                numbered.append((number[name], run))
        self._point(numbered, whole)

    def _span(self, name: str, shape: tuple[int, ...]) -> Span:
        """Locate the rows that this rank holds: torch.chunk cuts them."""
        each = -(-shape[0] // self.collectives.world)
        first, last = (min(shape[0], each * rank) for rank in (self.collectives.rank, self.collectives.rank + 1))
        size = torch.Size(shape[1:]).numel()
        return Span(name, shape, first * size, last * size)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # computed again
        if not torch.is_grad_enabled() and not self._in_loss:
            self.share()  # no backward lets go of the root, and what a loop writes to it would be lost
            return
        check_unwritten(self._whole)
        gathered = [each for group in _groups(self.model) if group.is_unsharded for each in group.fsdp_params]
        for each in gathered:
            name_parameter(each._unsharded_param, name_of(each.sharded_param))
        self._whole = [(each._unsharded_param, each._unsharded_param._version) for each in gathered]
        watch(parameter for parameter, _ in self._whole)

    def arm(self, *, last: bool) -> None:
        self.end_backward()
        check_unwritten(self._whole)
        self._whole = []
        if self._lent is not None:
            self._lent.finish()
            self._lent.waits = self._must_wait
        self._units.announce(last=last)

    @torch.no_grad()
    def end_backward(self) -> None:
        self._units.take_part()

    def drop_unused(self) -> None:
        """Mark tied parameters that no stage has used. Any other that no rank has used has no gradient since
        finish()."""
        self._idle = self.tied_names - self.used_in_stages

    @torch.no_grad()
    def load(self, gradients: Sequence[Tensor | None]) -> None:
        self.drop()
        for run, gradient in zip(self.runs, gradients, strict=True):
            run.parameter.grad = None if gradient is None else gradient.to(run.parameter.device).view_as(run.parameter)
        self._is_loaded = True

    @torch.no_grad()
    def finish(self) -> None:
        if self._is_loaded:
            return
        self.end_backward()
        if self._lent is not None:
            self._lent.finish()
        with AS_DTENSORS():
            for run, source in zip(self.runs, self._sources, strict=True):
                name = run.span.name
                if name in self.tied_names:
                    source.grad = torch.zeros_like(source) if source.grad is None else source.grad
                elif name not in self.used:
                    source.grad = None  # nobody has used it: the zeros that all have summed are no gradient
                run.parameter.grad = None if source.grad is None else _flat(source.grad)
            for run, source in self._unstepped:
                run.parameter.grad = None if source.grad is None else _flat(source.grad)

    def share(self) -> None:
        """A forward without a backward leaves the root's parameters gathered, and they would be taken for the new."""
        check_unwritten(self._whole)
        self._whole = []
        for module in self._modules:
            module.reshard()

    def drop(self) -> None:
        if self._lent is not None:
            self._lent.finish()
        self._forget()

    def _forget(self) -> None:
        self._is_loaded, self._idle = False, frozenset()
        with AS_DTENSORS():
            for run, source in (*zip(self.runs, self._sources, strict=True), *self._unstepped):
                run.parameter.grad = source.grad = None
        self._summed.clear()
        self.used.clear()


def _flat(part: Tensor) -> Tensor:
    return local_part(part).detach().view(-1)


def _is_gloo(group: dist.ProcessGroup | None, device_type: str) -> bool:
    return dist.get_backend(group) == "gloo" or (device_type == "cpu" and "gloo" in str(dist.get_backend(group)))
