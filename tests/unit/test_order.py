"""The order of rows is that of a single process which iterates over the same DataLoader."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from potluck.agree.records import Position
from potluck.data.loader import Loader
from potluck.data.order import EMPTY, SamplerOrder
from potluck.data.plan import BatchConfig, BatchShare
from potluck.data.source import AskedData, held_out, source_of
from potluck.errors import ConfigError

CPU = torch.device("cpu")
ROWS = 22


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Eager(Sampler[int]):
    """Draws when it is asked for an iterator, not when that is asked for a row; and counts epochs if it is told."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.epoch = generator, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        rows = torch.randperm(ROWS, generator=self.generator).tolist()
        return iter(rows[self.epoch % 3 :] + rows[: self.epoch % 3])

    def __len__(self) -> int:
        return ROWS


class ByLength(Sampler[list[int]]):
    """Batches of many sizes, in an order of their own each time, drawn from Python's own random numbers."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0, 1, 2, 3, 4, 5, 6], [7], [8, 9, 10, 11], [12, 13], [14, 15, 16, 17, 18], [19, 20, 21]]
        random.shuffle(batches)
        return iter(batches)

    def __len__(self) -> int:
        return 6


def data() -> torch.Tensor:
    return torch.arange(ROWS)


Made = Callable[[], "DataLoader[Any]"]
LOADERS: dict[str, Made] = {
    "shuffled": lambda: DataLoader(data(), batch_size=4, shuffle=True, generator=seeded()),
    "in turn": lambda: DataLoader(data(), batch_size=4),
    "dropping the last": lambda: DataLoader(data(), 4, shuffle=True, drop_last=True, generator=seeded()),
    "weighted": lambda: DataLoader(
        data(), 4, sampler=WeightedRandomSampler(torch.arange(ROWS).float(), 18, generator=seeded())
    ),
    "a part": lambda: DataLoader(data(), 4, sampler=SubsetRandomSampler(range(3, 13), seeded(1)), generator=seeded()),
    "with processes": lambda: DataLoader(data(), 4, shuffle=True, generator=seeded(), num_workers=1),
    "persistent": lambda: DataLoader(
        data(), 4, shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True
    ),
    "batches": lambda: DataLoader(
        data(), batch_sampler=BatchSampler(RandomSampler(data(), generator=seeded()), 5, drop_last=False)
    ),
    "eager": lambda: DataLoader(data(), 4, sampler=Eager(made := seeded()), generator=made),
}


def batches_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def drain(loader: Loader) -> list[list[int]]:
    found = []
    for batch in loader:
        assert loader.current is not None
        if loader.current.weighs:
            found.append(batch.tolist())
        if loader.current.last:
            loader.seek(replace(loader.position, row=loader.current.step_end))
    return found


def ours(made: "DataLoader[Any]", rank: int = 0, world: int = 1) -> Loader:
    source = source_of(made)
    return Loader(source, BatchConfig(size=source.batch_size), BatchShare((1.0,) * world, rank), device=CPU)


@pytest.mark.parametrize("name", LOADERS)
def test_epochs_are_those_of_the_data_loader_itself(name: str) -> None:
    made = LOADERS[name]()
    expected = []
    for epoch in range(4):
        if hasattr(made.sampler, "set_epoch"):
            made.sampler.set_epoch(epoch)
        expected.append(batches_of(made))
    loader = ours(LOADERS[name]())
    assert [drain(loader) for _ in range(4)] == expected
    # Resumed in the middle of the third epoch: the generators have to be replayed until there.
    again = ours(LOADERS[name]())
    again.seek(Position(epoch=2, row=again.batch.size))
    assert drain(again) == expected[2][1:] and drain(again) == expected[3]


def test_random_numbers_and_generators_are_left_as_they_were() -> None:
    generator = seeded()
    made = DataLoader(data(), 4, sampler=RandomSampler(data(), generator=generator))
    loose = DataLoader(data(), batch_sampler=ByLength())
    before = generator.get_state(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for loader in (ours(made), ours(loose)):
        loader.order.of(3, 0)
    after = generator.get_state(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1]) and before[2:] == after[2:]


def test_without_a_generator_each_epoch_has_an_order_of_its_own_which_the_seed_decides() -> None:
    def orders(seed: int) -> list[list[int]]:
        torch.manual_seed(random.randrange(1000))
        made = DataLoader(data(), 4, shuffle=True)
        return [source_of(made, AskedData(seed=seed)).order.of(epoch, seed).tolist() for epoch in range(3)]

    first = orders(0)
    assert first == orders(0) != orders(1) and len({tuple(order) for order in first}) == 3


def test_batches_of_many_sizes_are_steps_of_their_own_and_every_share_has_its_part() -> None:
    loaders = [ours(DataLoader(data(), batch_sampler=ByLength()), rank, 2) for rank in range(2)]
    order = loaders[0].order
    assert order.has_gaps and loaders[0].batch.size == 7 and order.rows == 6 * 7
    assert order.counted == "places in the sampler's order"
    laid = order.of(0, 0).view(6, 7)
    assert sorted(row for row in laid.flatten().tolist() if row != EMPTY) == list(range(ROWS))
    sizes = sorted(int((batch != EMPTY).sum()) for batch in laid)
    assert sizes == [1, 2, 3, 4, 5, 7]
    for batch in laid:  # evenly spread: any part of the places has its share of the rows, up to one
        rows = int((batch != EMPTY).sum())
        for part in range(8):
            assert abs(int((batch[:part] != EMPTY).sum()) - rows * part / 7) < 1
    found = [drain(loader) for loader in loaders]
    assert sorted(row for each in found for batch in each for row in batch) == list(range(ROWS))
    alone = drain(ours(DataLoader(data(), batch_sampler=ByLength())))
    assert [len(batch) for batch in alone] == [int((batch != EMPTY).sum()) for batch in laid]


def test_places_of_repeated_rows_are_told_from_samples() -> None:
    assert source_of(LOADERS["weighted"]()).order.counted == "places in the sampler's order"
    assert source_of(LOADERS["shuffled"]()).order.counted == "" == source_of(LOADERS["a part"]()).order.counted


class Odd(Sampler[Any]):
    def __init__(self, *epochs: list[Any]) -> None:
        self.epochs, self.epoch = epochs, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self.epochs[min(self.epoch, len(self.epochs) - 1)])


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "two sizes": (lambda: source_of(DataLoader(data(), 4), AskedData(batch_size=5)), r"batch_size = 5 .* batches of 4"),
    "distributed": (
        lambda: source_of(DataLoader(data(), 4, sampler=DistributedSampler(data(), 2, 0))),
        "DistributedSampler, which gives each worker a part",
    ),
    "two collates": (
        lambda: source_of(DataLoader(data(), 4, collate_fn=list), AskedData(collate=tuple)),
        "Leave one of them out",
    ),
    "nothing": (lambda: source_of(DataLoader(data(), 40, drop_last=True)), "gives no batch"),
    "one by one": (lambda: source_of(DataLoader(data(), batch_size=None)), "gives rows one by one"),
    "words": (lambda: source_of(DataLoader(data(), 2, sampler=Odd(["a", "b"]))), "strs, and rows are found by whole"),
    "outside": (lambda: source_of(DataLoader(data(), 2, sampler=Odd([1, 99]))), "gives row 99, .* 22 rows"),
    "shorter": (
        lambda: source_of(DataLoader(data(), 2, sampler=Odd([1, 2, 3, 4], [1, 2]))).order.of(1, 0),
        "gave 2 places in epoch 2, and 4 in the first",
    ),
    "larger": (
        lambda: source_of(DataLoader(data(), batch_sampler=Odd([[1], [2, 3]], [[1, 2, 4], [3]]))).order.of(1, 0),
        "gave batches of 1 and 3 rows in a later epoch, and of up to 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        make()


def test_sizes_are_agreed_on_and_rows_counted_from_the_end_are_rows() -> None:
    assert source_of(DataLoader(data(), 4), AskedData(batch_size=4)).batch_size == 4
    assert source_of(DataLoader(data(), 40)).batch_size == 40
    assert source_of(DataLoader(data(), batch_size=None), AskedData(batch_size=6)).batch_size == 6
    order = source_of(DataLoader(data(), 2, sampler=Odd([torch.tensor(0), -1]))).order
    assert order.of(0, 0).tolist() == [0, ROWS - 1]


def test_what_is_held_out_is_what_the_loader_would_give() -> None:
    part = held_out(DataLoader(data(), 4, sampler=SubsetRandomSampler([5, 3])), None)
    assert sorted(part.rows[row].item() for row in range(2)) == [3, 5] and part.batch_size == 4
    assert held_out(DataLoader(data(), 4, collate_fn=list), 9).collate is list
    with pytest.raises(ConfigError, match="evaluate\\(\\) needs a batch_size"):
        held_out(data(), None)
    assert isinstance(source_of(DataLoader(data(), 4, sampler=SequentialSampler(data()))).order, SamplerOrder)
