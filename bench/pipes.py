"""One net over two processes: through Potluck, as one writes it with torch.distributed.pipelining, and with somatize.

The net is a row of equal blocks with nothing before or after, so that two stages of half the blocks are equal. All
train it from the same weights on the same rows, with AdamW.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

LEARNING_RATE = 1e-3
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Task:
    width: int = 512
    blocks: int = 8
    rows: int = 96
    """Of a micro-batch."""
    micros: int = 8
    steps: int = 8
    """How many steps the rows are for."""

    def build(self) -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(*(Block(self.width) for _ in range(self.blocks)))

    def data(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        shape = (self.steps * self.micros * self.rows, self.width)
        return torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)

    def batches(self) -> Any:
        """Those that Potluck's loader gives, in its order."""
        inputs, targets = self.data()
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
        for rows in order.split(self.micros * self.rows):
            yield inputs[rows], targets[rows]


def pin(place: int) -> None:
    """One core to a process, wherever the system lets us."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[place % len(cores)]})


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Ours:
    """Two stages through potluck.init, prepare, train and step."""

    def __init__(self, task: Task, schedule: str) -> None:
        import potluck

        stages = potluck.Stages(
            protocol=potluck.Pipeline(micro_batch_size=task.rows, schedule=schedule),  # type: ignore[arg-type]
            cuts=cuts(task, schedule),
        )
        self.fleet = potluck.init(potluck.Sync(balance=False), stages=stages)
        model = task.build()
        optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        _, _, loader = self.fleet.prepare(
            model, optimizer, task.data(), batch_size=task.micros * task.rows, loss=loss_of
        )
        self.batches = iter(loader)

    def step(self) -> float:
        while True:
            self.fleet.train(loss_of, next(self.batches))
            if (done := self.fleet.step()) is not None:
                return done.loss  # type: ignore[union-attr]


def cuts(task: Task, schedule: str) -> tuple[int, ...]:
    """Equal stages: two, or four where each worker has two."""
    count = 4 if schedule == "interleaved" else 2
    return tuple(task.blocks * stage // count for stage in range(1, count))


class Bare:
    """PipelineStage and a schedule of torch.distributed.pipelining, and an optimizer."""

    def __init__(self, task: Task, schedule: str) -> None:
        from torch.distributed.pipelining import PipelineStage, schedules

        kinds = {
            "1f1b": schedules.Schedule1F1B,
            "gpipe": schedules.ScheduleGPipe,
            "interleaved": schedules.ScheduleInterleaved1F1B,
            "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
        }
        rank, whole = dist.get_rank(), task.build()
        edges = (0, *cuts(task, schedule), task.blocks)
        count = len(edges) - 1
        parts = {place: whole[edges[place] : edges[place + 1]] for place in range(rank, count, 2)}
        stages = [PipelineStage(part, place, count, CPU) for place, part in parts.items()]
        is_single = schedule in ("1f1b", "gpipe")
        self.schedule = kinds[schedule](stages[0] if is_single else stages, task.micros, loss_fn=F.mse_loss)  # type: ignore[arg-type]
        weights = [weight for part in parts.values() for weight in part.parameters()]
        self.optimizer = AdamW(weights, lr=LEARNING_RATE, fused=True)
        self.batches, self.rank = task.batches(), rank

    def step(self) -> float:
        inputs, targets = next(self.batches)
        losses: list[Tensor] = []
        if self.rank == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=targets, losses=losses)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).mean()) if losses else 0.0


class Somatize:
    """The first half of the net in a worker of somatize's, the second half here: its own way to train over a cut.

    Its Trainer cuts the batch into as many micro-batches (`micro`) and has a `Split` trainer beside the part that is
    elsewhere. Rank 1 does nothing meanwhile: the worker is on its core. The worker is sent the code (`network`), since
    somatize's default way, by version, says of any nn.Module: "`Tensor` has no source to read, so it cannot be
    versioned." On every pass, forward and backward, it packs that half anew, to see by a digest whether the
    worker has it; what it sends is the activation.
    """

    def __init__(self, task: Task) -> None:
        if dist.get_rank() != 0:
            self.worker: subprocess.Popen[str] | None = None
            return
        from somatize import Broker, Graph, Worker
        from somatize.torch import Split, Trainer, parameters

        from bench.somatize_half import Half

        self.worker = subprocess.Popen(
            [sys.executable, "-c", f"from bench.somatize_half import listen; listen({dist.get_rank() + 1})"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.worker.stdout is not None
        address = self.worker.stdout.readline().split()[-1]
        whole = task.build()
        middle = task.blocks // 2
        graph = Graph.somatize(
            Half(whole[:middle]).named("first").at("elsewhere") >> Half(whole[middle:]).named("last")
        )
        trains = {"first": Split(AdamW, lr=LEARNING_RATE, fused=True)}
        self.trainer = Trainer(
            graph,
            objective=F.mse_loss,
            optimizer=AdamW(parameters(graph, without=trains), lr=LEARNING_RATE, fused=True),
            trains=trains,
            micro=task.micros,
            broker=Broker.embedded({"elsewhere": Worker.at(address, mode="network")}),
        )
        self.batches = task.batches()

    def step(self) -> float:
        return float(self.trainer.step(next(self.batches))) if self.worker is not None else 0.0

    def close(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker.wait()


class Half:
    """A stage of half the blocks as Line asks for one: nothing but the blocks, so that its times are theirs."""

    def __init__(self, task: Task, rank: int, micros: int) -> None:
        middle = task.blocks // 2
        self.blocks = task.build()[middle * rank : middle * (rank + 1)]
        draw = torch.Generator().manual_seed(0)
        # The first stage computes the gradient of its input, too: else its backward would be a little shorter.
        self.rows = [
            torch.randn(task.rows, task.width, generator=draw).requires_grad_(rank == 0) for _ in range(micros)
        ]
        self.is_last = rank == 1

    def forward(self, micro: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = self.blocks(received[0] if received else self.rows[micro])
        return (F.mse_loss(given, self.rows[micro]) if self.is_last else given,)

    def weights(self) -> list[nn.Parameter]:
        return list(self.blocks.parameters())


class Idle:
    """Steps without an optimizer, and which share of the time its workers waited or sent."""

    def __init__(self, task: Task, schedule: str, micros: int) -> None:
        from potluck.stages.direct import GroupChannel
        from potluck.stages.pipeline import PipelineRunner
        from potluck.stages.schedule import plan_orders

        self.rank = dist.get_rank()
        self.orders = plan_orders(schedule, 2, micros)  # type: ignore[arg-type]
        self.half = Half(task, self.rank, micros)
        self.line = PipelineRunner({self.rank: self.half}, [1], GroupChannel(None, CPU, rank=self.rank, workers=2))
        self.steps = 0
        self.busy: list[list[float]] = []
        """Of each step, the share of its time in which each worker computed."""

    def share(self) -> float:
        """From when both may begin until both are done: clocks of one machine's processes agree."""
        for weight in self.half.weights():
            weight.grad = None
        self.steps += 1
        dist.barrier()
        started = time.perf_counter()
        self.line.run(self.steps, self.orders, self.rank)
        mine = torch.tensor([started, time.perf_counter(), self.line.times.busy_s], dtype=torch.float64)
        told = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(told, mine)
        took_s = float(max(one[1] for one in told) - min(one[0] for one in told))
        self.busy.append([float(one[2]) / took_s for one in told])
        return 1 - sum(self.busy[-1]) / 2

    def close(self) -> None:
        self.line.channel.close()
