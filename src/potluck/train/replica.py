"""A replica: one whole copy of the model, with its optimizer, whatever they are split over.

Knows how a step is computed, and nothing of data, schedules or files.
"""

import functools
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.errors import ConfigError
from potluck.train.buckets import Buckets
from potluck.train.link import Link


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """How one step is computed."""

    clip: float | None = None
    """The largest norm that the whole gradient may have; none: no limit."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the forward under autocast; parameters, gradients and optimizer stay as they are."""
    compile: bool = False
    """torch.compile for the model's repeated blocks, or for the whole model if it has none."""
    checkpoint_activations: bool = False
    """Keep only the input of each repeated block and compute the rest again in the backward: less memory, more time."""
    nonfinite_limit: int = 10
    """Stop after this many steps in a row whose loss or gradient is not finite."""

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be above 0, not {self.clip}; leave it out for no limit")
        if self.nonfinite_limit < 1:
            raise ValueError(f"nonfinite_limit must be at least 1, not {self.nonfinite_limit}")


class Replica:
    """For each step: arm and backward for every micro-batch, then finish, and apply or drop."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, link: Link, device: torch.device, config: StepConfig
    ) -> None:
        self.model = model.to(device)
        self.optimizer = optimizer
        self.link = link
        self.config = config
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._check()
        self._same_start()
        _switch_on(model, device, config)
        self._buckets = Buckets(model, find_blocks(model), link.start_sum) if link.world > 1 else None
        self._shared_buffers = [b for name, b in model.named_buffers() if name in set(model.state_dict())]

    def arm(self, *, last: bool) -> None:
        """Before each backward: only the step's last one talks to the other ranks."""
        if self._buckets is not None:
            self._buckets.arm(communicate=last)

    def finish(self) -> float:
        """Ends the sums over all ranks. Returns the seconds spent waiting for them."""
        return self._buckets.finish() if self._buckets is not None else 0.0

    def drop_unused(self) -> None:
        """Parameters that no rank used get no gradient, as in one process. A collective where there are several."""
        if self._buckets is None:
            return
        used = torch.tensor(self._buckets.arrivals(), dtype=torch.uint8)
        self.link.start_sum(used).wait()
        self._buckets.drop(used.bool().tolist())

    @property
    def has_unused(self) -> bool:
        return self._buckets is not None and not all(self._buckets.arrivals())

    def norm(self) -> Tensor:
        """The norm of the whole gradient, as it stands."""
        return torch.nn.utils.get_total_norm(self._gradients())

    def apply(self, scale: float) -> None:
        """Scales the gradient and steps the optimizer."""
        if scale != 1.0 and (gradients := self._gradients()):
            torch._foreach_mul_(gradients, scale)
        self.optimizer.step()
        self.drop()

    def drop(self) -> None:
        """Forgets the gradient."""
        if self._buckets is not None:
            self._buckets.reset()
        self.optimizer.zero_grad(set_to_none=True)

    def average_buffers(self, weight: float) -> None:
        """Floating-point buffers (running statistics) become the mean over ranks, by weight; others are rank 0's."""
        if self.link.world == 1:
            return
        for buffer in self._shared_buffers:
            if buffer.is_floating_point():
                self.link.start_sum(buffer.mul_(weight)).wait()
            else:
                self.link.broadcast(buffer)

    def fingerprint(self) -> str:
        """A hash of every parameter's bytes: equal exactly when replicas are."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(as_bytes(parameter.detach()))
        return digest.hexdigest()

    def _gradients(self) -> list[Tensor]:
        # A flat bucket holds zeros for what nobody used, so the norm over buckets is the norm over gradients.
        if self._buckets is not None:
            return self._buckets.flats
        return [parameter.grad for parameter in self.trained if parameter.grad is not None]

    def _check(self) -> None:
        if not self.trained:
            raise ConfigError("The model has no parameter that requires a gradient, so there is nothing to train.")
        for group in self.optimizer.param_groups:
            if any(id(parameter) not in self.names for parameter in group["params"]):
                raise ConfigError(
                    "The optimizer holds a parameter that is not one of the model's. Make the optimizer from"
                    " model.parameters() of the model that you pass here."
                )
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ConfigError("LBFGS evaluates the loss many times within one step, which step() cannot do.")

    def _same_start(self) -> None:
        """Every rank has the same shapes, and starts from rank 0's values."""
        state = self.model.state_dict()
        mine = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in state.items()]
        for rank, theirs in enumerate(map(json.loads, self.link.gather_bytes(json.dumps(mine).encode()))):
            if theirs != mine:
                first = next((a, b) for a, b in _padded(mine, theirs) if a != b)
                raise ConfigError(
                    f"The model differs between workers: on worker {self.link.rank} it has {_tell(first[0])}"
                    f" where worker {rank} has {_tell(first[1])}. Build the same model on every worker."
                )
        for tensor in state.values():
            self.link.broadcast(tensor)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated layers: the longest list of at least two modules of one class."""
    best: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = list(module)
            parameters = sum(p.numel() for p in module.parameters())
            alike = len({type(child) for child in children}) == 1
            if alike and len(children) >= 2 and parameters and len(children) > len(best):
                best = children
    return best


def as_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes, of whatever type it is, without a copy where it lies on the CPU."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _switch_on(model: nn.Module, device: torch.device, config: StepConfig) -> None:
    """The switches change how forward runs, in place: the model keeps its class and its parameters' names."""
    blocks = find_blocks(model)
    if config.checkpoint_activations:
        if not blocks:
            raise ConfigError(
                "checkpoint_activations found no repeated blocks in the model: a ModuleList or Sequential of at least"
                " two modules of one class. Switch it off, or arrange the model's layers so."
            )
        for block in blocks:
            _replace_forward(
                block, functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
            )
    if config.precision == "bf16":
        _replace_forward(model, torch.autocast(device.type, torch.bfloat16)(model.forward))
    if config.compile:
        if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
            raise ConfigError(
                "step.compile needs a C++ compiler on a CPU, and none is on the PATH. Install g++, or switch it off."
            )
        for module in blocks or [model]:
            module.compile()


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = forward


def _padded(a: list[Any], b: list[Any]) -> list[tuple[Any, Any]]:
    longest = max(len(a), len(b))
    return list(zip(a + [None] * (longest - len(a)), b + [None] * (longest - len(b)), strict=True))


def _tell(entry: list[Any] | None) -> str:
    return f"{entry[0]} {tuple(entry[1])} {entry[2]}" if entry else "nothing more"
