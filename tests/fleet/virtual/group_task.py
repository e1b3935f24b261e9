"""Tiny models for groups of ranks, and what one process of plain PyTorch makes of them. Imports nothing of potluck."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, IterableDataset

Rows = tuple[Tensor, Tensor, Tensor]
"""Inputs, targets, and the number of each row."""


class RowDataset(Dataset[Any]):
    """The rows one by one, as people mostly have them."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        return tuple(each[number] for each in self.rows)


class Stream(IterableDataset[Any]):
    """Rows that can only be read on."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(*self.rows, strict=True)


DATA: dict[str, Callable[[Rows], Any]] = {"tensors": lambda rows: rows, "dataset": RowDataset, "stream": Stream}


class Net(nn.Module):
    """`kind`: plain; norm (has buffers); drop (draws random numbers); branch (some parameters are used by few rows)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4) if kind == "norm" else nn.Identity()
        self.drop = nn.Dropout(0.3 if kind == "drop" else 0.0)
        self.branch = nn.Linear(3, 4) if kind == "branch" else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.enter(x))
        is_odd = x[:, :1] > 1.2
        if self.branch is not None and bool(is_odd.any()):
            hidden = torch.where(is_odd, self.branch(x), hidden)
        return self.leave(self.drop(torch.tanh(hidden)))  # type: ignore[no-any-return]


class Gan(nn.Module):
    """Two optimizers take turns on it."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        self.forger = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor, turn: int) -> Tensor:
        found = self.judge(self.forger(x))
        return F.softplus(found).mean() + F.softplus(-self.judge(y)).mean() if turn == 0 else F.softplus(-found).mean()


def make_rows(count: int, seed: int, dtype: torch.dtype, *, bad: int | None) -> Rows:
    """`bad`: the row of which no loss is finite."""
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(-1024, 1025, (count, width), generator=draw).to(dtype) / 512 for width in (3, 2))
    if bad is not None:
        x[bad] = torch.inf
    return x, y, torch.arange(count)


def make_model(kind: str, seed: int, dtype: torch.dtype) -> nn.Module:
    """The generator is its own: to build a model moves no state of the process."""
    model: nn.Module = (Gan() if kind == "gan" else Net(kind)).to(dtype)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-512, 513, parameter.shape, generator=draw).to(dtype) / 1024)
    return model


def make_optimizers(model: nn.Module, name: str) -> Any:
    if isinstance(model, Gan):
        return [_optimizer(model.judge, "sgd"), _optimizer(model.forger, name)]
    return _optimizer(model, name)


def _optimizer(module: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def loss_of(model: Any, x: Tensor, y: Tensor, turn: int) -> Tensor:
    return model(x, y, turn) if isinstance(model, Gan) else F.mse_loss(model(x), y)  # type: ignore[no-any-return]


def rate_of(step: int) -> float:
    """The share of its first value that the learning rate has."""
    return 1 / (1 + 0.1 * step)


class PlainReplica:
    """A model that one process trains, and skips steps of which the gradient is not finite."""

    def __init__(self, model: nn.Module, optimizer: str, rows: Rows, clip: float | None, *, is_scheduled: bool) -> None:
        made = make_optimizers(model, optimizer)
        self.model, self._rows, self._clip = model, rows, clip
        self._optimizers = made if isinstance(made, list) else [made]
        self._scheduler = LambdaLR(self._optimizers[0], rate_of) if is_scheduled else None
        self.skipped = 0

    def step(self, turn: int, numbers: Sequence[int]) -> bool:
        """Whether it was taken."""
        for each in self._optimizers:
            each.zero_grad()
        chosen = torch.tensor(list(numbers))
        loss = loss_of(self.model, self._rows[0][chosen], self._rows[1][chosen], turn)
        loss.backward()  # type: ignore[no-untyped-call]
        own = [parameter for group in self._optimizers[turn].param_groups for parameter in group["params"]]
        norm = nn.utils.clip_grad_norm_(own, math.inf if self._clip is None else self._clip)
        is_good = bool(norm.isfinite()) and bool(loss.isfinite())
        if is_good:
            self._optimizers[turn].step()
        self.skipped += not is_good
        if self._scheduler is not None:
            self._scheduler.step()
        return is_good


Window = tuple[int, Sequence[Sequence[Sequence[int]]]]
"""The life of a run that it is in, and of each rank, the rows of its batches."""


def average_plainly(first: PlainReplica, windows: Sequence[Window]) -> PlainReplica:
    """Local SGD in one process: in each window all ranks step by themselves from the same weights, and the mean by rows
    of what they come to is what the next begins with. A new life begins with the first rank's optimizer for all."""
    replicas, now = [first], windows[0][0]
    for life, batches in windows:
        if life != now or len(replicas) != len(batches):
            now, replicas = life, [copy.deepcopy(replicas[0]) for _ in batches]
        weights = [
            float(sum(len(rows) for rows in own if each.step(0, rows)))
            for each, own in zip(replicas, batches, strict=True)
        ]
        weights = weights if any(weights) else [1.0] * len(weights)
        states = [each.model.state_dict() for each in replicas]
        mean = {
            name: sum(weight / sum(weights) * state[name] for weight, state in zip(weights, states, strict=True))
            for name in states[0]
        }
        for each in replicas:
            each.model.load_state_dict(mean)
    return replicas[0]
