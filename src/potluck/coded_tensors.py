"""Tensors in fewer bits, coded on the device where they are: the same bytes as coded_numbers.py on each of them.

On a CPU numpy does it, whose operations cost less where numbers are few. No operation here is one that a device may
fuse with its neighbour, or rounds in its own way: bits are equal everywhere.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from potluck.coded_numbers import (
    HALF_LEVEL,
    INFINITE_BITS,
    LEAST_LEVEL,
    LEAST_SCALE,
    LEVEL_BITS,
    LEVELS_BELOW,
    MOST_LEVEL,
    NAN_LEVEL,
    NAN_SCALE,
    SIZE_BITS,
    ZERO_CODE,
    Coding,
)

AT_ONCE = 1 << 18
"""Numbers: whole blocks of every coding."""


@torch.no_grad()
def encode(coding: Coding, numbers: Tensor, out: Tensor | None = None) -> Tensor:
    """[coded_bytes], on the numbers' device. `out`: where they go."""
    flat = numbers.detach().reshape(-1).float()
    coded = flat.new_empty(coding.coded_bytes(len(flat)), dtype=torch.uint8) if out is None else out
    if flat.is_cpu and coding.block > 1:
        coding.encode(flat.numpy(), coded.numpy())
        return coded
    return encode_on_device(coding, flat, coded)


def encode_on_device(coding: Coding, flat: Tensor, coded: Tensor) -> Tensor:
    if coding.block == 1:
        coded.view(torch.bfloat16).copy_(flat)
        return coded
    whole = len(flat) // coding.block
    if whole:
        _encode_blocks(coding, flat[: whole * coding.block].view(whole, -1), coded[: whole * coding.record_bytes])
    if rest := len(flat) - whole * coding.block:
        last = flat.new_zeros(1, coding.block)
        last[0, :rest] = flat[-rest:]
        _encode_blocks(coding, last, coded[whole * coding.record_bytes :])
    return coded


@torch.no_grad()
def decode(coding: Coding, coded: Tensor, out: Tensor) -> Tensor:
    """Decode as many numbers as `out` has, into it; it is flat."""
    if out.dtype is not torch.float32:
        return out.copy_(decode(coding, coded, torch.empty(len(out), device=out.device)))
    if out.is_cpu and coding.block > 1:
        coding.decode(coded.numpy(), out.numpy())
        return out
    return decode_on_device(coding, coded, out)


def decode_on_device(coding: Coding, coded: Tensor, out: Tensor) -> Tensor:
    if coding.block == 1:
        return out.copy_(coded.view(torch.bfloat16))
    whole = len(out) // coding.block
    if whole:
        place = out[: whole * coding.block].view(whole, -1)
        _decode_blocks(coding, coded[: whole * coding.record_bytes], place)
    if rest := len(out) - whole * coding.block:
        last = out.new_empty(1, coding.block)
        _decode_blocks(coding, coded[whole * coding.record_bytes :], last)
        out[-rest:] = last[0, :rest]
    return out


def round_(coding: Coding, numbers: Tensor) -> Tensor:
    """The numbers, which are flat, become what would arrive of them."""
    if numbers.device.type == "cpu" and numbers.dtype == torch.float32 and numbers.is_contiguous():
        # In numpy, a piece at a time that stays in the caches: a sixth of the time.
        floats = numbers.detach().numpy()
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is NaN afterwards, and found by others
            for first in range(0, len(floats), AT_ONCE):
                coding.round(floats[first : first + AT_ONCE])
        return numbers
    return decode(coding, encode(coding, numbers), numbers)


