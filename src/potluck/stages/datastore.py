"""StoreChannel: a Channel over a store, for stages that have no connection to each other.

Every tensor is an object in its receiver's inbox. Several are put and fetched in the background while the stage
computes. An object stays until its receiver says that the step is behind it for good, so that a stage which is killed
and started again finds what it was sent.
"""

import math
import re
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from potluck.errors import TheirProtocolError
from potluck.stages.pipeline import WHAT, Buffers, Label
from potluck.store.sessions import IN_FLIGHT, StoreSession
from potluck.store.store import CHECK_EVERY_S, Store
from potluck.store.tensors import Header, about_of, start_to_host
from potluck.tensor_bytes import buffer

_KEY = re.compile(
    r"to-(?P<target>\d+)/s(?P<step>\d{12})-(?P<what>[a-z]+)-m(?P<micro>\d+)-p(?P<part>\d+)-from-(?P<source>\d+)"
)


def key_of(label: Label) -> str:
    return f"to-{label.target}/s{label.step:012d}-{label.what}-m{label.micro}-p{label.part}-from-{label.source}"  # _KEY


def label_of(key: str) -> Label | None:
    """The reverse; none for a key that is no label's."""
    match = _KEY.fullmatch(key)
    if match is None or match["what"] not in WHAT:
        return None
    numbers = {name: int(match[name]) for name in ("step", "source", "target", "micro", "part")}
    return Label(what=match["what"], **numbers)


