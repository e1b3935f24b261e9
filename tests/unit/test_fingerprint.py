"""A fingerprint of data: the same for the same rows, another for other rows, and no false alarm."""

import os
import random
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from potluck.agree.terms import check_fingerprint, differing_data, differs
from potluck.data import fingerprint as module
from potluck.data.fingerprint import ROWS, fingerprint, positions
from potluck.data.rows import FetchOptions, TensorRows
from potluck.engine.prepare import training_settings
from potluck.train.text import DataConfig, TextWindows, read_rows


class Rows:
    """Any row, made by a function of its position."""

    def __init__(self, make: Any, rows: int = 200) -> None:
        self.make, self.rows, self.fetched = make, rows, list[int]()

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Any:
        self.fetched.append(row)
        return self.make(row)


def drawn(seed: int, rows: int = 200) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=draw), torch.randint(0, 9, (rows,), generator=draw)


def pairs(seed: int) -> Rows:
    x, y = drawn(seed)
    return Rows(lambda row: {"x": x[row], "y": int(y[row]), "name": f"sample {row}"})


@pytest.mark.parametrize("make", [lambda seed: TensorRows(*drawn(seed)), pairs], ids=["tensors", "rows"])
def test_the_same_data_agree_and_others_of_as_many_rows_do_not(make: Any) -> None:
    mine, same, other = fingerprint(make(1)), fingerprint(make(1)), fingerprint(make(2))
    check_fingerprint(mine)
    assert mine["marks"] and differing_data(mine, same) is None
    assert (differing_data(mine, other) or "").startswith("what is in them is not the same")


def test_large_tensors_are_looked_at_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 100)
    data = TensorRows(*drawn(1))
    mine = fingerprint(data)
    assert set(mine["marks"]) == {str(row) for row in positions(200)}
    data.tensors[1][199] += 1
    assert "row 199 is another" in (differing_data(mine, fingerprint(data)) or "")


def test_the_first_and_the_last_row_are_looked_at_and_the_rest_evenly() -> None:
    for rows in (1, 2, 7, 1000, 10**9, 1 << 48):
        found = positions(rows)
        assert {0, rows - 1} <= set(found) and max(found) < rows and len(found) <= ROWS
        assert len(set(found)) == len(found)
    widest = np.diff(sorted(positions(10**6))).max()
    assert widest < 3 * 10**6 / ROWS


def test_one_changed_token_among_the_rows_that_are_looked_at_is_seen() -> None:
    tokens = [[row, row + 1, 5, 7] for row in range(50)]
    changed = [list(row) for row in tokens]
    changed[49][2] = 6
    assert "row 49 is another." in f"{differing_data(fingerprint(tokens), fingerprint(changed))}."


def test_any_change_of_a_text_is_seen_also_in_what_is_never_trained_on() -> None:
    text = bytes(range(256)) * 40
    mine = fingerprint(TextWindows(text, 16))
    assert differing_data(mine, fingerprint(TextWindows(text, 16))) is None
    assert differing_data(mine, fingerprint(TextWindows(text[:5000] + b"x" + text[5001:], 16))) is not None


def test_the_built_in_text_says_which_pythons_library_it_is(tmp_path: Any) -> None:
    mine = fingerprint(read_rows(DataConfig(limit_bytes=20_000), 16)[0])
    assert mine["origin"] == f"the library of Python {'.'.join(map(str, sys.version_info[:3]))}"
    theirs = {"origin": "the library of Python 3.9.9", "marks": {"all": ["0" * 64, []]}}
    said = differing_data(mine, theirs)
    assert said is not None and said.endswith(f"(this run's: {mine['origin']}; yours: the library of Python 3.9.9)")


@pytest.mark.parametrize("width", [torch.float64, torch.float16, torch.bfloat16])
def test_a_tensors_width_does_not_matter(width: torch.dtype) -> None:
    x = torch.tensor([[0.5, -2.0, 96.0]] * 5)
    assert differing_data(fingerprint(TensorRows(x)), fingerprint(TensorRows(x.to(width)))) is None
    whole = torch.arange(6)
    assert differing_data(fingerprint(TensorRows(whole)), fingerprint(TensorRows(whole.to(torch.int16)))) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensors_device_does_not_matter() -> None:
    x, y = drawn(1)
    assert differing_data(fingerprint(TensorRows(x, y)), fingerprint(TensorRows(x.cuda(), y.cuda()))) is None


