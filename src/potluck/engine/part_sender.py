"""PartSender: parts of a gradient, or of what a window changed, on their way to a host; off a GPU beside the work."""

import numpy as np
import torch
from torch import Tensor, nn

from potluck.coded_numbers import Coding, Floats
from potluck.coded_tensors import encode
from potluck.engine.host_holder import HostHolder
from potluck.replica.buckets import Allocate


class PartSender:
    def __init__(self, holder: HostHolder, device: torch.device) -> None:
        self._holder = holder
        self._client = holder.client
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._hosted: list[Tensor] = []
        """Parts in host memory, until they have been sent."""

    def make_room(self, model: nn.Module) -> Allocate | None:
        """For tensors that a host on this machine can read where they are."""
        if self._device.type != "cpu":
            return None
        client = self._client
        client.make_room(sum(p.numel() for p in model.parameters() if p.requires_grad))
        return lambda total, like: torch.from_numpy(client.allocate(total))

    def begin(self) -> None:
        """Wait for what was sent before, which must not change under the sender's hands."""
        self._client.flush()
        self._hosted = []

    def send(self, part: int, numbers: Tensor) -> None:
        """Send a part of the step that is under way."""
        self._holder.announce("part", part=part, gradients=numbers)
        step, coding = self._holder.version + 1, self._coding_of(part)
        if numbers.device.type != "cuda":
            numbers = numbers.cpu()
            if coding is None:
                self._client.send_part(step, part, numbers.numpy())
            else:
                self._code_and_send(step, part, numbers.numpy(), coding)
            return
        # The copy runs beside the backward; the sender waits for it, and the backward does not.
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            sent = numbers if coding is None else encode(coding, numbers)
            host = torch.empty(sent.shape, dtype=sent.dtype, pin_memory=True)
            host.copy_(sent, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(stream)
        numbers.record_stream(stream)
        self._hosted.append(host)
        send = self._client.send_part if coding is None else self._client.send_coded
        send(step, part, host.numpy(), before=copied.synchronize)

    def _code_and_send(self, step: int, part: int, floats: Floats, coding: Coding) -> None:
        """Coded by the thread that sends it, beside the work."""
        coded = np.empty(coding.coded_bytes(len(floats)), np.uint8)

        def code() -> None:
            coding.encode(floats, coded)

        self._client.send_coded(step, part, coded, before=code)

    def _coding_of(self, part: int) -> Coding | None:
        described = self._client.description
        assert described is not None
        return described.parts[part].coding_in(described.coding)
