"""What unequal workers do together, as a share of what they do alone at the same time: the contenders, and one rank.

A group of ranks computes for a second without a word to each other, then trains together for some seconds, then
computes alone again, and so on; so both figures come from the same processes at nearly the same time. Alone, a worker
does everything that the bare loop does: forward, backward, clipping, AdamW. Everybody's batch has the same rows, except
where shares follow speeds.
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
    "Async": Async(),
    "Cadence 20": Cadence(anchor=20),
}
WIRES = ("int4", "auto")
"""The last word of a contender whose numbers travel in this form; those of all others in fp32."""
BARE = ("bare DDP", "bare local SGD")


@dataclass(frozen=True, kw_only=True)
class Task:
    model: ModelConfig
    rows: int
    """A worker's batch where all have the same."""
    device: str = "cpu"
    bf16: bool = False
    tf32: bool = False
    length: int = 1 << 15
    """Rows of the data. An epoch should not end while we measure."""

    def build(self) -> tuple[GPT, AdamW]:
        torch.manual_seed(1)
        if self.tf32:
            torch.set_float32_matmul_precision("high")
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
    alone_s: float = 0.8
    """Alone, each time."""
    together_s: float = 2.5
    """Together, each time; at least, and until they agree."""
    chunks: int = 4
    """How often they compute together, after the warm-up; alone once more than that."""
    warm_windows: int = 5
    warm_steps: int = 40
    """Until shares have settled: where there are several steps to a window, and where there are not."""
    quiet_s: float = 0.1
    """Before they compute alone: an average that is formed while the next window computes takes less than that."""


def compete(seat: Seat, *, contender: str, task: dict[str, Any], times: dict[str, float]) -> dict[str, Any]:
    """One rank of one contender's turn."""
    return compete_as(seat, Task.from_json(task), contender, Times(**times), Meter)  # type: ignore[arg-type]


def compete_as(seat: Seat, task: Task, contender: str, clock: "Times", meters: "type[Meter]") -> dict[str, Any]:
    data = task.data()
    alone = BareLoop(seat, task, data)
    for _ in range(3):
        alone.step()
    meter = meters(seat, alone, clock)
    if contender in BARE:
        told = _compete_bare(meter, data, period=1 if contender == "bare DDP" else PERIOD)
    else:
        told = _compete_ours(meter, data, contender)
    return told | meter.told()


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


def rows_per_s(alone: BareLoop, seconds: float) -> float:
    """All ranks at the same time, none with a word to another."""
    _wait_for_device()
    dist.barrier()
    started, done = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        alone.step()
        done += alone.task.rows
    _wait_for_device()
    speed = done / (time.perf_counter() - started)
    dist.barrier()
    return speed


class Meter:
    """Called on every rank whenever all agree. All ranks count alike when they are to compute alone."""

    def __init__(self, seat: Seat, alone: BareLoop, clock: Times) -> None:
        self.seat, self.loop, self.clock = seat, alone, clock
        self.alone: list[float] = []
        """Rows per second of this rank."""
        self.together: list[tuple[int, float]] = []
        """Rows of all ranks, and seconds."""
        self._count = self._each = self._warm = 0
        self._from_s, self._from_rows = 0.0, 0

    def begin(self, warm: int) -> None:
        """The warm-up lasts for so many agreements."""
        self._warm = warm
        dist.barrier()
        self._from_s = time.perf_counter()

    def agreed(self, rows: int) -> bool:
        """`rows` were done by all so far. Whether that is enough."""
        _wait_for_device()
        now = time.perf_counter()
        self._count += 1
        since = self._count - self._warm
        if since in (-(self._warm // 2), 0):  # the second half of the warm-up tells how long a window is
            window_s = (now - self._from_s) / max(1, self._warm // 2)
            self._from_s = now
        if since == 0:
            each = torch.tensor(max(1, math.ceil(self.clock.together_s / window_s)))
            dist.broadcast(each, src=0)
            self._each = int(each)
        elif since > 0 and since % self._each == 0:
            self.together.append((rows - self._from_rows, now - self._from_s))
        if since >= 0 and since % self._each == 0:
            time.sleep(self.clock.quiet_s)
            self.alone.append(rows_per_s(self.loop, self.clock.alone_s))
            self._from_s, self._from_rows = time.perf_counter(), rows
        return since > 0 and since == self._each * self.clock.chunks

    def told(self) -> dict[str, Any]:
        seconds = sum(took for _, took in self.together)
        return {
            "rows_per_s": sum(rows for rows, _ in self.together) / seconds,
            "alone": self.alone,
            "windows": self._each * self.clock.chunks,
            "seconds": seconds,
        }


def _compete_bare(meter: Meter, data: Tensor, period: int) -> dict[str, Any]:
    seat, task = meter.seat, meter.loop.task
    if period == 1:
        loop = BareLoop(
            seat, task, data, wrap=lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True)
        )
    else:
        loop = BareLoop(seat, task, data, average=PeriodicModelAverager(period=period).average_parameters)
    meter.begin(8 if period == 1 else 2)
    steps, is_over = 0, False
    while not is_over:
        loop.step()
        steps += 1
        is_over = steps % period == 0 and meter.agreed(steps * task.rows * seat.world)
    return {"shares": [1 / seat.world] * seat.world}


def _compete_ours(meter: Meter, data: Tensor, contender: str) -> dict[str, Any]:
    import potluck

    seat, task, clock = meter.seat, meter.loop.task, meter.clock
    wire = next((wire for wire in WIRES if contender.endswith(f" {wire}")), "fp32")
    policy = POLICIES[contender.removesuffix(f" {wire}")]
    step = StepConfig(clip=CLIP, precision="bf16" if task.bf16 else "fp32")
    fleet = potluck.init(policy, step=step, wire=wire)  # type: ignore[arg-type]
    model, optimizer = task.build()
    model, _, loader = fleet.prepare(model, optimizer, data, batch_size=task.rows * seat.world)  # type: ignore[assignment]
    heard = Heard()

    def agreed() -> None:
        if meter.agreed(fleet.rows_seen):
            fleet.end()  # on every rank alike

    fleet.events.listeners.append(heard)
    fleet.after_agreement.append(agreed)
    warm = clock.warm_steps if isinstance(policy, Sync) else clock.warm_windows
    meter.begin(warm)
    train(fleet, model, loader, seat)
    return heard.told(warm)


def train(
    fleet: Any, model: nn.Module, loader: Any, seat: Seat, after_batch: Callable[[], None] = lambda: None
) -> None:
    """One rank of ours, until the run stops."""
    while not fleet.stopping:
        for batch in loader:
            loss, samples = next_token_loss(model, batch)
            fleet.backward(loss, samples=samples)
            seat.pause()
            fleet.step()
            after_batch()


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
