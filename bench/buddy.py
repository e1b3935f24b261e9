"""What it costs to outlive the loss of a worker: a refresh of the copies, and the time from a kill -9 to the next step.

    python -m bench buddy [--quick]

A GPT of 20M parameters under `potluck run -n 2` with FullShard(buddy=True), one row of 256 tokens for each rank, so
that steps are short and a refresh shows. Rank 1 is killed, and the other is started anew from what was kept in memory.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench.ranks import ENVIRONMENT, ROOT
from bench.report import Comparison, Result
from bench.turns import say

POTLUCK = [sys.executable, "-m", "potluck.cli", "run", "-n", "2", "--threads", "1"]
PATH = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
EVERY = 10
"""Steps between two refreshes."""
Heard = list[dict[str, Any]]


def measure(quick: bool) -> Result:
    kills = 1 if quick else 5
    refreshes = 4 if quick else 8
    found = [_kill(refreshes) for _ in range(kills)]
    cost = "of a step's time for the copies, refreshed every 10 steps; 20M model, FullShard, 2 CPU ranks"
    pause = "from the kill -9 of one of 2 ranks to the next finished step; 20M model, FullShard"
    return Result(
        [
            Comparison(what=cost, unit="%", ours=[each["percent"] for each in found], bare=[], target=None),
            Comparison(what=pause, unit="s", ours=[each["pause_s"] for each in found], bare=[], target=None),
        ],
        {name: median(each[name] for each in found) for name in ("step_s", "refresh_s", "refresh_bytes")},
    )


def _kill(refreshes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        told = Path(folder) / "told"
        script = str(ROOT / "bench" / "buddy_script.py")
        process = subprocess.Popen([*POTLUCK, script, str(told), str(EVERY)], env=os.environ | ENVIRONMENT | PATH)
        try:
            before = _await(process, told, lambda heard: _steps(heard)[-1:] >= [refreshes * EVERY + EVERY // 2])
            died_at = time.time()
            os.kill(next(each["pid"] for each in before if each["what"] == "rank 1"), signal.SIGKILL)
            after = _await(process, told, lambda heard: any(_is_after(each, died_at) for each in heard))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
    steps = [each["seconds"] for each in before if each["what"] == "step"][2:]
    # The first was before the first step, when the optimizer had no state; the next two took new memory for it.
    refresh = [each for each in before if each["what"] == "refresh"][3:]
    next_at = next(each["at"] for each in after if _is_after(each, died_at))
    step_s, refresh_s = median(steps), median(each["seconds"] for each in refresh)
    figures = {
        "step_s": step_s,
        "refresh_s": refresh_s,
        "refresh_bytes": median(each["bytes"] for each in refresh),
        "percent": 100 * refresh_s / (EVERY * step_s),
        "pause_s": next_at - died_at,
    }
    say("buddy: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    return figures


def _is_after(each: dict[str, Any], died_at: float) -> bool:
    return each["what"] == "step" and each["at"] > died_at and each["workers"] == 1


def _steps(heard: Heard) -> list[int]:
    return [each["step"] for each in heard if each["what"] == "step"]


def _await(process: subprocess.Popen[bytes], told: Path, is_enough: Callable[[Heard], bool]) -> Heard:
    while True:
        lines = told.read_text().splitlines(keepends=True) if told.exists() else []
        heard = [json.loads(line) for line in lines if line.endswith("\n")]
        if is_enough(heard):
            return heard
        if process.poll() is not None:
            raise SystemExit(f"buddy: the run ended with exit code {process.returncode}")
        time.sleep(0.02)
