"""GroupChannel: tensors straight from one stage to another, over a process group. For Direct and Pipeline.

A header of fixed size goes ahead of each tensor. What is expected of a peer is taken by threads, so that tensors
arrive while the stage computes, and the header of the next one while the bytes of this one still travel. Gloo moves
bytes of host memory, so what is on a GPU goes through there.
"""

import queue
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from potluck.errors import TheirProtocolError, WorkerLost
from potluck.stages.channel import MAX_DIMENSIONS, WHAT, Header, Label

MAGIC = 0x504F544C55434B31
FIELDS = 9
"""Of a header, before the shape: magic, step, what, source, target, micro, part, type, dimensions."""
TENSOR, HEADER = 0, 1
"""Tags: headers are awaited ahead of the tensors that are under way."""
REUSED_BYTES = 1 << 20
"""What is smaller gets memory from the system each time."""
CLOSE_S = 1.0
"""How long to wait for a thread at the end: after a loss it may still await what never comes."""

_Expected = queue.SimpleQueue[tuple[Label, Tensor, dist.Work] | None]
"""Label, the tensor that is being filled, and the work that fills it. None ends it."""


def pack(label: Label, header: Header) -> Tensor:
    shape = [*header.shape, *(0,) * (MAX_DIMENSIONS - len(header.shape))]
    fields = [MAGIC, label.step, WHAT.index(label.what), label.source, label.target, label.micro, label.part]
    return torch.tensor([*fields, header.code, len(header.shape), *shape])


def unpack(numbers: Sequence[int], label: Label) -> Header:
    """What was sent, which must be what is expected."""
    magic, step, what, source, target, micro, part, code, dimensions, *shape = numbers
    if magic != MAGIC or not 0 <= what < len(WHAT) or not 0 <= dimensions <= MAX_DIMENSIONS:
        raise TheirProtocolError(
            f"What came instead of the {label} is no header. Run one version of Potluck everywhere."
        )
    if (step, WHAT[what], source, target, micro, part) != (
        label.step,
        label.what,
        label.source,
        label.target,
        label.micro,
        label.part,
    ):
        raise TheirProtocolError(
            f"Instead of the {label} came the {WHAT[what]} {micro} of step {step}, from stage {source} for stage"
            f" {target}. The workers do not follow the same plan."
        )
    return Header.read(code, shape[:dimensions], label)


class GroupChannel:
    """Among the workers of one lane, who are the ranks of `group`. Stage s is with worker s % workers."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, *, rank: int, workers: int) -> None:
        """`rank`: ours in the group, of so many workers. One alone needs no group."""
        self._group = group
        self._device = device
        self._rank = rank
        self._workers = workers
        self._sent: list[tuple[Label, dist.Work, Tensor]] = []
        self._here: dict[Label, Tensor] = {}
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._readers: dict[int, _Expected] = {}
        self._threads: list[threading.Thread] = []

    def expect(self, labels: Sequence[Label]) -> None:
        for label in labels:
            peer = label.source % self._workers
            if peer != self._rank:
                head = torch.empty(FIELDS + MAX_DIMENSIONS, dtype=torch.int64)
                self._reader(peer).put((label, head, self._start_receive(head, peer, label, HEADER)))

    def send(self, label: Label, tensor: Tensor) -> None:
        peer = label.target % self._workers
        if peer == self._rank:
            with self._changed:
                self._here[label] = tensor.detach()
            return
        payload = tensor.detach().to("cpu").contiguous()
        parts = (pack(label, Header.of(payload)), HEADER), (payload.reshape(-1).view(torch.uint8), TENSOR)
        for part, tag in parts:
            if part.numel():
                try:
                    work = dist.isend(part, group=self._group, group_dst=peer, tag=tag)
                except RuntimeError as error:
                    raise _lost(label, label.target, "could not be sent", error) from error
                assert work is not None
                self._sent.append((label, work, part))

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
        for label, work, _ in sent:
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
            headers, tensors = _Expected(), _Expected()
            self._readers[peer] = headers
            for read, given in ((self._read_headers, (peer, headers, tensors)), (self._read_tensors, (tensors,))):
                thread = threading.Thread(target=read, args=given, name=f"tensors from worker {peer}", daemon=True)
                thread.start()
                self._threads.append(thread)
        return self._readers[peer]

    def _read_headers(self, peer: int, headers: _Expected, tensors: _Expected) -> None:
        memory = _Memory()
        try:
            while (expected := headers.get()) is not None:
                tensors.put(self._on_header(peer, memory, *expected))
        except Exception as error:
            self._fail(error)
        finally:
            tensors.put(None)

    def _on_header(
        self, peer: int, memory: "_Memory", label: Label, head: Tensor, work: dist.Work
    ) -> tuple[Label, Tensor, dist.Work]:
        _wait(label, work)
        tensor = memory.empty(unpack(head.tolist(), label))
        if tensor.numel():
            work = self._start_receive(tensor.view(-1).view(torch.uint8), peer, label, TENSOR)
        return label, tensor, work

    def _read_tensors(self, tensors: _Expected) -> None:
        try:
            while (expected := tensors.get()) is not None:
                self._on_tensor(*expected)
                del expected  # else its memory would be in use until the next one comes
        except Exception as error:
            self._fail(error)

    def _on_tensor(self, label: Label, tensor: Tensor, work: dist.Work) -> None:
        _wait(label, work)
        with self._changed:
            self._here[label] = tensor
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _start_receive(self, tensor: Tensor, peer: int, label: Label, tag: int) -> dist.Work:
        try:
            work = dist.irecv(tensor, group=self._group, group_src=peer, tag=tag)
        except RuntimeError as error:
            raise _lost(label, label.source, "did not come", error) from error
        assert work is not None
        return work


class _Memory:
    """Memory of tensors that are gone, for those that come: to get fresh pages costs more than to fill them.

    It never holds more than was in use at once.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[Tensor, StorageWeakRef]] = []
        """Bytes, and a storage on top of them that expires when nobody uses them any more."""

    def empty(self, header: Header) -> Tensor:
        if header.nbytes < REUSED_BYTES:
            return header.empty()
        block = self._take(header.nbytes)
        shared = from_dlpack(block)
        self._blocks.append((block, StorageWeakRef(shared.untyped_storage())))  # type: ignore[no-untyped-call]
        return shared[: header.nbytes].view(header.dtype).view(header.shape)

    def _take(self, size_bytes: int) -> Tensor:
        free = [place for place, (_, user) in enumerate(self._blocks) if user.expired()]  # type: ignore[no-untyped-call]
        fitting = [place for place in free if self._blocks[place][0].nbytes >= size_bytes]
        if fitting:
            return self._blocks.pop(min(fitting, key=lambda place: self._blocks[place][0].nbytes))[0]
        self._blocks = [each for place, each in enumerate(self._blocks) if place not in free]
        return torch.empty(size_bytes, dtype=torch.uint8)


def _wait(label: Label, work: dist.Work) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _lost(label, label.source, "did not come", error) from error


def _lost(label: Label, stage: int, what: str, error: Exception) -> WorkerLost:
    reason = str(error).strip().splitlines()[0]
    return WorkerLost(f"Stage {stage} stopped answering: the {label} {what} ({reason}).")
