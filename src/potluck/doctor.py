"""`potluck doctor`: what this machine brings, measured, and what is wrong with it, with the fix."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from potluck.environment import free_memory_bytes, machine_bytes, usable_cores
from potluck.words import plural, size

BACKEND_PROBE = """
import os, sys, time, torch, torch.distributed as dist
backend, rank, world = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
if backend == "nccl":
    torch.cuda.set_device(device)
dist.init_process_group(backend, "file://" + os.environ["POTLUCK_RENDEZVOUS"], rank=rank, world_size=world)
def average():
    tensor = torch.ones(4_000_000, device=device)
    start = time.perf_counter()
    dist.all_reduce(tensor)
    assert tensor[0].item() == world
    return tensor.nbytes / (time.perf_counter() - start)
rate = max(average() for _ in range(6))
if rank == 0:
    print(f"{rate:.0f}")
dist.destroy_process_group()
"""
WAYS_OUT = {
    "gloo": "If a firewall guards the loopback interface, allow it; if the interface is not called lo, name it in"
    " GLOO_SOCKET_IFNAME.",
    "nccl": "Set NCCL_DEBUG=INFO and run it again to see why; until it works, workers can share over Gloo.",
}


@dataclass
class Findings:
    brings: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """Each with what to do about it."""


def examine() -> int:
    """Prints the findings; 0 if nothing is wrong, else 1."""
    console = Console(highlight=False, soft_wrap=True)
    findings = Findings()
    steps: dict[str, Callable[[Findings], None]] = {
        "Looking at the machine": look_at_machine,
        "Loading torch": look_at_torch,
        "Measuring matrix products and memory": measure,
        "Starting two workers that talk": try_backends,
    }
    for what, look in steps.items():
        with console.status(f"{what} ..."):
            look(findings)
    console.print("This machine brings", style="bold")
    for name, value in findings.brings.items():
        console.print(f"  {name:<22} {value}")
    console.print()
    if not findings.wrong:
        console.print(
            "Nothing is wrong. `potluck demo` shows a slow worker among fast ones, in under three minutes.",
            style="green",
        )
        return 0
    console.print("What is wrong", style="bold yellow")
    for sentence in findings.wrong:
        console.print(f"  - {sentence}")
    return 1


def look_at_machine(findings: Findings) -> None:
    memory = free_memory_bytes()
    findings.brings["cores"] = f"{usable_cores()} ({platform.machine()}, {platform.system()})"
    findings.brings["memory"] = f"{size(memory)} free of {size(machine_bytes())}"
    if memory < 1e9:
        findings.wrong.append(
            f"Only {size(memory)} of memory are free, and each worker needs about half a GB before it holds a model."
            " Close something, or use fewer workers."
        )
    free = shutil.disk_usage(Path.cwd()).free
    findings.brings["disk here"] = f"{size(free)} free"
    if free < 1e9:
        findings.wrong.append(
            f"Only {size(free)} are free on this disk, and a checkpoint takes twelve bytes per parameter. Free some,"
            " or keep runs elsewhere with --out."
        )
    if not os.access(Path.cwd(), os.W_OK):
        findings.wrong.append("This folder is not writable, and runs are kept in it. Go elsewhere, or use --out.")
    compiler = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    findings.brings["C++ compiler"] = compiler or "none, so step.compile does not work on the CPU"
    if "OMP_NUM_THREADS" in os.environ:
        findings.brings["OMP_NUM_THREADS"] = f"{os.environ['OMP_NUM_THREADS']}, and workers obey it"


def look_at_torch(findings: Findings) -> None:
    import torch

    from potluck.devices import build_of_torch, gpus, memory_of

    findings.brings["torch"] = f"{torch.__version__} ({build_of_torch()}), Python {platform.python_version()}"
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < (2, 11):
        findings.wrong.append(f"torch is {torch.__version__}, and Potluck needs 2.11: pip install 'torch>=2.11'.")
    for index, (device, name) in enumerate(gpus_here := gpus().items()):
        memory = memory_of(device)
        assert memory is not None
        findings.brings[f"GPU {index}"] = f"{name}, {size(memory[0])} free of {size(memory[1])}"
    if not gpus_here:
        findings.brings["GPU"] = "none that torch can use"
        if shutil.which("nvidia-smi") and not torch.version.cuda:
            findings.wrong.append(
                "There is an NVIDIA driver here, but this torch is built for CPUs only. Install a CUDA build of torch."
            )
        elif shutil.which("nvidia-smi"):
            findings.wrong.append(
                "There is an NVIDIA driver here, but torch cannot reach a GPU. Run nvidia-smi: if it fails, the driver"
                " needs mending; if not, compare its CUDA version with torch's."
            )


def measure(findings: Findings) -> None:
    import torch

    from potluck.devices import choose_device, synchronize

    device = choose_device()

    def rate(work: Callable[[], object], amount: float, seconds: float = 0.7) -> float:
        """Amount per second, the best of as many tries as fit."""
        work()
        best = float("inf")
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            start = time.perf_counter()
            work()
            synchronize(device)
            best = min(best, time.perf_counter() - start)
        return amount / best

    side = 8192 if device.type == "cuda" else 1024
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(side, side, device=device).to(dtype)
        b = torch.randn(side, side, device=device).to(dtype)
        flops = rate(lambda a=a, b=b: a @ b, 2 * side**3)  # type: ignore[misc]
        name = str(dtype).removeprefix("torch.")
        findings.brings[f"{name} matmul"] = f"{flops / 1e12:.3g} TFLOP/s"
        if dtype is torch.float32:
            plain = flops
        elif flops < plain:
            findings.brings[f"{name} matmul"] += ", slower than float32: keep step.precision at fp32 here"
    elements = 1 << 30 if device.type == "cuda" else 1 << 25
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    speed = rate(lambda: target.copy_(source), 2 * source.nbytes)
    findings.brings["memory rate"] = f"{size(speed)}/s, read and written"


def try_backends(findings: Findings) -> None:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        findings.wrong.append("This torch is built without torch.distributed, so there can be only one worker.")
        return
    backends = {"gloo": 2}
    if torch.cuda.is_available() and dist.is_nccl_available():
        backends["nccl"] = torch.cuda.device_count()
    for name, workers in backends.items():
        label = f"{name}, {plural(workers, 'worker')}"
        code, said = _launch_probe(name, workers)
        if code == 0 and said.split():
            findings.brings[label] = f"works, averages {size(float(said.split()[-1]))}/s"
        else:
            reason = (said.strip() or str(code)).splitlines()[-1]
            findings.brings[label] = "does not work"
            findings.wrong.append(f"Workers on this machine cannot talk over {name}: {reason}. {WAYS_OUT[name]}")


def _launch_probe(backend: str, workers: int) -> tuple[int, str]:
    """Runs the probe as `potluck run` would run a script."""
    with tempfile.TemporaryDirectory(prefix="potluck-doctor-") as folder:
        script = Path(folder) / "probe.py"
        script.write_text(BACKEND_PROBE, encoding="utf-8")
        command = [sys.executable, "-m", "potluck.cli", "run", "-n", str(workers), str(script), backend]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            return 124, "they did not find each other within two minutes"
        return done.returncode, done.stdout if done.returncode == 0 else done.stderr
