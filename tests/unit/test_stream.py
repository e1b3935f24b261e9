"""A stream as a dataset of places: read on, found again, saved, and the same each time or refused in a sentence."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from potluck.data import stream as streams
from potluck.data.loader import Loader
from potluck.data.plan import BatchConfig, BatchShare
from potluck.data.source import AskedData, held_out, source_of
from potluck.data.stream import StreamRows, is_stream
from potluck.errors import ConfigError

ROWS = 40


@pytest.fixture(autouse=True)
def marks_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "EVERY", 4)


class Plain(IterableDataset[int]):
    """Counts how many rows were read, and gives another order in each epoch, if it is told of them."""

    def __init__(self, rows: int = ROWS, *, shuffles: bool = False) -> None:
        self.rows, self.epoch, self.read, self.shuffles = rows, 0, 0, shuffles

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for row in range(self.rows):
            self.read += 1
            yield 1000 * self.epoch + row + (random.random() if self.shuffles else 0)


class Stateful(Plain):
    def __init__(self, rows: int = ROWS, *, is_wrong: bool = False) -> None:
        super().__init__(rows)
        self.row, self.is_wrong = 0, is_wrong

    def state_dict(self) -> dict[str, int]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.row = state["row"] + (state["row"] > 0 and self.is_wrong)

    def __iter__(self) -> Iterator[Any]:
        while self.row < self.rows:
            self.row, self.read = self.row + 1, self.read + 1
            yield 1000 * self.epoch + self.row - 1


def counting(rows: int = ROWS) -> Iterator[int]:
    yield from range(rows)


def of(stream: Any, rows: int = ROWS, **options: Any) -> StreamRows:
    return StreamRows(stream, rows, **{"is_endless": False, "keep": 6} | options)


@pytest.mark.parametrize("stream", [Plain(), Stateful(), Stateful(is_wrong=True)])
def test_rows_are_found_wherever_they_are_asked_for(stream: Plain) -> None:
    rows = of(stream)
    for places in ([0, 1, 5], [3, 4], [20, 22], [17], [2, 39], [ROWS + 3], [11, 10], [2 * ROWS, ROWS + 39]):
        assert rows.__getitems__(places) == [1000 * (place // ROWS) + place % ROWS for place in places]


def test_a_state_saves_reading_what_was_read() -> None:
    found = {}
    for stream in (Plain(), Stateful()):
        rows = of(stream)
        rows.__getitems__([30])
        rows.__getitems__([17])
        found[type(stream)] = stream.read
    assert found == {Plain: 31 + 18, Stateful: 31 + 2}


def test_an_epoch_of_another_length_continues_where_the_last_one_ended() -> None:
    rows = of(Plain(10), rows=7, is_endless=True)
    expected = [1000 * turn + row for turn in range(5) for row in range(10)]
    for places in ([0, 6], [7, 13], [8, 9], [20, 27], [1, 2], [34, 12]):
        assert rows.__getitems__(places) == [expected[place] for place in places]


@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_what_is_saved_is_enough_to_continue_anywhere_else(kind: type[Plain]) -> None:
    for is_endless, rows in ((False, ROWS), (True, 13)):
        before = of(kind(), rows=rows, is_endless=is_endless)
        read = before.__getitems__(list(range(30)))
        stream = kind()
        again = of(stream, rows=rows, is_endless=is_endless)
        again.restore(before.saved(27))
        assert again.__getitems__([27, 28, 29, 30]) == [*read[27:], read[29] + 1]
        assert stream.read == (31 if kind is Plain else 7)


def test_random_numbers_of_a_stream_are_its_own() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    rows = of(Plain(shuffles=True))
    first = rows.__getitems__(list(range(10)))
    assert random.random() == expected
    random.seed(9)
    other = of(Plain(shuffles=True))
    found = [other.__getitems__([place])[0] for place in range(10)]
    assert found == first and of(Plain(shuffles=True), seed=1).__getitems__([0]) != first[:1]


def test_a_stream_that_is_another_each_time_is_refused() -> None:
    own = random.Random(0)

    class Other(IterableDataset[float]):
        def __iter__(self) -> Iterator[float]:
            return (own.random() for _ in range(ROWS))

    rows = of(Other())
    rows.__getitems__([30])
    with pytest.raises(ConfigError, match=r"gave another row at place 0 of epoch 1 than when that was read before"):
        rows.__getitems__([3])


def test_a_stream_that_ends_early_is_told_of() -> None:
    with pytest.raises(ConfigError, match=r"has ended after 40 rows of epoch 2, and an epoch has 50"):
        of(Plain(), rows=50).__getitems__([50 + 45])
    with pytest.raises(ConfigError, match="gives no row at all"):
        of(Plain(0), rows=5, is_endless=True).__getitems__([1])


def test_its_length_is_what_it_says_or_what_was_asked_for_or_is_counted() -> None:
    said: list[str] = []
    source = source_of(counting, AskedData(batch_size=8, notice=said.append))
    assert source.order.rows == ROWS and "read once to count them. rows= would" in said[0]
    assert source.order.counted == "places of the stream" and source.fetchers == 0
    source_of(counting, AskedData(batch_size=8, notice=said.append))
    assert len(said) == 1, "it is counted once"
    assert source_of(partial(counting, 9), AskedData(rows=5, batch_size=2)).order.rows == 5
    loader = DataLoader(Plain(), batch_size=7, drop_last=True, num_workers=3)
    source = source_of(loader)
    assert (source.order.rows, source.batch_size, source.fetchers) == (35, 7, 1)
    with pytest.raises(ConfigError, match="batch_size = 3 was given, and the DataLoader has batches of 7"):
        source_of(loader, AskedData(batch_size=3))
    with pytest.raises(ConfigError, match="rows= says how many rows of a stream"):
        source_of([1, 2, 3], AskedData(rows=5))
    assert len(held_out(counting, 4).rows) == ROWS and held_out(DataLoader(Plain(), 4), None).batch_size == 4


def test_what_is_a_stream() -> None:
    assert is_stream(Plain()) and is_stream(counting) and is_stream(partial(counting, 3))
    assert not any(map(is_stream, ([1], (1,), {1: 2}, "text", torch.zeros(3), iter([1]), counting(), {1, 2}, None, 3)))


@pytest.mark.parametrize("kind", [Plain, Stateful])
@pytest.mark.parametrize("fetchers", [0, 2])
def test_workers_use_each_place_once_and_what_reading_showed_comes_back(kind: type[Plain], fetchers: int) -> None:
    found: list[list[int]] = []
    for rank in range(2):
        source = source_of(kind(), AskedData(batch_size=6, fetchers=fetchers, rows=ROWS))
        share = BatchShare((1.0, 2.0), rank)
        loader = Loader(source, BatchConfig(size=6, fetchers=source.fetchers), share, device=torch.device("cpu"))
        for epoch in range(2):
            mine: list[int] = []
            for batch in loader:
                mine += batch.tolist()
                assert loader.current is not None
                if loader.current.last:
                    loader.seek(replace(loader.position, row=loader.current.step_end))
                saved = loader.saved_stream()
                assert saved and max(each[0] for each in saved) <= epoch * ROWS + loader.position.row
            found.append(mine)
            assert loader.dataset.seen(epoch)["marks"].keys() >= {"0", "4", "8", "32"}
    assert sorted(found[0] + found[2]) == list(range(ROWS))
    assert sorted(found[1] + found[3]) == list(range(1000, 1000 + ROWS))


@pytest.mark.parametrize("has_buffer", [False, True])
def test_streams_of_datasets_are_saved_and_continued_exactly(has_buffer: bool) -> None:
    """Of one that shuffles, the state forgets what was in its buffer: it is found out, and read from the start."""
    datasets = pytest.importorskip("datasets")

    def made() -> Any:
        stream = datasets.Dataset.from_dict({"n": list(range(ROWS))}).to_iterable_dataset(num_shards=4)
        return stream.shuffle(seed=1, buffer_size=9) if has_buffer else stream

    plain = made()
    plain.set_epoch(1)
    expected = list(plain)
    before = of(made())
    assert before.__getitems__(list(range(ROWS, ROWS + 30))) == expected[:30]
    saved = before.saved(ROWS + 26)
    assert any(state is not None for *_, state in saved)
    again = of(made())
    again.restore(saved)
    assert again.__getitems__([ROWS + 26, ROWS + 39, ROWS + 3]) == [expected[26], expected[39], expected[3]]
    assert again._trusts_states is not has_buffer
