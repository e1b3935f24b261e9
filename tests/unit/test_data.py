import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.agree.records import Position
from potluck.data.loader import Loader
from potluck.data.plan import BatchConfig, BatchShare, MicroBatch, even_batches, plan_step
from potluck.data.source import source_of
from potluck.errors import ConfigError
from potluck.train.text import DataConfig, read_rows, read_text

CPU = torch.device("cpu")


@given(
    row=st.integers(0, 50),
    rows=st.integers(51, 80),
    size=st.integers(1, 40),
    micro=st.none() | st.integers(1, 9),
    shares=st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
)
def test_a_steps_parts_are_complete_disjoint_and_no_larger_than_asked(
    row: int, rows: int, size: int, micro: int | None, shares: list[float]
) -> None:
    batch = BatchConfig(size=size, micro_size=micro)
    plans = [plan_step(row, rows, batch, shares, rank) for rank in range(len(shares))]
    parts = [part for plan in plans for part in plan if part.counts]
    covered = [position for part in parts for position in range(part.start, part.end)]
    assert covered == list(range(row, min(row + size, rows)))
    for plan in plans:
        assert [part.last for part in plan] == [False] * (len(plan) - 1) + [True]
        assert {part.step_end for part in plan} == {min(row + size, rows)}
    assert micro is None or all(part.end - part.start <= micro for part in parts)


@given(
    rows=st.integers(2, 40),
    size=st.integers(2, 40),
    micro=st.none() | st.integers(3, 9),
    shares=st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
    in_step=st.booleans(),
)
def test_no_part_of_a_step_has_a_single_row_where_that_can_be_had(
    rows: int, size: int, micro: int | None, shares: list[float], in_step: bool
) -> None:
    batch, row, together = BatchConfig(size=size, micro_size=micro), 0, {"in_step": in_step, "in_pairs": True}
    while row < rows:
        end = min(row + size, rows)
        plans = [plan_step(row, rows, batch, shares, rank, **together) for rank in range(len(shares))]
        parts = [part for plan in plans for part in plan if part.counts]
        assert [at for part in parts for at in range(part.start, part.end)] == list(range(row, end))
        assert micro is None or all(part.end - part.start <= micro for part in parts)
        assert all([part.last for part in plan] == [False] * (len(plan) - 1) + [True] for plan in plans)
        assert not in_step or len({len(plan) for plan in plans}) == 1
        if end - row > 1 and (end - row < size or size >= 2 * len(shares)):
            assert not [part for plan in plans for part in plan if part.end - part.start == 1]
        row = end


@given(
    rows=st.integers(2, 60),
    size=st.integers(3, 40),
    workers=st.integers(1, 5),
    ranks=st.integers(1, 3),
    in_step=st.booleans(),
)
def test_no_row_of_a_window_is_alone_also_among_the_ranks_of_a_node(
    rows: int, size: int, workers: int, ranks: int, in_step: bool
) -> None:
    own, batch = -(-size // workers), BatchConfig(size=size)
    batches = even_batches(5, 5 + rows, own, size, in_pairs=True)
    assert [at for start, end in batches for at in range(start, end)] == list(range(5, 5 + rows))
    lengths = {end - start for start, end in batches}
    assert max(lengths) - min(lengths) <= 1 and max(lengths) <= max(own, 3)
    if own == 1:
        assert lengths == {1}  # as many workers as rows of a batch: what was asked for
        return
    for start, end in batches:
        shares, together = (1.0,) * ranks, {"in_step": in_step or ranks > 1, "in_pairs": True}
        plans = [plan_step(start, end, batch, shares, rank, **together) for rank in range(ranks)]
        parts = [part for plan in plans for part in plan if part.counts]
        assert [at for part in parts for at in range(part.start, part.end)] == list(range(start, end))
        if end - start < size or size >= 2 * ranks:
            assert not [part for plan in plans for part in plan if part.end - part.start == 1]


def drain(loader: Loader) -> list[Any]:
    """As the engine does: a step is done once its last micro-batch was given."""

    batches = []
    for batch in loader:
        assert loader.current is not None
        if loader.current.counts:
            batches.append(batch)
        if loader.current.last:
            loader.seek(replace(loader.position, row=loader.current.step_end))
    return batches


def loader_of(data: Any, rank: int = 0, world: int = 1, **batch: Any) -> Loader:
    return Loader(data, BatchConfig(**batch), BatchShare((1.0,) * world, rank), device=CPU)


@pytest.mark.parametrize("fetchers", [0, 2])
def test_each_row_of_an_epoch_is_given_once_in_a_new_order_each_time(fetchers: int) -> None:
    loaders = [
        loader_of(torch.arange(23), rank=rank, world=3, size=7, micro_size=2, fetchers=fetchers) for rank in range(3)
    ]
    epochs = []
    for _ in range(2):
        given = torch.cat([batch for loader in loaders for batch in drain(loader)])
        assert sorted(given.tolist()) == list(range(23))
        epochs.append(given.tolist())
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])


