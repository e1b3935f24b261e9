"""What policies learn from the same samples, where a model has learned something: product runs, against Sync.

    python -m bench h200_learning [--quick]
    python -m bench.h200_learning --policies Sync Cadence Auto --rates 3e-3 4e-3 --seeds 0 1 2 --at-once 4

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

PUBLISHED = ("policy.overhead_target=0.1", "policy.max_anchor=200", "policy.together=0", "policy.moments=false")
POLICIES: dict[str, tuple[str, ...]] = {
    "Sync": ("policy=sync",),
    "Sync int4": ("policy=sync", "wire=int4"),
    "Cadence": ("policy=cadence",),
    "Cadence int4": ("policy=cadence", "wire=int4"),
    "Cadence as published": ("policy.kind=cadence", *PUBLISHED),
    "Async": ("policy=async",),
    "Auto": ("policy=auto",),
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
class Trial:
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
    anchors: tuple[int, ...] = ()
    """Batches of the slowest in each window; 0: a step of all."""


def measure(quick: bool) -> Result | None:
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or quick):
        say("h200_learning needs a CUDA GPU, and torch sees none here: skipped.")
        return None
    rates, seeds = ((3e-3,), (0,)) if quick else ((2e-3, 3e-3, 4e-3), (0, 1, 2))
    names = ("Sync", "Cadence", "Auto") if quick else ("Sync", "Cadence", "Async", "Auto")
    found = learn_all(trials(names, rates, seeds, 2 if quick else 4), 1 if quick else 3)
    return Result(compare(found), {"found": told(found)})


def trials(names: Sequence[str], rates: Sequence[float], seeds: Sequence[int], workers: int) -> list[Trial]:
    where = Path(torch.__file__).parent
    size = (*WHOLE, f'data.paths=["{where}"]', "data.limit_bytes=16_000_000") if torch.cuda.is_available() else TINY
    return [Trial(name, rate, seed, workers, size) for seed, rate, name in product(seeds, rates, names)]


def learn_all(wanted: Sequence[Trial], at_once: int) -> dict[Trial, Learned]:
    """So many runs at a time: their times are comparable only if it is one."""
    found: dict[Trial, Learned] = {}
    if torch.cuda.is_available():
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False, capture_output=True)
    with ThreadPoolExecutor(at_once) as pool, tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for trial, learned in zip(wanted, pool.map(lambda each: learn(each, Path(folder)), wanted), strict=True):
            if learned is None:
                continue
            found[trial] = learned
            say(f"h200_learning: {trial.policy}, rate {trial.rate:g}, seed {trial.seed}: {learned.loss:.4f}")
            if out := os.environ.get("OUT"):
                Path(out, "h200_learning.json").write_text(json.dumps(told(found), indent=1))
    return found


def learn(trial: Trial, folder: Path) -> Learned | None:
    out = folder / f"{trial.policy}-{trial.rate}-{trial.seed}".replace(" ", "-")
    settings = (
        *COMMON,
        *trial.settings,
        *POLICIES[trial.policy],
        f"optimizer.lr={trial.rate}",
        f"fit.seed={trial.seed}",
        f"workers.count={trial.workers}",
        "workers.threads=1",
    )
    command = [sys.executable, "-c", "import sys; from potluck.cli import main; sys.exit(main())", "train", "demo"]
    command += ["--out", str(out), *(word for each in settings for word in ("--set", each))]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    with (folder / f"{out.name}.log").open("wb") as log:
        ran = subprocess.run(["timeout", str(LIMIT_S), *command], stdout=log, stderr=log, env=environment, check=False)
    if ran.returncode:
        say(f"h200_learning: {trial.policy} ended with {ran.returncode}: {log.name}")
        print(Path(log.name).read_text()[-2000:])
        return None
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    looks = [(event["time"], event["loss"]) for event in events if event["event"] == "validated"]
    start = min(event["time"] for event in events)
    end = next(event for event in reversed(events) if event["event"] == "run_ended")
    anchors = tuple(event["anchor"] for event in events if event["event"] == "decided")
    return Learned(end["validation_loss"], end["seconds"], tuple((at - start, loss) for at, loss in looks), anchors)


def best(found: dict[Trial, Learned], policy: str) -> list[float]:
    """The losses of all seeds at the rate that is best for this policy."""
    by_rate: dict[float, list[float]] = {}
    for trial, learned in found.items():
        if trial.policy == policy:
            by_rate.setdefault(trial.rate, []).append(learned.loss)
    return min(by_rate.values(), key=mean, default=[])


def compare(found: dict[Trial, Learned]) -> list[Comparison]:
    sync = best(found, "Sync")
    names = dict.fromkeys(trial.policy for trial in found if trial.policy != "Sync")
    workers = next((trial.workers for trial in found), 0)
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


def told(found: dict[Trial, Learned]) -> list[dict[str, object]]:
    return [
        {
            "policy": trial.policy,
            "rate": trial.rate,
            "seed": trial.seed,
            "workers": trial.workers,
            "loss": learned.loss,
            "seconds": learned.seconds,
            "curve": learned.curve,
            "windows": sum(anchor > 0 for anchor in learned.anchors),
            "last_anchor": max(learned.anchors[-5:], default=0),
        }
        for trial, learned in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.h200_learning")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--policies", nargs="+", default=["Sync", "Cadence", "Auto"], choices=list(POLICIES))
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--at-once", type=int, default=3)
    asked = parser.parse_args()
    started = time.monotonic()
    found = learn_all(trials(asked.policies, asked.rates, asked.seeds, asked.workers), asked.at_once)
    for each in compare(found):
        print(f"{each.what}: {each.ratio:.3f} ({each.median_ours:.4f} against {each.median_bare:.4f})")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
