"""How long a worker takes from a notice that its machine is taken back to its polite leave; and what is done again.

The real commands: a host, a worker that stays, and one whose whole machine gets SIGTERM at a moment drawn at random, as
by a scheduler: the joiner and its worker. 20M parameters, under Sync and under Cadence, whose windows last much longer
than a notice should. It has left when the host says so.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report import Comparison, Result
from bench.turns import say

RECIPE = """
name = "preempt"
[model]
dim = 384
layers = 11
heads = 6
context = 64
[data]
paths = ["text"]
validation = 0.0
[batch]
size = 8
[fit]
epochs = 1000
[policy]
"""
POLICIES = {
    "Sync": 'kind = "sync"',
    "Cadence": 'kind = "cadence"\nanchor = 12\nmax_anchor = 12\ntogether = 0.0',
}
POTLUCK = [sys.executable, "-m", "potluck.cli"]
TARGET_S = 5.0


def measure(quick: bool) -> Result:
    found: list[Comparison] = []
    details: dict[str, Any] = {}
    for name, policy in POLICIES.items():
        times, redone, rounds = _preempt(name, policy, 1 if quick else 5)
        what = f"from SIGTERM to all of a machine to its polite leave, 20M parameters, under {name}"
        found.append(Comparison(what=what, unit="s", ours=times, bare=[], target=TARGET_S))
        found.append(Comparison(what=f"steps redone, under {name}", unit="steps", ours=redone, bare=[], target=0.0))
        details |= {f"notice_to_leave_s_{name}": times, f"seconds_of_a_round_{name}": rounds}
    return Result(found, details)


def _preempt(name: str, policy: str, times: int) -> tuple[list[float], list[float], list[float]]:
    """The seconds of each leave; steps that the host told of twice; and how long rounds took, to compare."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        folder = Path(place)
        (folder / "text").write_text("".join(f"word{i % 97} and{i % 13}\n" for i in range(40_000)))
        (folder / "preempt.toml").write_text(RECIPE + policy + "\n")
        run = folder / "run"
        options = ["--threads", "1", "--out", str(run)]
        host = _start(folder, "host", "preempt.toml", "-n", "1", *options)
        seconds: list[float] = []
        redone: list[float] = []
        try:
            _await(lambda: (run / "invite").exists() and (run / "invite").read_text().endswith("\n"))
            for _ in range(times):
                joiner = _start(folder, "join", "--threads", "1", "--data", "text", str(run / "invite"))
                whose = f"-{joiner.pid}"
                _await(lambda whose=whose: _rounds_with(run, whose) >= 2)  # type: ignore[misc]
                time.sleep(draw.uniform(0.0, 1.5))
                began = time.time()
                for pid in (*_children(joiner.pid), joiner.pid):
                    os.kill(pid, signal.SIGTERM)
                joiner.wait(60)
                went = _await(lambda whose=whose: _find(run, "worker_went", whose))  # type: ignore[misc]
                if not went["polite"]:
                    raise SystemExit(f"preempt: it was lost: {went}")
                seconds.append(went["time"] - began)
                steps = [r["step"] for r in _events(run) if r["event"] == "step_done"]
                redone.append(float(len(steps) - len(set(steps))))
                say(f"preempt: {name}: left {seconds[-1]:.2f} s after SIGTERM ({went['reason']})")
            rounds = [r["seconds"] for r in _events(run) if r["event"] == "step_done"]
        finally:
            host.send_signal(signal.SIGINT)
            host.wait(60)
    return seconds, redone, rounds[-5:]


def _start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder)}
    return subprocess.Popen([*POTLUCK, *arguments], cwd=folder, env=environment, **quiet)  # type: ignore[call-overload,no-any-return]


def _events(run: Path) -> list[dict[str, Any]]:
    try:
        lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _find(run: Path, event: str, whose: str) -> dict[str, Any] | None:
    found = [r for r in _events(run) if r["event"] == event and str(r["name"]).endswith(whose)]
    return found[-1] if found else None


def _rounds_with(run: Path, whose: str) -> int:
    """Rounds that this worker had a part in."""
    steps = [r for r in _events(run) if r["event"] == "step_done"]
    return sum(any(str(w["name"]).endswith(whose) and w["rows"] for w in r["workers"]) for r in steps)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _await(found: Callable[[], Any], limit_s: float = 180.0) -> Any:
    deadline = time.monotonic() + limit_s
    while not (there := found()):
        if time.monotonic() > deadline:
            raise SystemExit("preempt: it did not come to that.")
        time.sleep(0.05)
    return there
