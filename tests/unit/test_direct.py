"""The memory of received tensors: used again once nobody has them, and not before."""

import torch

from potluck.stages.channel import Header
from potluck.stages.direct import REUSED_BYTES, _Memory

FLOATS = REUSED_BYTES // 4


def test_memory_is_used_again_once_a_tensor_is_gone() -> None:
    memory = _Memory()
    first = memory.empty(Header(torch.float32, (2, FLOATS)))
    where = first.data_ptr()
    del first
    second = memory.empty(Header(torch.bfloat16, (4, FLOATS)))
    assert second.data_ptr() == where and second.shape == (4, FLOATS) and second.dtype is torch.bfloat16


def test_memory_is_not_used_again_while_anything_is_made_from_it() -> None:
    memory = _Memory()
    leaf = memory.empty(Header(torch.float32, (FLOATS,))).fill_(3.0).requires_grad_()
    loss = (leaf * leaf).sum()  # autograd keeps it
    del leaf
    memory.empty(Header(torch.float32, (FLOATS,))).fill_(7.0)
    assert loss.grad_fn is not None
    saved = loss.grad_fn.next_functions[0][0]._saved_self  # type: ignore[union-attr]
    assert torch.equal(saved, torch.full((FLOATS,), 3.0))


def test_memory_holds_no_more_than_was_in_use_at_once() -> None:
    memory = _Memory()
    for size in range(1, 9):
        memory.empty(Header(torch.float32, (size, FLOATS)))
    assert [block.nbytes for block, _ in memory._blocks] == [8 * REUSED_BYTES]
    memory.empty(Header(torch.float32, (FLOATS,)))
    assert [block.nbytes for block, _ in memory._blocks] == [8 * REUSED_BYTES]
