"""Tensors straight from one worker to another: with their header in one message if they are small, or after it."""

import re

import pytest
import torch
from torch import Tensor

from potluck.errors import TheirProtocolError
from potluck.link.link import connect
from potluck.stages import direct
from potluck.stages.direct import AHEAD, SMALL_BYTES, GroupChannel, pack, unpack
from potluck.stages.pipeline import Label
from potluck.store.tensors import Header
from tests.ranks import RankFailed, run_ranks

CPU = torch.device("cpu")


def tensors() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    edge = torch.randn(SMALL_BYTES // 4, generator=draw)  # the largest that comes with its header
    return [
        edge,
        torch.randn(SMALL_BYTES // 4 + 1, generator=draw),
        torch.randn(3, 1024, 512, generator=draw),
        torch.randn(5, 7, generator=draw).bfloat16(),
        torch.randn(64, 32, generator=draw).t(),
        torch.randn(2048, 512, generator=draw)[:, ::2],
        torch.tensor(2.5, dtype=torch.float64),
        torch.empty(0, 3),
        torch.randint(0, 2, (9,), generator=draw).bool(),
        torch.randint(0, 99, (4, 4), generator=draw),
        torch.randn(6, generator=draw, dtype=torch.complex64),
    ] * 3  # more than are awaited at once


def pass_on(shift: int) -> list[Tensor]:
    """Both send all of them, and receive all of the other's; `shift`: a worker that counts otherwise."""
    link = connect(CPU, 30)
    channel = GroupChannel(None, CPU, rank=link.rank, workers=2)
    sent, found = tensors(), []
    assert len(sent) > AHEAD
    for step in range(2):
        coming = [Label(step, "activation", 1 - link.rank, link.rank, number) for number in range(len(sent))]
        channel.expect(coming)
        for number, tensor in enumerate(sent):
            channel.send(Label(step, "activation", link.rank, 1 - link.rank, number + shift * link.rank), tensor)
        found = [channel.receive(label) for label in coming]
        channel.flush()
    channel.close()
    return found


def test_tensors_arrive_as_they_were_sent() -> None:
    for found in run_ranks(2, pass_on, 0):
        for one, other in zip(found, tensors(), strict=True):
            assert one.dtype is other.dtype and torch.equal(one, other)


def test_workers_that_follow_different_plans_are_told_so() -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, pass_on, 1)
    told = re.search(
        r"Instead of the activation (\d) of step 0 .* came the activation (\d) of step 0", str(failed.value)
    )
    assert told is not None, failed.value
    awaited, came = map(int, told.groups())  # several are awaited at once: whichever thread looks first says so
    assert came == awaited + 1


def test_a_header_is_checked_before_memory_is_taken() -> None:
    label = Label(3, "gradient", 1, 0, 2)
    data = pack(label, Header(torch.float32, (4, 5)))
    assert len(data) == direct.HEADER_BYTES
    assert unpack(data, label) == Header(torch.float32, (4, 5))
    with pytest.raises(TheirProtocolError, match="is no header"):
        unpack(b"\1" * len(data), label)
    huge = pack(label, Header(torch.float32, (1 << 20, 1 << 20)))
    with pytest.raises(TheirProtocolError, match="is the most"):
        unpack(huge, label)
