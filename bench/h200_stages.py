"""Two stages on parts of one GPU, to the losses of one process without stages, and the rows per second of both.

    python -m bench h200_stages [--quick]

Parts of 45 % each by MPS (bench/testbed) for the stages, and one of 90 % for the process that has the whole model: the
same processors in all. A GPT of 135M parameters in fp32, 8 micro-batches of 2 rows of 1,024 tokens, under 1f1b;
activations travel by Gloo through host memory, since NCCL refuses two ranks on one GPU. The one process accumulates the
same micro-batches. In two stages that are equal a worker waits for 1 / 9 of the time.

Needs CUDA, MPS and torch alone. With --quick and no GPU it runs a tiny model on CPU quotas, to see that it works.
"""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.h200_mixed import GPT_130M, GPT_TINY, _device_name
from bench.mixed import Task
from bench.report import Comparison, Result
from bench.testbed import Machine, TestbedError
from bench.turns import say
from bench.uneven import Uneven

PARTS = (45, 45)
LIMIT_S = 200.0


@dataclass(frozen=True, kw_only=True)
class Length:
    micros: int = 8
    steps: int = 12
    warm_steps: int = 3


def measure(quick: bool) -> Result | None:
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or quick):
        say("h200_stages needs a CUDA GPU, and torch sees none here: skipped.")
        return None
    task = Task(model=GPT_130M if has_gpu else GPT_TINY, rows=2, device="cuda" if has_gpu else "cpu")
    length = Length(steps=3, warm_steps=1) if quick else Length()
    found: dict[str, dict[str, Any]] = {}
    for name, parts in (("two stages", PARTS), ("one process", (sum(PARTS),))):
        try:
            found[name] = _train(parts, task, length, has_gpu)
        except TestbedError as error:
            say(f"h200_stages cannot go on: {error}")
            return None
        say(f"h200_stages: {name}: {found[name]}")
        _keep(found)
    return Result(compare(found), {"device": _device_name(), "task": task.as_json(), "found": found})


def _train(parts: tuple[int, ...], task: Task, length: Length, has_gpu: bool) -> dict[str, Any]:
    machines = [Machine(gpu=part) if has_gpu else Machine(cpu=part / 100) for part in parts]
    cores = [] if has_gpu else [machine.cpu for machine in machines]
    with Uneven(machines) as fleet:
        answers = fleet.run(
            "bench.h200_stages:train", cores=cores, limit_s=LIMIT_S, task=task.as_json(), length=asdict(length)
        )
    return answers[-1] | {"peaks_gib": [answer["peak_gib"] for answer in answers]}  # type: ignore[no-any-return]


def train(seat: Any, *, task: dict[str, Any], length: dict[str, Any]) -> dict[str, Any]:
    """One rank, of two stages or of one process: the losses of all steps, and rows per second after the warm-up."""
    import potluck
    from potluck.train.model import next_token_loss

    given, clock = Task.from_json(task), Length(**length)
    batch_size, steps = clock.micros * given.rows, clock.warm_steps + clock.steps
    protocol = potluck.Pipeline(micro_batch_size=given.rows)
    fleet = potluck.init(potluck.Sync(balance=False), stages=protocol if seat.world > 1 else None)
    model, optimizer = given.build()
    _, _, loader = fleet.prepare(
        model,
        optimizer,
        given.data()[: batch_size * steps],
        batch_size=batch_size,
        micro_batch_size=given.rows,
        loss=next_token_loss,
    )
    losses: list[float] = []
    started = 0.0
    for batch in loader:
        fleet.train(next_token_loss, batch)
        if (done := fleet.step()) is not None:
            losses.append(done.loss)  # type: ignore[union-attr]
            if len(losses) == clock.warm_steps:
                started = time.perf_counter()
    return {
        "losses": losses,
        "rows_per_s": batch_size * clock.steps / (time.perf_counter() - started),
        "peak_gib": torch.cuda.max_memory_allocated() / (1 << 30) if torch.cuda.is_available() else 0.0,
        "layout": fleet.layout,
    }


def compare(found: dict[str, dict[str, Any]]) -> list[Comparison]:
    two, one = found["two stages"], found["one process"]
    apart = max(abs(a - b) / b for a, b in zip(two["losses"], one["losses"], strict=True))
    return [
        Comparison(
            what=f"losses of two stages on parts of one {_device_name()}: the furthest from those of one process",
            unit="of the loss",
            ours=[apart],
            bare=[],
            target=0.001,
        ),
        Comparison(
            what=f"rows/s of two stages on parts of one {_device_name()}, against one process on both parts",
            unit="rows/s",
            ours=[two["rows_per_s"]],
            bare=[one["rows_per_s"]],
            target=None,
        ),
    ]


def _keep(found: dict[str, dict[str, Any]]) -> None:
    if folder := os.environ.get("OUT"):
        lines = [f"{name}: {one['rows_per_s']:.2f} rows/s, losses {one['losses']}" for name, one in found.items()]
        Path(folder, "h200_stages.txt").write_text("\n".join(lines) + "\n")
