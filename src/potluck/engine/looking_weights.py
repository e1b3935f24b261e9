"""LookingWeights: schedule-free optimizers train some weights, and have others, a mean of them, for looking.

Their own eval() and train() go there and back, each with a rounding error. Here the weights that are trained come back
to the bit, so that looking changes nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from potluck.engine.replica import Replica
from potluck.sharding.optimizer_traits import TRAIN_MODE, has_eval_weights
from potluck.sharding.united_optimizers import each_of


class LookingWeights:
    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._free = [each for each in each_of(replica.optimizer) if has_eval_weights(each)]
        self._trained: list[Tensor] = []
        """The weights that are trained, while the others are in their place."""
        for each in self._free:
            each.train()  # type: ignore[attr-defined]

    def __bool__(self) -> bool:
        """Whether they are others than those that are trained."""
        return bool(self._free)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Called on every worker alike; replicas are equal."""
        is_training = all(group[TRAIN_MODE] for each in self._free for group in each.param_groups)
        if not self._free or self._trained or not is_training:  # else a person has put them there
            yield
            return
        with self._replica.optimizer_writes():
            self._trained = [parameter.detach().clone() for parameter in self._parameters()]
            for each in self._free:
                each.eval()  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self._put_back()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Put the trained weights back while they are saved, also in the middle of an evaluation: a run continues from
        those."""
        if not self._trained:
            yield
            return
        shown = [parameter.detach().clone() for parameter in self._parameters()]
        trained = self._trained
        self._put_back()
        try:
            yield
        finally:
            self._put(shown, is_trained=False)
            self._trained = trained

    def _put_back(self) -> None:
        self._put(self._trained, is_trained=True)
        self._trained = []

    @torch.no_grad()
    def _put(self, weights: list[Tensor], *, is_trained: bool) -> None:
        with self._replica.optimizer_writes():
            for parameter, numbers in zip(self._parameters(), weights, strict=True):
                parameter.copy_(numbers)
        for each in self._free:
            for group in each.param_groups:
                group[TRAIN_MODE] = is_trained

    def _parameters(self) -> list[Tensor]:
        return [p for each in self._free for group in each.param_groups for p in group["params"]]
