"""`potluck up` against what a cluster has without it: torchrun under SLURM, and Ray Train's TorchTrainer.

From the command to the end of the first step, and the steps after it; two nodes of one thread, on this machine.
"""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench.ranks import ENVIRONMENT, ROOT
from bench.report import Comparison, Result
from bench.turns import say, take_turns
from tests.clusters.slurm import free_ports, missing, slurm

LOOP = str(ROOT / "bench" / "up_loop.py")
POTLUCK = (sys.executable, "-m", "potluck.cli", "up", "--threads", "1")
STEPS = 16


def measure(quick: bool) -> Result:
    rounds, found = (1 if quick else 3), []
    if sentence := missing():
        say(f"up: {sentence}")
    else:
        found += _under_slurm(rounds)
    if importlib.util.find_spec("ray") is None:
        say("up: Ray is not installed: pip install 'potluck[ray]'")
    else:
        found += _under_ray(rounds)
    return Result(found)


def _under_slurm(rounds: int) -> list[Comparison]:
    with slurm({"n1": 1, "n2": 1}) as cluster, tempfile.TemporaryDirectory(prefix="bench-") as runs:
        srun = ("srun", "-N2", "--ntasks-per-node=1")
        number = itertools.count()

        def ours(led: str) -> Callable[[str], list[str]]:
            def command(file: str) -> list[str]:
                options = ("--as", led, "--at-least", "2", "--out", f"{runs}/{next(number)}")
                return [*srun, *POTLUCK, *options, LOOP, "ours", file, str(STEPS)]

            return command

        def torchrun(file: str) -> list[str]:
            meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}")
            nodes = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "bench")
            return [*srun, sys.executable, "-m", "torch.distributed.run", *nodes, *meet, LOOP, "bare", file, str(STEPS)]

        environment = cluster.environment | ENVIRONMENT
        return _compare("SLURM", "torchrun", rounds, ours("group"), ours("host"), torchrun, environment)


def _under_ray(rounds: int) -> list[Comparison]:
    from ray.cluster_utils import Cluster as RayCluster

    os.environ |= ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)  # TorchTrainer's own actor wants a CPU too
        with tempfile.TemporaryDirectory(prefix="bench-") as runs:
            number = itertools.count()

            def ours(led: str) -> Callable[[str], list[str]]:
                def command(file: str) -> list[str]:
                    options = ("--as", led, "--at-least", "2", "--out", f"{runs}/{next(number)}")
                    return [*POTLUCK, *options, LOOP, "ours", file, str(STEPS)]

                return command

            def trainer(file: str) -> list[str]:
                return [sys.executable, str(ROOT / "bench" / "up_trainer.py"), file, str(STEPS), "2"]

            environment = dict(os.environ) | {"RAY_ADDRESS": cluster.address}
            return _compare("Ray", "TorchTrainer", rounds, ours("group"), ours("host"), trainer, environment)
    finally:
        cluster.shutdown()


def _compare(
    where: str,
    theirs: str,
    rounds: int,
    group: Callable[[str], list[str]],
    host: Callable[[str], list[str]],
    bare: Callable[[str], list[str]],
    environment: dict[str, str],
) -> list[Comparison]:
    steps: dict[str, list[float]] = {}

    def side(name: str, command: Callable[[str], list[str]]) -> Callable[[], float]:
        def start() -> float:
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                file = Path(folder) / "told"
                started_s = time.time()
                words = command(str(file))
                done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
                if done.returncode or not file.exists():
                    raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
                told = json.loads(file.read_text())
                steps.setdefault(name, []).append(1e3 * median(told["steps_s"][3:]))
                say(f"{where}: {name}: {steps[name][-1]:.1f} ms a step")
                return float(told["first_at"]) - started_s

        return start

    sides = {"a group": side("a group", group), "a host": side("a host", host), theirs: side(theirs, bare)}
    say(f"{where}: once each, so that every file is in the page cache")
    for start in sides.values():
        start()
    steps.clear()
    found = take_turns(where, rounds, sides, "s")
    said = []
    for led in ("a group", "a host"):
        against = f"of `potluck up` as {led} under {where}, against {theirs}"
        is_alike = led == "a group"
        said += [
            Comparison(
                what=f"time to the first step {against}", unit="s", ours=found[led], bare=found[theirs], target=1.2
            ),
            Comparison(
                what=f"step time {against}",
                unit="ms",
                ours=steps[led],
                bare=steps[theirs],
                target=1.02 if is_alike else None,
            ),
        ]
    return said
