"""TurnOptimizer: several optimizers as one, of which each step is that of the one whose turn it is."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from potluck.agree.turns import Turns
from potluck.errors import ConfigError


class TurnOptimizer(Optimizer):
    """Its groups are theirs, one after the other, and its state is theirs: whoever changes one has changed the other.

    So whatever splits, saves, loads or averages an optimizer need not know that it is several.
    """

    def __init__(self, optimizers: Sequence[Optimizer], turns: Turns) -> None:
        try:
            super().__init__([{"params": g["params"]} for each in optimizers for g in each.param_groups], {})
        except ValueError as error:
            raise ConfigError(
                f"Two optimizers hold the same parameter, or one holds none ({error}). Give each parameter to one of"
                " them: on every batch each steps its own, in its turn."
            ) from None
        self.each, self._turns = list(optimizers), turns
        self.param_groups = [group for each in self.each for group in each.param_groups]
        self.state = defaultdict(dict)
        for each in self.each:
            self.state.update(each.state)
            each.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.each[self._turns.now].step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also after a state was loaded, which gives an optimizer other groups and another state."""
        super().__setstate__(state)
        at = 0
        for each in self.__dict__.get("each", ()):
            own = self.param_groups[at : at + len(each.param_groups)]
            at += len(own)
            each.__setstate__({"state": self.state, "param_groups": own})


def unite(optimizers: Sequence[Optimizer], turns: Turns) -> Optimizer:
    """Named for those that it is made of: a checkpoint is of the same ones, in the same order."""
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        kinds = ", ".join(type(each).__name__ for each in optimizers) or "an empty list"
        raise ConfigError(f"prepare() takes a torch.optim.Optimizer, or a list of them, not {kinds}.")
    name = " and ".join(type(each).__name__ for each in optimizers)
    made: Optimizer = type(name, (TurnOptimizer,), {})(optimizers, turns)
    return made


def each_of(optimizer: Optimizer) -> list[Optimizer]:
    """Those that it is made of: mostly itself alone."""
    return optimizer.each if isinstance(optimizer, TurnOptimizer) else [optimizer]
