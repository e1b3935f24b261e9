"""From the command to the end of the first step: `potluck run -n 2`, against torchrun."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.ranks import ENVIRONMENT, ROOT
from bench.report import Comparison, Result
from bench.turns import say, take_turns

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
POTLUCK = [str(Path(sys.executable).with_name("potluck")), "run", "-n", "2"]


def measure(quick: bool) -> Result:
    sides = {
        "ours": _first_step_s(POTLUCK, "startup_script.py"),
        "the same script under torchrun": _first_step_s(TORCHRUN, "startup_script.py"),
        "a bare script under torchrun": _first_step_s(TORCHRUN, "startup_bare_script.py"),
    }
    say("startup: once each, so that every file is in the page cache")
    for start in sides.values():
        start()
    found = take_turns("startup", 1 if quick else 9, sides, "s")
    ours = found.pop("ours")
    what = "time to the first step of `potluck run -n 2`, against"
    return Result(
        [Comparison(what=f"{what} {side}", unit="s", ours=ours, bare=bare, target=1.2) for side, bare in found.items()]
    )


def _first_step_s(command: list[str], script: str) -> Callable[[], float]:
    def start() -> float:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            told = Path(folder) / "first_step"
            started_s = time.time()
            done = subprocess.run(
                [*command, str(ROOT / "bench" / script), str(told)],
                env=os.environ | ENVIRONMENT,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} {script} failed:\n{done.stderr}")
            return float(told.read_text()) - started_s

    return start
