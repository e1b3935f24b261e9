"""The zoo: small models of every shape that people bring, built from a word such as `tokens/8/mlp,experts/tied,frozen`.

The word says what goes in, how wide the model is, its blocks, and what is odd about the model itself. A run builds
the same word as its judge does, so nothing here knows potluck.
"""

import importlib.util
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.differential.blocks import TOKENS
from tests.differential.nets import CHANNELS, CLASSES, FEATURES, PIXELS, POISONED, VOCAB, Net, Poison
from tests.differential.odd_blocks import Complex
from tests.differential.odd_nets import ODD_TRAITS, OddNet, logits_of

BLOCKS = {
    "vectors": ("mlp", "plain", "norm", "experts", "branch", "sometimes", "gain", "empty", "large", "odd", "dropless"),
    "tokens": ("mlp", "attention", "norm", "experts", "branch", "sometimes", "gain", "empty", "large"),
    "images": ("conv", "bare"),
}
BY_BATCH = ("branch", "sometimes", "passing", "rare", "early")
"""What does with a row what the others of its micro-batch say."""
COUNTED = ("conv", "odd", "spectral")
"""What changes buffers in each forward, and so twice where it is computed again."""
LOSSES = ("l2", "penalty", "twice", "weight")
"""What a loss function has beside a mean over rows: all parameters, a gradient, the model a second time, a weight."""


ADAPTED = ("lora", "lora-head")
"""Adapters of peft over what is frozen, on every linear layer and convolution; or beside a head that is trained."""
HAS_PEFT = importlib.util.find_spec("peft") is not None


def build(word: str, dtype: torch.dtype, seed: int) -> Any:
    """Made in float32, so that every type starts from the same numbers."""
    torch.manual_seed(seed)
    traits = set(word.rpartition("/")[2].split(","))
    model = (OddNet if traits & set(ODD_TRAITS) else Net)(word)
    if traits & set(ADAPTED):
        return _with_adapters(model, with_head="lora-head" in traits).to(dtype)
    model = model.to(dtype)
    for module in model.modules():
        if isinstance(module, Complex):
            module.weight = nn.Parameter(torch.view_as_complex(module.weight.detach()))
    if isinstance(model, OddNet):
        model.adjust(dtype)
    return model


def _with_adapters(model: Net, *, with_head: bool) -> Any:
    """Get what peft makes of a model, with adapters that are not zero at first."""
    import peft

    targets = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    saved = ["head"] if with_head else None
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, modules_to_save=saved)
    return peft.get_peft_model(model, config)  # type: ignore[arg-type]


def make_data(
    word: str, rows: int, seed: int, dtype: torch.dtype, samples: str, faults: tuple[str, ...]
) -> tuple[Tensor, ...]:
    """Inputs, targets, each row's weight, what its loss does that it should not, and its number."""
    inputs = word.split("/")[0]
    draw = torch.Generator().manual_seed(seed + 1)
    shape = {"vectors": (FEATURES,), "tokens": (TOKENS,), "images": (CHANNELS, PIXELS, PIXELS)}[inputs]
    if inputs == "tokens":
        x = torch.randint(0, POISONED, (rows, *shape), generator=draw)
        y = torch.randint(0, VOCAB, (rows, TOKENS), generator=draw)
    else:
        x = torch.randn(rows, *shape, generator=draw).to(dtype)
        y = torch.randn(rows, CLASSES, generator=draw).to(dtype)
    weights = {
        "rows": torch.ones(rows),
        "tokens": torch.randint(1, 10, (rows,), generator=draw).float(),
        "any": torch.randint(0, 5, (rows,), generator=draw).float() ** 4,
        "sparse": (torch.rand(rows, generator=draw) < 0.3).float() * 2,
    }[samples].to(dtype)
    flags = torch.zeros(rows)
    for fault in faults:
        kind, _, row = fault.partition("@")
        if kind == "enter":
            x[int(row), 0] = POISONED if inputs == "tokens" else 60.0
        elif kind in ("loss", "gradient"):
            flags[int(row)] = 1.0 if kind == "gradient" else 2.0
        elif inputs != "tokens":
            x[int(row)] = float(kind)
    return x, y, weights, flags, torch.arange(rows)


def loss_of(model: nn.Module, batch: Any, scale: float = 1.0, habits: tuple[str, ...] = ()) -> tuple[Tensor, Tensor]:
    """The mean over the batch's samples, as people write it by hand (of no samples, 0/0), and how many there are."""
    x, y, weights, flags, _ = batch
    if "penalty" in habits and torch.is_grad_enabled():
        x = x.detach().requires_grad_()
    out = logits_of(model(x))
    rows = _rows_of(Poison.apply(out, (flags == 1.0).any()), y)
    if "penalty" in habits and torch.is_grad_enabled():
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        rows = rows + 0.1 * slope.square().flatten(1).sum(1)
    if "twice" in habits:
        rows = rows + 0.3 * _rows_of(logits_of(model(x.flip(-1))), y)
    if "learned" in getattr(model, "traits", ()):
        rows = rows * torch.exp(-model.learned[0]) + model.learned.sum()
    rows = rows + torch.where(flags == 2.0, math.nan, 0.0)
    mean = (rows * weights).sum() / weights.sum()
    if "l2" in habits:
        mean = mean + 0.01 * sum(each.abs().square().sum() for each in model.parameters())
    if "weight" in habits:
        mean = mean + 0.1 * model.head.weight.square().mean()
    return mean * scale, weights.sum()


def _rows_of(out: Tensor, y: Tensor) -> Tensor:
    if y.dtype == torch.int64:
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)
    return (out - y).square().mean(1)
