"""Plain PyTorch in one process says what a fleet must have computed: from its records, or from its data alone."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from potluck.data.rows import mix, seed_everything
from potluck.events import Decided
from potluck.fleet.effects import StepRecord
from potluck.fleet.tree import children, slice_rows
from tests.fleet.fleet import BATCH, EPOCHS, ROWS, SLICES, STEPS, Fleet, build
from tests.parity.test_learning_windows import average_moments

# Steps that all take together

Gradients = dict[str, torch.Tensor]


def floating(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()]


def moved_by(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return torch.where(now.isfinite() & before.isfinite(), (now - before).float(), 0.0)


def plain_run(
    epochs: int = EPOCHS,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    slices_of_step: int = SLICES,
    rounded: Callable[[Gradients], Gradients] = lambda gradients: gradients,
    make: Callable[[], tuple[Any, Any, Any]] = build,
) -> dict[str, torch.Tensor]:
    """One process and no Potluck: a step's slices one after the other, their gradients added in the tree.

    `rounded`: what arrives of the gradients of a node of the tree, and of their mean. `make`: model, optimizer, data.
    """
    torch.set_num_threads(1)
    model, optimizer, (x, y) = make()
    scheduler = schedule(optimizer) if schedule is not None else None
    step = 0
    for epoch in range(epochs):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(1, epoch)))
        for row in range(0, ROWS, BATCH):
            rows, step = min(BATCH, ROWS - row), step + 1
            slices = min(slices_of_step, rows // 2)  # BatchNorm takes no mean of a single row
            unit = 2.0**-5
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            found, changes = [], []
            for number, (start, end) in enumerate(slice_rows(row, rows, slices)):
                for name, buffer in model.named_buffers():
                    buffer.set_(before[name].clone())
                seed_everything(mix(1, step, number))
                batch = order[start:end]
                model.zero_grad()
                (F.cross_entropy(model(x[batch]), y[batch]) * ((end - start) * unit)).backward()
                found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
                weight = (end - start) * unit
                changes.append({n: moved_by(b, before[n]) * weight for n, b in floating(model)})
                if number == 0:  # what has no mean is the first slice's
                    first = {name: buffer.clone() for name, buffer in model.named_buffers()}

            def add(
                parts: list[Gradients], node: tuple[int, int], arrives: Callable[[Gradients], Gradients]
            ) -> Gradients:
                if node[1] - node[0] == 1:
                    return arrives(parts[node[0]])
                left, right = (add(parts, child, arrives) for child in children(node))
                return arrives({name: left[name] + right[name] for name in left})

            scale = torch.tensor(1 / (rows * unit), dtype=torch.float32)
            total, moves = add(found, (0, slices), rounded), add(changes, (0, slices), lambda change: change)
            mean = rounded({name: value * scale for name, value in total.items()})
            moved = {name: value * scale for name, value in moves.items()}
            for name, parameter in model.named_parameters():
                parameter.grad = mean.get(name)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            for name, buffer in model.named_buffers():
                value = first[name]
                if buffer.is_floating_point() and before[name].isfinite().all():
                    value = torch.where(moved[name] == 0, before[name], before[name] + moved[name])
                buffer.set_(value)
    return dict(model.state_dict())


def plain(clip: float | None = None, epochs: int = EPOCHS) -> dict[str, torch.Tensor]:
    """One process, whole batches, and no Potluck but its order of rows."""
    torch.set_num_threads(1)
    model, optimizer, (x, y) = build(bare=True)
    for epoch in range(epochs):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(1, epoch)))
        for row in range(0, ROWS, BATCH):
            batch = order[row : row + BATCH]
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return dict(model.state_dict())


# Workers that step by themselves


def kinds(fleet: Fleet) -> dict[int, bool]:
    """By step: whether all took it together."""
    return {event.version + 1: event.anchor == 0 for event in fleet.events if isinstance(event, Decided)}


def rows_of(fleet: Fleet, name: str) -> list[int]:
    return [row["rows"] for record in fleet.records for row in record.workers if row["name"] == name]


def cosine(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, T_max=STEPS)


def cosine_rate(rows: int) -> float:
    """The rate of the step that ends there."""
    epoch, row = divmod(rows - 1, ROWS)
    return 0.005 * (1 + math.cos(math.pi * (epoch * STEPS // EPOCHS + row // BATCH) / STEPS))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Without a state, so that it does not matter which replica has had which range."""
    return torch.optim.SGD(model.parameters(), lr=0.05)


