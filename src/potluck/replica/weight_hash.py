"""A hash of weights: the same for the same bits on every device, quick to take, and added up from pieces."""

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_BYTES = 4096

ROW_WORDS = ROW_BYTES // 8
"""Words of a row of a tensor's digest."""


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of every tensor's bits, the same for the same bits on every device."""
    return digest_and_quick_digest(tensors)[0]


def digest_and_quick_digest(tensors: Iterable[Tensor]) -> tuple[str, Tensor]:
    sums = [digest_sums(tensor) for tensor in tensors]
    return hash_sums(sums), join([found[:-ROW_WORDS] for found in sums])


@torch.no_grad()
def quick_digest(tensors: Iterable[Tensor]) -> Tensor:
    """Sums of rows only, computed where the tensors are: quicker than digest(), and sees any single flipped bit."""
    return join([_row_sums(tensor) for tensor in tensors])


def hash_sums(sums: Sequence[Tensor]) -> str:
    return hashlib.blake2b(join(sums).cpu().numpy().tobytes(), digest_size=16).hexdigest()


def join(sums: Sequence[Tensor]) -> Tensor:
    """The sums of several tensors end to end; of none, nothing: a stage may have no parameters."""
    return torch.cat(list(sums)) if sums else torch.zeros(0, dtype=torch.int64)


@torch.no_grad()
def digest_sums(tensor: Tensor) -> Tensor:
    """Compute the sums that a tensor's digest is of: its words are laid out in rows, and each row and each column is
    added up.

    Sums of integers, so that it runs at the speed of memory, where the tensor is, and is the same in any order. Words
    that changed so that their row's sum stayed lie in several columns, whose sums then did not.
    """
    return torch.cat([_row_sums(tensor), _column_sums(tensor)])


@torch.no_grad()
def digest_sums_of_piece(numbers: Tensor, start: int, size: int) -> Tensor:
    """Return what some numbers of a tensor of that size, laid flat, add to its sums."""
    at = start * numbers.itemsize
    first, count = at // ROW_BYTES, -(-size * numbers.itemsize // ROW_BYTES)
    sums = torch.zeros(count + ROW_WORDS, dtype=torch.int64, device=numbers.device)
    padded = F.pad(_bytes(numbers), (at - first * ROW_BYTES, 0)) if numbers.numel() else _bytes(numbers)
    rows = _row_sums(padded)
    sums[first : first + len(rows)] = rows
    sums[count:] = _column_sums(padded)
    return sums


def _row_sums(tensor: Tensor) -> Tensor:
    rows, rest = _rows(tensor)
    return torch.cat([rows.sum(dim=1), rest.sum(dim=1)]) if len(rest) else rows.sum(dim=1)


def _column_sums(tensor: Tensor) -> Tensor:
    rows, rest = _rows(tensor)
    return rows.sum(dim=0) + rest[0] if len(rest) else rows.sum(dim=0)


def _rows(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, words], without a copy; and what is left, filled up with zeros to one more row, if anything is."""
    raw = _bytes(tensor)
    raw = raw if raw.storage_offset() % 8 == 0 else raw.clone()  # a word must lie where words do
    whole = raw.numel() // ROW_BYTES * ROW_BYTES
    rest = F.pad(raw[whole:], (0, -raw.numel() % ROW_BYTES))
    return raw[:whole].view(torch.int64).view(-1, ROW_WORDS), rest.view(torch.int64).view(-1, ROW_WORDS)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