class Pairs:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((2,), float(index)), "y": index}


def test_batches_that_are_fetched_ahead_are_the_same_also_when_shares_change() -> None:
    def taken(ahead: bool) -> list[list[list[int]]]:
        loader = loader_of(torch.arange(40), world=2, size=6, micro_size=2)
        epochs = []
        for _ in range(2):
            batches = []
            for batch in loader:
                batches.append(batch.tolist())
                assert loader.current is not None
                if loader.current.last:
                    loader.seek(replace(loader.position, row=loader.current.step_end))
                if ahead and loader.current.last and loader.current.step_end < 40:
                    loader.fetch_ahead(loader.step_at(loader.current.step_end)[0])
                if len(batches) == 4:
                    loader.shares = (2.0, 1.0)
            epochs.append(batches)
        return epochs

    assert taken(ahead=True) == taken(ahead=False)


def test_processes_that_fetch_rows_end_with_the_pass_that_needed_them() -> None:
    loader = loader_of(torch.arange(12), size=4, fetchers=2)
    before = set(multiprocessing.active_children())
    drain(loader)
    assert set(multiprocessing.active_children()) == before
    for _ in loader:
        assert len(multiprocessing.active_children()) == len(before) + 2
        break
    assert set(multiprocessing.active_children()) == before


