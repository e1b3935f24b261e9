"""Recipes: a run of the built-in model, written down as TOML.

RunConfig joins the dataclasses that live beside their owners; `train_recipe` builds what they name and trains it. Every
worker of the run calls `main` with the same arguments.
"""

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from potluck.agree.policy import ApplyPolicy, policy_of
from potluck.coded_numbers import AskedWire
from potluck.composition import Wanted, compose, ranks_per_worker
from potluck.config import from_dict, from_toml, to_toml
from potluck.data.plan import BatchConfig
from potluck.devices import choose_device, memory_of
from potluck.engine.engine import Engine
from potluck.engine.node_client import NodeClient
from potluck.engine.start import as_one_worker, connect, init, led_engine
from potluck.engine.switches import StepConfig
from potluck.environment import free_memory_bytes, machine_bytes, usable_cores
from potluck.errors import ConfigError, Interrupted
from potluck.events import Event, RunStarted
from potluck.files import first_free, write_whole
from potluck.fleet.client import Client
from potluck.fleet.invite import read_invite
from potluck.link.link import Alone, Link
from potluck.link.ranks import asked_ranks, is_later_rank, ranks_here
from potluck.save.run_folder import holds_run, name_fault
from potluck.sharding.strategy import NoShard, ShardingStrategy
from potluck.stages.protocol import Stages
from potluck.train.arguments import TrainArgs, WorkersConfig, ask_for_files, find_recipe
from potluck.train.model import GPT, ModelConfig, next_token_loss
from potluck.train.slowdown import Brake
from potluck.train.text import DataConfig, read_windows
from potluck.train.trainer import FitConfig, Summary, Trainer
from potluck.wire.words import clean
from potluck.words import check_at_most, count, plural, size


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    """The peak of the schedule."""
    weight_decay: float = 0.1
    """For matrices only; norms are never decayed."""
    betas: tuple[float, ...] = (0.9, 0.95)
    """Of AdamW: how long its two means remember. SGD takes the first as its momentum."""

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
class RunConfig:
    """A recipe: a run of the built-in model. `potluck train` reads it from TOML, one table per field."""

    name: str
    """Names the run folder."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
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
    """In which form replicas send each other their numbers: fp32, or in fewer bits as bf16, int8 or int4, or auto."""

    def __post_init__(self) -> None:
        if fault := name_fault(self.name):
            raise ValueError(f"name {fault}")
        if self.stages is not None and self.batch.micro_size is not None:
            raise ValueError("batch.micro_size does not go with stages: stages.protocol.micro_batch_size cuts a batch")
        if self.model.vocab < 256:
            raise ValueError(f"model.vocab must be at least 256 for text read byte by byte, not {self.model.vocab}")


def train_recipe(config: RunConfig, args: TrainArgs, engine: Engine) -> tuple[Summary, GPT]:
    """Trains the recipe in its run folder. Called on every worker."""
    training, validation = read_windows(config.data, config.model.context)
    _check_memory(config, engine, len(training))
    engine.run.caller.samples_per_row = float(config.model.context)
    torch.manual_seed(config.fit.seed)
    model = GPT(config.model)
    optimizer = _optimizer(model, config.optimizer)
    engine.introduce(
        model, optimizer, training, batch_size=config.batch.size, seed=config.fit.seed, name=config.name, out=args.out
    )
    folder = Path("runs") / config.name  # where a host leads, it keeps its own
    if not engine.is_led:
        folder = Path(engine.link.gather_bytes(str(_run_folder(config, args, engine)).encode())[0].decode())
    loss = next_token_loss
    if args.slowdown is not None:
        brake = Brake(args.slowdown, engine.rank, has_gpu=engine.device.type == "cuda")
        engine.events.listeners.append(brake)
        loss = brake.slow(loss)
    trainer = Trainer(
        model,
        optimizer,
        training,
        loss=loss,
        batch_size=config.batch,
        folder=folder,
        validation=validation,
        engine=engine,
        config=replace(config.fit, unit="tokens"),
    )
    if engine.lifecycle.keeps_folder:
        engine.events.listeners.append(lambda event: _keep_recipe(event, folder, config))
    try:
        return trainer.fit(resume=args.resume), model
    except Interrupted as error:
        if engine.is_led:
            raise
        raise Interrupted(f"{error} Continue with: potluck train {folder}/run.toml --out {folder} --resume") from None


def main(arguments: list[str]) -> None:
    """One worker of a recipe's run; the launcher passes its arguments as JSON."""
    args = from_dict(TrainArgs, json.loads(arguments[0]), "the arguments")
    text, source = find_recipe(args.recipe)
    config = from_toml(RunConfig, text, source=source, overrides=tuple(args.settings))
    with init(
        config.policy,
        config.strategy,
        stages=config.stages,
        step=config.step,
        wire=config.wire,
        patience_s=config.workers.patience_s,
    ) as engine:
        summary, model = train_recipe(config, args, engine)
        if engine.lifecycle.keeps_folder and args.summary != "none":
            from potluck.train.summary import show_summary

            replica = engine.run.replica
            is_split = replica is not None and (replica.gathers or config.stages is not None)
            show_summary(summary, model, args, epochs=config.fit.epochs, is_split=is_split)


