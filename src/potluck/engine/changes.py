"""What a window changed in a model, as a worker of a host sends it. Knows nothing of hosts, rows or optimizers."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from potluck.engine.averages import difference_, finite_norm
from potluck.engine.buckets import Allocate, split_like
from potluck.engine.buffers import SavedBuffers
from potluck.engine.slices import digest_and_glance, glance, insist_on_float32, plan_parts


class Changes:
    """What a window changed in a model. For each: begin; train; finish; apply."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        allocate: Allocate | None = None,
        own: Callable[[nn.Parameter], list[Tensor]] = lambda parameter: [parameter.data],
    ) -> None:
        """`own`: the memory of what is here of a parameter; of one that is split it may be a part, or nothing."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        insist_on_float32(trained)
        self._model = model
        self._buffers = SavedBuffers(model)
        planned = plan_parts(model, blocks)
        self.described = tuple(part for part, _ in planned) + self._buffers.parts
        self.planned = [parameters for _, parameters in planned]
        """The parameters of each part."""
        self._parameters = [[piece for each in parameters for piece in own(each)] for _, parameters in planned]
        self._flats = [(allocate or _zeros)(sum(map(Tensor.numel, of)), of[0]) for of in self._parameters]
        """While a window is open, the parameters that it began with; then what it changed, weighted."""
        self._before: list[Tensor] = []
        self._weight = 0.0
        self._forgotten = 0
        """How many times."""
        self.is_open = False

    @torch.no_grad()
    def begin(self) -> None:
        """From the parameters as they are: those that all agreed on."""
        for flat, parameters in self._parts():
            torch._foreach_copy_(split_like(flat, parameters), parameters)
        self._before = self._buffers.copy()
        self.is_open = True

    def starts(self) -> dict[int, Tensor]:
        """While a window is open: by a parameter's id, what all began with."""
        parts = zip(self._parts(), self.planned, strict=True) if self.is_open else ()
        return {
            id(parameter): start
            for (flat, pieces), parameters in parts
            for parameter, start in zip(parameters, split_like(flat, pieces), strict=True)
        }

    @property
    def agreed_buffers(self) -> list[Tensor]:
        return self._before if self.is_open else self._buffers.now()

    def _agreed(self) -> list[Tensor]:
        starts = self.starts()
        return [*(starts.get(id(parameter), parameter) for parameter in self._model.parameters()), *self.agreed_buffers]

    def hash_weights(self) -> tuple[str, Tensor]:
        """The digest of what all agreed on last, and a glance at it."""
        return digest_and_glance(self._agreed())

    def glance(self) -> Tensor:
        return glance(self._agreed())

    def exact(self) -> bytes:
        """What the window changed in buffers that have no mean. Before finish()."""
        return self._buffers.for_host(self._before, 0.0)[1]

    @torch.no_grad()
    def finish(self, weight: float) -> Iterator[tuple[int, Tensor]]:
        """What to send, part by part. The model is again as it was at the beginning."""
        self.is_open, self._weight = False, weight
        for index, (flat, parameters) in enumerate(self._parts()):
            ended = torch.cat([parameter.reshape(-1) for parameter in parameters])
            torch._foreach_copy_(parameters, split_like(flat, parameters))
            changed = self._whole(index, difference_(flat, ended).mul_(weight))
            if changed is not None:
                yield index, changed
        self._on_written()
        if len(self._buffers):
            moved, _ = self._buffers.for_host(self._before, weight)
            self._buffers.put(self._before)
            yield len(self._flats), moved

    def _whole(self, index: int, changed: Tensor) -> Tensor | None:
        """What is sent of a part, from what is here of it; none if another sends it."""
        return changed

    def _of_replica(self, squares: list[float]) -> list[float]:
        """Sums over the whole replica, from those of what is here."""
        return squares

    def _on_written(self) -> None:
        """The parameters' memory was written."""

    @torch.no_grad()
    def apply(self, means: Sequence[Tensor], exact: bytes = b"") -> float:
        """What all agreed on, from where all began. How far this worker's own end was from it, as a part of it."""
        off = size = 0.0
        for (flat, parameters), mean in zip(self._parts(), means, strict=False):
            mean = mean.to(flat.device)
            torch._foreach_sub_(parameters, split_like(mean, parameters))
            size += float(finite_norm(parameters)) ** 2
            if self._weight:
                off += float((flat / self._weight - mean).norm()) ** 2
        if len(self._buffers):
            self._buffers.apply_from_host(self._buffers.copy(), means[-1], exact)
        self._weight = 0.0
        self._on_written()
        off, size = self._of_replica([off, size])
        return math.sqrt(off / size) if size else 0.0

    @torch.no_grad()
    def forget(self) -> None:
        """What was computed since begin() is of no use: the model is again as it was."""
        if self.is_open:
            self._go_back()
        self.start_anew()

    def start_anew(self) -> None:
        """The model's state has been replaced."""
        self.is_open, self._weight = False, 0.0
        self._forgotten += 1

    def _go_back(self) -> None:
        for flat, parameters in self._parts():
            torch._foreach_copy_(parameters, split_like(flat, parameters))
        self._buffers.put(self._before)
        self._on_written()

    @contextmanager
    def as_agreed(self) -> Iterator[None]:
        """The model as all agreed on it last, also in the middle of a window."""
        if not self.is_open:
            yield
            return
        tensors = [*self._buffers.now(), *(parameter for parameters in self._parameters for parameter in parameters)]
        own, forgotten = [tensor.clone() for tensor in tensors], self._forgotten
        with torch.no_grad():
            self._go_back()
        self.is_open = False
        try:
            yield
        finally:
            if forgotten == self._forgotten:  # else the window was lost meanwhile, with the connection
                self.is_open = True
                with torch.no_grad():
                    torch._foreach_copy_(tensors, own)
                self._on_written()

    def _parts(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        yield from zip(self._flats, self._parameters, strict=True)


def _zeros(total: int, like: Tensor) -> Tensor:
    return torch.zeros(total, device=like.device)
