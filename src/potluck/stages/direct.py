"""GroupChannel: tensors straight from one stage to another, over a process group. For Direct and Pipeline.

Every message begins with a header of fixed size. A small tensor is in the same message, since one message more costs
more than its bytes; a large one follows by itself, into memory of its own. What is expected of a peer is taken by
threads, so that tensors arrive while the stage computes, and the next ones while the bytes of this one still travel.
Gloo moves bytes of host memory, so what is on a GPU goes through there.
"""

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from potluck.errors import TheirProtocolError, WorkerLost
from potluck.stages.pipeline import WHAT, Buffers, Label
from potluck.store.sessions import Background
from potluck.store.tensors import MAX_DIMENSIONS, Header
from potluck.tensor_bytes import from_bytes, raw, to_bytes

MAGIC = 0x504F544C55434B32
LAYOUT = struct.Struct(f"<{9 + MAX_DIMENSIONS}q")
"""Layout of a header: magic, step, what, source, target, micro, part, type, dimensions; then the shape."""
HEADER_BYTES = 256
"""More than it needs: a tensor after it begins where tensors do."""
SMALL_BYTES = 1 << 18
"""A tensor that is no larger comes with its header."""
FIRST = Header(torch.uint8, (HEADER_BYTES + SMALL_BYTES,))
"""Form of the memory in which a message that begins with a header is received: Gloo takes a shorter one too."""
AHEAD = 8
"""Tensors that are awaited at once, from one peer."""
MOST_TAGS = 1 << 20
CLOSE_S = 1.0
"""How long to wait for threads at the end: after a loss they may still await what never comes."""


def pack(label: Label, header: Header) -> bytes:
    shape = [*header.shape, *(0,) * (MAX_DIMENSIONS - len(header.shape))]
    fields = [MAGIC, label.step, WHAT.index(label.what), label.source, label.target, label.micro, label.part]
    return LAYOUT.pack(*fields, header.code, len(header.shape), *shape).ljust(HEADER_BYTES, b"\0")


def unpack(data: bytes, label: Label) -> Header:
    """Read a header, and refuse one of anything else than what is expected."""
    magic, step, what, source, target, micro, part, code, dimensions, *shape = LAYOUT.unpack_from(data)
    if magic != MAGIC or not 0 <= what < len(WHAT) or not 0 <= dimensions <= MAX_DIMENSIONS:
        raise TheirProtocolError(
            f"What came instead of the {label} is no header. Run one version of Potluck everywhere."
        )
    expected = (label.step, label.what, label.source, label.target, label.micro, label.part)
    if (step, WHAT[what], source, target, micro, part) != expected:
        raise TheirProtocolError(
            f"Instead of the {label} came the {WHAT[what]} {micro} of step {step}, from stage {source} for stage"
            f" {target}. The workers do not follow the same plan."
        )
    return Header.read(code, shape[:dimensions], label)


class GroupChannel:
    """Carries tensors among the workers of one pipeline, who are the ranks of `group`. Stage s is with worker s %
    workers."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, rank: int, workers: int) -> None:
        """`rank`: ours in the group. One worker alone needs no group."""
        self._group = group
        self._device = device
        self._rank = rank
        self._workers = workers
        self._buffers = Buffers()
        self._sent: list[tuple[Label, Tensor, dist.Work]] = []
        self._coming: dict[Label, Future[Tensor]] = {}
        self._failed: Future[Tensor] = Future()
        """Holds the first error; every wait waits for this too."""
        # Threads of their own for each peer: one that is late must not delay what others have sent.
        self._peers = {
            peer: Background(AHEAD, f"tensors from worker {peer}", self._failed)
            for peer in range(workers)
            if peer != rank
        }
        self._sent_to, self._awaited_of = Counter[int](), Counter[int]()
        """Tensors so far, by peer: their numbers are the tags of the messages."""

    def expect(self, labels: Sequence[Label]) -> None:
        for label in labels:
            peer = label.source % self._workers
            if peer != self._rank:
                fetch = partial(self._fetch, label, peer, _next_tag(self._awaited_of, peer))
                self._coming[label] = self._peers[peer].start(fetch)

    def send(self, label: Label, tensor: Tensor) -> None:
        peer, tensor = label.target % self._workers, tensor.detach()
        if peer == self._rank:
            self._coming[label] = Future()
            self._coming[label].set_result(tensor)
            return
        tag, header = _next_tag(self._sent_to, peer), Header.of(tensor)
        head = from_bytes(pack(label, header))
        if header.nbytes <= SMALL_BYTES:
            first = self._buffers.take(Header(torch.uint8, (HEADER_BYTES + header.nbytes,)))
            first[:HEADER_BYTES] = head
            first[HEADER_BYTES:].view(header.dtype).view(header.shape).copy_(tensor)
            self._start_send(first, peer, label, tag)
        else:
            self._start_send(head, peer, label, tag)
            self._start_send(raw(tensor.to("cpu")), peer, label, tag + 1)

    def receive(self, label: Label) -> Tensor:
        coming = self._coming.pop(label)
        if not coming.done():  # no deadline of ours: the backend's ends the message after the run's patience
            wait([coming, self._failed], return_when=FIRST_COMPLETED)
        return (coming if coming.done() else self._failed).result().to(self._device)

    def flush(self) -> None:
        sent, self._sent = self._sent, []
        for label, _, work in sent:
            with _told(label, label.target, "did not arrive"):
                work.wait()

    def close(self) -> None:
        for peer in self._peers.values():  # one that lets go of memory while the interpreter ends would bring it down
            peer.close(CLOSE_S)

    def _fetch(self, label: Label, peer: int, tag: int) -> Tensor:
        first = self._buffers.take(FIRST)
        self._receive_into(first, label, peer, tag)
        header = unpack(to_bytes(first[:HEADER_BYTES]), label)
        if header.nbytes <= SMALL_BYTES:
            return first[HEADER_BYTES : HEADER_BYTES + header.nbytes].view(header.dtype).view(header.shape)
        tensor = self._buffers.take(header)
        self._receive_into(raw(tensor), label, peer, tag + 1)
        return tensor

    def _receive_into(self, memory: Tensor, label: Label, peer: int, tag: int) -> None:
        with _told(label, label.source, "did not come"):
            work = dist.irecv(memory, group=self._group, group_src=peer, tag=tag)
            assert work is not None
            work.wait()

    def _start_send(self, part: Tensor, peer: int, label: Label, tag: int) -> None:
        with _told(label, label.target, "could not be sent"):
            work = dist.isend(part, group=self._group, group_dst=peer, tag=tag)
        assert work is not None
        self._sent.append((label, part, work))


def _next_tag(counts: Counter[int], peer: int) -> int:
    """The tag of the next tensor's header; its own, if it follows by itself, is the one after that."""
    counts[peer] += 1
    return 2 * (counts[peer] % MOST_TAGS)


@contextmanager
def _told(label: Label, stage: int, what: str) -> Iterator[None]:
    """Say which tensor of which stage a backend's error is about."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise WorkerLost(f"Stage {stage} stopped answering: the {label} {what} ({reason}).") from error
