"""One rank that learns: the demo's text and settings, under a policy of Potluck or in a bare DDP loop, and its curve.

The weights are copied at intervals, which costs a millisecond, and the copies are judged when all is trained and every
quota is lifted; so looking at the validation loss costs no time that is counted.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from bench.mixed import train
from bench.uneven_rank import Seat
from potluck import Async, Auto, Cadence, StepConfig, Sync
from potluck.config import from_toml
from potluck.data.rows import mix
from potluck.devices import choose_device
from potluck.train.arguments import find_recipe
from potluck.train.model import GPT, next_token_loss
from potluck.train.recipe import RunConfig
from potluck.train.schedule import ScheduleConfig
from potluck.train.text import TextWindows, read_rows

TRAINED = "trained"
"""What a rank tells when it has ended: quotas may be lifted."""
JUDGED_AT_ONCE = 24
POLICIES: dict[str, Any] = {
    "Sync": Sync(),
    "Sync equal": Sync(balance=False),
    "Cadence": Cadence(),
    "Async": Async(),
    "Auto": Auto(),
    "Cadence of 5": Cadence(anchor=5, max_anchor=5),
    "Cadence of 20": Cadence(anchor=20, max_anchor=20),
    "Cadence as published": Cadence.published(),
}


@dataclass(frozen=True)
class Lesson:
    """What is learnt, in how many steps: model, data, optimizer and schedule."""

    config: RunConfig
    seed: int
    steps: int

    @classmethod
    def of(cls, seed: int, steps: int, settings: Sequence[str]) -> "Lesson":
        """The demo's recipe, with some settings replaced."""
        text, source = find_recipe("demo")
        return cls(from_toml(RunConfig, text, source=source, overrides=tuple(settings)), seed, steps)

    def data(self) -> tuple[TextWindows, TextWindows]:
        training, validation, _ = read_rows(self.config.data, self.config.model.context)
        return training, validation

    @property
    def rows(self) -> int:
        return self.steps * self.config.batch.size

    def build(self) -> tuple[GPT, AdamW]:
        torch.manual_seed(self.seed)
        torch.set_float32_matmul_precision("high")
        model = GPT(self.config.model).to(choose_device())
        settings = self.config.optimizer
        groups = [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return model, AdamW(groups, lr=settings.lr, betas=(settings.betas[0], settings.betas[1]), fused=True)

    def lr_factor(self, rows_seen: int) -> float:
        return (self.config.fit.schedule or ScheduleConfig()).factor(rows_seen, self.rows)


class Curve:
    """Copies of the weights, and when they were taken; `take` is called whenever all replicas are equal."""

    def __init__(self, model: nn.Module, every_rows: int) -> None:
        self._model, self._every_rows, self._next = model, every_rows, every_rows
        self.copies: list[tuple[float, int, list[Tensor]]] = []
        self.started = time.perf_counter()

    def take(self, rows: int, *, last: bool = False) -> None:
        if rows >= self._next or last:
            copied = [parameter.detach().clone() for parameter in self._model.parameters()]
            self.copies.append((time.perf_counter() - self.started, rows, copied))
            self._next = (rows // self._every_rows + 1) * self._every_rows

    def judge(self, seat: Seat, model: GPT, validation: TextWindows) -> list[list[float]]:
        """[seconds, rows, validation loss] of this rank's part of the copies: each rank judges every world-th."""
        found = []
        for seconds, rows, copied in self.copies[seat.rank :: seat.world]:
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), copied, strict=True):
                    parameter.copy_(value)
            found.append([seconds, rows, validation_loss(model, validation)])
        return found


@torch.no_grad()
def validation_loss(model: GPT, validation: TextWindows) -> float:
    total = count = 0.0
    for first in range(0, len(validation), JUDGED_AT_ONCE):
        rows = _rows(validation, range(first, min(first + JUDGED_AT_ONCE, len(validation))))
        loss, samples = next_token_loss(model, rows)
        total, count = total + loss.item() * samples, count + samples
    return total / count


