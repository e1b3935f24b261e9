"""The digest of a model: the same whether it is whole, or in pieces whose sums are added."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.train.slices import digest, hash_sums, sums_of_piece


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=3), st.lists(st.integers(0, 3000), max_size=4))
def test_pieces_add_up_to_the_whole(sizes: list[int], cuts: list[int]) -> None:
    torch.manual_seed(sum(sizes))
    parameters = [torch.randn(size) for size in sizes]
    sums = []
    for parameter in parameters:
        at = sorted({0, parameter.numel(), *(cut for cut in cuts if cut < parameter.numel())})
        ranges = [(0, 0), *itertools.pairwise(at)]  # a rank may hold none
        found = [sums_of_piece(parameter[start:end], start, parameter.numel()) for start, end in ranges]
        sums.append(torch.stack(found).sum(dim=0))
    assert hash_sums(sums) == digest(parameters)


def test_a_flipped_bit_shows() -> None:
    parameter = torch.randn(2500)
    before = digest([parameter])
    for place in (0, 1023, 1024, 2499):
        parameter.view(torch.int32)[place] ^= 1
        assert digest([parameter]) != before
        parameter.view(torch.int32)[place] ^= 1
    assert digest([parameter]) == before
