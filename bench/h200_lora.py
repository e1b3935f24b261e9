"""LoRA on a large frozen base in 4 bits, on parts of one GPU: speed together, bytes an exchange, and a newcomer's wait.

    python -m bench h200_lora [--quick]

A llama of 8 billion parameters with made-up weights, all linear layers but the head in NF4 (bitsandbytes), adapters of
rank 16 (peft), 4 rows of 512 tokens to a worker's batch, on parts of 50 and 14 percent of a GPU (MPS). 70 and 20 were
wanted, but on parts of 35, 40, 45 and 56 to 80 percent cuBLAS multiplied these shapes wrongly in bf16, and rightly on
20 and 50. Bytes are those that crossed the loopback between two agreements, of all workers together, by the kernel's
count, divided by their number.

First the same under a host: one worker trains, another is started beside it, without MPS, and the time counts from
there until a step has rows of its own; that it has to load torch and to make the base is in it.

With --quick and no GPU, a tiny llama in fp32 on the CPU, to see that it works.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from bench.mixed import Meter, Task, Times, combined, compete_as
from bench.ranks import ROOT
from bench.report import Comparison, Result
from bench.testbed import Machine, TestbedError
from bench.turns import say
from bench.uneven import Uneven
from bench.uneven_rank import Seat
from potluck.events import read_events
from potluck.train.model import ModelConfig

LARGE = ModelConfig(vocab=128_256, dim=4096, layers=32, heads=32, context=512)
TINY = ModelConfig(vocab=512, dim=64, layers=2, heads=2, context=16)
RANK = 16
PARTS = (50, 14)
CONTENDERS = ("Cadence int4", "Sync balanced int4", "bare DDP", "Cadence")
GOALS = {"Cadence int4": 0.95}
MOST_MB = 60.0
NEWCOMER_S = 60.0
LIMIT_S = 150.0


class Logits(nn.Module):
    """What next_token_loss expects of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens.long(), use_cache=False).logits  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class LoraTask(Task):
    def build(self) -> tuple[nn.Module, AdamW]:  # type: ignore[override]
        from peft import LoraConfig, get_peft_model

        base = make_base(self.model, self.device)
        torch.manual_seed(1)
        model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return Logits(model).to(self.device), AdamW(trained, lr=1e-4, fused=self.device == "cuda")


