"""Data in the forms in which people have it: a DataLoader of any sampler, or a stream. Knows nothing of potluck.

Of these, plain PyTorch says which rows a step has: those of the batch that a DataLoader of one process gives.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.differential.cases import Case

KINDS = ("loader", "in-order", "weighted", "subset", "lengths", "drop-last", "stream", "stream-loader")


class _Lengths(Sampler[list[int]]):
    """Batches of many sizes, as those by length have."""

    def __init__(self, rows: int, batch: int) -> None:
        self.rows, self.batch = rows, batch

    def __iter__(self) -> Iterator[list[int]]:
        at, number = 0, 0
        while at < self.rows:
            size = max(1, self.batch - 2 * (number % 3))
            yield [(7 * row + 3) % self.rows if self.rows % 7 else row for row in range(at, min(self.rows, at + size))]
            at, number = at + size, number + 1

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Stream(IterableDataset[tuple[Tensor, ...]]):
    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(*self.tensors, strict=True)


def given_data(case: Case, tensors: tuple[Tensor, ...]) -> Any:
    """What prepare() is given. Each call begins anew, with generators as they are at the start."""
    if not case.data:
        return tensors
    draw = torch.Generator().manual_seed(case.seed + 2)
    rows = TensorDataset(*tensors)
    kinds: dict[str, Callable[[], Any]] = {
        "loader": lambda: DataLoader(rows, case.batch, shuffle=True, generator=draw),
        "in-order": lambda: DataLoader(
            rows, batch_sampler=BatchSampler(SequentialSampler(rows), case.batch, drop_last=False)
        ),
        "weighted": lambda: DataLoader(
            rows,
            case.batch,
            sampler=WeightedRandomSampler([1.0 + row % 3 for row in range(case.rows)], case.rows, generator=draw),
        ),
        "subset": lambda: DataLoader(
            rows, case.batch, sampler=SubsetRandomSampler(range(0, case.rows, 2), generator=draw)
        ),
        "lengths": lambda: DataLoader(rows, batch_sampler=_Lengths(case.rows, case.batch)),
        "drop-last": lambda: DataLoader(rows, case.batch, shuffle=True, drop_last=True, generator=draw),
        "stream": lambda: _Stream(tensors),
        "stream-loader": lambda: DataLoader(_Stream(tensors), case.batch),
    }
    return kinds[case.data]()


def plain_batches(case: Case, tensors: tuple[Tensor, ...]) -> list[list[list[int]]]:
    """The rows of each batch of each epoch, as one process has them."""
    loader = given_data(case, tensors)
    loader = DataLoader(loader, case.batch) if case.data == "stream" else loader
    return [[batch[-1].tolist() for batch in loader] for _ in range(case.epochs)]
