"""The loss of fine-tuning: over the answers of a batch, or its labels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUTS = ("input_ids", "attention_mask", "position_ids")


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


def _inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: batch[name] for name in INPUTS if name in batch}