def _rows(data: TextWindows, rows: Iterable[int]) -> Tensor:
    return torch.stack([data[row] for row in rows]).to(choose_device())


def learn(
    seat: Seat, *, contender: str, seed: int, steps: int, settings: Sequence[str], looks: int, wire: str = "fp32"
) -> dict[str, Any]:
    """Trains for so many steps; `looks` is how often the loss is looked at, 0 for only at the end."""
    lesson = Lesson.of(seed, steps, [*settings, f"wire={wire}"])
    train = _learn_bare if contender == "bare DDP" else _learn_ours
    told = train(seat, lesson, contender, max(1, lesson.rows // looks) if looks else 1 << 62)
    return told | {"rows": lesson.rows}


def _learn_ours(seat: Seat, lesson: Lesson, contender: str, every_rows: int) -> dict[str, Any]:
    import potluck

    training, validation = lesson.data()
    step = StepConfig(clip=lesson.config.step.clip)
    fleet = potluck.init(POLICIES[contender], step=step, wire=lesson.config.wire)
    model, optimizer = lesson.build()
    batch_size = lesson.config.batch.size
    model, _, loader = fleet.prepare(model, optimizer, training, batch_size=batch_size, seed=lesson.seed)  # type: ignore[assignment]
    fleet.lr_factor, fleet.loop.rows_limit = lesson.lr_factor, lesson.rows
    windows = 0

    def after_step() -> None:
        nonlocal windows
        windows += 1
        curve.take(fleet.rows_seen, last=fleet.rows_seen >= lesson.rows)
        if fleet.rows_seen >= lesson.rows:
            fleet.end()

    fleet.after_agreement.append(after_step)
    dist.barrier()
    curve = Curve(model, every_rows)
    train(fleet, model, loader, seat)
    seat.tell(TRAINED)
    final = fleet.evaluate(next_token_loss, validation, JUDGED_AT_ONCE)
    if every_rows < lesson.rows:
        return {"curve": curve.judge(seat, model, validation), "final": final, "windows": windows}
    return {"curve": [], "final": final, "windows": windows}


def _learn_bare(seat: Seat, lesson: Lesson, contender: str, every_rows: int) -> dict[str, Any]:
    """The same rows in the same order, in equal parts."""
    training, validation = lesson.data()
    weights, optimizer = lesson.build()
    model = DistributedDataParallel(weights, gradient_as_bucket_view=True)
    size, part = lesson.config.batch.size, lesson.config.batch.size // seat.world
    dist.barrier()
    curve = Curve(weights, every_rows)
    for step in range(lesson.steps):
        epoch, row = divmod(step * size, len(training) // size * size)
        if row == 0:
            draw = torch.Generator().manual_seed(mix(lesson.seed, epoch))
            order = torch.randperm(len(training), generator=draw).tolist()
        first = row + seat.rank * part
        loss, _ = next_token_loss(model, _rows(training, order[first : first + part]))
        loss.backward()
        seat.pause()
        clip_grad_norm_(weights.parameters(), lesson.config.step.clip or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = lesson.config.optimizer.lr * lesson.lr_factor((step + 1) * size)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curve.take((step + 1) * size, last=step + 1 == lesson.steps)
    seat.tell(TRAINED)
    return {"curve": curve.judge(seat, weights, validation), "final": validation_loss(weights, validation)}


def merged(answers: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(seconds, validation loss) of all ranks' parts of one curve."""
    return [(seconds, loss) for seconds, _, loss in sorted(point for answer in answers for point in answer["curve"])]


def lift(set_cores: Callable[[int, float | None], None], workers: int) -> Callable[[], None]:
    """What is done when all is trained."""

    def act() -> None:
        for index in range(workers):
            set_cores(index, None)

    return act
