"""OuterState: what a run keeps of each parameter beside the optimizer, and saves with the optimizer's state."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

PREFIX = "outer_"

Kept = dict[str, dict[str, Tensor]]
"""By the name of what the optimizer takes for a parameter: `outer_average`, and so on."""


class OuterState:
    """State that a run keeps of each parameter beside the optimizer, saved and loaded with the optimizer's.

    It is an average of the weights, or what coding left out. So checkpoints, states for newcomers and any way to split
    them carry it and know nothing of it. It is not put into the optimizer's own state, which most of them begin only
    where there is none yet.
    """

    def __init__(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        """`names`: by a parameter's id, and of all that the optimizer has."""
        self.names = names
        self.kept: Kept = {}
        """What is saved with the optimizer's state."""
        self.loaded: Kept = {}
        """What was loaded, until its owner takes it."""
        self.early: Kept = {}
        """What was loaded and has no owner yet, on the CPU: until the first step, since it is of the weights before."""
        optimizer.register_state_dict_post_hook(self._add)
        optimizer.register_load_state_dict_pre_hook(self._take)

    def _order(self, optimizer: Optimizer) -> list[str]:
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return [self.names.get(id(parameter), "") for parameter in held]

    def _add(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        state = saved["state"]
        for place, name in enumerate(self._order(optimizer)):
            if name in self.kept:
                state[place] = {**state.get(place, {}), **self.kept[name]}

    def _take(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Also where nobody wants it: an optimizer that found it would take its own state for begun."""
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        names = dict(zip(keys, self._order(optimizer), strict=True))
        self.loaded, self.early, state = {}, {}, {}
        for key, known in saved["state"].items():
            outer = {name: value for name, value in known.items() if str(name).startswith(PREFIX)}
            wanted = self.kept.get(names[key], {})
            self.loaded[names[key]] = {name: value for name, value in outer.items() if name in wanted}
            self.early[names[key]] = {name: value.cpu() for name, value in outer.items() if name not in wanted}
            if rest := {name: value for name, value in known.items() if name not in outer}:
                state[key] = rest
        return {**saved, "state": state}