def test_last_bits_do_not_matter_and_a_large_number_hides_no_small_one() -> None:
    x, _ = drawn(1)
    noisy = x * (1 + 1e-6 * torch.randn(x.shape))
    assert differing_data(fingerprint(TensorRows(x)), fingerprint(TensorRows(noisy))) is None
    rows = [torch.tensor([1.6e9, 0.1 * row, 0.7]) for row in range(9)]
    others = [torch.tensor([1.6e9, 0.1 * row + 0.5, 0.7]) for row in range(9)]
    assert differing_data(fingerprint(rows), fingerprint(others)) is not None


def contents() -> dict[str, tuple[Any, Any]]:
    return {
        "numbers": (3, 4),
        "a float": (0.5, 0.6),
        "a whole number and a float": (1, 1.0),
        "words": ("a", "b"),
        "bytes": (b"a", b"b"),
        "nothing": (None, 0),
        "arrays": (np.arange(4), np.arange(1, 5)),
        "numpy's strings": (np.array(["a", "b"]), np.array(["a", "c"])),
        "dates": (np.array(["2024-01-01"], "M8[D]"), np.array(["2024-01-02"], "M8[D]")),
        "complex": (torch.tensor([1 + 2j]), torch.tensor([1 - 2j])),
        "sparse": (torch.eye(3).to_sparse(), torch.zeros(3, 3).to_sparse()),
        "shapes": (torch.zeros(2, 3), torch.zeros(3, 2)),
        "a NaN": (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 0.0])),
        "nested": ({"a": [1, {"b": torch.ones(2)}]}, {"a": [1, {"b": torch.zeros(2)}]}),
        "keys": ({"a": 1}, {"b": 1}),
        "how they are nested": ([[1, 2], [3]], [[1], [2, 3]]),
        "signs of small numbers": (torch.tensor([1e-6] * 4), torch.tensor([-1e-6] * 4)),
    }


@pytest.mark.parametrize("name", contents())
def test_content_of_every_kind_is_compared(name: str) -> None:
    one, other = contents()[name]
    mine = fingerprint(Rows(lambda row: one, 3))
    assert mine["marks"] and differing_data(mine, fingerprint(Rows(lambda row: one, 3))) is None
    assert differing_data(mine, fingerprint(Rows(lambda row: other, 3))) is not None


def test_a_picture_is_compared_by_its_pixels() -> None:
    class Picture:
        def __init__(self, seed: int) -> None:
            self._pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)

        @property
        def __array_interface__(self) -> Any:
            return self._pixels.__array_interface__

    mine = fingerprint(Rows(lambda row: (Picture(row), row), 5))
    assert differing_data(mine, fingerprint(Rows(lambda row: (Picture(row), row), 5))) is None
    assert differing_data(mine, fingerprint(Rows(lambda row: (Picture(row + 1), row), 5))) is not None


# No false alarm


def test_augmented_rows_are_compared_by_drawing_the_same_random_numbers() -> None:
    x, _ = drawn(1)

    def augmented(row: int) -> Any:
        flipped = x[row].flip(0) if random.random() < 0.5 else x[row]
        return flipped + 0.1 * torch.randn(6), np.random.rand()

    torch.manual_seed(1)
    mine = fingerprint(Rows(augmented))
    torch.manual_seed(2)
    random.seed(9)
    assert mine["marks"] and differing_data(mine, fingerprint(Rows(augmented))) is None


@pytest.mark.parametrize("chance", [1.0, 0.5])
def test_rows_that_are_random_on_their_own_account_are_not_compared(chance: float) -> None:
    draw = np.random.default_rng()
    assert fingerprint(Rows(lambda row: row if draw.random() > chance else draw.random())) == {}


def test_rows_that_raise_or_have_no_content_are_left_out() -> None:
    def make(row: int) -> Any:
        if row == 0:
            raise OSError("this file is broken")
        return object() if row == 199 else row

    found = fingerprint(Rows(make))
    assert found["marks"] and not {"0", "199"} & set(found["marks"])
    assert fingerprint(Rows(lambda row: object())) == {}


