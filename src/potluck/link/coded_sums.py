"""CodedSums: sums over a process group of which only coded numbers travel; coded_numbers.py says how.

    shares   a tensor's blocks, cut into as many equal shares as there are ranks
    out      each rank sends each other rank its share of what it has, coded
    back     each adds up the share that is its own, in order of rank, and sends it to all others, coded once more

So a rank sends at most twice the coded bytes, however many there are, and all of them decode the same bytes: they hold
the same bits. Two ranks send each other all that they have, in as many bytes, and each adds up both: nothing is coded
twice, and nobody waits for an answer.

Over NCCL the collectives are put on a stream, beside the backward. Gloo's work has to be waited for, and two threads do
that: one sends out, also while the other waits for a rank that is not so far. Their messages have tags: ranks need not
agree on their order among the collectives that other threads begin.
"""

from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from potluck.coded_numbers import Coding
from potluck.coded_tensors import decode, encode
from potluck.sharding.collectives import add_up, is_nccl
from potluck.store.sessions import Background

MOST_TAGS = 1 << 20


class CodedSums:
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._started = 0
        self._out, self._back = Background(1, "coded sums, out"), Background(1, "coded sums, back")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.sent_bytes = 0
        """By this rank, in all sums so far."""

    def start(self, tensor: Tensor, coding: Coding) -> "_CodedSum":
        """Begins to replace a flat tensor by its sum over all ranks. Every rank starts the same sums in this order."""
        begun = _CodedSum(self, tensor, coding, self._started)
        self._started += 1
        if tensor.is_cuda and is_nccl(self.group, tensor.device):
            begun.put_on_stream()
        else:
            begun.sent_out = self._out.start(begun.send_out)
            begun.sent_back = self._back.start(begun.send_back)
        return begun

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def others(self) -> list[int]:
        """List the other ranks from the next one on, so that not all send to the same one first."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]


class _CodedSum:
    """One sum on its way."""

    def __init__(self, sums: CodedSums, tensor: Tensor, coding: Coding, number: int) -> None:
        assert tensor.dim() == 1 and tensor.is_contiguous(), "shares are cut out of numbers that lie end to end"
        self._sums, self._tensor, self._coding = sums, tensor.detach(), coding
        self._tags = 1 + 2 * number % MOST_TAGS, 2 + 2 * number % MOST_TAGS
        blocks = -(-len(tensor) // coding.block)
        self._is_pair = sums.world == 2
        self._share_blocks = blocks if self._is_pair else -(-blocks // sums.world)
        self.sent_out: Future[None] | None = None
        self.sent_back: Future[None] | None = None
        self._at_start: torch.cuda.Event | None = None
        self._at_end: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._at_start = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._at_start.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> None:
        if self.sent_back is not None:
            self.sent_back.result()
            self.sent_back = None
            self._take()
        if self._at_end is not None:
            torch.cuda.current_stream(self._tensor.device).wait_event(self._at_end)

    # With threads that wait

    def send_out(self) -> None:
        sums = self._sums
        self._coded = self._on_device(self._encode).cpu()
        self._heard = torch.empty_like(self._coded)
        self._coming = [self._receive(self._heard[of], of, self._tags[0]) for of in sums.others()]
        self._going = [self._send(self._coded[to], to, self._tags[0]) for to in sums.others()]

    def send_back(self) -> None:
        """The sum of this rank's share, to all."""
        sums = self._sums
        assert self.sent_out is not None
        self.sent_out.result()
        for work in self._coming:
            work.wait()
        self._heard[sums.rank] = self._coded[sums.rank]
        if self._is_pair:
            self._coming = []
            self._on_device(lambda: add_up(self._coding, list(self._heard), self._tensor))
            return
        added = self._add_up(self._heard)
        for work in self._going:  # what is being sent must not be overwritten
            work.wait()
        self._coded[sums.rank] = added
        self._coming = [self._receive(self._coded[of], of, self._tags[1]) for of in sums.others()]
        self._going = [self._send(added, to, self._tags[1]) for to in sums.others()]

    def _take(self) -> None:
        for work in (*self._coming, *self._going):
            work.wait()
        if not self._is_pair:
            self._decode(self._coded.to(self._tensor.device))

    def _send(self, coded: Tensor, to: int, tag: int) -> dist.Work:
        self._sums.sent_bytes += coded.nbytes
        work = dist.isend(coded, group=self._sums.group, group_dst=to, tag=tag)
        assert work is not None
        return work

    def _receive(self, coded: Tensor, of: int, tag: int) -> dist.Work:
        work = dist.irecv(coded, group=self._sums.group, group_src=of, tag=tag)
        assert work is not None
        return work

    def _on_device(self, work: Callable[[], Tensor]) -> Tensor:
        """Run the sum on the device, beside what else it does; it is done when this returns."""
        if self._at_start is None:
            return work()
        stream = self._sums.stream(self._tensor.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._at_start)
            found = work()
            stream.synchronize()
        return found

    # On a stream

    def put_on_stream(self) -> None:
        sums, group = self._sums, self._sums.group
        stream = sums.stream(self._tensor.device)
        with torch.cuda.stream(stream):
            assert self._at_start is not None
            stream.wait_event(self._at_start)
            self.exchange(group)
            self._at_end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._at_end.record(stream)
        self._tensor.record_stream(stream)

    def exchange(self, group: dist.ProcessGroup | None) -> None:
        """All of it, by collectives that all ranks begin in one order."""
        coded = self._encode()
        heard = torch.empty_like(coded)
        if self._is_pair:
            _end(dist.all_gather_into_tensor(heard.view(-1), coded[0], group=group, async_op=True))
            self._sums.sent_bytes += coded[0].nbytes
            add_up(self._coding, list(heard), self._tensor)
            return
        _end(dist.all_to_all_single(heard.view(-1), coded.view(-1), group=group, async_op=True))
        added = self._add_up(heard)
        _end(dist.all_gather_into_tensor(coded.view(-1), added, group=group, async_op=True))
        self._sums.sent_bytes += 2 * (self._sums.world - 1) * added.nbytes
        self._decode(coded)

    # What is computed

    def _encode(self) -> Tensor:
        """[ranks, bytes of a share]: what each rank is to add up."""
        coding, tensor = self._coding, self._tensor
        if self._is_pair:
            return encode(coding, tensor).expand(2, -1)
        share_bytes = self._share_blocks * coding.record_bytes
        coded = torch.zeros(self._sums.world, share_bytes, dtype=torch.uint8, device=tensor.device)
        encode(coding, tensor, coded.view(-1)[: coding.coded_bytes(len(tensor))])
        return coded

    def _add_up(self, heard: Tensor) -> Tensor:
        coding = self._coding
        total = torch.empty(self._share_blocks * coding.block, device=heard.device)
        return encode(coding, add_up(coding, list(heard), total))

    def _decode(self, coded: Tensor) -> Tensor:
        coding, tensor = self._coding, self._tensor
        return decode(coding, coded.view(-1)[: coding.coded_bytes(len(tensor))], tensor)


def _end(work: dist.Work | None) -> None:
    """Wait for a collective; with NCCL the stream waits, and we do not."""
    if work is not None:
        work.wait()
