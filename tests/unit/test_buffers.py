"""The memory of received tensors: used again once nobody has them, and not before."""

import torch

from potluck.stages.pipeline import Buffers
from potluck.store.tensors import Header


def test_memory_of_a_tensor_is_used_again_once_nobody_holds_it() -> None:
    buffers = Buffers()
    header = Header(torch.float32, (64, 1024))
    first = buffers.take(header)
    place, part = first.data_ptr(), first[3:5]
    first.fill_(1)
    del first
    second = buffers.take(header)
    assert second.data_ptr() != place, "a view still holds the first"
    assert part.sum() == 2048
    del part
    third = buffers.take(header)
    assert third.data_ptr() == place and third.shape == (64, 1024)
    assert buffers.take(Header(torch.bfloat16, (128, 1024))).dtype == torch.bfloat16
    kept = [buffers.take(header) for _ in range(40)]
    del kept, second, third
    assert len(buffers._free) == 16


def test_memory_is_not_used_again_while_autograd_keeps_what_is_in_it() -> None:
    buffers = Buffers()
    header = Header(torch.float32, (1 << 16,))
    leaf = buffers.take(header).fill_(3.0).requires_grad_()
    loss = (leaf * leaf).sum()
    del leaf
    buffers.take(header).fill_(7.0)
    assert loss.grad_fn is not None
    saved = loss.grad_fn.next_functions[0][0]._saved_self  # type: ignore[union-attr]
    assert torch.equal(saved, torch.full((1 << 16,), 3.0))
