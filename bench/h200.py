"""Tokens per second of a 0.9B model on one GPU (bf16, compiled blocks), against a bare loop in the same process.

Needs CUDA and torch alone. With --quick and no GPU it runs a tiny model on the CPU, to see that it works.
"""

import time
from collections.abc import Callable

import torch

from bench.contenders import Bare, Ours, Task, distance, parameters_of
from bench.report import Comparison, Result
from bench.turns import say, take_turns
from potluck.train.model import GPT, ModelConfig

GPT_900M = ModelConfig(vocab=32768, dim=1536, layers=28, heads=12, context=2048)  # 893 million parameters
GPT_TINY = ModelConfig(vocab=512, dim=64, layers=2, heads=2, context=64)
WARM_UP_STEPS = 5


def measure(quick: bool) -> Result | None:
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or quick):
        say("h200 needs a CUDA GPU, and torch sees none here: skipped.")
        return None
    rounds, steps = (2, 2) if quick else (20, 5)
    task = Task(
        model=GPT_900M if has_gpu else GPT_TINY,
        rows_per_rank=8 if has_gpu else 2,
        steps=WARM_UP_STEPS + rounds * steps,
        device=torch.device("cuda", 0) if has_gpu else torch.device("cpu"),
        fast=True,
    )
    ours, bare = _warmed_up("ours", Ours(task)), _warmed_up("bare", Bare(task))
    tokens = steps * task.rows_per_rank * task.model.context
    sides = {"ours": _timed(ours.step, steps, tokens), "bare": _timed(bare.step, steps, tokens)}
    found = take_turns("h200", rounds, sides, "tokens/s")
    speed = Comparison(
        what=f"tokens/s, {parameters_of(bare.weights) / 1e6:.3g}M model on {_device_name()}, against a bare loop",
        unit="tokens/s",
        **found,
        target=0.98,
        at_least=True,
    )
    return Result([speed], _details(speed, ours, bare))


def _warmed_up(name: str, side: Bare | Ours) -> Bare | Ours:
    for step in range(WARM_UP_STEPS):
        say(f"h200: {name}: warm-up step {step + 1} of {WARM_UP_STEPS}{'' if step else ', compiles first'}")
        side.step()
    return side


def _timed(step: Callable[[], float], steps: int, tokens: int) -> Callable[[], float]:
    """Tokens per second of one group of steps."""

    def group() -> float:
        _wait_for_device()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        _wait_for_device()
        return tokens / (time.perf_counter() - started)

    return group


def flops_per_token(model: GPT) -> float:
    """Forward and backward: 6 per weight that multiplies (the embedding only looks up), and attention's causal half."""
    config = model.config
    attention = 6 * config.layers * config.dim * config.context
    return 6 * (parameters_of(model) - model.embedding.weight.numel()) + attention


def _details(speed: Comparison, ours: Bare | Ours, bare: Bare | Ours) -> dict[str, float]:
    tflop = flops_per_token(bare.weights) / 1e12
    return {
        "parameters": parameters_of(bare.weights),
        "tflop_per_s_ours": speed.median_ours * tflop,
        "tflop_per_s_bare": speed.median_bare * tflop,
        "distance_of_weights": distance(ours.weights, bare.weights),
        "peak_device_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
    }


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
