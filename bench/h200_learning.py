"""What policies learn from the same samples, where a model has learned something: product runs, against Sync.

    python -m bench h200_learning [--quick]
    python -m bench.h200_learning --policies Sync "Cadence 5" Auto --rates 2e-3 4e-3 --seeds 0 1 2 --at-once 3

Each run is `potluck train` with workers of its own on one GPU under MPS: a byte-level GPT of 10.9M parameters (384
wide, 6 layers, rows of 256) on torch's source text, batches of 64 rows, bf16, warm-up and cosine, to losses near 0.7.
Of each policy, the rate that is best for it. What was measured is written to $OUT as well, after each run. With --quick
and no GPU, a tiny model on the CPU, to see that it works.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean

import torch

from bench.ranks import ROOT
from bench.report import Comparison, Result
from bench.turns import say

POLICIES: dict[str, tuple[str, ...]] = {
    "Sync": ("kind=sync",),
    "Cadence as it was": ("kind=cadence",),
    "Cadence 5": ("kind=cadence", "anchor=5", "max_anchor=5", "together=0.15", "moments=true"),
    "Cadence 10": ("kind=cadence", "anchor=10", "max_anchor=10", "together=0.15", "moments=true"),
    "Async 5": ("kind=async", "anchor=5", "max_anchor=5", "together=0.15", "moments=true"),
    "Auto": ("kind=auto",),
}
COMMON = (
    "data.validation=0.03",
    "optimizer.betas=[0.9, 0.95]",
    "fit.validate_every=100",
    "fit.checkpoint.every=100000",
)
WHOLE = (
    "model.dim=384",
    "model.layers=6",
    "model.heads=6",
    "model.context=256",
    "batch.size=64",
    "step.precision=bf16",
)
TINY = (
    "model.dim=32",
    "model.layers=1",
    "model.heads=2",
    "model.context=32",
    "batch.size=16",
    "data.limit_bytes=40_000",
)
GOAL = 1.05
LIMIT_S = 400.0


@dataclass(frozen=True)
class Lesson:
    policy: str
    rate: float
    seed: int
    workers: int
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Learned:
    loss: float
    seconds: float
    curve: tuple[tuple[float, float], ...]
    """(seconds since the first step, validation loss)"""


def measure(quick: bool) -> Result | None:
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or quick):
        say("h200_learning needs a CUDA GPU, and torch sees none here: skipped.")
        return None
    rates, seeds = ((3e-3,), (0,)) if quick else ((2e-3, 3e-3, 4e-3), (0, 1, 2))
    names = ("Sync", "Cadence 5", "Auto") if quick else ("Sync", "Cadence 5", "Async 5", "Auto")
    found = learn_all(lessons(names, rates, seeds, 2 if quick else 4), 1 if quick else 3)
    return Result(compare(found), {"found": told(found)})


def lessons(names: Sequence[str], rates: Sequence[float], seeds: Sequence[int], workers: int) -> list[Lesson]:
    where = Path(torch.__file__).parent
    size = (*WHOLE, f'data.paths=["{where}"]', "data.limit_bytes=16_000_000") if torch.cuda.is_available() else TINY
    return [Lesson(name, rate, seed, workers, size) for seed, rate, name in product(seeds, rates, names)]


def learn_all(wanted: Sequence[Lesson], at_once: int) -> dict[Lesson, Learned]:
    """So many runs at a time: their times are comparable only if it is one."""
    found: dict[Lesson, Learned] = {}
    if torch.cuda.is_available():
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False, capture_output=True)
    with ThreadPoolExecutor(at_once) as pool, tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for lesson, learned in zip(wanted, pool.map(lambda each: learn(each, Path(folder)), wanted), strict=True):
            if learned is None:
                continue
            found[lesson] = learned
            say(f"h200_learning: {lesson.policy}, rate {lesson.rate:g}, seed {lesson.seed}: {learned.loss:.4f}")
            if out := os.environ.get("OUT"):
                Path(out, "h200_learning.json").write_text(json.dumps(told(found), indent=1))
    return found


def learn(lesson: Lesson, folder: Path) -> Learned | None:
    out = folder / f"{lesson.policy}-{lesson.rate}-{lesson.seed}".replace(" ", "-")
    settings = (
        *COMMON,
        *lesson.settings,
        *(f"policy.{each}" for each in POLICIES[lesson.policy]),
        f"optimizer.lr={lesson.rate}",
        f"fit.seed={lesson.seed}",
        f"workers.count={lesson.workers}",
        "workers.threads=1",
    )
    command = [sys.executable, "-c", "import sys; from potluck.cli import main; sys.exit(main())", "train", "demo"]
    command += ["--out", str(out), *(word for each in settings for word in ("--set", each))]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    with (folder / f"{out.name}.log").open("wb") as log:
        ran = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=LIMIT_S, check=False)
    if ran.returncode:
        say(f"h200_learning: {lesson.policy} ended with {ran.returncode}: {log.name}")
        print(Path(log.name).read_text()[-2000:])
        return None
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    looks = [(event["time"], event["loss"]) for event in events if event["event"] == "validated"]
    start = min(event["time"] for event in events)
    end = next(event for event in reversed(events) if event["event"] == "run_ended")
    return Learned(end["validation_loss"], end["seconds"], tuple((at - start, loss) for at, loss in looks))


def best(found: dict[Lesson, Learned], policy: str) -> list[float]:
    """The losses of all seeds at the rate that is best for this policy."""
    by_rate: dict[float, list[float]] = {}
    for lesson, learned in found.items():
        if lesson.policy == policy:
            by_rate.setdefault(lesson.rate, []).append(learned.loss)
    return min(by_rate.values(), key=mean, default=[])


def compare(found: dict[Lesson, Learned]) -> list[Comparison]:
    sync = best(found, "Sync")
    names = dict.fromkeys(lesson.policy for lesson in found if lesson.policy != "Sync")
    workers = next((lesson.workers for lesson in found), 0)
    return [
        Comparison(
            what=f"validation loss after the same samples, {workers} workers, each at its best rate: {name} / Sync",
            unit="",
            ours=losses,
            bare=sync,
            target=GOAL,
        )
        for name in names
        if (losses := best(found, name)) and len(losses) == len(sync)
    ]


def told(found: dict[Lesson, Learned]) -> list[dict[str, object]]:
    return [
        {
            "policy": lesson.policy,
            "rate": lesson.rate,
            "seed": lesson.seed,
            "workers": lesson.workers,
            "loss": learned.loss,
            "seconds": learned.seconds,
            "curve": learned.curve,
        }
        for lesson, learned in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.h200_learning")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--policies", nargs="+", default=["Sync", "Cadence 5", "Auto"], choices=list(POLICIES))
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--at-once", type=int, default=3)
    asked = parser.parse_args()
    started = time.monotonic()
    found = learn_all(lessons(asked.policies, asked.rates, asked.seeds, asked.workers), asked.at_once)
    for each in compare(found):
        print(f"{each.what}: {each.ratio:.3f} ({each.median_ours:.4f} against {each.median_bare:.4f})")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
