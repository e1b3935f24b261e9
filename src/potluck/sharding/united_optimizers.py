"""Several optimizers as one: TurnOptimizer steps the one whose turn it is, JointOptimizer all of them.

Its groups are theirs, one after the other, and its state is theirs: to change one is to change the other. So
whatever splits, saves, loads or averages an optimizer need not know that it is several.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from potluck.agree.turns import Turns
from potluck.errors import ConfigError


class _United(Optimizer):
    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
            kinds = ", ".join(type(each).__name__ for each in optimizers) or "none"
            raise ConfigError(f"A torch.optim.Optimizer is needed, or several of them, not {kinds}.")
        try:
            super().__init__([{"params": g["params"]} for each in optimizers for g in each.param_groups], {})
        except ValueError as error:
            raise ConfigError(
                f"Two optimizers hold the same parameter, or one holds none ({error}). Give each parameter to one of"
                " them."
            ) from None
        self.each = list(optimizers)
        # Named for those that it is made of: a checkpoint is of the same ones, in the same order.
        self.__class__ = type(" and ".join(type(each).__name__ for each in optimizers), (type(self),), {})
        self._unite()

    def _unite(self) -> None:
        self.param_groups = [group for each in self.each for group in each.param_groups]
        self.state = defaultdict(dict)
        for each in self.each:
            self.state.update(each.state)
            each.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Each its own, in its own way: some know how to take back what they have coded."""
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = iter(state_dict["param_groups"])
        for each in self.each:
            own = [next(groups) for _ in each.param_groups]
            keys = {key for group in own for key in group["params"]}
            state = {key: known for key, known in state_dict["state"].items() if key in keys}
            each.load_state_dict({"param_groups": own, "state": state})
        self._unite()


class TurnOptimizer(_United):
    """Each step is that of the one whose turn it is."""

    def __init__(self, optimizers: Sequence[Optimizer], turns: Turns) -> None:
        self._turns = turns
        super().__init__(optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.each[self._turns.now].step()


class JointOptimizer(_United):
    """Several that step together, each its own parameters: `JointOptimizer(Muon(matrices), AdamW(the_rest))`."""

    def __init__(self, *optimizers: Optimizer) -> None:
        super().__init__(optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.each:
            each.step()


def each_of(optimizer: Optimizer) -> list[Optimizer]:
    """List the optimizers that this one is made of: mostly itself alone."""
    if not isinstance(optimizer, _United):
        return [optimizer]
    return [single for each in optimizer.each for single in each_of(each)]