def make_base(shape: ModelConfig, device: str) -> nn.Module:
    """The same on every part of a GPU, whose own random numbers depend on how many multiprocessors it has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    about = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        intermediate_size=shape.dim * 7 // 2,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=max(1, shape.heads // 4),
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
    )
    on_gpu = device == "cuda"
    with torch.device("meta"):
        model = LlamaForCausalLM(about).to(torch.bfloat16 if on_gpu else torch.float32)
    for place, (owner, name, empty) in enumerate(list(_parameters(model))):
        made = _made_up(empty, device, place) if empty.dim() > 1 else torch.ones_like(empty, device=device)
        setattr(owner, name, nn.Parameter(made, requires_grad=False))
        is_quantized = isinstance(owner, nn.Linear) and owner is not model.lm_head
        if on_gpu and is_quantized:
            _to_four_bits(model, owner)
    model.model.rotary_emb = type(model.model.rotary_emb)(about).to(device)
    return model


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in model.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            yield owner, name, parameter


def _made_up(like: Tensor, device: str, seed: int) -> Tensor:
    """Numbers between -0.03 and 0.03 that look like noise."""
    count = torch.arange(like.numel(), device=device, dtype=torch.int64)
    count.add_(seed * 7919).mul_(2654435761).bitwise_and_(0xFFFFFFFF)
    count.bitwise_xor_(count >> 15).mul_(2246822519).bitwise_and_(0xFFFFFFFF)
    return count.to(torch.float32).div_(2**32).sub_(0.5).mul_(0.06).to(like.dtype).view(like.shape)


def _to_four_bits(model: nn.Module, linear: nn.Linear) -> None:
    import bitsandbytes

    path = next(name for name, each in model.named_modules() if each is linear)
    parent, _, name = path.rpartition(".")
    with torch.device("meta"):  # else its weight is drawn on the CPU first, which takes a minute for all of them
        new = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
    packed = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    new.weight = packed.to(linear.weight.device)
    setattr(model.get_submodule(parent), name, new)


# Together, on parts


class ByteMeter(Meter):
    """Also counts the bytes that cross the loopback while all train together."""

    def begin(self, warm: int) -> None:
        super().begin(warm)
        self._first_bytes, self._first_count = 0, -1
        self.sent: list[float] = []

    def agreed(self, rows: int) -> bool:
        if self._first_count >= 0:
            self.sent.append(loopback_bytes() - self._first_bytes)
        is_over = super().agreed(rows)
        self._first_bytes, self._first_count = loopback_bytes(), self._count
        return is_over

    def told(self) -> dict[str, Any]:
        last = sorted(self.sent[-max(1, len(self.sent) // 2) :])
        return super().told() | {"mb_per_agreement": last[len(last) // 2] / 1e6 / self.seat.world}


def loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[8])
    return 0


def compete(seat: Seat, *, contender: str, task: dict[str, Any], times: dict[str, float]) -> dict[str, Any]:
    return compete_as(seat, LoraTask.from_json(task), contender, Times(**times), ByteMeter)  # type: ignore[arg-type]


def measure(quick: bool) -> Result | None:
    has_gpu = torch.cuda.is_available()
    if not (has_gpu or quick):
        say("h200_lora needs a CUDA GPU, and torch sees none here: skipped.")
        return None
    task = LoraTask(model=LARGE if has_gpu else TINY, rows=4, device="cuda" if has_gpu else "cpu", length=1 << 12)
    times = Times(alone_s=4.0, together_s=15.0, warm_windows=3, warm_steps=12, chunks=1, quiet_s=1.0)
    if not has_gpu:
        times = Times(alone_s=0.5, together_s=1.0, warm_windows=1, warm_steps=4, chunks=1)
    found: dict[str, Any] = {"newcomer_s": newcomer(task)}
    say(f"h200_lora: a newcomer took part after {found['newcomer_s']} s")
    _keep(found)
    try:
        for contender in CONTENDERS[: None if has_gpu else 1]:
            _measure_one(contender, task, times, has_gpu, found)
    except TestbedError as error:
        say(f"h200_lora cannot go on: {error}")
    return Result(compare(found), {"task": task.as_json(), "found": found})


def _measure_one(contender: str, task: LoraTask, times: Times, has_gpu: bool, found: dict[str, Any]) -> None:
    machines = [Machine(gpu=part) if has_gpu else Machine(cpu=part / 100) for part in PARTS]
    with Uneven(machines) as fleet:
        say(f"h200_lora: {contender} begins")
        try:
            answers = fleet.run(
                "bench.h200_lora:compete",
                cores=[] if has_gpu else [machine.cpu for machine in machines],
                limit_s=LIMIT_S,
                contender=contender,
                task=task.as_json(),
                times=asdict(times),
            )
        except SystemExit as error:
            say(f"h200_lora: {contender} failed: {error}")
            return
    together, alone = combined(answers)
    found[contender] = {"together": together, "alone": alone, "mb": answers[0]["mb_per_agreement"]}
    say(f"h200_lora: {contender} {together / alone:.3f} ({together:.1f} of {alone:.1f} rows/s), {found[contender]}")
    _keep(found)


def compare(found: dict[str, Any]) -> list[Comparison]:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    compared = []
    for name, turn in found.items():
        if name not in CONTENDERS:
            continue
        compared += [
            Comparison(
                what=f"rows/s of parts of {PARTS} % of one {where}, LoRA on a 4-bit base: {name}, against each alone",
                unit="rows/s",
                ours=[turn["together"]],
                bare=[turn["alone"]],
                target=GOALS.get(name),
                at_least=True,
            ),
            Comparison(
                what=f"MB that a worker sends per exchange there: {name}, against {MOST_MB:g}",
                unit="MB",
                ours=[turn["mb"]],
                bare=[MOST_MB],
                target=1.0,
            ),
        ]
    if found.get("newcomer_s"):
        compared.append(
            Comparison(
                what=f"from a newcomer's start until a step has rows of its own, against {NEWCOMER_S:g} s",
                unit="s",
                ours=[found["newcomer_s"]],
                bare=[NEWCOMER_S],
                target=1.0,
            )
        )
    return compared


def _keep(found: dict[str, Any]) -> None:
    if folder := os.environ.get("OUT"):
        Path(folder, "h200_lora.json").write_text(json.dumps(found, indent=1))


# A newcomer, under a host


def newcomer(task: LoraTask) -> float | None:
    """Seconds from the start of the second worker's process until a step was committed that has rows of its."""
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        script = Path(place, "lora.py")
        script.write_text(f"from bench.h200_lora import train\ntrain({json.dumps(task.as_json())!r})\n")
        host = _start(place, 70, "host", str(script), "--threads", "1")
        other: subprocess.Popen[bytes] | None = None
        try:
            events = Path(place, "runs", "lora", "events.jsonl")
            invite = Path(place, "host.log")
            _wait(host, lambda: _steps(events, 1))
            line = next(word for word in invite.read_text(errors="replace").split() if word.startswith("potluck://"))
            started = time.time()
            other = _start(place, 20, "join", line, str(script))
            _wait(host, lambda: _steps(events, 2))
            return next(at for at in (_steps(events, 2),) if at) - started
        except (TimeoutError, StopIteration) as error:
            say(f"h200_lora: the newcomer was not measured: {error!r} {Path(place, 'host.log').read_text()[-1500:]}")
            return None
        finally:
            for process in (other, host):
                if process is not None:
                    process.terminate()
                    process.wait(30)


def _steps(events: Path, workers: int) -> float | None:
    """When a step was done that so many workers had rows of."""
    if not events.exists():
        return None
    for event in read_events(events):
        if event["event"] == "step_done" and sum(part["rows"] > 0 for part in event["workers"]) >= workers:
            return float(event["time"])
    return None


def _start(place: str, part: int, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "import sys; from potluck.cli import main; sys.exit(main())", *words]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(part)}
    with Path(place, f"{words[0]}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log)


def _wait(process: subprocess.Popen[bytes], is_there: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_there():
        if time.monotonic() > deadline or process.poll() is not None:
            raise TimeoutError(f"the host ended with {process.poll()}" if process.poll() is not None else "time is up")
        time.sleep(0.25)


def train(told: str) -> None:
    """The script of each worker."""
    import potluck
    from potluck.train.model import next_token_loss

    task = LoraTask.from_json(json.loads(told))
    model, optimizer = task.build()
    fleet = potluck.init("sync", wire="int4")
    wrapped, _, loader = fleet.prepare(model, optimizer, task.data(), batch_size=task.rows * 2)
    for _ in fleet.epochs(100):
        for batch in loader:
            loss, samples = next_token_loss(wrapped, batch)
            fleet.backward(loss, samples=samples)
            fleet.step()