@torch.no_grad()
def round_pieces(
    coding: Coding, pieces: Sequence[tuple[int, Tensor]], total: int, maximum: Callable[[Tensor], object]
) -> None:
    """Round some pieces of `total` numbers, each with where it begins; other ranks hold the rest, and call this too.

    `maximum`: each number becomes the largest of all who do.
    """
    if coding.block == 1:
        for _, numbers in pieces:
            round_(coding, numbers)
        return
    largest = torch.zeros(-(-total // coding.block), device=pieces[0][1].device if pieces else "cpu")
    padded = [(start // coding.block, *_in_blocks(coding, start, numbers)) for start, numbers in pieces]
    for first, blocks, _ in padded:
        own = largest[first : first + len(blocks)]
        torch.maximum(own, blocks.abs().amax(dim=1).nan_to_num_(torch.inf, torch.inf), out=own)
    maximum(largest)
    scales = _scales(coding, largest[:, None])
    for (_, numbers), (first, blocks, inside) in zip(pieces, padded, strict=True):
        scale = scales[first : first + len(blocks)].float()
        found = (blocks * _inverse(scale)).round_().add_(0.0)  # no -0, which a whole number cannot be
        numbers.copy_(found.mul_(scale).view(-1)[inside])


def _in_blocks(coding: Coding, start: int, numbers: Tensor) -> tuple[Tensor, slice]:
    """[blocks, numbers of a block], with zeros before and after; and where the numbers are in it."""
    before = start % coding.block
    after = -(before + len(numbers)) % coding.block
    padded = torch.nn.functional.pad(numbers, (before, after))
    return padded.view(-1, coding.block), slice(before, before + len(numbers))


def _scales(coding: Coding, largest: Tensor) -> Tensor:
    """Return the blocks' scales as bf16."""
    scale = largest * float(coding.inverse_top)
    bits = scale.to(torch.bfloat16)
    bits.masked_fill_(bits < LEAST_SCALE, 0.0)
    bits.view(torch.int16).masked_fill_(~scale.isfinite(), NAN_SCALE)
    return bits


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale.reciprocal(), 0.0)


def _encode_blocks(coding: Coding, blocks: Tensor, out: Tensor) -> None:
    records = out.view(len(blocks), coding.record_bytes)
    if coding.has_levels:
        _encode_levels(blocks, records)
        return
    largest = blocks.amax(dim=1, keepdim=True).maximum(blocks.amin(dim=1, keepdim=True).neg_())
    bits = _scales(coding, largest)
    wide = bits.float()
    multiples = (blocks * _inverse(wide)).round_()
    if multiples.is_cuda or not math.isfinite(wide.sum()):  # elsewhere a look costs less than the work
        multiples.nan_to_num_(0.0, 0.0, 0.0)
    records[:, :2] = bits.view(torch.uint8)
    if coding.top == 127:
        records[:, 2:].view(torch.int8).copy_(multiples)
    else:
        low, high = torch.split(multiples.to(torch.int8).view(torch.uint8), coding.block // 2, dim=1)
        records[:, 2:] = torch.add(low, high, alpha=16).add_(8 * 17)  # bytes wrap around: each plus 8


def _decode_blocks(coding: Coding, coded: Tensor, out: Tensor) -> None:
    records = coded.view(len(out), coding.record_bytes)
    if coding.has_levels:
        _decode_levels(records, out)
        return
    scale = records[:, :2].contiguous().view(torch.bfloat16).float()
    codes = records[:, 2:]
    if coding.top == 127:
        out.copy_(codes.view(torch.int8))
    else:
        codes = codes.contiguous()  # else shifts take ten times as long
        low, high = torch.split(out, coding.block // 2, dim=1)
        low.copy_(codes & 15)
        high.copy_(codes >> 4)
        out.sub_(8)
    out.mul_(scale)


def _encode_levels(blocks: Tensor, records: Tensor) -> None:
    bits = blocks.view(torch.int32)
    levels = (bits + HALF_LEVEL).bitwise_right_shift_(LEVEL_BITS).clamp_(LEAST_LEVEL, MOST_LEVEL)
    levels.masked_fill_(bits <= 0, 0)
    tops = levels.amax(dim=1, keepdim=True)
    tops.masked_fill_((bits & SIZE_BITS).amax(dim=1, keepdim=True) >= INFINITE_BITS, NAN_LEVEL)
    codes = (tops - levels).clamp_(max=LEVELS_BELOW)
    codes.masked_fill_(levels == 0, ZERO_CODE).masked_fill_(tops == NAN_LEVEL, 0)
    records[:, :2] = tops.to(torch.int16).view(torch.uint8)
    records[:, 2:] = codes


def _decode_levels(records: Tensor, out: Tensor) -> None:
    tops = records[:, :2].contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    codes = records[:, 2:]
    levels = (tops - codes).clamp_(min=LEAST_LEVEL)
    levels.masked_fill_(codes == ZERO_CODE, 0).masked_fill_(tops > MOST_LEVEL, NAN_LEVEL)
    out.view(torch.int32).copy_(levels.bitwise_left_shift_(LEVEL_BITS))
