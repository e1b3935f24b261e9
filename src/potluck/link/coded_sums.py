"""CodedSums: sums over a process group of which only coded numbers travel; coded_numbers.py says how.

    shares   a tensor's blocks, cut into as many equal shares as there are ranks
    swap     each rank sends each other rank its share of what it has, coded
    spread   each adds up the share that is its own, in order of rank, and sends it to all others, coded once more

So a rank sends at most twice the coded bytes, however many there are, and all of them decode the same bytes: they hold
the same bits. Two ranks send each other all that they have, in as many bytes, and each adds up both: nothing is coded
twice, and nobody waits for an answer.

Over NCCL the collectives are put on a stream, beside the backward. Gloo's work has to be waited for, by a thread for
each sum: one sends out while another waits for a rank that is not so far. Their messages have tags: ranks need not
agree on their order among the collectives that other threads begin.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from potluck.coded_numbers import Coding
from potluck.coded_tensors import decode, encode
from potluck.sharding.collectives import add_up, is_nccl
from potluck.store.sessions import Background

MOST_TAGS = 1 << 20
AT_ONCE = 16
"""Sums whose messages are under way; further ones wait for the first of them."""


class CodedSums:
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._started = 0
        self.threads = Background(AT_ONCE, "coded sums")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.sent_bytes = 0
        """By this rank, in all sums so far."""

    def start(self, tensor: Tensor, coding: Coding) -> "_CodedSum":
        """Begins to replace a flat tensor by its sum over all ranks. Every rank starts the same sums in this order."""
        begun = _CodedSum(self, tensor, coding, self._started)
        self._started += 1
        begun.start()
        return begun

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class ByCollectives:
    """How coded shares travel where all ranks begin them in one order. They are rows, by rank: [ranks, bytes of a
    share]."""

    def __init__(self, sums: CodedSums) -> None:
        self._group, self._world = sums.group, sums.world

    def swap(self, coded: Tensor) -> Tensor:
        """Give each rank its row, and return what each had in ours."""
        if self._world == 2:  # both rows are one
            return self.spread(coded[0])
        heard = torch.empty_like(coded)
        dist.all_to_all_single(heard.view(-1), coded.view(-1), group=self._group)
        return heard

    def spread(self, own: Tensor) -> Tensor:
        """Give each rank our row, and return everybody's."""
        heard = own.new_empty(self._world, len(own))
        dist.all_gather_into_tensor(heard.view(-1), own, group=self._group)
        return heard


class _ByMessages:
    """Swaps and spreads them by messages in host memory, from a thread that may wait."""

    def __init__(self, sums: CodedSums, number: int) -> None:
        self._sums, self._tag = sums, 1 + 2 * number % MOST_TAGS

    def swap(self, coded: Tensor) -> Tensor:
        return self._exchange(coded.cpu(), self._tag)

    def spread(self, own: Tensor) -> Tensor:
        return self._exchange(own.expand(self._sums.world, -1), self._tag + 1)

    def _exchange(self, rows: Tensor, tag: int) -> Tensor:
        rank, world, group = self._sums.rank, self._sums.world, self._sums.group
        heard = torch.empty(rows.shape, dtype=rows.dtype)
        heard[rank] = rows[rank]
        # From the next rank on, so that not all send to the same one first.
        others = [(rank + step) % world for step in range(1, world)]
        works = [dist.irecv(heard[of], group=group, group_src=of, tag=tag) for of in others]
        works += [dist.isend(rows[to], group=group, group_dst=to, tag=tag) for to in others]
        for work in works:
            assert work is not None
            work.wait()
        return heard


class _CodedSum:
    """One sum on its way."""

    def __init__(self, sums: CodedSums, tensor: Tensor, coding: Coding, number: int) -> None:
        assert tensor.dim() == 1 and tensor.is_contiguous(), "shares are cut out of numbers that lie end to end"
        self._sums, self._tensor, self._coding, self._number = sums, tensor.detach(), coding, number
        blocks = -(-len(tensor) // coding.block)
        self._is_pair = sums.world == 2
        self._share_blocks = blocks if self._is_pair else -(-blocks // sums.world)
        self._done: Future[None] | None = None
        self._stream = sums.stream(tensor.device) if tensor.is_cuda else None
        self._at_start: torch.cuda.Event | None = None
        self._at_end: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._at_start = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._at_start.record(torch.cuda.current_stream(tensor.device))

    def start(self) -> None:
        if self._stream is None or not is_nccl(self._sums.group, self._tensor.device):
            self._done = self._sums.threads.start(self._exchange_and_wait)
            return
        with self._beside():
            self.exchange(ByCollectives(self._sums))
            self._at_end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._at_end.record(self._stream)
        self._tensor.record_stream(self._stream)

    def wait(self) -> None:
        if self._done is not None:
            self._done.result()
        if self._at_end is not None:
            torch.cuda.current_stream(self._tensor.device).wait_event(self._at_end)

    def exchange(self, wire: ByCollectives | _ByMessages) -> None:
        coding, tensor = self._coding, self._tensor
        coded = self._encode()
        heard = wire.swap(coded)
        self._sums.sent_bytes += (self._sums.world - 1) * coded[0].nbytes
        if self._is_pair:
            add_up(coding, list(heard), tensor)
            return
        total = torch.empty(self._share_blocks * coding.block, device=heard.device)
        added = encode(coding, add_up(coding, list(heard), total))
        found = wire.spread(added).to(tensor.device)
        self._sums.sent_bytes += (self._sums.world - 1) * added.nbytes
        decode(coding, found.view(-1)[: coding.coded_bytes(len(tensor))], tensor)

    def _exchange_and_wait(self) -> None:
        with self._beside():
            self.exchange(_ByMessages(self._sums, self._number))
            if self._stream is not None:
                self._stream.synchronize()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Within this context a GPU computes beside what else it does, once the numbers are there."""
        if self._stream is None or self._at_start is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._at_start)
            yield

    def _encode(self) -> Tensor:
        """[ranks, bytes of a share]: what each rank is to add up."""
        coding, tensor = self._coding, self._tensor
        if self._is_pair:
            return encode(coding, tensor).expand(2, -1)
        share_bytes = self._share_blocks * coding.record_bytes
        coded = torch.zeros(self._sums.world, share_bytes, dtype=torch.uint8, device=tensor.device)
        encode(coding, tensor, coded.view(-1)[: coding.coded_bytes(len(tensor))])
        return coded
