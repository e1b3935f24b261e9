"""GroupChannel: tensors straight from one stage to another, over a process group. For Direct and Pipeline.

A header of fixed size goes ahead of each tensor. One thread per peer takes what is expected of it, so that tensors
arrive while the stage computes. Gloo moves bytes of host memory, so what is on a GPU goes through there.
"""

import queue
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from potluck.errors import TheirProtocolError, WorkerLost
from potluck.stages.channel import MAX_DIMENSIONS, WHAT, Header, Label

MAGIC = 0x504F544C55434B31
FIELDS = 9
"""Of a header, before the shape: magic, step, what, source, target, micro, part, type, dimensions."""


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
        self._readers: dict[int, queue.SimpleQueue[Label | None]] = {}

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
        payload = tensor.detach().to("cpu").contiguous()
        for part in (pack(label, Header.of(payload)), payload.reshape(-1).view(torch.uint8)):
            if part.numel():
                try:
                    work = dist.isend(part, group=self._group, group_dst=peer)
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
        for labels in self._readers.values():
            labels.put(None)
        self._readers.clear()

    def _reader(self, peer: int) -> "queue.SimpleQueue[Label | None]":
        if peer not in self._readers:
            labels = self._readers[peer] = queue.SimpleQueue()
            threading.Thread(
                target=self._read, args=(peer, labels), name=f"tensors from worker {peer}", daemon=True
            ).start()
        return self._readers[peer]

    def _read(self, peer: int, labels: "queue.SimpleQueue[Label | None]") -> None:
        while (label := labels.get()) is not None:
            try:
                tensor = self._take(peer, label)
            except Exception as error:
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
                return
            with self._changed:
                self._here[label] = tensor
                self._changed.notify_all()

    def _take(self, peer: int, label: Label) -> Tensor:
        head = torch.empty(FIELDS + MAX_DIMENSIONS, dtype=torch.int64)
        try:
            dist.recv(head, group=self._group, group_src=peer)
            tensor = unpack(head.tolist(), label).empty()
            if tensor.numel():
                dist.recv(tensor.reshape(-1).view(torch.uint8), group=self._group, group_src=peer)
        except RuntimeError as error:
            raise _lost(label, label.source, "did not come", error) from error
        return tensor


def _lost(label: Label, stage: int, what: str, error: Exception) -> WorkerLost:
    reason = str(error).strip().splitlines()[0]
    return WorkerLost(f"Stage {stage} stopped answering: the {label} {what} ({reason}).")