def join(arguments: list[str]) -> None:
    """One worker of the run that the invite names: the recipe comes from the host, as TOML and never as code."""
    settings = tuple(json.loads(arguments[0]))  # what was given by --data, and nothing else
    device, is_first = choose_device(), not is_later_rank()
    joined: tuple[Client | NodeClient, torch.device, Link]
    if is_first:
        joined = connect(read_invite(None), device, asked_ranks() or 1), device, Alone()
    else:
        joined = as_one_worker(None, device, int(os.environ["WORLD_SIZE"]))
    client = joined[0]
    try:
        text = client.welcome.recipe if client.welcome is not None else ""
        if not text:
            raise ConfigError(
                "This host trains a script, not a recipe. Join with your copy of it: potluck join INVITE SCRIPT"
            )
        try:
            config = from_toml(RunConfig, text, source="the host's recipe", overrides=settings)
        except ConfigError as error:  # it may quote the recipe, which the host wrote
            raise ConfigError(clean(str(error))) from None
        if config.data.paths and not settings:
            raise ask_for_files(config.data.paths)
        _check_little(config)
        ranks = ranks_per_worker(config.strategy, ranks_here(torch.cuda.device_count()), asked_ranks())
        wanted = Wanted(
            policy=policy_of(config.policy, has_host=True),
            strategy=config.strategy,
            stages=config.stages,
            wire=config.wire,
            world=ranks,
            has_host=True,
            offload_optimizer=config.step.offload_optimizer,
            on_gpu=device.type == "cuda",
        )
        compose(wanted)
        if isinstance(client, Client):
            joined = as_one_worker(client, device, ranks)
    except BaseException:
        client.close()
        raise
    with led_engine(*joined, wanted, config.step) as engine:
        train_recipe(config, TrainArgs(recipe="the host's"), engine)


def _check_little(config: RunConfig) -> None:
    """What a host's recipe may make this machine do."""
    ranks, most = ranks_per_worker(config.strategy, 1), max(4, usable_cores(), torch.cuda.device_count())
    if ranks > most:
        raise ConfigError(
            f"The host's recipe wants {ranks} processes on this machine for one worker (strategy.intra_node_size), and"
            f" at most {most} are started here. Ask for a recipe with fewer, or join from a machine with more cores."
        )


def _check_memory(config: RunConfig, engine: Engine, rows: int) -> None:
    """A model or a batch that cannot fit is refused, with figures, before the system ends somebody for it."""
    # Weights, gradients and AdamW's two means, in fp32; each rank's share of what the strategy splits.
    stages = engine.link.world // engine.layers.pipelines
    for_model = int(config.model.parameters * config.strategy.bytes_per_parameter(engine.layers.pipelines) / stages)
    at_once = _rows_at_once(config, engine, rows)
    step = config.step
    kept = config.model.activations(at_once, checkpointed=step.checkpoint_activations, compiled=step.compile)
    for_rows = kept * (2 if step.precision != "fp32" else 4) // stages
    if (memory := memory_of(engine.device)) is not None:
        here, has, where = 1, memory[not engine.is_led], "this GPU"
    else:
        here = engine.link.world if engine.is_led else config.workers.count
        # Who trains for somebody else gives what is free, not what others use.
        has, where = free_memory_bytes() if engine.is_led else machine_bytes(), "this machine"
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


def _rows_at_once(config: RunConfig, engine: Engine, rows: int) -> int:
    """That go through a worker's part of the model together."""
    if config.stages is not None:
        return min(config.stages.micro_batch_size or config.batch.size, config.batch.size, rows)
    parts = config.batch.slice_count if engine.is_led else engine.layers.pipelines
    return min(config.batch.micro_size or config.batch.size, -(-min(config.batch.size, rows) // parts))


def _keep_recipe(event: Event, folder: Path, config: RunConfig) -> None:
    """Once the run has really started: a resume that was refused must not change what the folder says."""
    if isinstance(event, RunStarted):
        write_whole(folder / "run.toml", to_toml(config))


def _run_folder(config: RunConfig, args: TrainArgs, engine: Engine) -> Path | str:
    """Rank 0 decides. A new run never takes over a folder that holds one; one that outlived a loss has its own."""
    if engine.rank != 0 or engine.run.is_restored:
        return ""
    if engine.run.recovery is not None and engine.run.recovery.standing["folder"] is not None:
        return str(engine.run.recovery.standing["folder"])
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


def _optimizer(model: GPT, config: OptimizerConfig) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.betas[0])
    # One kernel for all parameters, on CPUs and GPUs alike.
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), fused=True)
