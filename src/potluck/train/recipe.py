"""Recipes: a run of the built-in model, written down as TOML.

RunConfig joins the dataclasses that live beside their owners; `train_recipe` builds what they name and trains it.
RecipeConfig and `fit_recipe` are what every recipe has, whatever it trains.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from potluck import ApplyPolicy, BatchConfig, Engine, NoShard, ShardingStrategy, Stages, StepConfig
from potluck.coded_numbers import AskedWire
from potluck.config import to_toml
from potluck.devices import memory_of
from potluck.environment import free_memory_bytes, machine_bytes
from potluck.errors import ConfigError, Interrupted
from potluck.events import Event, RunStarted
from potluck.files import first_free, write_whole
from potluck.save.run_folder import holds_run, name_fault
from potluck.train.arguments import TrainArgs, WorkersConfig
from potluck.train.model import GPT, ModelConfig, next_token_loss
from potluck.train.sampler import Sampler, may_sample, writing
from potluck.train.text import TOKENIZER, DataConfig, read_rows
from potluck.train.trainer import FitConfig, LossFunction, Summary, Trainer
from potluck.words import check_at_most, count, plural, size

SLOWED = 3.0
"""How many times slower the slow worker of the demo is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    name: Literal["adamw", "sgd"] = "adamw"
    """The optimizer's name."""
    lr: float = 3e-4
    """The peak of the schedule."""
    weight_decay: float = 0.1
    """For matrices only; norms are never decayed."""
    betas: tuple[float, ...] = (0.9, 0.95)
    """For AdamW, how long its two means remember. SGD takes the first as its momentum."""

    def __post_init__(self) -> None:
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr must be above 0, not {self.lr}")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ValueError(f"weight_decay must be at least 0, not {self.weight_decay}")
        check_at_most("lr", self.lr, 1000, "3e-4 is usual for AdamW, and 0.1 for SGD")
        check_at_most("weight_decay", self.weight_decay, 1000, "0.1 is usual")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are two numbers in [0, 1), not {list(self.betas)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeConfig:
    """The settings that every recipe has, whatever it trains."""

    name: str
    """Names the run folder."""
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    step: StepConfig = StepConfig()
    fit: FitConfig = FitConfig()
    workers: WorkersConfig = WorkersConfig()
    policy: ApplyPolicy | None = None
    """When workers agree; None: Sync, and Auto under a host."""
    strategy: ShardingStrategy = NoShard()
    stages: Stages | None = None
    """Cuts the model over several workers; None: each has all layers."""
    wire: AskedWire = "fp32"
    """Form in which replicas send each other their numbers: fp32, or in fewer bits as bf16, int8 or int4, or auto."""

    def __post_init__(self) -> None:
        if fault := name_fault(self.name):
            raise ValueError(f"name {fault}")
        if self.stages is not None and self.batch.micro_size is not None:
            raise ValueError("batch.micro_size does not go with stages: stages.protocol.micro_batch_size cuts a batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(RecipeConfig):
    """A recipe: a run of the built-in model. `potluck train` reads it from TOML, one table per field."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()

    def __post_init__(self) -> None:
        RecipeConfig.__post_init__(self)
        if self.model.vocab < 256:
            raise ValueError(f"model.vocab must be at least 256 for text read byte by byte, not {self.model.vocab}")
        if self.data.tokenizer == "bpe" and self.model.vocab < 512:
            raise ValueError(
                f'data.tokenizer = "bpe" learns as many tokens as model.vocab: at least 512, and 4096 is usual for a'
                f" small model, not {self.model.vocab}"
            )


@dataclass(frozen=True, kw_only=True)
class RecipeParts:
    """The objects that a recipe names: what is trained, on what, and by which loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    training: Any
    validation: Any
    loss: LossFunction
    validate: LossFunction | None = None
    """Loss for the validation rows; None: the training loss."""
    collate: Callable[[list[Any]], Any] | None = None
    samples_per_row: float
    """About how many samples the loss function counts in a row."""
    unit: str = "tokens"
    """Unit of the samples."""


def train_recipe(config: RunConfig, args: TrainArgs, engine: Engine) -> tuple[Summary, GPT]:
    """Trains a recipe of the built-in model in its run folder. Called on every worker."""
    training, validation, pieces = read_rows(config.data, config.model.context, config.model.vocab)
    _check_memory(config, engine, len(training))
    torch.manual_seed(config.fit.seed)
    model = GPT(config.model)
    loss: LossFunction = next_token_loss
    if args.slow_worker is not None:
        loss = slowed(loss, args.slow_worker, engine.rank)
    parts = RecipeParts(
        model=model,
        optimizer=make_optimizer(model, config.optimizer),
        training=training,
        validation=validation,
        loss=loss,
        samples_per_row=float(config.model.context),
    )
    if (
        may_sample(engine, is_compiled=config.step.compile)
        and (write := writing(model, validation, pieces)) is not None
    ):
        engine.events.listeners.append(Sampler(engine, write))
    if pieces is not None and engine.keeps_folder:
        engine.events.listeners.append(partial(_keep_file, TOKENIZER, pieces.json))  # the model is of no use without
    return fit_recipe(config, parts, args, engine), model


def slowed(loss: LossFunction, worker: int, rank: int) -> LossFunction:
    """Let this worker pause after each call, for all that it has really computed since the last one, whatever else had
    the cores. Only the demo asks for it; quotas of the kernel, for measurements, are bench/testbed's."""
    if rank == 0:
        times = f"{SLOWED - 1:g} times as long as it computes"
        print(f"Worker {worker} is slowed {SLOWED:g}-fold: it pauses {times}.", flush=True)
    if rank != worker:
        return loss
    until_s: float | None = None

    def slow(*arguments: Any) -> Any:
        nonlocal until_s
        began_s = time.process_time() if until_s is None else until_s  # what came before the run does not count
        result = loss(*arguments)
        until_s = time.process_time()
        time.sleep((SLOWED - 1) * (until_s - began_s))
        return result

    return slow


def fit_recipe(config: RecipeConfig, parts: RecipeParts, args: TrainArgs, engine: Engine) -> Summary:
    """Trains what a recipe names, in its run folder. Called on every worker."""
    engine.loop.samples_per_row = parts.samples_per_row
    if parts.unit == "tokens":
        engine.loop.flops_per_sample = flops_per_token(parts.model)
    engine.introduce(
        parts.model,
        parts.optimizer,
        parts.training,
        batch_size=config.batch.size,
        seed=config.fit.seed,
        name=config.name,
        out=args.out,
    )
    folder = Path("runs") / config.name  # where a host leads, it keeps its own
    if not engine.is_led:
        folder = Path(engine.broadcast(str(_run_folder(config, args, engine))))
    trainer = Trainer(
        parts.model,
        parts.optimizer,
        parts.training,
        loss=parts.loss,
        batch_size=config.batch,
        folder=folder,
        validation=parts.validation,
        validate=parts.validate,
        collate=parts.collate,
        engine=engine,
        config=replace(config.fit, unit=parts.unit),
    )
    if engine.keeps_folder:
        engine.events.listeners.append(partial(_keep_file, "run.toml", to_toml(config)))
    try:
        return trainer.fit(resume=args.resume)
    except Interrupted as error:
        if engine.is_led:
            raise
        raise Interrupted(f"{error} Continue with: potluck train {folder}/run.toml --out {folder} --resume") from None


def _check_memory(config: RunConfig, engine: Engine, rows: int) -> None:
    """A model or a batch that cannot fit is refused, with figures, before the system ends somebody for it."""
    # Weights, gradients and AdamW's two means, in fp32; each rank's share of what the strategy splits.
    stages = engine.ranks // engine.pipelines
    for_model = int(config.model.parameters * config.strategy.bytes_per_parameter(engine.pipelines) / stages)
    at_once = _rows_at_once(config, engine, rows)
    step = config.step
    kept = config.model.activations(at_once, checkpointed=step.checkpoint_activations, compiled=step.compile)
    for_rows = kept * (2 if step.precision != "fp32" else 4) // stages
    here, has, where = memory_here(config, engine)
    if for_model * here > has:
        raise ConfigError(
            f"A model of {count(config.model.parameters)} parameters needs {size(for_model * here)} of memory to be"
            f" trained here, and {where} has {size(has)}. Make model.dim or model.layers smaller, use fewer workers, or"
            ' split the model over them with strategy.kind = "full_shard".'
        )
    if (for_model + for_rows) * here > has:
        cut = "stages.protocol.micro_batch_size" if stages > 1 else "batch.micro_size"
        raise ConfigError(
            f"{plural(at_once, 'row')} of {plural(config.model.context, 'token')} at once on a worker (batch.size is"
            f" {config.batch.size:,}) need at least {size(for_rows * here)} of memory beside the model's"
            f" {size(for_model * here)}, and {where} has {size(has)}. Set a smaller batch.size or model.context, or"
            f" {cut} to fewer rows at once: the numbers stay the same."
        )


def memory_here(config: RecipeConfig, engine: Engine) -> tuple[int, int, str]:
    """How many workers share which memory, its bytes, and what it is called."""
    if (memory := memory_of(engine.device)) is not None:
        return 1, memory[not engine.is_led], "this GPU"
    here = engine.ranks if engine.is_led else config.workers.count
    # Who trains for somebody else gives what is free, not what others use.
    return here, free_memory_bytes() if engine.is_led else machine_bytes(), "this machine"


def _rows_at_once(config: RunConfig, engine: Engine, rows: int) -> int:
    """Count the rows that go through a worker's part of the model together."""
    if config.stages is not None:
        return min(config.stages.micro_batch_size or config.batch.size, config.batch.size, rows)
    parts = config.batch.slice_count if engine.is_led else engine.pipelines
    return min(config.batch.micro_size or config.batch.size, -(-min(config.batch.size, rows) // parts))


def _keep_file(name: str, text: str, event: Event) -> None:
    """Keep a file in the run folder once the run has really started: a resume that was refused must not change what the
    folder says."""
    if isinstance(event, RunStarted):
        write_whole(Path(event.folder) / name, text)


def _run_folder(config: RecipeConfig, args: TrainArgs, engine: Engine) -> Path | str:
    """Rank 0 decides. A new run never takes over a folder that holds one; one that outlived a loss has its own."""
    if engine.rank != 0 or engine.is_restored:
        return ""
    wanted = Path(args.out) if args.out else Path("runs") / config.name
    if args.resume:
        if not (wanted / "checkpoints").exists():
            raise ConfigError(
                f"There is no run to resume in {wanted}. Leave out --resume, or name its folder with --out."
            )
        return wanted
    if args.out and holds_run(wanted):
        raise ConfigError(
            f"{wanted} already holds a run. Continue it with --resume, or name another folder with --out."
        )
    return first_free(wanted, holds_run)


def flops_per_token(model: nn.Module) -> float:
    """Two for each number in the forward, and as many for the gradients of what flows and of what is trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return float(sum((6 if is_trained else 4) * numbers for numbers, is_trained in sizes))


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    others = [parameter for parameter in trained if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.betas[0])
    # One kernel for all parameters, on CPUs and GPUs alike.
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), fused=True)
