"""Weights that are looked at in place of those that are trained: LookingWeights and WeightAverage."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from potluck.errors import ConfigError
from potluck.replica.replica import Replica
from potluck.save.checkpoint_folder import AVERAGE
from potluck.sharding.optimizer_traits import TRAIN_MODE, has_eval_weights
from potluck.sharding.united_optimizers import each_of

if TYPE_CHECKING:
    from potluck.engine.run_parts import RunParts


class LookingWeights:
    """The weights of schedule-free optimizers, which train some, and have others, a mean of them, for looking.

    Their own eval() and train() go there and back, each with a rounding error. Here the weights that are trained come
    back to the bit, so that looking changes nothing.
    """

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


class WeightAverage:
    """An exponential moving average of the weights, of whatever part of them this worker's optimizer has.

    It is kept with the optimizer's state of each parameter (outer_state.py), so checkpoints, newcomers and any way to
    split a model carry it. It follows the weights that all agree on, and so is the same on all workers.
    """

    def __init__(self, run: "RunParts", decay: float) -> None:
        _check(run, decay)
        if run.prepared().steps_whole:
            raise ConfigError(
                "fleet.ema(), and a Trainer's fit.ema, follows what each rank's optimizer steps, and under a strategy"
                " that splits parameters this one steps whole matrices, each on one rank. Use NoShard, or an optimizer"
                " that is elementwise."
            )
        self._run = run
        self._decay = decay
        self._is_applied = False
        replica = run.prepared()
        replica.before_parts_are_used()
        optimizer, outer = replica.optimizer, replica.outer
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._tensors: list[Tensor] = [parameter.data for parameter in trained]
        self._averages = [tensor.float() if tensor.dtype.itemsize < 4 else tensor.clone() for tensor in self._tensors]
        self._names = [outer.names.get(id(parameter), "") for parameter in trained]
        for name, average in zip(self._names, self._averages, strict=True):
            outer.kept.setdefault(name, {})[AVERAGE] = average
            if (loaded := outer.early.get(name, {}).pop(AVERAGE, None)) is not None:  # by a load() before this
                average.copy_(loaded)
        self._step = run.progress.step_number
        run.kept.add(AVERAGE, lambda tensors: None, lambda saved, tensors: self._stand())
        run.after_agreement.insert(0, self._follow)
        run.looks_with = self.applied

    @torch.no_grad()
    def _follow(self) -> None:
        """By all the steps since the last agreement at once, of which only the last has weights that all agree on."""
        run = self._run
        steps, self._step = run.progress.step_number - self._step, run.progress.step_number
        if steps <= 0:
            return
        keep = self._decay**steps
        with run.works.now.as_agreed():  # this worker may be ahead of that
            for average, tensor in zip(self._averages, self._tensors, strict=True):
                # One operation at a time: a fused one rounds otherwise on some devices.
                average.mul_(keep).add_(tensor.to(average.dtype) * (1 - keep))

    @torch.no_grad()
    def _stand(self) -> None:
        """The run was put somewhere else: with what was saved of it, or where nothing was, from the weights there."""
        loaded = self._run.prepared().outer.loaded
        for name, average, tensor in zip(self._names, self._averages, self._tensors, strict=True):
            average.copy_(loaded.get(name, {}).pop(AVERAGE, tensor))
        self._step = self._run.progress.step_number

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The averages in the weights' place. Of a model that is split, on every rank alike."""
        if self._is_applied:
            yield
            return
        replica = self._run.prepared()
        with torch.no_grad(), replica.optimizer_writes():
            own = [tensor.clone() for tensor in self._tensors]
            _put(self._tensors, self._averages)
        self._is_applied = True
        try:
            yield
        finally:
            self._is_applied = False
            with torch.no_grad(), replica.optimizer_writes():
                _put(self._tensors, own)


def _check(run: "RunParts", decay: Any) -> None:
    if not isinstance(decay, int | float) or isinstance(decay, bool) or not 0 <= decay < 1:
        raise ConfigError(
            "fleet.ema() takes how much of the average stays at each step, at least 0 and below 1, such as 0.999, not"
            f" {decay!r}."
        )
    if AVERAGE in run.kept:
        raise ConfigError(
            "A run keeps one moving average of its weights, and it has one already, by fleet.ema() or a Trainer's"
            " fit.ema. Call fleet.ema() once, after prepare() and before the loop, and use what it returned."
        )


def _put(tensors: list[Tensor], values: list[Tensor]) -> None:
    if tensors:  # a rank whose weight is 0 has none, of which torch makes an error
        torch._foreach_copy_(tensors, values)
