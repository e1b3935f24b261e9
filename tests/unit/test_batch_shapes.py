"""Batches of any shape: moved, counted, and refused in words where they cannot be counted."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from potluck.batch_shapes import rows_of, tensors_of, to_device
from potluck.errors import ConfigError

META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


def rows(count: int = 3) -> Tensor:
    return torch.zeros(count, 2)


@dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str = "a"
    more: list[Tensor] = field(default_factory=lambda: [rows(), rows()])
    size: int = field(init=False, default=7)


class ReadOnly(Mapping[str, Any]):
    def __init__(self, of: dict[str, Any]) -> None:
        self._of = of

    def __getitem__(self, key: str) -> Any:
        return self._of[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)


class Graph:
    """An object that moves itself, and returns nothing."""

    def __init__(self) -> None:
        self.x = rows()

    def to(self, device: torch.device) -> None:
        self.x = self.x.to(device)


SHAPES = {
    "a tensor": rows(),
    "a dict whose first value is no tensor": {"id": "x", "n": 3, "x": rows(), "deep": {"y": [rows()]}},
    "an ordered dict": OrderedDict(a=rows(), b=None),
    "a user dict": UserDict(a="text", x=rows()),
    "a mapping that cannot be changed": ReadOnly({"x": rows()}),
    "a view of a dict": MappingProxyType({"x": rows()}),
    "a tuple": (rows(), "text", 3.5),
    "a named tuple": Pair(rows(), [rows()]),
    "a list of lists": [["a", "b", "c"], [rows(), rows()]],
    "a dataclass": Sample(rows()),
    "a scalar before the rows": (torch.tensor(1.0), rows()),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_tensor_is_moved_and_the_rows_are_counted(name: str) -> None:
    batch = SHAPES[name]
    moved = to_device(batch, META)
    assert rows_of(batch) == rows_of(moved) == 3
    assert type(moved) is type(batch)
    found = tensors_of(moved)
    assert len(found) == len(tensors_of(batch)) > 0 and all(tensor.device == META for tensor in found)
    assert all(tensor.device.type == "cpu" for tensor in tensors_of(batch)), "the batch that was given is left alone"


def test_what_is_no_tensor_stays_as_it_is() -> None:
    moved = to_device(Sample(rows()), META)
    assert moved.name == "a" and moved.size == 7
    assert to_device({"a": "text", "b": 3, "c": None, "d": b"x", "e": {1, 2}}, META) == {
        "a": "text",
        "b": 3,
        "c": None,
        "d": b"x",
        "e": {1, 2},
    }


def test_an_encoding_of_transformers_keeps_its_kind_and_all_that_is_in_it() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"text": ["a", "b"], "input_ids": rows(2).long(), "nested": [{"x": rows(2)}]})
    moved = to_device(batch, META)
    assert type(moved) is transformers.BatchEncoding and rows_of(moved) == 2
    assert moved["input_ids"].device == moved["nested"][0]["x"].device == META and moved["text"] == ["a", "b"]
    features = to_device(transformers.BatchFeature({"pixels": rows()}), META)
    assert type(features) is transformers.BatchFeature and features["pixels"].device == META


def test_an_object_that_moves_itself_does_so() -> None:
    graph = Graph()
    assert to_device([graph], META)[0] is graph and graph.x.device == META
    packed = pack_sequence([torch.zeros(4, 1), torch.zeros(2, 1)])
    assert rows_of(packed) == 2 and to_device(packed, torch.device("cpu")).batch_sizes.device.type == "cpu"


@pytest.mark.parametrize(
    ("batch", "count"),
    [(["a", "b"], 2), ({"text": ("a", "b", "c")}, 3), ([1.0, 2.0, 3.0], 3), (np.zeros((5, 2)), 5)],
)
def test_texts_and_numbers_that_nobody_made_a_tensor_of_are_counted(batch: Any, count: int) -> None:
    assert rows_of(batch) == count


@pytest.mark.parametrize("batch", [object(), {}, "text", [rows(3), rows(5)], {"x": [rows(2), rows(1)]}, 3])
def test_what_cannot_be_counted_is_refused_in_a_sentence(batch: Any) -> None:
    with pytest.raises(ConfigError, match=r"Cannot tell how many rows .* return \(loss, samples\), or give samples="):
        rows_of(batch)


def test_a_to_of_another_meaning_is_named() -> None:
    class Odd:
        def to(self) -> None: ...

    with pytest.raises(ConfigError, match="type Odd has a method to"):
        to_device(Odd(), META)
