"""OptimizerAdapter: a user's optimizer while a run steps it; and its owner's again, when the run is over."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from potluck.agree.turns import Turns
from potluck.errors import ConfigError
from potluck.patches import replace_attribute
from potluck.sharding.runs import in_host_memory, laid_out, sees_nothing, state_at
from potluck.sharding.united_optimizers import TurnOptimizer, each_of


class OptimizerAdapter:
    """Makes what a loop of plain PyTorch calls out of habit harmless, or refuses it with what to call instead."""

    def __init__(
        self,
        optimizer: Optimizer,
        turns: Turns,
        names: dict[int, str],
        takes: Callable[[Sequence[nn.Parameter]], bool],
    ) -> None:
        """`names`: by a parameter's id. `takes`: whether a group of these parameters may be added now."""
        self.optimizer = optimizer
        self._turns, self._takes = turns, takes
        each_turn = optimizer.each if isinstance(optimizer, TurnOptimizer) else []
        groups = [[p for group in each.param_groups for p in group["params"]] for each in each_turn]
        self._of_turns = [frozenset(names.get(id(p), "") for p in parameters) for parameters in groups]
        self._copies: HostCopies | None = None
        self._is_stepping = self._is_released = False
        self.on_own_step: Callable[[], Any] = self._refuse_own_step
        """What optimizer.step() does in a loop that calls it out of habit."""
        self._undo = ExitStack()
        for each in {optimizer, *each_of(optimizer)}:
            # Each step forgets its gradients by itself: a zero_grad() would drop those of earlier parts of it.
            self._replace(each, "zero_grad", lambda set_to_none=True: None)
            hook = each.register_step_pre_hook(sees_nothing(lambda *told: self._refuse_own_step()))
            self._undo.callback(hook.remove)
            self._replace(each, "step", MethodType(self._step_of_habit(each.step), each))
        self._add_group = optimizer.add_param_group
        self._replace(optimizer, "add_param_group", self._add_param_group)

    def _replace(self, owner: Optimizer, name: str, value: Any) -> None:
        self._undo.callback(replace_attribute(owner, name, value))

    def release(self) -> None:
        """The optimizer is its owner's again, and steps the model's parameters."""
        self._is_released = True  # a scheduler that was made meanwhile has wrapped what we put there
        self._undo.close()
        if self._copies is not None:
            self._copies.release()
            self._copies = None

    def steps_now(self, name: str) -> bool:
        """Whether this parameter is one of the optimizer whose turn it is. Of the others, gradients are dropped: they
        count neither in the norm nor for the step."""
        return self._turns.count == 1 or name in self._of_turns[self._turns.now]

    def offload(self, names: dict[int, str]) -> None:
        """From now on it steps copies of the parameters in host memory. `names`: by id; those of copies are added."""
        self._copies = HostCopies(self.optimizer, names)

    @property
    def is_offloaded(self) -> bool:
        return self._copies is not None

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A step of the optimizer is the run's."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def step(self) -> None:
        copied = self._copies.gradients() if self._copies is not None else nullcontext()
        with self.stepping(), copied, laid_out(self.optimizer):
            self.optimizer.step()

    def writes(self) -> AbstractContextManager[None]:
        """Around anything but a step that changes what the optimizer steps."""
        return self._copies.written() if self._copies is not None else nullcontext()

    def _step_of_habit(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A method, since schedulers that are made later wrap it as one."""

        def step(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
            if self._is_stepping or self._is_released:
                return plain(*arguments, **options)
            self._check_turn(optimizer)
            return self.on_own_step()

        return step

    def _check_turn(self, optimizer: Optimizer) -> None:
        own = self.optimizer
        if isinstance(own, TurnOptimizer) and optimizer in own.each and optimizer is not own.each[self._turns.now]:
            raise ConfigError(
                f"It is the turn of optimizer {self._turns.now}, and step() of another was called. Each batch of the"
                " loader comes once for each optimizer, and fleet.turn says whose turn it is: step that one alone."
            )

    def _refuse_own_step(self) -> None:
        if not self._is_stepping:
            raise ConfigError(
                "optimizer.step() was called. Call fleet.step() in its place, after fleet.backward(): it steps the"
                " optimizer once the gradients of all workers are in."
            )

    def _add_param_group(self, param_group: dict[str, Any]) -> None:
        """Later than prepare(): of parameters whose gradients we know."""
        self._add_group(param_group)
        if not self._takes(self.optimizer.param_groups[-1]["params"]):
            self.optimizer.param_groups.pop()
            raise ConfigError(
                "add_param_group() was called after prepare() with a parameter that was not trained then, or under a"
                " strategy that has split the optimizer. Give the model and the optimizer all their parameters before"
                " prepare(), with requires_grad on; a learning rate of 0 keeps a group as it is until its time."
            )
        if self._copies is not None:
            self._copies.take(self.optimizer.param_groups[-1])


class HostCopies:
    """Copies of the parameters in host memory, which an optimizer steps there, and where its state is."""

    def __init__(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        self._optimizer = optimizer
        self._names = names
        self._twins: list[tuple[nn.Parameter, nn.Parameter]] = []
        for group in optimizer.param_groups:
            self.take(group)

    def take(self, group: dict[str, Any]) -> None:
        """A group has copies instead of its parameters, and what is known of those."""
        pairs = [(own, nn.Parameter(in_host_memory(own), own.requires_grad)) for own in group["params"]]
        for own, twin in pairs:
            self._names[id(twin)] = self._names[id(own)]
        self._exchange(group, dict(pairs))
        self._twins += pairs

    def release(self) -> None:
        """The groups have their parameters back, and what is known of those is where they are."""
        for group in self._optimizer.param_groups:
            self._exchange(group, {twin: own for own, twin in self._twins})

    def _exchange(self, group: dict[str, Any], others: dict[nn.Parameter, nn.Parameter]) -> None:
        state = self._optimizer.state
        for parameter in group["params"]:
            if parameter in state:
                other = others[parameter]
                state[other] = state_at(other.device, state.pop(parameter), group)
        group["params"] = [others[parameter] for parameter in group["params"]]

    @contextmanager
    def written(self) -> Iterator[None]:
        """Copy parameters into their copies before, so that changes such as an average count, and back afterwards."""
        with torch.no_grad():
            for own, twin in self._twins:
                twin.copy_(own)
        yield
        with torch.no_grad():
            for own, twin in self._twins:
                own.copy_(twin)

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Around a step."""
        with self.written():
            for own, twin in self._twins:
                twin.grad = own.grad.to("cpu") if own.grad is not None else None
            yield
        for _, twin in self._twins:
            twin.grad = None
