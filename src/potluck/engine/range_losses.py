"""RangeLosses: the loss of a model over some rows of held-out data, in the ranges that a host hands out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from potluck.engine.loader import BatchConfig, SliceLoader, plan_step
from potluck.engine.replica import Replica
from potluck.link.link import Link


class RangeLosses:
    def __init__(
        self,
        loss_of: Callable[[Any], tuple[Tensor, float]],
        rows: Any,
        replica: Replica,
        link: Link,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        """`loss_of`: a batch's mean loss, and its samples. `link`: of the ranks that are one worker; each looks at its
        own part of a range."""
        self._loss_of = loss_of
        self._replica = replica
        self._link = link
        batch = BatchConfig(size=len(rows))
        self._rows = SliceLoader(rows, batch, device=replica.device, collate=collate)
        self._rows._ordered = (0, 0, ()), torch.arange(len(rows))

    def sum_of(self, start: int, end: int) -> list[float]:
        """The sum of the losses of these rows, and how many samples they are."""
        replica, rows, total, count = self._replica, self._rows, 0.0, 0.0
        shares = (1.0,) * self._link.world
        for micro in plan_step(start, end, rows.batch, shares, self._link.rank, in_step=replica.in_step):
            batch = rows.take(micro.start, micro.end)
            with torch.no_grad():
                loss, samples = self._loss_of(batch)
            if samples and micro.counts:
                total, count = total + loss.item() * samples, count + samples
        return [sum(column) for column in zip(*self._link.gather_rows([total, count]), strict=True)]
