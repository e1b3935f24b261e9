"""Residuals: what coding left out of what was sent, kept to be sent with what comes next. Error feedback.

Without it numbers that are small beside their block's largest would be rounded away window after window. They are a
worker's own: a newcomer begins without any, and so does one whose last change was lost. Knows nothing of windows.
"""

import torch
from torch import Tensor

from potluck.coded_numbers import Coding
from potluck.coded_tensors import round_
from potluck.engine.buckets import split_like
from potluck.engine.flats import FlatBuffer
from potluck.engine.outer_state import PREFIX, OuterState
from potluck.link.link import Link

RESIDUAL = f"{PREFIX}residual"


class Residuals:
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

    def keep_in(self, outer: OuterState, flats: list[FlatBuffer]) -> None:
        """With the optimizer's state; and what was loaded with that is taken."""
        for index, flat in enumerate(flats):
            pieces = split_like(self._of(index, flat.sum), flat.tensors)
            for run, piece in zip(flat.runs, pieces, strict=True):
                name = outer.names.get(id(run.parameter), "")
                if RESIDUAL in (loaded := outer.loaded.get(name, {})):
                    piece.copy_(loaded[RESIDUAL])
                if name:
                    outer.kept.setdefault(name, {})[RESIDUAL] = piece

    def _of(self, index: int, numbers: Tensor) -> Tensor:
        if index not in self._left:
            self._left[index] = torch.zeros_like(numbers)
        return self._left[index]