def test_looking_disturbs_no_random_numbers() -> None:
    def state() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), np.random.rand()]

    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = state()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    fingerprint(Rows(lambda row: (torch.rand(2), random.random(), np.random.rand())))
    assert state() == expected


def test_a_slow_dataset_is_looked_at_for_a_bounded_time_and_what_both_saw_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BUDGET_S", 0.0)
    slow = Rows(lambda row: row)
    mine = fingerprint(slow)
    assert set(slow.fetched) == {0} and set(mine["marks"]) == {"0"}
    monkeypatch.undo()
    whole = fingerprint(Rows(lambda row: row))
    assert differing_data(mine, whole) is None and differing_data(whole, mine) is None
    assert differing_data(whole, fingerprint(Rows(lambda row: row + 1))) is not None


def test_a_row_without_end_is_not_looked_at_whole() -> None:
    volume = torch.zeros(1, dtype=torch.uint8).expand(1 << 40)  # whoever copied it would not come back
    mine = fingerprint([volume])
    assert mine["marks"] and differing_data(mine, fingerprint([volume])) is None
    assert differing_data(mine, fingerprint([(volume[:1] + 1).expand(1 << 40)])) is not None


def test_rows_that_are_fetched_by_other_processes_are_looked_at_there() -> None:
    here = os.getpid()
    data = Rows(lambda row: (row, os.getpid() == here))
    found = fingerprint(data, elsewhere=FetchOptions())
    assert data.fetched == [] and len(found["marks"]) == len(positions(200))
    assert differing_data(found, fingerprint(Rows(lambda row: (row, False)))) is None


def test_data_that_say_what_they_are_are_believed() -> None:
    class Named(Rows):
        def potluck_fingerprint(self) -> str:
            return "version 7"

    named = Named(lambda row: random.random())
    assert differing_data(fingerprint(named), fingerprint(Named(lambda row: row))) is None and not named.fetched


def test_where_there_is_nothing_to_compare_nothing_differs() -> None:
    mine = fingerprint(Rows(lambda row: row))
    assert differing_data(mine, {}) is None and differing_data({}, mine) is None
    whole = fingerprint(TensorRows(torch.arange(200)))
    assert differing_data(mine, whole) is None  # looked at in another way


def test_marks_of_nothing_but_zeros_are_alike() -> None:
    assert not differs(["a", [0.0, 0.0, 0.0]], ["a", [0.0, 0.0, 0.0]])
    assert differs(["a", [0.0, 0.0, 0.0]], ["a", [1.0, 1.0, 1.0]]) and differs(["a", []], ["a", [0.0]])


# What steps do


def optimizer(kind: Any = torch.optim.AdamW, **settings: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind([torch.nn.Parameter(torch.zeros(2))], **settings)
    return made


def test_settings_of_an_optimizer_are_told_but_not_how_a_machine_computes_it() -> None:
    mine = training_settings(optimizer(lr=0.1, weight_decay=0.2), 1.0)
    assert mine["optimizer"] == "AdamW" and mine["optimizer.lr"] == 0.1 and mine["step.clip"] == 1.0
    assert mine["optimizer.betas"] == [0.9, 0.999]
    assert training_settings(optimizer(lr=0.1, weight_decay=0.2, fused=True), 1.0) == mine
    assert training_settings(optimizer(lr=torch.tensor(0.25)), None)["optimizer.lr"] == 0.25


def test_groups_that_differ_are_told_one_by_one() -> None:
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    made = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.2}], momentum=0.9)
    told = training_settings(made, None)
    assert told["optimizer.lr"] == [0.1, 0.2] and told["optimizer.momentum"] == 0.9


def test_a_description_of_ours_keeps_its_fingerprint_through_json() -> None:
    from potluck.fleet.description import Description
    from tests.unit.test_description import DESCRIBED

    mine = replace(DESCRIBED, data=fingerprint(pairs(1)), training=training_settings(optimizer(), 1.0))
    back = Description.from_json(mine.to_json())
    assert back == mine and mine.difference(back) is None
