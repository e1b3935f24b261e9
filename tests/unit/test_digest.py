"""The digest of a model: the same whether it is whole, or in pieces whose sums are added; and no flip escapes it."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.replica.weight_hash import digest, digest_and_quick_digest, digest_sums_of_piece, hash_sums, quick_digest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=3), st.lists(st.integers(0, 3000), max_size=4))
def test_pieces_add_up_to_the_whole(sizes: list[int], cuts: list[int]) -> None:
    torch.manual_seed(sum(sizes))
    parameters = [torch.randn(size) for size in sizes]
    sums = []
    for parameter in parameters:
        at = sorted({0, parameter.numel(), *(cut for cut in cuts if cut < parameter.numel())})
        ranges = [(0, 0), *itertools.pairwise(at)]  # a rank may hold none
        found = [digest_sums_of_piece(parameter[start:end], start, parameter.numel()) for start, end in ranges]
        sums.append(torch.stack(found).sum(dim=0))
    assert hash_sums(sums) == digest(parameters)


def test_nothing_has_a_digest() -> None:
    assert digest([]) == hash_sums([]) != digest([torch.zeros(1)]) and quick_digest([]).numel() == 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.bfloat16, torch.bool, torch.int8])
def test_any_type_has_a_digest_also_in_pieces(dtype: torch.dtype) -> None:
    numbers = torch.randn(3, 1001).to(dtype)
    pieces = [digest_sums_of_piece(numbers.view(-1)[a:b], a, 3003) for a, b in ((0, 7), (7, 7), (7, 3003))]
    assert digest([numbers]) == digest([numbers.t().contiguous().t()]) == hash_sums([torch.stack(pieces).sum(dim=0)])
    assert digest([numbers[0, 0]]) == digest([numbers[0, :1]])


def test_where_a_tensor_lies_does_not_matter() -> None:
    whole = torch.randn(3001)
    for start in range(4):
        assert digest([whole[start:]]) == digest([whole[start:].clone()])


def flip(words: torch.Tensor, place: int, bit: int) -> None:
    words[place] ^= 1 << bit if bit < 31 else -(1 << 31)


def test_a_flipped_bit_shows() -> None:
    parameter = torch.randn(2500)
    before, seen = digest_and_quick_digest([parameter])
    words = parameter.view(torch.int32)
    for place, bit in itertools.product((0, 1, 1023, 1024, 2047, 2048, 2499), range(32)):
        flip(words, place, bit)
        assert digest([parameter]) != before and not torch.equal(quick_digest([parameter]), seen), (place, bit)
        flip(words, place, bit)
    assert digest([parameter]) == before and torch.equal(quick_digest([parameter]), seen)


@given(st.integers(0, 2499), st.integers(0, 2499), st.integers(0, 31), st.booleans())
def test_two_flips_that_would_make_up_for_each_other_show(a: int, b: int, bit: int, up: bool) -> None:
    """The same bit of two words, one set and one cleared, or two signs: the sum of a row cannot tell."""
    parameter = torch.zeros(2500)
    words = parameter.view(torch.int32)
    if not up and a != b:
        flip(words, b, bit)
    before = digest([parameter])
    flip(words, a, bit)
    flip(words, b, bit)
    assert (digest([parameter]) != before) == (a != b)


@pytest.mark.parametrize("seed", range(20))
def test_a_few_random_flips_show(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    parameter = torch.randn(5000, generator=draw)
    before, words = digest([parameter]), parameter.view(torch.int32)
    for count in (2, 3, 5):
        places = torch.randperm(5000, generator=draw)[:count].tolist()
        bits = torch.randint(0, 32, (count,), generator=draw).tolist()
        for _ in range(2):  # there, and back
            for place, bit in zip(places, bits, strict=True):
                flip(words, place, bit)
            assert (digest([parameter]) == before) == (_ == 1)


@pytest.mark.parametrize("device", DEVICES)
def test_the_digest_is_that_of_plain_arithmetic_on_every_device(device: str) -> None:
    """As docs/protocol.md has it, in Python's own integers."""
    import hashlib

    tensors = [torch.randn(1500), torch.arange(7), torch.tensor([True, False]), torch.tensor(3.5, dtype=torch.bfloat16)]
    raw = b""
    for tensor in tensors:
        data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        data += bytes(-len(data) % 4096)
        words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
        rows = [sum(words[at : at + 512]) for at in range(0, len(words), 512)]
        columns = [sum(words[at::512]) for at in range(512)]
        raw += b"".join((number % 2**64).to_bytes(8, "little") for number in rows + columns)
    expected = hashlib.blake2b(raw, digest_size=16).hexdigest()
    assert digest([tensor.to(device) for tensor in tensors]) == expected
