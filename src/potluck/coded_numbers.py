"""Numbers in fewer bits: what replicas send each other, where `wire` is not fp32. Here in numpy.

coded_tensors.py is the same for tensors, with the same bytes on every device.

    bf16   the upper half of a float32, rounded to nearest
    int8   blocks of 256: a scale in bf16, then each number as a multiple of it, from -127 to 127
    int4   blocks of 64: a scale in bf16, then two multiples to a byte, from -7 to 7, each plus 8: in the lower halves
           the block's first 32 numbers, in the upper ones the rest
    log8   for what steps are divided by, which is never negative, where all else travels as int8 or int4. Blocks of
           256: the level of the largest number in two bytes, then how many levels each number is below that, from 0 to
           254, which stands for all that is smaller; 255: it is 0. There are eight levels from one power of two to the
           next: a level is the upper 12 bits of a float32, rounded, from 2**-126 up

The last block is filled up with zeros. What was coded and decoded is coded to the same bytes again. A number that is
not finite makes its whole block NaN. In int8 and int4 a block whose numbers are all below 1e-28 or so becomes zeros; in
log8 only zeros do, and what is negative. Stateless, pure.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Octets = npt.NDArray[np.uint8]

Wire = Literal["fp32", "bf16", "int8", "int4"]
WIRES: tuple[Wire, ...] = get_args(Wire)
AskedWire = Literal["fp32", "bf16", "int8", "int4", "auto"]
"""Wires that a person may ask for; auto: what the run finds out."""

LEAST_SCALE = 2.0**-100
"""A block with a smaller scale is zeros: below 2**-126 numbers lose digits, and some devices drop them."""
NAN_SCALE = 0x7FC0

LEVEL_BITS = 20
"""Bits of a float32 below its level."""
HALF_LEVEL = 1 << LEVEL_BITS - 1
LEAST_LEVEL, MOST_LEVEL, NAN_LEVEL = 0x008, 0x7F7, 0x7FC
"""Levels of the smallest number that has all its digits, of the largest, and of NaN."""
LEVELS_BELOW, ZERO_CODE = 254, 255
INFINITE_BITS, SIZE_BITS = 0x7F80_0000, 0x7FFF_FFFF


@dataclass(frozen=True, slots=True)
class Coding:
    wire: Wire | Literal["log8"]
    number: int
    """How messages name it."""
    block: int
    """Numbers that share a scale; 1: they need none."""
    record_bytes: int
    """Bytes of one block."""
    top: int = 0
    """The largest multiple of the scale; 0: there is no scale."""
    has_levels: bool = False
    """Whether numbers are how far they are below the block's largest, and never negative."""

    @property
    def inverse_top(self) -> np.float32:
        """Multiplied with, never divided by: a division by a constant is rounded otherwise on some devices."""
        return np.float32(1.0 / self.top)

    @property
    def of_divisors(self) -> "Coding":
        """How what steps are divided by travels beside: of that, what is small beside its neighbours must not be 0."""
        return LOG8 if self.top else self

    def coded_bytes(self, count: int) -> int:
        return -(-count // self.block) * self.record_bytes

    def encode(self, numbers: Floats, out: Octets) -> Octets:
        """Into the first bytes of `out`, which are returned."""
        out = out[: self.coded_bytes(len(numbers))]
        if self.block == 1:
            out.view(np.uint16)[:] = _to_bf16(numbers)
            return out
        whole = len(numbers) // self.block
        if whole:
            self._encode_blocks(numbers[: whole * self.block].reshape(whole, -1), out[: whole * self.record_bytes])
        if rest := len(numbers) - whole * self.block:
            last = np.zeros((1, self.block), np.float32)
            last[0, :rest] = numbers[-rest:]
            self._encode_blocks(last, out[whole * self.record_bytes :])
        return out

    def decode(self, coded: Octets, out: Floats) -> Floats:
        """Decode as many numbers as `out` has, into it."""
        if self.block == 1:
            np.left_shift(coded.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
            return out
        whole = len(out) // self.block
        if whole:
            self._decode_blocks(coded[: whole * self.record_bytes], out[: whole * self.block].reshape(whole, -1))
        if rest := len(out) - whole * self.block:
            last = np.empty((1, self.block), np.float32)
            self._decode_blocks(coded[whole * self.record_bytes :], last)
            out[-rest:] = last[0, :rest]
        return out

    def round(self, numbers: Floats) -> Floats:
        """The numbers become what would arrive of them."""
        if self.block == 1:
            np.left_shift(_to_bf16(numbers), 16, out=numbers.view(np.uint32), dtype=np.uint32)
            return numbers
        whole = len(numbers) // self.block * self.block
        if whole:
            self._round_blocks(numbers[:whole].reshape(-1, self.block))
        if whole < len(numbers):
            last = np.zeros((1, self.block), np.float32)
            last[0, : len(numbers) - whole] = numbers[whole:]
            self._round_blocks(last)
            numbers[whole:] = last[0, : len(numbers) - whole]
        return numbers

    def _scales(self, blocks: Floats) -> npt.NDArray[np.uint16]:
        """[blocks], as the bits of bf16."""
        largest = np.maximum.reduceat(np.abs(blocks.reshape(-1)), np.arange(0, blocks.size, self.block))
        scale = largest * self.inverse_top
        bits = _to_bf16(scale)
        bits[~np.isfinite(scale)] = NAN_SCALE
        bits[_from_bf16(bits) < LEAST_SCALE] = 0
        return bits

    def _multiples(self, blocks: Floats, scale: Floats, out: Floats) -> Floats:
        """Whole numbers, as floats. Of a block that is not finite, they are 0 or NaN."""
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        with np.errstate(invalid="ignore"):  # an infinity times 0, in a block that becomes NaN
            np.multiply(blocks, inverse[:, None], out=out)
        return np.rint(out, out=out)

    def _encode_blocks(self, blocks: Floats, out: Octets) -> None:
        records = out.reshape(len(blocks), self.record_bytes)
        bits = self._scales(blocks)
        multiples = self._multiples(blocks, _from_bf16(bits), np.empty_like(blocks))
        if (bits == NAN_SCALE).any():
            np.nan_to_num(multiples, copy=False, posinf=0.0, neginf=0.0)
        records[:, :2] = bits.view(np.uint8).reshape(-1, 2)
        if self.top == 127:
            np.copyto(records[:, 2:].view(np.int8), multiples, casting="unsafe")
        else:
            halves = multiples.astype(np.int8).view(np.uint8).reshape(len(blocks), 2, -1)
            codes = np.left_shift(halves[:, 1], 4)
            np.add(codes, halves[:, 0], out=codes)  # bytes wrap around: the sum of both, each plus 8
            np.add(codes, 8 * 17, out=records[:, 2:])

    def _decode_blocks(self, coded: Octets, out: Floats) -> None:
        records = coded.reshape(len(out), self.record_bytes)
        scale = _from_bf16(np.ascontiguousarray(records[:, :2]).view(np.uint16)[:, 0])
        if self.top == 127:
            np.copyto(out, records[:, 2:].view(np.int8))
        else:
            half, codes = self.block // 2, records[:, 2:]
            halves = np.empty((len(out), 2, half), np.uint8)
            np.bitwise_and(codes, 15, out=halves[:, 0])
            np.right_shift(codes, 4, out=halves[:, 1])
            np.subtract(halves, 8, out=halves)  # wraps around, as int8 does
            np.copyto(out, halves.view(np.int8).reshape(out.shape))
        np.multiply(out, scale[:, None], out=out)

    def _round_blocks(self, blocks: Floats) -> None:
        scale = _from_bf16(self._scales(blocks))
        self._multiples(blocks, scale, blocks)
        np.add(blocks, np.float32(0), out=blocks)  # no -0, which a whole number cannot be
        np.multiply(blocks, scale[:, None], out=blocks)


@dataclass(frozen=True, slots=True)
class LevelCoding(Coding):
    """Codes non-negative numbers by levels, with whole numbers alone: no device can round them in its own way."""

    has_levels: bool = True

    def _encode_blocks(self, blocks: Floats, out: Octets) -> None:
        levels, tops = self._levels(blocks)
        codes = np.minimum(tops[:, None] - levels, LEVELS_BELOW)
        codes[levels == 0] = ZERO_CODE
        codes[tops == NAN_LEVEL] = 0
        records = out.reshape(len(blocks), self.record_bytes)
        records[:, :2] = tops.astype("<u2").view(np.uint8).reshape(-1, 2)
        records[:, 2:] = codes

    def _decode_blocks(self, coded: Octets, out: Floats) -> None:
        records = coded.reshape(len(out), self.record_bytes)
        tops = np.ascontiguousarray(records[:, :2]).view("<u2").astype(np.int32)
        codes = records[:, 2:]
        levels = np.maximum(tops - codes, LEAST_LEVEL)
        levels[codes == ZERO_CODE] = 0
        levels[tops[:, 0] > MOST_LEVEL] = NAN_LEVEL
        np.left_shift(levels, LEVEL_BITS, out=out.view(np.int32))

    def _round_blocks(self, blocks: Floats) -> None:
        levels, tops = self._levels(blocks)
        np.maximum(levels, tops[:, None] - LEVELS_BELOW, out=levels, where=levels > 0)
        levels[tops == NAN_LEVEL] = NAN_LEVEL
        np.left_shift(levels, LEVEL_BITS, out=blocks.view(np.int32))

    def _levels(self, blocks: Floats) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return the level of each number, 0 where it is none; and the level of each block's largest."""
        bits = blocks.view(np.int32)
        levels = np.right_shift(bits + np.int32(HALF_LEVEL), LEVEL_BITS)
        np.clip(levels, LEAST_LEVEL, MOST_LEVEL, out=levels)
        levels *= bits > 0
        tops: npt.NDArray[np.int32] = levels.max(axis=1)
        tops[(bits & np.int32(SIZE_BITS)).max(axis=1) >= INFINITE_BITS] = NAN_LEVEL
        return levels, tops


CODINGS: dict[str, Coding] = {
    "bf16": Coding("bf16", 1, 1, 2),
    "int8": Coding("int8", 2, 256, 2 + 256, 127),
    "int4": Coding("int4", 3, 64, 2 + 32, 7),
}
LOG8 = LevelCoding("log8", 4, 256, 2 + 256)


def coding_of(wire: str) -> Coding | None:
    """None: numbers travel as they are, in fp32."""
    return CODINGS.get(wire)


def _to_bf16(numbers: Floats) -> npt.NDArray[np.uint16]:
    """Rounded to nearest, ties to even."""
    bits: npt.NDArray[Any] = np.ascontiguousarray(numbers).view(np.uint32)
    odd = (bits >> 16) & 1
    odd += 0x7FFF
    odd += bits
    odd >>= 16
    found = odd.astype(np.uint16)
    if (is_nan := np.isnan(numbers)).any():  # whose bits might have wrapped around
        found[is_nan] = NAN_SCALE
    return found


def _from_bf16(bits: npt.NDArray[np.uint16]) -> Floats:
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
