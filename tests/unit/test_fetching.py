"""What processes fetch arrives as it was read, whatever it is made of: small tensors in the pipe, large ones shared."""

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from potluck.data.rows import MOST_IN_LINE, Fetcher, FetchOptions

CPU = torch.device("cpu")


def batches() -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, 8, generator=draw)
    large = torch.arange(MOST_IN_LINE)
    same = torch.arange(4)
    return [
        numbers,
        {"text": ["a", "b"], "half": numbers.bfloat16(), "nested": (numbers > 0, [torch.tensor(3), None])},
        (numbers.t(), numbers[:, ::2], numbers[:0], torch.empty(0, dtype=torch.float16), numbers.to(torch.complex64)),
        (torch.view_as_complex(numbers.reshape(3, 4, 2)).conj(), same.to_sparse()),
        [large, large[: MOST_IN_LINE // 8], {"same": same, "again": same}],
        torch.nn.Parameter(torch.ones(2)),
    ]


class Given(Dataset[Any]):
    def __getitem__(self, number: int) -> Any:
        return batches()[number]


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_batches_of_any_tensors_arrive_as_they_were_read() -> None:
    expected = batches()
    fetcher = Fetcher(Given(), 2, FetchOptions(), CPU)
    found = list(fetcher.read(range(len(expected))))
    fetcher.close()
    assert_same(found, expected)
    found[0].add_(1)  # memory of its own, which may be written to
    assert found[4][2]["same"] is found[4][2]["again"]
    assert_same(found[1:], expected[1:])


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape, found.layout) == (expected.dtype, expected.shape, expected.layout)
        assert found.requires_grad == expected.requires_grad
        assert torch.equal(found.to_dense().resolve_conj(), expected.to_dense().resolve_conj())
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_same(list(found.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected
