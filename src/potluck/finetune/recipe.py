"""Recipes that fine-tune a model of Hugging Face: `[model] hf`, `[lora]`, `[data]`, and all that every recipe has.

The loss is over the answers of a batch, or over its labels.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from potluck import Engine
from potluck.batch_shapes import to_device
from potluck.errors import ConfigError
from potluck.finetune.base import add_adapter, bytes_of_frozen, check_described, context_of, known_labels, load_base
from potluck.finetune.base_files import find_base, numbers_in
from potluck.finetune.encoding import load_tokenizer
from potluck.finetune.rows import PreparedRows, prepare_rows
from potluck.finetune.settings import AdapterConfig, PretrainedConfig, RowsConfig
from potluck.finetune.talking import continue_row
from potluck.finetune.token_rows import TokenRow
from potluck.train.arguments import TrainArgs
from potluck.train.recipe import RecipeConfig, RecipeParts, fit_recipe, make_optimizer, memory_here
from potluck.train.sampler import Sampler, may_sample
from potluck.train.trainer import Summary
from potluck.words import count, plural, say, size

INPUTS = ("input_ids", "attention_mask", "position_ids")
TRIED = 16
"""Tokens of each document with which it is tried whether a model keeps packed ones apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig(RecipeConfig):
    """A recipe that fine-tunes a model of Hugging Face."""

    model: PretrainedConfig
    data: RowsConfig
    lora: AdapterConfig | None = None
    """An adapter, which alone is trained; None: all of the model is."""

    def __post_init__(self) -> None:
        RecipeConfig.__post_init__(self)
        if self.lora is None and self.model.load != "plain":
            raise ValueError(f'model.load = "{self.model.load}" is for a frozen base: add a [lora] table')


def train_finetune(config: FinetuneConfig, args: TrainArgs, engine: Engine) -> Summary:
    """Trains the recipe in its run folder. Called on every worker."""
    speaks = engine.speaks
    folder = find_base(config.model.hf, tells=speaks)
    tokenizer, context = load_tokenizer(folder), context_of(folder, config.model)
    with telling(speaks, "Reading the rows") as tell:
        rows = prepare_rows(config.data, tokenizer, context, config.model.task, known_labels(folder), tell)
    if speaks:
        _tell_of_rows(rows)
    check_described(folder, rows.labels)
    _check_memory(config, folder, engine)
    torch.manual_seed(config.fit.seed)
    with telling(speaks, f"Loading {folder.name if Path(config.model.hf).is_dir() else config.model.hf}"):
        model = make_model(config, folder, engine.device, rows.labels, pad=tokenizer.pad_token_id)
    if config.lora is not None and speaks:
        trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        say(f"The adapter has {count(trained)} parameters; those of the base stay as they are.")
    if rows.collate.packing and speaks:
        _try_packing(model, rows)
    is_labelled = rows.labels is not None
    parts = RecipeParts(
        model=model,
        optimizer=make_optimizer(model, config.optimizer),
        training=rows.training,
        validation=rows.validation,
        loss=label_loss if is_labelled else answer_loss,
        validate=label_figures if is_labelled else None,
        collate=rows.collate,
        samples_per_row=rows.answers_per_row,
        unit="rows" if is_labelled else "tokens",
    )
    if not is_labelled and len(rows.validation) and may_sample(engine, is_compiled=config.step.compile):
        engine.events.listeners.append(Sampler(engine, lambda: continue_row(model, tokenizer, rows.validation[0])))
    return fit_recipe(config, parts, args, engine)


def make_model(
    config: FinetuneConfig, folder: Path, device: torch.device, labels: list[str] | None, *, pad: int
) -> nn.Module:
    """The base, with the adapter if there is to be one. Draws random numbers."""
    model, fresh = load_base(folder, config.model, device, labels=labels, is_frozen=config.lora is not None)
    about: Any = model.config
    if about.pad_token_id is None:  # by it a model that classifies finds where a row ends
        about.pad_token_id = pad
    if config.lora is not None:
        return add_adapter(model, config.lora, classifies=labels is not None, fresh=fresh)
    return model


@contextmanager
def telling(speaks: bool, what: str) -> Iterator[Callable[[int], None]]:
    """A line that lives while something takes its time, and stays away where nobody looks."""
    console = Console(stderr=True, highlight=False)
    if not (speaks and console.is_terminal):
        yield lambda rows: None
        return
    started = time.monotonic()
    with console.status(f"{what} ...") as status:
        yield lambda rows: status.update(f"{what}: {rows:,} in {time.monotonic() - started:.0f} s ...")


def _tell_of_rows(rows: PreparedRows) -> None:
    for sentence in rows.sentences:
        say(sentence)
    what = f"{count(rows.answers_per_row * len(rows.training))} tokens of answers"
    if rows.labels is not None:
        shown = ", ".join(rows.labels[:6]) + (", ..." if len(rows.labels) > 6 else "")
        what = f"{plural(len(rows.labels), 'label')}: {shown}"
    say(f"{plural(len(rows.training), 'row')} to train on, {len(rows.validation):,} to validate with; {what}.")


def _check_memory(config: FinetuneConfig, folder: Path, engine: Engine) -> None:
    """A model that cannot fit is refused, with figures, before the system ends somebody for it."""
    pipelines = engine.pipelines
    if config.lora is not None:
        needed = bytes_of_frozen(folder, config.model)
        has_parts = config.strategy.bytes_per_parameter(2) < config.strategy.bytes_per_parameter(1)
        needed = needed // pipelines if has_parts else needed
    else:
        needed = int(numbers_in(folder) * config.strategy.bytes_per_parameter(pipelines))
    needed //= max(1, engine.ranks // pipelines)
    here, has, where = memory_here(config, engine)
    if needed * here > has:
        advice = "Load it in fewer bits, with --load 4bit" if config.lora is not None else "Train an adapter instead"
        raise ConfigError(
            f"{folder.name} needs {size(needed * here)} of memory to be fine-tuned here, and {where} has {size(has)}."
            f' {advice}, use fewer workers, or split the model over them with strategy.kind = "full_shard".'
        )


def _try_packing(model: nn.Module, rows: PreparedRows) -> None:
    """Whether this kind of model keeps documents of one row apart is seen, and said if it does not."""
    several = (row for row in map(rows.training.__getitem__, range(len(rows.training))) if len(row.lengths) > 1)
    if (row := next(several, None)) is None:
        return
    packed, first = packed_pair(row)
    if not packs_apart(model, to_device(packed, next(model.parameters()).device), first):
        say(
            "Rows are packed, and this kind of model does not keep them apart: each sees those before it in its row."
            " Leave out data.packing to have each by itself."
        )


def packed_pair(row: TokenRow) -> tuple[dict[str, Tensor], int]:
    """The beginnings of a row's first two documents as a batch, and the length of the first: enough to see whether a
    model keeps them apart, and quick on any machine."""
    first, second = row.lengths[:2]
    parts = [row.tokens[: min(first, TRIED)].long(), row.tokens[first : first + min(second, TRIED)].long()]
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    return {"input_ids": torch.cat(parts)[None], "position_ids": positions[None]}, len(parts[0])


@torch.no_grad()
def packs_apart(model: nn.Module, packed: dict[str, Tensor], first: int, tolerance: float = 2e-2) -> bool:
    """Whether the second document of a packed row is to the model as if it had a row of its own: it is tried.

    `first`: tokens of the document before it. `tolerance`: a model in bf16 has two or three digits.
    """
    was_training = model.training
    model.eval()
    second = packed["input_ids"][:, first:]
    logits = [model(**_inputs(packed), use_cache=False).logits[:, first:], model(second, use_cache=False).logits]
    model.train(was_training)
    together, alone = (float(F.cross_entropy(each[0, :-1].float(), second[0, 1:])) for each in logits)
    return abs(together - alone) <= tolerance * max(1.0, abs(alone))


def answer_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The mean over the answers' tokens, and how many those are.

    Their number is known without asking the GPU, and only their logits are made float32.
    """
    logits = model(**_inputs(batch), use_cache=False).logits
    chosen = logits.flatten(0, 1).index_select(0, batch["at"])
    return F.cross_entropy(chosen.float(), batch["targets"]), batch["targets"].numel()


def label_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over rows."""
    return F.cross_entropy(model(**_inputs(batch)).logits.float(), batch["labels"])


def label_figures(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    logits = model(**_inputs(batch)).logits.float()
    right = (logits.argmax(-1) == batch["labels"]).float().mean()
    return {"loss": F.cross_entropy(logits, batch["labels"]), "accuracy": right}


def _inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: batch[name] for name in INPUTS if name in batch}
