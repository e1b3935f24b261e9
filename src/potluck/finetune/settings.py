"""Settings of a recipe for the model from Hugging Face, its adapter and its rows. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from potluck.words import check_at_least, check_at_most

Task = Literal["auto", "write", "classify"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedConfig:
    hf: str
    """A folder that `save_pretrained` wrote, or an id on the Hugging Face hub, such as org/name."""
    task: Task = "auto"
    """Task that it learns: to write, or to classify; auto: to classify where the rows have a label."""
    load: Literal["plain", "4bit", "int8"] = "plain"
    """How the frozen weights are kept: as they are, in 4 bits (bitsandbytes), or in 8 (torchao). They need [lora]."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the weights; auto: frozen ones as they were saved, and fp32 where all are trained, or a new head is."""
    context: int | None = None
    """The most tokens of a row; None: as many as the model takes, and no more than 1024."""

    def __post_init__(self) -> None:
        if not self.hf.strip():
            raise ValueError(
                "hf names the model to fine-tune: a folder, or an id on the Hugging Face hub, such as"
                ' --set model.hf="org/name"'
            )
        check_at_least(2, context=self.context)
        check_at_most("context", self.context, 1 << 24, "no model takes such rows")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """LoRA, through peft: small matrices beside the frozen ones, which alone are trained."""

    rank: int = 16
    """The width of the matrices."""
    alpha: float = 32.0
    """The adapter's output is scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout of the adapter's input."""
    targets: tuple[str, ...] = ()
    """The layers that get one, by the ends of their names, such as q_proj; empty: every linear layer but the head."""
    modules_to_save: tuple[str, ...] = ()
    """Layers that are trained whole, beside the adapter, and saved with it."""

    def __post_init__(self) -> None:
        check_at_least(1, rank=self.rank)
        check_at_most("rank", self.rank, 1 << 14, "8 to 64 are usual")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ValueError(f"alpha must be above 0, not {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsConfig:
    paths: tuple[str, ...] = ()
    """Files (JSONL, JSON, CSV, Parquet, text; or packed, .gz), folders of them, a folder of `datasets`, or a hub id."""
    validation: float = 0.05
    """The share of the rows, spread over all, that is never trained on; data with a validation split have their own."""
    packing: bool = False
    """Put several rows into one of the context's length, each with its own attention; batch.size then counts those."""
    limit: int | None = None
    """Read this many rows at the most."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation is a share of the rows, in [0, 1), not {self.validation}")
        check_at_least(1, limit=self.limit)
        if not self.paths:
            raise ValueError("paths names what to train on: files, a folder of `datasets`, or an id on the hub")


def is_finetune(table: Mapping[str, Any]) -> bool:
    """Whether a recipe is of the kind that fine-tunes."""
    model = table.get("model")
    return "lora" in table or (isinstance(model, Mapping) and "hf" in model)
