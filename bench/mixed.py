"""What unequal workers do together, as a share of what they do alone at the same time: the contenders, and one rank.

A group of ranks first computes without a word to each other, then trains together, then computes alone again; so both
figures come from the same processes, within seconds. Alone, a worker does everything that the bare loop does: forward,
backward, clipping, AdamW. Everybody's batch has the same rows, except where shares follow speeds.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from bench.uneven_rank import Seat
from potluck import Async, Cadence, StepConfig, Sync
from potluck.events import Decided, StepDone
from potluck.train.model import GPT, ModelConfig, next_token_loss

CLIP = 1.0
PERIOD = 10
"""Steps between two averages of bare local SGD."""
POLICIES: dict[str, Any] = {
    "Sync": Sync(balance=False),
    "Sync balanced": Sync(balance=True),
    "Cadence": Cadence(),
    "Cadence overlap": Cadence(overlap=True),
    "Async": Async(),
    "Cadence 20": Cadence(anchor=20),
    "Cadence 20 overlap": Cadence(anchor=20, overlap=True),
}
BARE = ("bare DDP", "bare local SGD")


@dataclass(frozen=True, kw_only=True)
class Task:
    model: ModelConfig
    rows: int
    """A worker's batch where all have the same."""
    device: str = "cpu"
    bf16: bool = False
    length: int = 1 << 15
    """Rows of the data. An epoch should not end while we measure."""

    def build(self) -> tuple[GPT, AdamW]:
        torch.manual_seed(1)
        model = GPT(self.model).to(self.device)
        return model, AdamW(model.parameters(), lr=3e-4, fused=True)

    def data(self) -> Tensor:  # [length, context + 1]
        draw = torch.Generator().manual_seed(0)
        return torch.randint(self.model.vocab, (self.length, self.model.context + 1), generator=draw, dtype=torch.int32)

    def as_json(self) -> dict[str, Any]:
        model = asdict(self.model)
        return vars(self) | {"model": model}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "Task":
        return cls(**told | {"model": ModelConfig(**told["model"])})


TASK = Task(model=ModelConfig(dim=192, layers=2, heads=4, context=8), rows=24)
"""What mixed_speeds.py says of it."""


@dataclass(frozen=True, kw_only=True)
class Times:
    alone_s: float = 1.5
    """Before, and again after."""
    warm_s: float = 2.5
    """Until shares have settled; at least that long."""
    warm_windows: int = 3
    """And at least so many windows, where there are several steps to one."""
    measure_s: float = 6.0


@dataclass(frozen=True)
class Mark:
    """Where the whole fleet stood when it agreed."""

    at_s: float
    rows: int


def compete(seat: Seat, *, contender: str, task: dict[str, Any], times: dict[str, float]) -> dict[str, Any]:
    """One rank of one contender's turn."""
    given, clock = Task.from_json(task), Times(**times)  # type: ignore[arg-type]
    data = given.data()
    alone = BareLoop(seat, given, data)
    for _ in range(3):
        alone.step()
    before = rows_per_s(seat, alone, clock.alone_s)
    if contender in BARE:
        told = _compete_bare(seat, given, data, clock, period=1 if contender == "bare DDP" else PERIOD)
    else:
        told = _compete_ours(seat, given, data, clock, POLICIES[contender])
    return told | {"alone": [before, rows_per_s(seat, alone, clock.alone_s)]}


class BareLoop:
    """A loop as one writes it for one process; wrapped, or averaged after each step, it is one of several."""

    def __init__(
        self,
        seat: Seat,
        task: Task,
        data: Tensor,
        *,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
        average: Callable[[Any], None] = lambda parameters: None,
    ) -> None:
        self.seat, self.task = seat, task
        model, self.optimizer = task.build()
        self.model, self.average = wrap(model), average
        self.batches = _cycle(data, task.rows, seat.rank)

    def step(self) -> None:
        rows = next(self.batches).to(self.task.device, non_blocking=True)
        with torch.autocast(self.task.device, torch.bfloat16, enabled=self.task.bf16):
            loss, _ = next_token_loss(self.model, rows)
        loss.backward()
        self.seat.pause()
        clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.average(self.model.parameters())
        self.optimizer.zero_grad(set_to_none=True)
        loss.item()


def rows_per_s(seat: Seat, alone: BareLoop, seconds: float) -> float:
    """All ranks at the same time, none with a word to another."""
    _wait_for_device()
    dist.barrier()
    started, done = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        alone.step()
        done += alone.task.rows
    _wait_for_device()
    return done / (time.perf_counter() - started)


