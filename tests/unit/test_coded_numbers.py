"""Numbers in fewer bits: the error has a bound, what was rounded stays as it is, and devices give the same bits."""

import math
import struct
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from potluck import coded_tensors
from potluck.coded_numbers import CODINGS, LEAST_SCALE, LOG8, WIRES, Coding, coding_of

FLOATS = arrays.arrays(
    np.float32,
    st.integers(0, 700),
    elements=st.floats(-(2.0**120), 2.0**120, width=32) | st.floats(-1, 1, width=32) | st.just(0.0),
)
ANY_FLOATS = arrays.arrays(np.float32, st.integers(1, 300), elements=st.floats(width=32))
wire_ = pytest.mark.parametrize("coding", CODINGS.values(), ids=lambda coding: coding.wire)
coding_ = pytest.mark.parametrize("coding", [*CODINGS.values(), LOG8], ids=lambda coding: coding.wire)


def encoded(coding: Coding, numbers: np.ndarray) -> bytes:
    return coding.encode(numbers, np.empty(coding.coded_bytes(len(numbers)), np.uint8)).tobytes()


def decoded(coding: Coding, coded: bytes, count: int) -> np.ndarray:
    return coding.decode(np.frombuffer(coded, np.uint8), np.empty(count, np.float32))


def on_device(coding: Coding, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Coded, and decoded again, by the operations of devices, here on a CPU."""
    place = torch.empty(coding.coded_bytes(len(tensor)), dtype=torch.uint8)
    coded = coded_tensors.encode_on_device(coding, tensor, place)
    return coded, coded_tensors.decode_on_device(coding, coded, torch.empty(len(tensor)))


def test_there_is_one_for_each_wire_but_fp32() -> None:
    assert coding_of("fp32") is None
    assert [wire for wire in WIRES if coding_of(wire)] == list(CODINGS)
    assert [coding.coded_bytes(1 << 20) for coding in CODINGS.values()] == [2 << 20, 258 << 12, 34 << 14]


@wire_
@given(numbers=FLOATS)
def test_the_error_has_a_bound(coding: Coding, numbers: np.ndarray) -> None:
    found = decoded(coding, encoded(coding, numbers), len(numbers))
    for first in range(0, len(numbers), coding.block):
        block, back = (each[first : first + coding.block].astype(np.float64) for each in (numbers, found))
        largest = np.abs(block).max()
        step = largest / coding.top * (1 + 2**-7) + 254 * LEAST_SCALE if coding.top else 0.0
        limit = np.abs(block) * 2.0**-8 + 2.0**-133 if not coding.top else step / 2
        assert (np.abs(block - back) <= limit).all()


@coding_
@given(numbers=FLOATS)
def test_what_was_rounded_is_not_rounded_again(coding: Coding, numbers: np.ndarray) -> None:
    once = encoded(coding, numbers)
    back = decoded(coding, once, len(numbers))
    assert encoded(coding, back) == once
    assert coding.round(numbers.copy()).tobytes() == back.tobytes()


@coding_
@given(numbers=ANY_FLOATS)
def test_what_is_not_finite_stays_so(coding: Coding, numbers: np.ndarray) -> None:
    found = decoded(coding, encoded(coding, numbers), len(numbers))
    assert not np.isfinite(found[~np.isfinite(numbers)]).any()
    assert encoded(coding, found) == encoded(coding, numbers)


@coding_
@given(numbers=FLOATS)
def test_tensors_have_the_same_bytes(coding: Coding, numbers: np.ndarray) -> None:
    tensor = torch.from_numpy(numbers.copy())
    coded, back = on_device(coding, tensor)
    assert coded.numpy().tobytes() == encoded(coding, numbers)
    expected = decoded(coding, encoded(coding, numbers), len(numbers))
    assert back.numpy().tobytes() == expected.tobytes()
    assert coded_tensors.round_(coding, tensor).numpy().tobytes() == expected.tobytes()


@coding_
@given(numbers=ANY_FLOATS)
def test_tensors_that_are_not_finite_too(coding: Coding, numbers: np.ndarray) -> None:
    expected = decoded(coding, encoded(coding, numbers), len(numbers))
    assert np.array_equal(coding.round(numbers.copy()), expected, equal_nan=True)
    for found in (
        coded_tensors.round_(coding, torch.from_numpy(numbers.copy())),
        on_device(coding, torch.from_numpy(numbers))[1],
    ):
        assert np.array_equal(found.numpy(), expected, equal_nan=True)


@wire_
@given(numbers=ANY_FLOATS | FLOATS, cuts=st.lists(st.integers(0, 700), max_size=4))
def test_pieces_are_rounded_as_the_whole_is(coding: Coding, numbers: np.ndarray, cuts: list[int]) -> None:
    expected = on_device(coding, torch.from_numpy(numbers.copy()))[1].numpy()
    pieces, at = [], 0
    for end in sorted([*(cut for cut in cuts if cut < len(numbers)), len(numbers)]):
        pieces.append((at, torch.from_numpy(numbers[at:end].copy())))
        at = end
    mine, theirs = pieces[::2], [piece for piece in pieces[1::2] if len(piece[1])]
    heard: list[torch.Tensor] = []
    with suppress(Stop):
        coded_tensors.round_pieces(coding, theirs, len(numbers), partial(stop_with, heard))
    coded_tensors.round_pieces(coding, mine, len(numbers), lambda own: [own.copy_(own.maximum(t)) for t in heard])
    for start, piece in mine:
        found = piece.numpy()
        assert np.array_equal(found, expected[start : start + len(found)], equal_nan=True)
        assert coding.block == 1 or not np.signbit(found[found == 0]).any()


class Stop(Exception):
    pass


def stop_with(heard: list[torch.Tensor], largest: torch.Tensor) -> None:
    heard.append(largest.clone())
    raise Stop


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@coding_
def test_a_gpu_gives_the_same_bytes(coding: Coding) -> None:
    numbers = torch.randn(1_000_001) * torch.logspace(-30, 30, 1_000_001)
    numbers[::50_000] = torch.inf
    numbers[70_000:90_000] = 0.0
    coded = coded_tensors.encode(coding, numbers.cuda())
    here = coded_tensors.encode(coding, numbers)
    assert torch.equal(coded.cpu(), here)
    back = [coded_tensors.decode(coding, each, torch.empty(len(numbers), device=each.device)) for each in (coded, here)]
    torch.testing.assert_close(back[0].cpu(), back[1], rtol=0, atol=0, equal_nan=True)


def judge(wire: str, numbers: list[float]) -> list[float]:
    """By the definition, number by number, in exact arithmetic of Python's doubles."""

    def to_bf16(value: float) -> float:
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        return struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16))[0]

    if wire == "bf16":
        return [to_bf16(value) for value in numbers]
    if wire == "log8":
        return [value for first in range(0, len(numbers), 256) for value in in_levels(numbers[first : first + 256])]
    block, top = {"int8": (256, 127), "int4": (64, 7)}[wire]
    found = []
    for first in range(0, len(numbers), block):
        part = numbers[first : first + block]
        scale = to_bf16(float(np.float32(max(map(abs, part))) * np.float32(1 / top)))
        found += [round(float(np.float32(value) * (np.float32(1) / np.float32(scale)))) * scale for value in part]
    return found