class StoreChannel:
    """One stage's end. It makes the store its own, and closes it."""

    def __init__(
        self, store: Store, stage: int, *, device: torch.device | None = None, in_flight: int = IN_FLIGHT
    ) -> None:
        """`in_flight`: objects that are put at once. Twice as many are fetched ahead of each source, read or not."""
        self.stage = stage
        self._store, self._device, self._in_flight = store, device or torch.device("cpu"), in_flight
        self._session = StoreSession(store, f"stage-{stage}", f"stage {stage}", in_flight=in_flight)
        self._buffers = Buffers()
        self._sent: list[Future[Any]] = []
        self._expected: dict[int, deque[Label]] = {}
        self._coming: dict[Label, Future[Tensor]] = {}
        self._last: dict[int, threading.Event] = {}
        """By source: whether the object that is to be fetched last is there."""
        self._received: set[Label] = set()
        """And not consumed yet."""
        self._marks: dict[int, int] = {}
        self._looked_at = -math.inf

    def expect(self, labels: Sequence[Label]) -> None:
        for label in labels:
            assert label.target == self.stage, label
            self._expected.setdefault(label.source, deque()).append(label)
        for source in {label.source for label in labels}:
            self._fetch_ahead(source)

    def send(self, label: Label, tensor: Tensor) -> None:
        assert label.source == self.stage, label
        self._session.raise_failure()
        if label.step <= self._consumed_by(label.target):
            return
        about, on_host = about_of(tensor), start_to_host(tensor)
        put = self._session.puts.start(lambda: self._store.put(key_of(label), [buffer(on_host())], about))
        self._sent.append(put)

    def receive(self, label: Label) -> Tensor:
        """Nothing is deleted by this: see consumed()."""
        coming = self._coming.get(label) or self._fetch_now(label)
        arrived = self._session.wait(coming, lambda: self._lost(label))
        del self._coming[label]
        self._received.add(label)
        self._fetch_ahead(label.source)
        return arrived.to(self._device, non_blocking=True)

    def consumed(self, step: int) -> None:
        """Tell that everything received for this step and earlier ones is not needed again, even if this stage is
        killed now.

        Deletes it, and tells those who sent it, so that they do not send it again when they are started again.
        """
        self._session.raise_failure()
        self._session.claim.check()  # else we might delete what our successor needs
        gone = [label for label in self._received if label.step <= step]
        self._received.difference_update(gone)
        self._session.clears.start(lambda: self._clear_up_to(step, gone))

    def flush(self) -> None:
        sent, self._sent = self._sent, []
        for put in sent:
            put.exception()  # it has a deadline of its own
        self._session.raise_failure()

    def end(self) -> None:
        """The run has ended, and this stage needs nothing more: its inbox, its mark and its claim go."""
        self.flush()
        self._session.claim.check()
        self._session.clears.close()  # else a clear that is under way would write our mark again, once it is gone
        self._store.sweep(f"to-{self.stage}", lambda key: True)
        self._store.forget([f"marks/stage-{self.stage}"])
        self._session.claim.release()  # last: by a claim that is left a successor knows that more may lie here
        self._store.tidy()
        self.close()

    def close(self) -> None:
        """Everything in the store stays for a successor."""
        self._session.close()

    def _lost(self, label: Label) -> str:
        return (
            f"Waited {self._store.patience_s:g} s in vain for {label}, in {self._store.url}. Stage {label.source} is"
            " gone, or too slow for this patience."
        )

    def _fetch_ahead(self, source: int) -> None:
        under_way = sum(label.source == source for label in self._coming)
        expected = self._expected.get(source, deque())
        while expected and under_way < 2 * self._in_flight:
            self._start_fetch(expected.popleft(), self._last.get(source))
            under_way += 1

    def _fetch_now(self, label: Label) -> Future[Tensor]:
        """Out of turn, or unexpected."""
        assert label.target == self.stage, label
        expected = self._expected.get(label.source, deque())
        if label in expected:
            expected.remove(label)
        return self._start_fetch(label)

    def _start_fetch(self, label: Label, before: threading.Event | None = None) -> Future[Tensor]:
        """`before`: nobody looks for this one until that is set."""
        is_there = self._last[label.source] = threading.Event()
        self._coming[label] = coming = self._session.gets.start(lambda: self._fetch(label, before, is_there))
        return coming

    def _fetch(self, label: Label, before: threading.Event | None, is_there: threading.Event) -> Tensor:
        arrived: list[Tensor] = []

        def room(about: bytes, size: int) -> memoryview:
            is_there.set()
            header = header_of(about, size, label)
            arrived[:] = [self._memory_for(header)]
            return buffer(arrived[0])

        try:
            if before is not None:  # they come one after another, and to look for each of them would take its time
                before.wait()
            # Without end: an object may be awaited long before anybody asks for it. receive() has the deadline.
            self._store.wait_for(key_of(label), room, f"the {label}", patience_s=float("inf"))
        finally:
            is_there.set()  # also where this failed: the thread that looks for the next one waits for it
        return arrived[0]

    def _memory_for(self, header: Header) -> Tensor:
        if self._device.type == "cuda":  # torch itself keeps such memory, and uses it again
            return torch.empty(header.shape, dtype=header.dtype, pin_memory=True)
        return self._buffers.take(header)

    def _consumed_by(self, target: int) -> int:
        """Up to which step a stage needs nothing, as of when we took over. A stage's first worker need not ask."""
        if not self._session.claim.was_held:
            return -1
        if target not in self._marks:
            told = self._store.get_bytes(f"marks/stage-{target}")
            self._marks[target] = -1 if told is None else int(told)
        return self._marks[target]

    def _clear_up_to(self, step: int, received: Sequence[Label]) -> None:
        self._store.delete((key_of(label) for label in received), recycle=True)
        # What a predecessor received, or a sender sent twice, is found by listing. That and the mark are for those who
        # start again, and may be a little late.
        if time.monotonic() > self._looked_at + CHECK_EVERY_S:
            # The mark first: a sender that starts between the two would send again what was just swept.
            self._store.put_bytes(f"marks/stage-{self.stage}", str(step).encode())
            self._store.sweep(
                f"to-{self.stage}", lambda key: (label := label_of(key)) is not None and label.step <= step
            )
            self._looked_at = time.monotonic()


def header_of(about: bytes, size: int, label: Label) -> Header:
    """The reverse, checked."""
    if len(about) % 8 != 1:
        raise TheirProtocolError(f"The {label} does not say what shape it has.")
    code, *shape = struct.unpack(f"<B{len(about) // 8}Q", about)
    header = Header.read(code, shape, label)
    if header.nbytes != size:
        raise TheirProtocolError(f"The {label} has {size:,} bytes, and {header.nbytes:,} in its header.")
    return header