def _compete_bare(seat: Seat, task: Task, data: Tensor, clock: Times, period: int) -> dict[str, Any]:
    if period == 1:
        loop = BareLoop(
            seat, task, data, wrap=lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True)
        )
    else:
        loop = BareLoop(seat, task, data, average=PeriodicModelAverager(period=period).average_parameters)
    marks: list[Mark] = []

    def run(windows: int) -> None:
        for _ in range(windows):
            for _ in range(period):
                loop.step()
            _wait_for_device()
            marks.append(Mark(time.perf_counter(), task.rows * seat.world * period * len(marks)))

    run(6 if period == 1 else 2)
    window_s = (marks[-1].at_s - marks[1 if period == 1 else 0].at_s) / (len(marks) - (2 if period == 1 else 1))
    count = torch.tensor(max(1, math.ceil(clock.measure_s / window_s)))
    dist.broadcast(count, src=0)
    warm = len(marks) - 1
    run(int(count))
    return _told(marks, warm) | {"shares": [1 / seat.world] * seat.world}


def _compete_ours(seat: Seat, task: Task, data: Tensor, clock: Times, policy: Any) -> dict[str, Any]:
    import potluck

    fleet = potluck.init(policy, step=StepConfig(clip=CLIP, precision="bf16" if task.bf16 else "fp32"))
    model, optimizer = task.build()
    model, _, loader = fleet.prepare(model, optimizer, data, batch_size=task.rows * seat.world)  # type: ignore[assignment]
    marks, heard = [Mark(time.perf_counter(), 0)], Heard()
    warm_marks = 1 if isinstance(policy, Sync) else clock.warm_windows

    def note() -> None:
        marks.append(Mark(time.perf_counter(), fleet.rows_seen))
        at = _warm(marks, clock.warm_s, warm_marks)
        if seat.rank == 0 and at is not None and marks[-1].at_s - marks[at].at_s >= clock.measure_s:
            fleet.request_stop()

    fleet.events.listeners.append(heard)
    fleet.after_step.append(note)
    while not fleet.stopping:
        for batch in loader:
            loss, samples = next_token_loss(model, batch)
            fleet.backward(loss, samples=samples)
            seat.pause()
            fleet.step()
    fleet.evaluate(next_token_loss, data[: seat.world], seat.world)  # nothing is on its way any more
    warm = _warm(marks, clock.warm_s, warm_marks)
    assert warm is not None
    return _told(marks, warm) | heard.told(warm)


class Heard:
    """What the engine tells of its windows, or steps."""

    def __init__(self) -> None:
        self.windows: list[StepDone] = []
        self.decided: Decided | None = None

    def __call__(self, event: Any) -> None:
        if isinstance(event, StepDone):
            self.windows.append(event)
        elif isinstance(event, Decided):
            self.decided = event

    def told(self, warm: int) -> dict[str, Any]:
        """Since the warm-up: each worker's share of the rows, and of the time in which it computed."""
        windows = self.windows[warm:]
        per_rank = list(zip(*(window.workers for window in windows), strict=True))
        rows = [sum(part.rows for part in parts) for parts in per_rank]
        seconds = sum(window.seconds for window in windows)
        return {
            "shares": [part / sum(rows) for part in rows],
            "busy": [sum(part.busy_s for part in parts) / seconds for parts in per_rank],
            "anchor": self.decided.anchor if self.decided is not None else 1,
        }


def _warm(marks: list[Mark], seconds: float, least: int) -> int | None:
    """Which mark ended the warm-up."""
    return next((i for i, mark in enumerate(marks) if i >= least and mark.at_s - marks[0].at_s >= seconds), None)


def _told(marks: list[Mark], warm: int) -> dict[str, Any]:
    first, last = marks[warm], marks[-1]
    return {
        "rows_per_s": (last.rows - first.rows) / (last.at_s - first.at_s),
        "windows": len(marks) - 1 - warm,
        "seconds": last.at_s - first.at_s,
    }


def _cycle(data: Tensor, rows: int, rank: int) -> Any:
    """Batches of random rows, for ever, other ones on each rank."""
    draw = torch.Generator().manual_seed(rank)
    while True:
        for part in torch.randperm(len(data), generator=draw).split(rows)[:-1]:
            yield data[part]


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def combined(answers: list[dict[str, Any]]) -> tuple[float, float]:
    """Rows per second of the fleet, and the sum of what its workers did alone just before and after."""
    alone = sum(sum(answer["alone"]) / len(answer["alone"]) for answer in answers)
    return answers[0]["rows_per_s"], alone
