"""Tensors in fewer bits, coded on the device where they are: the same bytes as coded_numbers.py on each of them.

No operation here is one that a device may fuse with its neighbour, or rounds in its own way: bits are equal everywhere.
"""

import math

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


@torch.no_grad()
def encode(coding: Coding, numbers: Tensor, out: Tensor | None = None) -> Tensor:
    """[coded_bytes], on the numbers' device. `out`: where they go."""
    flat = numbers.detach().reshape(-1).float()
    coded = flat.new_empty(coding.coded_bytes(len(flat)), dtype=torch.uint8) if out is None else out
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
    """As many numbers as `out` has, into it; it is flat."""
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
    return decode(coding, encode(coding, numbers), numbers)


def _encode_blocks(coding: Coding, blocks: Tensor, out: Tensor) -> None:
    records = out.view(len(blocks), coding.record_bytes)
    if coding.has_levels:
        _encode_levels(blocks, records)
        return
    scale = blocks.abs().amax(dim=1, keepdim=True).mul_(float(coding.inverse_top))
    bits = scale.to(torch.bfloat16)
    bits.masked_fill_(bits < LEAST_SCALE, 0.0)
    bits.view(torch.int16).masked_fill_(~scale.isfinite(), NAN_SCALE)
    wide = bits.float()
    inverse = torch.where(wide > 0, wide.reciprocal(), 0.0)
    found = (blocks * inverse).round_()
    if found.is_cuda or not math.isfinite(wide.sum()):  # elsewhere a look costs less than the work
        found.nan_to_num_(0.0, 0.0, 0.0)
    records[:, :2] = bits.view(torch.uint8)
    if coding.top == 127:
        records[:, 2:].view(torch.int8).copy_(found)
    else:
        low, high = torch.split(found.to(torch.int8).view(torch.uint8), coding.block // 2, dim=1)
        records[:, 2:] = (high << 4).add_(low).add_(8 * 17)  # bytes wrap around: the sum of both, each plus 8


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
        low, high = torch.split(out, coding.block // 2, dim=1)
        low.copy_(codes & 15).sub_(8)
        high.copy_(codes >> 4).sub_(8)
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
