"""What changes the bits of a gradient, and of an update: threads, vector instructions, settings of the libraries.

`python -m bench.bits` starts one process for each setting and prints a table: the same letter in a row is the same
bits. Decision 0111 is made from it. A GPU, if there is one, is one more setting.
"""

import hashlib
import json
import os
import string
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

SETTINGS: dict[str, dict[str, str]] = {
    **{f"{threads} threads": {"THREADS": str(threads)} for threads in (1, 2, 3, 4, 8)},
    "no AVX": {"THREADS": "2", "ATEN_CPU_CAPABILITY": "default"},
    "AVX2": {"THREADS": "2", "ATEN_CPU_CAPABILITY": "avx2"},
    "AVX512": {"THREADS": "2", "ATEN_CPU_CAPABILITY": "avx512"},
    "oneDNN AVX": {"THREADS": "2", "ONEDNN_MAX_CPU_ISA": "AVX"},
    "MKL compatible": {"THREADS": "2", "MKL_CBWR": "COMPATIBLE"},
    "GPU": {"THREADS": "2", "ON": "cuda"},
}


def main() -> None:
    found: dict[str, dict[str, str]] = {}
    for name, setting in SETTINGS.items():
        command = [sys.executable, "-m", "bench.bits", "here"]
        done = subprocess.run(command, env=os.environ | setting, capture_output=True, text=True, check=False)
        if done.returncode:
            why = (done.stderr.strip() or f"ended with {done.returncode}").splitlines()[-1]
            print(f"{name}: {why}", file=sys.stderr)
        else:
            found[name] = json.loads(done.stdout)
    print("| what | " + " | ".join(found) + " |\n|---" * 1 + "|---" * len(found) + "|")
    for what in next(iter(found.values())):
        letters = dict(zip(dict.fromkeys(bits[what] for bits in found.values()), string.ascii_uppercase, strict=False))
        print(f"| {what} | " + " | ".join(letters[bits[what]] for bits in found.values()) + " |")


def measure_here() -> None:
    import torch

    torch.set_num_threads(int(os.environ["THREADS"]))
    device = torch.device(os.environ.get("ON", "cpu"))
    if device.type == "cpu":
        wanted = os.environ.get("ATEN_CPU_CAPABILITY", "")
        if wanted not in ("", "default") and wanted.upper() not in torch.backends.cpu.get_cpu_capability():
            raise SystemExit(f"this processor has no {wanted}")
    found = {f"gradient: {name}": _gradient(call, device) for name, call in _models().items()}
    found |= {f"update: {name}": _update(call, device) for name, call in _updates().items()}
    print(json.dumps(found))


def _models() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """name -> (a module, its input), both on the CPU."""
    import torch
    from torch import nn

    from potluck.train.model import GPT, ModelConfig

    def attention() -> tuple[Any, Any]:
        return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True), torch.randn(4, 96, 64)

    return {
        "small linear": lambda: (nn.Linear(24, 24), torch.randn(16, 24)),
        "large linear": lambda: (nn.Linear(512, 768), torch.randn(256, 512)),
        "convolution": lambda: (nn.Conv2d(8, 16, 3), torch.randn(8, 8, 32, 32)),
        "layer norm": lambda: (nn.LayerNorm(300), torch.randn(512, 300)),
        "batch norm": lambda: (nn.BatchNorm1d(64), torch.randn(2048, 64)),
        "embedding": lambda: (nn.Embedding(500, 64), torch.randint(0, 500, (8, 512))),
        "attention": attention,
        "the recipe's GPT": lambda: (
            GPT(ModelConfig(context=64, dim=64, layers=2, heads=4)),
            torch.randint(0, 256, (8, 64)),
        ),
    }


def _gradient(make: Callable[[], tuple[Any, Any]], device: Any) -> str:
    import numpy as np
    import torch

    model, given = make()
    draw = np.random.default_rng(1)  # torch's own numbers depend on the vector instructions
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(draw.standard_normal(tuple(parameter.shape), np.float32) / 8)
    if given.is_floating_point():
        given = torch.from_numpy(draw.standard_normal(tuple(given.shape), np.float32))
    else:
        given = torch.from_numpy(draw.integers(0, 256, tuple(given.shape)))
    model.to(device)(given.to(device)).square().mean().backward()
    return _hash(parameter.grad for parameter in model.parameters())


def _updates() -> dict[str, Callable[[list[Any]], Any]]:
    """name -> what is done to parameters that have gradients."""
    import torch

    def stepped(kind: Any, **options: Any) -> Callable[[list[Any]], Any]:
        def run(parameters: list[Any]) -> None:
            optimizer = kind(parameters, lr=0.01, weight_decay=0.1, **options)
            for _ in range(3):
                optimizer.step()

        return run

    def subtracted(parameters: list[Any]) -> None:
        torch._foreach_sub_([p.data for p in parameters], [p.grad for p in parameters])

    def with_norm(norm: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        return lambda parameters: [p.data.fill_(float(norm([p.grad for p in parameters]))) for p in parameters]

    return {
        "AdamW": stepped(torch.optim.AdamW),
        "AdamW foreach": stepped(torch.optim.AdamW, foreach=True),
        "AdamW fused": stepped(torch.optim.AdamW, fused=True),
        "SGD with momentum": stepped(torch.optim.SGD, momentum=0.9),
        "SGD fused": stepped(torch.optim.SGD, momentum=0.9, fused=True),
        "RMSprop": stepped(torch.optim.RMSprop),
        "Adagrad": stepped(torch.optim.Adagrad),
        "the gradient's norm": with_norm(torch.nn.utils.get_total_norm),
        "a window's mean subtracted": subtracted,
    }


def _update(call: Callable[[list[Any]], Any], device: Any) -> str:
    import numpy as np
    import torch

    draw = np.random.default_rng(2)  # torch's own numbers depend on the vector instructions
    shapes = ((7,), (300, 301), (2000, 1000))
    given = [torch.from_numpy(draw.standard_normal((2, *shape), np.float32)).to(device) for shape in shapes]
    parameters = [both[0].clone().requires_grad_() for both in given]
    for parameter, both in zip(parameters, given, strict=True):
        parameter.grad = both[1].clone()
    with torch.no_grad():
        call(parameters)
    return _hash(parameters)


def _hash(tensors: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    measure_here() if sys.argv[1:] == ["here"] else main()
