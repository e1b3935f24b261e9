"""The two sides: a bare PyTorch loop as a careful person would write it, and Potluck's engine in a loop of one's own.

Both train the same model from the same weights on the same rows, so that their weights stay close for the first steps;
`distance` says how close. (Later AdamW makes large steps of the last bits of small gradients.) Potluck's engine is
imported only by its own side, so that the memory of the bare one is its own.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from potluck.train.model import GPT, ModelConfig, next_token_loss

CLIP = 1.0
LEARNING_RATE = 3e-4
GPT_20M = ModelConfig(dim=384, layers=11, heads=6, context=256)  # 19.7 million parameters


@dataclass(frozen=True, kw_only=True)
class Task:
    model: ModelConfig
    rows_per_rank: int
    steps: int
    """How many steps the rows are for. An epoch never ends while we measure."""
    device: torch.device = torch.device("cpu")
    fast: bool = False
    """bf16 and, unless it is eager, compiled blocks."""
    eager: bool = False

    @property
    def compiled(self) -> bool:
        return self.fast and not self.eager

    def build(self) -> tuple[GPT, AdamW]:
        torch.manual_seed(1)
        with self.device:
            model = GPT(self.model)
        return model, AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def tokens(self, world: int) -> Tensor:  # [rows, context + 1]
        draw = torch.Generator().manual_seed(0)
        shape = (self.steps * self.rows_per_rank * world, self.model.context + 1)
        return torch.randint(self.model.vocab, shape, generator=draw, dtype=torch.int32)

    def order(self, rank: int, world: int) -> list[list[int]]:
        """A rank's rows of each step: those that Potluck's loader gives it."""
        shuffled = torch.randperm(len(self.tokens(world)), generator=torch.Generator().manual_seed(0))
        return [step.tolist() for step in shuffled.split(self.rows_per_rank)[rank::world]]

    def batches(self, rank: int, world: int) -> Iterator[list[Tensor]]:
        rows = TensorDataset(self.tokens(world))
        pinned = self.device.type == "cuda"
        return iter(DataLoader(rows, batch_sampler=self.order(rank, world), pin_memory=pinned))


class Bare:
    """DistributedDataParallel where there are several ranks, and nothing around the model where there is one."""

    def __init__(self, task: Task, *, bucket_view: bool = True) -> None:
        self.task = task
        self.weights, self.optimizer = task.build()
        if task.compiled:
            for block in self.weights.blocks:
                block.compile()
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.model: nn.Module = self.weights
        if world > 1:
            self.model = DistributedDataParallel(self.weights, gradient_as_bucket_view=bucket_view)
        self.batches = task.batches(rank, world)

    def step(self) -> float:
        rows = next(self.batches)[0].to(self.task.device, non_blocking=True)
        with torch.autocast(self.task.device.type, torch.bfloat16, enabled=self.task.fast):
            loss, _ = next_token_loss(self.model, rows)
        loss.backward()
        clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


class Ours:
    """The same through potluck.init, prepare, backward and step."""

    def __init__(self, task: Task, **options: Any) -> None:
        import potluck

        config = potluck.StepConfig(clip=CLIP, precision="bf16" if task.fast else "fp32", compile=task.compiled)
        self.fleet = potluck.init(step=config, **options)
        world = self.fleet.world
        self.weights, optimizer = task.build()
        self.model, _, loader = self.fleet.prepare(
            self.weights, optimizer, self.data(task), batch_size=task.rows_per_rank * world
        )
        self.batches = iter(loader)

    def data(self, task: Task) -> Any:
        return task.tokens(self.fleet.world)

    def step(self) -> float:
        rows = next(self.batches)
        loss, samples = next_token_loss(self.model, rows)
        self.fleet.backward(loss, samples=samples)
        return self.fleet.step().loss


class Led:
    """The same as a worker that a server leads; the environment holds its invite."""

    policy: tuple[Any, ...] = ("sync",)
    """As bare DDP does it. The default under a host is Auto, whose windows are other work."""

    def __init__(self, task: Task) -> None:
        import potluck

        self.fleet = potluck.init(*self.policy, step=potluck.StepConfig(clip=CLIP))
        self.weights, optimizer = task.build()
        self.model, _, loader = self.fleet.prepare(
            self.weights, optimizer, self.data(task), batch_size=task.rows_per_rank * dist.get_world_size()
        )
        self.batches = iter(loader)
        self.step_s: list[float] = []
        """What engine.step() took, once the last backward had ended: the rest of the sending, averaging, applying."""

    def data(self, task: Task) -> Any:
        return task.tokens(dist.get_world_size())

    def step(self) -> float:
        while True:  # slice by slice
            loss, samples = next_token_loss(self.model, next(self.batches))
            self.fleet.backward(loss, samples=samples)
            started = time.perf_counter()
            if (done := self.fleet.step()) is not None:
                self.step_s.append(time.perf_counter() - started)
                return float(done.loss)


def distance(ours: nn.Module, bare: nn.Module) -> float:
    """|ours - bare| / |bare| over all weights. A loop that left out part of the work would be far away."""
    with torch.no_grad():
        pairs = list(zip(ours.parameters(), bare.parameters(), strict=True))
        apart = sum((a - b).square().sum().item() for a, b in pairs)
        return (apart / sum(b.square().sum().item() for _, b in pairs)) ** 0.5


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
