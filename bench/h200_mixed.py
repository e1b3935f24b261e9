"""Parts of one GPU as workers of different speeds: what they do together, against the sum of what each does alone.

    python -m bench h200_mixed [--quick]

One GPU in parts of 70 and 20 percent, then of 40, 30 and 20, by MPS (bench/testbed); a GPT of 134M parameters in TF32,
8 rows of 512 tokens to a worker's batch; gradients and weights, 540 MB, travel by Gloo, since NCCL refuses two ranks
on one GPU. Not in bf16: there, on parts of 52, 92 or 104 multiprocessors, torch 2.11's plain matrix product is wrong or
not a number (`a @ b.T` of 8192 x 768 and 768 x 768), which a bare loop does not notice, and our engine stops at.

Parts of a GPU are not whole machines: they share its memory's bandwidth, its copy engines and this machine's cores; so
workers that compute alone are measured at the same time, as everywhere in mixed.py.

Needs CUDA, MPS and torch alone: neither control groups nor network namespaces. What was measured is written to $OUT as
well, after each contender; one that fails does not keep the others from being measured. With --quick and no GPU it runs
a tiny model on CPU quotas, to see that it works.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from bench.mixed import Task, Times, combined
from bench.report import Comparison, Result
from bench.testbed import Machine, TestbedError
from bench.turns import say
from bench.uneven import Uneven
from potluck.train.model import ModelConfig

GPT_130M = ModelConfig(vocab=32768, dim=768, layers=12, heads=12, context=512)  # 134 million parameters
GPT_TINY = ModelConfig(vocab=512, dim=64, layers=2, heads=2, context=16)
PARTS = ((70, 20), (40, 30, 20))
CONTENDERS = ("Sync balanced int4", "Cadence int4", "Cadence", "bare DDP", "Sync balanced")
GOALS = {"Cadence int4": 0.97, "Sync balanced int4": 0.6}
BUDGET_S = 400.0
"""Nothing more is begun after that."""
LIMIT_S = 150.0
"""Of one contender."""

Found = dict[str, dict[str, Any]]
"""By the parts and the contender."""


def measure(quick: bool) -> Result | None:
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or quick):
        say("h200_mixed needs a CUDA GPU, and torch sees none here: skipped.")
        return None
    task, times, parts = _size(has_gpu, quick)
    found: Found = {}
    deadline = time.monotonic() + BUDGET_S
    try:
        for shape in parts:
            _measure_parts(shape, task, times, has_gpu, found, deadline)
    except TestbedError as error:
        say(f"h200_mixed cannot go on: {error}")
    return Result(compare(found), {"device": _device_name(), "task": task.as_json(), "found": found})


def _size(has_gpu: bool, quick: bool) -> tuple[Task, Times, Sequence[tuple[int, ...]]]:
    if not has_gpu:
        return Task(model=GPT_TINY, rows=8), Times(alone_s=0.5, together_s=1.0, warm_windows=1, chunks=1), PARTS[:1]
    task = Task(model=GPT_130M, rows=8, device="cuda", tf32=True)
    if quick:
        return task, Times(alone_s=2.0, together_s=5.0, warm_windows=1, warm_steps=4, chunks=1, quiet_s=2.0), PARTS[:1]
    return task, Times(alone_s=3.0, together_s=12.0, warm_windows=2, warm_steps=16, chunks=1, quiet_s=2.0), PARTS


def _measure_parts(
    parts: tuple[int, ...], task: Task, times: Times, has_gpu: bool, found: Found, deadline: float
) -> None:
    machines = [Machine(gpu=part) if has_gpu else Machine(cpu=part / 100) for part in parts]
    cores = [] if has_gpu else [machine.cpu for machine in machines]
    left = list(CONTENDERS)
    while left:
        with Uneven(machines) as fleet:
            while left:
                name = f"{'/'.join(map(str, parts))}: {(contender := left.pop(0))}"
                if time.monotonic() > deadline:
                    say(f"h200_mixed: {name}: left out, since time is up")
                    continue
                say(f"h200_mixed: {name} begins")
                try:
                    answers = fleet.run(
                        "bench.mixed:compete",
                        cores=cores,
                        limit_s=LIMIT_S,
                        contender=contender,
                        task=task.as_json(),
                        times=asdict(times),
                    )
                except SystemExit as error:
                    say(f"h200_mixed: {name} failed: {error}")
                    break  # its ranks may hang; the next has new ones
                together, alone = combined(answers)
                speeds = [mean(answer["alone"]) for answer in answers]
                told = {key: value for key, value in answers[0].items() if key != "alone"}
                found[name] = {"together": together, "alone": alone, "speeds": speeds, "told": told}
                say(f"h200_mixed: {name} {together / alone:.3f} ({together:.1f} of {alone:.1f} rows/s; {told})")
                _keep(found)


def _keep(found: Found) -> None:
    if folder := os.environ.get("OUT"):
        Path(folder, "h200_mixed.json").write_text(json.dumps(found, indent=1))


def compare(found: Found) -> list[Comparison]:
    return [
        Comparison(
            what=f"rows/s of parts of one {_device_name()}, in percent, {name}, against the sum of each alone",
            unit="rows/s",
            ours=[turn["together"]],
            bare=[turn["alone"]],
            target=GOALS.get(name.split(": ")[1]),
            at_least=True,
        )
        for name, turn in found.items()
    ]


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