class Noisy:
    """Rows that draw random numbers, and tell who has read them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor, int]:
        return row, torch.rand(()), os.getpid()


def windows_of(fetchers: int) -> tuple[list[Any], set[int]]:
    """What a loop sees and draws where a plan tells what to expect, ends a window early, and gives what nobody said."""
    loader = Loader(Noisy(), BatchConfig(size=4, fetchers=fetchers), None, device=CPU)
    micros = [MicroBatch(row, row + 2, True, row + 2) for row in range(0, 12, 2)]

    def plan() -> Iterator[MicroBatch]:
        loader.follow((0,), 0, lambda: ((micro, micro.start) for micro in micros[:4]))
        yield from micros[:2]
        loader.follow((1,), 6, lambda: ((micro, micro.start) for micro in micros[3:5]))
        yield from micros[3:5]
        yield micros[5]

    loader.plan, loader.seeds_of = plan, lambda micro: (micro.start, micro.start + 100)
    found, readers = [], set()
    for rows, noise, reader in loader:
        found.append([rows.tolist(), noise.tolist(), torch.rand(()).item()])
        readers |= set(reader.tolist())
    return found, readers


def test_rows_of_windows_are_fetched_ahead_and_draw_what_they_would_draw_here() -> None:
    before = set(multiprocessing.active_children())
    (found, readers), (expected, (here,)) = windows_of(2), windows_of(0)
    assert found == expected and len(found) == 5
    assert (
        here == os.getpid() and readers & {here} == {here} and len(readers) > 1
    )  # the last one, which nobody expected
    assert set(multiprocessing.active_children()) == before


def prepared(number: int) -> None:
    """As a worker_init_fn that opens what rows are read from: in the process that looks at it, the dataset is ours."""
    info = torch.utils.data.get_worker_info()
    assert info is not None and isinstance(info.dataset, Prepared)
    info.dataset.is_open = True


class Prepared(Noisy):
    is_open = False

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor, int]:
        assert self.is_open
        return super().__getitem__(row)


def test_what_is_handed_out_is_fetched_as_expected_and_else_by_a_process_that_was_prepared() -> None:
    source = source_of(torch.utils.data.DataLoader(Prepared(), 4, num_workers=1, worker_init_fn=prepared))
    loader = Loader(source, BatchConfig(size=4, fetchers=1), None, device=CPU)
    asked: list[int] = []

    def expected(start: int) -> Iterator[tuple[MicroBatch, int]]:
        for row in range(start, 12, 4):
            asked.append(row)
            yield MicroBatch(row, row + 2, True, row + 4), row

    def plan() -> Iterator[MicroBatch]:
        for row in range(0, 12, 4):
            loader.follow((0,), row, lambda row=row: expected(row))  # type: ignore[misc]
            yield MicroBatch(row, row + 2, True, row + 4) if row != 4 else MicroBatch(6, 8, True, 8)

    loader.plan, loader.seeds_of = plan, lambda micro: (micro.start, micro.start + 100)
    found = [(rows.tolist(), reader.tolist()[0]) for rows, _, reader in loader]
    assert [rows for rows, _ in found] == [[0, 1], [6, 7], [8, 9]] and asked == [0, 4, 8]
    readers = [reader for _, reader in found]
    assert readers[0] == readers[2] != readers[1] and os.getpid() not in readers


def test_nothing_is_fetched_ahead_of_data_that_may_draw_random_numbers() -> None:
    seen: list[int] = []

    class Rows:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, row: int) -> int:
            seen.append(row)
            return row

    loader = loader_of(Rows(), size=2)
    next(iter(loader))
    loader.fetch_ahead(loader.step_at(2)[0])
    assert len(seen) == 2


def test_map_style_datasets_and_tensors_alike() -> None:
    batch = drain(loader_of(Pairs(), size=6))[0]
    assert batch["x"].shape == (6, 2) and sorted(batch["y"].tolist()) == list(range(6))
    x, y = drain(loader_of((torch.zeros(6, 2), torch.arange(6)), size=6))[0]
    assert x.shape == (6, 2) and sorted(y.tolist()) == list(range(6))
    assert drain(loader_of(torch.arange(6), size=4))[1].shape == (2,)


def test_a_collate_function_is_used() -> None:
    loader = Loader(Pairs(), BatchConfig(size=6), device=CPU, collate=len)
    assert drain(loader) == [6]


def test_the_length_is_the_micro_batches_that_are_left() -> None:
    loader = loader_of(torch.arange(10), size=4, micro_size=2)
    assert len(loader) == 5
    loader.seek(replace(loader.position, row=8))
    assert len(loader) == 1


def test_looking_ahead_draws_no_random_number() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    drain(loader_of(Pairs(), size=2))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (torch.empty(0, 3), "The dataset is empty"),
        (iter([1, 2]), "needs __len__ and __getitem__"),
        (None, "needs __len__ and __getitem__"),
        ({"x": torch.zeros(3)}, "dict is neither"),
        (([1, 2], [3, 4]), "tuple is neither"),
        (torch.tensor(3.0), "Tensor is neither"),
        ("text", "str is neither"),
        ((torch.zeros(3), torch.zeros(4)), "differ in length: 3, 4"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(data: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loader_of(data, size=1)


# Text


def test_text_is_cut_into_rows_and_its_end_is_kept_for_validation(tmp_path: Path) -> None:
    text = bytes(range(128, 256)) * 8
    (tmp_path / "a.txt").write_bytes(text)
    training, validation, _ = read_rows(DataConfig(paths=(str(tmp_path),), validation=0.25), context=10)
    assert (len(training), len(validation)) == (76, 25)
    assert bytes(training[1].tolist()) == text[10:21]
    assert bytes(validation[0].tolist()) == text[768:779]


def test_folders_are_read_in_order_without_hidden_or_binary_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {"b": b"two ", "sub/c": b"three", "a": b"one ", ".git/x": b"no", "z": b"\0no"}.items():
        (tmp_path / name).write_bytes(content)
    assert read_text(DataConfig(paths=(str(tmp_path),))) == b"one two three"
    assert read_text(DataConfig(paths=(str(tmp_path),), limit_bytes=6)) == b"one tw"


def test_the_standard_library_is_there_and_mixed() -> None:
    text = read_text(DataConfig(limit_bytes=200_000))
    assert len(text) == 200_000 and b"def " in text and b"import " in text


@pytest.mark.parametrize("limit", [3, 10, 1 << 40, 1 << 62])
def test_a_limit_takes_no_memory_beyond_the_text(limit: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abcde")
    (tmp_path / "b").write_text("fgh")
    assert read_text(DataConfig(paths=(str(tmp_path),), limit_bytes=limit)) == b"abcdefgh"[:limit]


def test_missing_empty_and_short_text_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no file or folder .*nowhere"):
        read_text(DataConfig(paths=(str(tmp_path / "nowhere"),)))
    for odd in ("a\0b", "\x1b[2J", "x" * 10_000):
        with pytest.raises(ConfigError, match=r"There is no file or folder '[\\ -~]{,90}'\.") as error:
            read_text(DataConfig(paths=(odd,)))
        assert str(error.value).isprintable()
    with pytest.raises(ConfigError, match="There is no text in"):
        read_text(DataConfig(paths=(str(tmp_path),)))
    (tmp_path / "short").write_text("abc")
    with pytest.raises(ConfigError, match=r"The text has 3 bytes, .* and one row needs 11"):
        read_rows(DataConfig(paths=(str(tmp_path),)), context=10)


def test_what_is_left_of_an_epoch_follows_what_is_done_in_the_same_shuffled_order() -> None:
    loader = Loader(torch.arange(20), BatchConfig(size=4), device=torch.device("cpu"))
    order = loader._order().tolist()
    assert loader.left_after([(8, 20)]) == () and loader.left_after([]) == ()
    left = loader.left_after([(3, 5), (9, 20)])
    assert left == ((3, 5), (9, 20))
    loader.seek(Position(row=7, left=left))
    again = loader._order().tolist()
    assert again[7:] == order[3:5] + order[9:20] and sorted(again) == sorted(order)
    # And once more, within what was left: rows 7 and 10 to 12 of the new order are still to do.
    assert loader.left_after([(7, 8), (10, 13)]) == ((3, 4), (10, 13))
    loader.seek(Position(row=16, left=loader.left_after([(7, 8), (10, 13)])))
    assert loader._order().tolist()[16:] == [again[7], *again[10:13]]