def in_levels(block: list[float]) -> list[float]:
    def level(value: float) -> int:
        digits, power = math.frexp(value)
        return max(8 * -126, 8 * (power - 2) + math.floor(16 * digits + 0.5))

    top = max((level(value) for value in block if value > 0), default=0)
    levels = [max(level(value), top - 254) if value > 0 else None for value in block]
    return [math.ldexp(8 + each % 8, each // 8 - 3) if each is not None else 0.0 for each in levels]


@coding_
def test_the_format_is_what_it_says(coding: Coding) -> None:
    draw = np.random.default_rng(5)
    numbers = draw.standard_normal(1000).astype(np.float32)
    if coding is LOG8:
        numbers *= np.exp2(draw.uniform(-60, 0, 1000)).astype(np.float32)
        numbers[::9] *= np.float32(2.0**-80)
        numbers[::7] = 0.0
    found = decoded(coding, encoded(coding, numbers), len(numbers))
    assert found.tolist() == judge(coding.wire, numbers.tolist())
    assert len(encoded(coding, numbers)) == coding.coded_bytes(1000)


@given(numbers=FLOATS)
def test_what_steps_are_divided_by_is_near_or_larger_and_never_0(numbers: np.ndarray) -> None:
    numbers = np.abs(numbers)
    found = decoded(LOG8, encoded(LOG8, numbers), len(numbers))
    assert ((found > 0) == (numbers > 0)).all()
    is_far = np.zeros(len(numbers), bool)
    for first in range(0, len(numbers), LOG8.block):
        block = numbers[first : first + LOG8.block].astype(np.float64)
        is_far[first : first + LOG8.block] = block < max(block.max() * 2.0**-31, 2.0**-126)
    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.where(numbers > 0, found.astype(np.float64) / numbers - 1, 0.0)
    assert (np.abs(off[~is_far]) <= 1 / 16).all() and (off[is_far] >= -1 / 16).all()


@given(arrays.arrays(np.uint8, st.integers(1, 3).map(lambda blocks: blocks * LOG8.record_bytes)))
def test_any_bytes_are_numbers_that_stay_as_they_are(coded: np.ndarray) -> None:
    count = len(coded) // LOG8.record_bytes * LOG8.block
    found = decoded(LOG8, coded.tobytes(), count)
    tensors = coded_tensors.decode_on_device(LOG8, torch.from_numpy(coded.copy()), torch.empty(count)).numpy()
    assert found.tobytes() == tensors.tobytes() and not (found < 0).any() and not np.isinf(found).any()
    assert LOG8.round(found.copy()).tobytes() == found.tobytes()
