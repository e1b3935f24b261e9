"""ErrorFeedback, which sends with the next numbers what coding left out of these; and OuterState, where it is saved."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from potluck.coded_numbers import Coding
from potluck.coded_tensors import round_
from potluck.engine.buckets import split_like
from potluck.link.link import Link

if TYPE_CHECKING:
    from potluck.engine.means import FlatBuffer

PREFIX = "outer_"

Kept = dict[str, dict[str, Tensor]]
"""By the name of what the optimizer takes for a parameter: `outer_average`, and so on."""

RESIDUAL = f"{PREFIX}residual"


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
        self.loaded, state = {}, {}
        for key, known in saved["state"].items():
            outer = {name: value for name, value in known.items() if str(name).startswith(PREFIX)}
            wanted = self.kept.get(names[key], {})
            self.loaded[names[key]] = {name: value for name, value in outer.items() if name in wanted}
            if rest := {name: value for name, value in known.items() if name not in outer}:
                state[key] = rest
        return {**saved, "state": state}


class ErrorFeedback:
    """Remainders that coding left out of what was sent, kept to be sent with what comes next.

    Without it numbers that are small beside their block's largest would be rounded away window after window. They are a
    worker's own: a newcomer begins without any, and so does one whose last change was lost. Knows nothing of windows.
    """

    def __init__(self, coding: Coding) -> None:
        self.coding = coding
        self._left: dict[int, Tensor] = {}
        """By the number of a flat buffer; weighted, as what is sent is."""
        self._is_shared = True

    def code(self, index: int, numbers: Tensor) -> None:
        """The numbers of a flat buffer become what will arrive of them and of what was left out before."""
        left = self._of(index, numbers)
        numbers.add_(left)
        left.copy_(numbers)
        round_(self.coding, numbers)
        left.sub_(numbers).nan_to_num_(0.0, 0.0, 0.0)  # what is not finite must not stay here for good
        self._is_shared = False

    def clear(self) -> None:
        for left in self._left.values():
            left.zero_()
        self._is_shared = True

    def share(self, link: Link) -> None:
        """Each worker's becomes the mean of all: their sum is what matters, and a checkpoint has one for everybody."""
        if self._is_shared:
            return
        for left in self._left.values():
            link.start_coded_sum(left, self.coding).wait()
            left.mul_(1 / link.world)
        self._is_shared = True

    def keep_in(self, outer: OuterState, flats: "list[FlatBuffer]") -> None:
        """With the optimizer's state; and what was loaded with that is taken."""
        for index, flat in enumerate(flats):
            pieces = split_like(self._of(index, flat.sum), flat.tensors)
            for run, piece in zip(flat.runs, pieces, strict=True):
                name = outer.names.get(id(run.parameter), "")
                if (loaded := outer.loaded.get(name, {}).pop(RESIDUAL, None)) is not None:
                    piece.copy_(loaded)
                if name:
                    outer.kept.setdefault(name, {})[RESIDUAL] = piece

    def _of(self, index: int, numbers: Tensor) -> Tensor:
        if index not in self._left:
            self._left[index] = torch.zeros_like(numbers)
        return self._left[index]
