"""GroupChannel: tensors straight from one stage to another, over a process group. For Direct and Pipeline.

Every message begins with a header of fixed size. A small tensor is in the same message, since one message more costs
more than its bytes; a large one follows by itself, into memory of its own. What is expected of a peer is taken by
threads, so that tensors arrive while the stage computes, and the header of the next one while the bytes of this one
still travel. Gloo moves bytes of host memory, so what is on a GPU goes through there.
"""

import queue
import struct
import threading
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from potluck.errors import TheirProtocolError, WorkerLost
from potluck.stages.channel import WHAT, Buffers, Label
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
"""How many such messages are awaited at once, from one peer."""
TENSOR, HEADER = 0, 1
"""Tags: headers are awaited ahead of the tensors that are under way."""
CLOSE_S = 1.0
"""How long to wait for a thread at the end: after a loss it may still await what never comes."""

_Expected = queue.SimpleQueue[Label | None]
"""None ends it."""
_UnderWay = tuple[Label, Tensor, dist.Work]
"""A label, the memory that is being filled, and the work that fills it."""
_Tensors = queue.SimpleQueue[_UnderWay | None]


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
        self._sent: list[_UnderWay] = []
        self._here: dict[Label, Tensor] = {}
        # Readers put tensors here while the stage waits for one; it also wakes where a reader has failed.
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._readers: dict[int, _Expected] = {}
        self._threads: list[threading.Thread] = []

    def expect(self, labels: Sequence[Label]) -> None:
        for label in labels:
            peer = label.source % self._workers
            if peer != self._rank:
                self._reader(peer).put(label)

    def send(self, label: Label, tensor: Tensor) -> None:
        peer = label.target % self._workers
        if peer == self._rank:
            with self._changed:
                self._here[label] = tensor.detach()
            return
        tensor = tensor.detach()
        header = Header.of(tensor)
        head = from_bytes(pack(label, header))
        if header.nbytes <= SMALL_BYTES:
            first = self._buffers.take(Header(torch.uint8, (HEADER_BYTES + header.nbytes,)))
            first[:HEADER_BYTES] = head
            first[HEADER_BYTES:].view(header.dtype).view(header.shape).copy_(tensor)
            self._start_send(first, peer, label, HEADER)
        else:
            self._start_send(head, peer, label, HEADER)
            self._start_send(raw(tensor.to("cpu")), peer, label, TENSOR)

    def receive(self, label: Label) -> Tensor:
        with self._changed:
            while label not in self._here:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            tensor = self._here.pop(label)
        return tensor.to(self._device)

    def flush(self) -> None:
        sent, self._sent = self._sent, []
        for label, _, work in sent:
            try:
                work.wait()
            except RuntimeError as error:
                raise _lost(label, label.target, "did not arrive", error) from error

    def close(self) -> None:
        for expected in self._readers.values():
            expected.put(None)
        for thread in self._threads:  # one that lets go of memory while the interpreter ends would bring it down
            thread.join(CLOSE_S)
        self._readers.clear()
        self._threads.clear()

    def _reader(self, peer: int) -> _Expected:
        if peer not in self._readers:
            expected: _Expected = queue.SimpleQueue()
            tensors: _Tensors = queue.SimpleQueue()
            self._readers[peer] = expected
            # Threads of their own for each peer: one that is late must not delay what others have sent; and headers
            # are read on while a large tensor is still on its way.
            for read, given in ((self._read_headers, (peer, expected, tensors)), (self._read_tensors, (tensors,))):
                thread = threading.Thread(target=read, args=given, name=f"tensors from worker {peer}", daemon=True)
                thread.start()
                self._threads.append(thread)
        return self._readers[peer]

    def _read_headers(self, peer: int, expected: _Expected, tensors: _Tensors) -> None:
        awaited: deque[_UnderWay] = deque()
        is_open = True
        try:
            while is_open or awaited:
                while is_open and len(awaited) < AHEAD and not (awaited and expected.empty()):
                    if (label := expected.get()) is None:
                        is_open = False
                    else:
                        first = self._buffers.take(FIRST)
                        awaited.append((label, first, self._start_receive(first, peer, label, HEADER)))
                if awaited:
                    self._on_header(peer, tensors, *awaited.popleft())
        except Exception as error:  # raised in receive(): here nobody would hear of it
            self._fail(error)
        finally:
            tensors.put(None)

    def _on_header(self, peer: int, tensors: _Tensors, label: Label, first: Tensor, work: dist.Work) -> None:
        _wait(label, work)
        header = unpack(to_bytes(first[:HEADER_BYTES]), label)
        if header.nbytes <= SMALL_BYTES:
            found = first[HEADER_BYTES : HEADER_BYTES + header.nbytes].view(header.dtype).view(header.shape)
            self._give(label, found)
        else:
            tensor = self._buffers.take(header)
            tensors.put((label, tensor, self._start_receive(raw(tensor), peer, label, TENSOR)))

    def _read_tensors(self, tensors: _Tensors) -> None:
        try:
            while (coming := tensors.get()) is not None:
                label, tensor, work = coming
                _wait(label, work)
                self._give(label, tensor)
                del coming, tensor, work  # else its memory would be in use until the next one comes
        except Exception as error:
            self._fail(error)

    def _give(self, label: Label, tensor: Tensor) -> None:
        with self._changed:
            self._here[label] = tensor
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _start_send(self, part: Tensor, peer: int, label: Label, tag: int) -> None:
        try:
            work = dist.isend(part, group=self._group, group_dst=peer, tag=tag)
        except RuntimeError as error:
            raise _lost(label, label.target, "could not be sent", error) from error
        assert work is not None
        self._sent.append((label, part, work))

    def _start_receive(self, tensor: Tensor, peer: int, label: Label, tag: int) -> dist.Work:
        try:
            work = dist.irecv(tensor, group=self._group, group_src=peer, tag=tag)
        except RuntimeError as error:
            raise _lost(label, label.source, "did not come", error) from error
        assert work is not None
        return work


def _wait(label: Label, work: dist.Work) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _lost(label, label.source, "did not come", error) from error


def _lost(label: Label, stage: int, what: str, error: Exception) -> WorkerLost:
    reason = str(error).strip().splitlines()[0]
    return WorkerLost(f"Stage {stage} stopped answering: the {label} {what} ({reason}).")