def standing_records(fleet: Fleet) -> list[StepRecord]:
    """Those that the run stands on: where it went back to a checkpoint, the later ones of a step."""
    found: list[StepRecord] = []
    for record in fleet.records:
        while found and found[-1].step >= record.step:
            found.pop()
        found.append(record)
    return found


def judge(
    fleet: Fleet,
    epochs: int = EPOCHS,
    *,
    optimizer_of: Callable[[nn.Module], Any] = adamw,
    clip: float = math.inf,
    moments: bool = False,
    falls: bool = False,
) -> dict[str, torch.Tensor]:
    """One process and no Potluck: a step along the gradient of all rows, where it was taken together; else each
    recorded range by a replica of its own, and then their mean by rows, and with `moments` that of their optimizers.

    Each worker keeps its optimizer from window to window. The batch of a step of its own is the run's over the workers
    for which the window was planned. `falls`: the rate is that of cosine().
    """
    torch.set_num_threads(1)
    model, _, (x, y) = build(bare=True)
    records = standing_records(fleet)
    workers = {row["rank"] for record in records for row in record.workers}
    workers |= {who for record in records for _, _, who in record.ranges}
    replicas = {who: copy.deepcopy(model) for who in workers}
    own = {who: optimizer_of(each) for who, each in replicas.items()}
    planned = {event.version + 1: len(event.rows) for event in fleet.events if isinstance(event, Decided)}

    def step(who: int, rows: torch.Tensor, at: int, stretch: float = 1.0) -> None:
        if falls:
            own[who].param_groups[0]["lr"] = min(0.01 * stretch ** (1 / 3), stretch * cosine_rate(at))
        replicas[who].zero_grad()
        F.cross_entropy(replicas[who](x[rows]), y[rows]).backward()
        nn.utils.clip_grad_norm_(replicas[who].parameters(), clip)
        own[who].step()

    seen = 0
    for record in records:
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(1, record.epoch)))
        if kinds(fleet)[record.step]:
            for who in workers:
                step(who, order[record.row : record.row + record.rows], seen + record.rows)
            seen += record.rows
            continue
        size = -(-BATCH // planned[record.step])
        parts = [end - start for start, end, _ in record.ranges]
        steps = sum(part * part / size for part in parts) / record.rows
        stretch = max(1.0, record.rows / BATCH * math.sqrt(BATCH / size) / steps) if moments else 1.0
        before = copy.deepcopy(replicas[min(workers)].state_dict())
        mean = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
        for start, end, who in record.ranges:
            replicas[who].load_state_dict(before)
            done = 0
            for rows in torch.tensor_split(order[start:end], -(-(end - start) // size)):
                done += len(rows)
                step(who, rows, seen + round(record.rows * done / (end - start)), stretch)
            for name, tensor in replicas[who].state_dict().items():
                mean[name] += tensor * ((end - start) / record.rows)
        for replica in replicas.values():
            replica.load_state_dict(mean)
        if moments:
            weights = {who: (end - start) / record.rows for start, end, who in record.ranges}
            average_moments([replicas[who] for who in weights], [own[who] for who in weights], [*weights.values()])
            for who in workers - weights.keys():
                own[who].load_state_dict(copy.deepcopy(own[next(iter(weights))].state_dict()))
        seen += record.rows
    assert seen == epochs * ROWS
    return replicas[min(workers)].state_dict()


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=2e-4, atol=2e-5)
