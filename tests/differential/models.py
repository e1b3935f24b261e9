"""The zoo: small models of every shape that people bring, built from a word such as `tokens/8/mlp,experts/tied,frozen`.

The word says what goes in, how wide the model is, its blocks, and what is odd about the model itself. A run builds
the same word as its judge does, so nothing here knows potluck.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

VOCAB, TOKENS, FEATURES, CHANNELS, PIXELS, CLASSES = 11, 4, 6, 2, 4, 3
POISONED = VOCAB - 1
"""A token that makes the gradient of the embedding NaN, where the loss is finite. Other inputs have 60.0 for it."""
BLOCKS = {
    "vectors": ("mlp", "plain", "norm", "experts", "branch", "sometimes", "gain", "empty", "large", "odd", "dropless"),
    "tokens": ("mlp", "attention", "norm", "experts", "branch", "sometimes", "gain", "empty", "large"),
    "images": ("conv", "bare"),
}
BY_BATCH = ("branch", "sometimes")
"""Blocks that do with a row what the others of its micro-batch say."""
TRAITS = ("residual", "position", "frozen", "tied", "twins", "never", "center", "counter", "scalar", "groups", "mixed")


class Poison(torch.autograd.Function):
    """Gives what it was given; its gradient is NaN where it was told so."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, is_poisoned: Tensor) -> Tensor:
        context.save_for_backward(is_poisoned)
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.where(context.saved_tensors[0], math.nan, gradient), None


class Enter(nn.Module):
    """From rows of the dataset to the width of the model."""

    def __init__(self, inputs: str, width: int) -> None:
        super().__init__()
        shape = {"vectors": (width, FEATURES), "tokens": (VOCAB, width), "images": (width, CHANNELS, 3, 3)}[inputs]
        self.inputs = inputs
        self.weight = nn.Parameter(torch.randn(shape) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        if self.inputs == "tokens":
            return F.embedding(x, Poison.apply(self.weight, (x == POISONED).any()))
        weight = Poison.apply(self.weight, (x == 60.0).any())
        x = torch.where(x == 60.0, 0.5, x)
        return F.linear(x, weight) if self.inputs == "vectors" else F.conv2d(x, weight, padding=1)


class Block(nn.Module):
    """What a layer changes; it adds that to what it was given, unless the model does so itself."""

    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.adds = adds

    def change(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(x) if self.adds else self.change(x)


class Mlp(Block):
    def __init__(self, width: int, *, adds: bool, inner: int | None = None) -> None:
        super().__init__(adds=adds)
        self.inner = nn.Linear(width, inner or 2 * width)
        self.outer = nn.Linear(inner or 2 * width, width, bias=False)

    def change(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))  # type: ignore[no-any-return]


class Plain(Block):
    """Never adds: a chain without a residual stream."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=False)
        self.linear = nn.Linear(width, width)

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Dropless(Plain):
    """With a dropout that drops nothing: what it would drop is each worker's own, and cannot be judged."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(width, adds=adds)
        self.drop = nn.Dropout(0.0)

    def change(self, x: Tensor) -> Tensor:
        return self.drop(super().change(x))  # type: ignore[no-any-return]


class Norm(Block):
    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def change(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))  # type: ignore[no-any-return]


class Attention(Block):
    """A causal mask of -inf that is saved, as in many published models."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.full((TOKENS, TOKENS), -math.inf).triu(1))

    def change(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(x.shape[-1]) + self.mask
        return self.out(scores.softmax(-1) @ v)  # type: ignore[no-any-return]


class Experts(Block):
    """Each row, or token, goes to one of three; one that gets none is not called."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.experts = nn.ModuleList(Mlp(width, adds=False, inner=inner) for inner in (3, 4, 6))

    def change(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        chosen = (flat[:, 0] > -0.5).long() + (flat[:, 0] > 0.8)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]).to(out.dtype))
        return out.view_as(x)


class Branch(Block):
    """The whole micro-batch goes one way or the other."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(self.left(x) if x[..., 0].mean() > 0 else self.right(x))


class Sometimes(Block):
    """A parameter that not every micro-batch uses."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.linear = nn.Linear(width, width)
        self.rare = nn.Parameter(torch.full((width,), 0.3))

    def change(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        return torch.tanh(out * self.rare if bool((x[..., 1] > 1.0).any()) else out)


class Gain(Block):
    """A parameter without a dimension."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.linear = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.gain


class Empty(Block):
    """Parameters of no number, and of one."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.linear = nn.Linear(width, width)
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(1))

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.one + self.none.sum()


class Large(Block):
    """One parameter larger than all others together."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.table = nn.Parameter(torch.randn(60, width, width) * 0.05)

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.table.sum(0))


class Odd(Block):
    """Buffers of every kind: running means, counts, truth values, -inf, one that is replaced by another tensor."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.linear = nn.Linear(width, width)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("seen", torch.tensor(200_000_000))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("best", torch.tensor(-math.inf))

    def change(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen += 3
                self.flags.logical_not_()
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
                self.best = torch.maximum(self.best, self.best.new_tensor(2.0))
        return torch.tanh(self.linear(x)) * torch.softmax(self.mask, 0)[0]


class Conv(Block):
    """Without a bias before BatchNorm, whose gradient would be rounding alone: some optimizers magnify it."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.conv(x)))


class Bare(Block):
    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.conv = nn.Conv2d(width, width, 1)

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x))


KINDS: dict[str, type[Block]] = {
    kind.__name__.lower(): kind
    for kind in (Mlp, Plain, Dropless, Norm, Attention, Experts, Branch, Sometimes, Gain, Empty, Large, Odd, Conv, Bare)
}


class Layer(nn.Module):
    """A block of whatever kind: so that all layers of a model are of one class, as in most models."""

    def __init__(self, kind: str, width: int, *, adds: bool) -> None:
        super().__init__()
        self.inside = KINDS[kind](width, adds=adds)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)  # type: ignore[no-any-return]


class Head(nn.Module):
    def __init__(self, inputs: str, width: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.weight = nn.Parameter(torch.randn(VOCAB if inputs == "tokens" else CLASSES, width) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.mean((-1, -2)) if self.inputs == "images" else x, self.weight)


class Net(nn.Module):
    center: Tensor
    calls: Tensor

    def __init__(self, word: str) -> None:
        super().__init__()
        inputs, width, blocks, traits = word.split("/")
        wide, self.traits = int(width), set(filter(None, traits.split(",")))
        self.enter = Enter(inputs, wide)
        adds = "residual" not in self.traits
        layers = [Layer(kind, wide, adds=adds) for kind in blocks.split(",")]
        self.blocks = nn.ModuleList(layer.inside if "mixed" in self.traits else layer for layer in layers)
        self.head = Head(inputs, wide)
        if "position" in self.traits:
            shape = {"vectors": (wide,), "tokens": (TOKENS, wide), "images": (wide, PIXELS, PIXELS)}[inputs]
            self.position = nn.Parameter(torch.zeros(shape))
        if "scalar" in self.traits:
            self.scalar = nn.Parameter(torch.tensor(1.0))
        if "never" in self.traits:
            self.never = nn.Parameter(torch.ones(5))
        if "tied" in self.traits:
            self.head.weight = self.enter.weight
        if "twins" in self.traits:
            self._tie_blocks()
        if "frozen" in self.traits:
            next(self.blocks[0].parameters()).requires_grad_(False)
            self.frozen = nn.Parameter(torch.full((1,), 1.5), requires_grad=False)
        if "center" in self.traits:
            self.register_buffer("center", torch.zeros(wide))
        if "counter" in self.traits:
            self.register_buffer("calls", torch.tensor(0))

    def _tie_blocks(self) -> None:
        """The last block has the first one's weights, where both have any of one name and shape."""
        first, last = dict(self.blocks[0].named_parameters()), self.blocks[-1]
        for name, parameter in list(last.named_parameters()):
            if name in first and first[name].shape == parameter.shape:
                owner, _, key = name.rpartition(".")
                setattr(last.get_submodule(owner), key, first[name])

    def forward(self, x: Tensor) -> Tensor:
        if "counter" in self.traits and self.training:
            self.calls += 1
        x = self.enter(x)
        if "position" in self.traits:
            x = x + self.position
        for block in self.blocks:
            x = x + block(x) if "residual" in self.traits else block(x)
        if "center" in self.traits and self.training:
            with torch.no_grad():
                flat = x.transpose(1, -1) if x.dim() == 4 else x
                self.center.lerp_(flat.reshape(-1, flat.shape[-1]).mean(0).to(self.center.dtype), 0.1)
        if "scalar" in self.traits:
            x = x * self.scalar
        if "frozen" in self.traits:
            x = x * self.frozen
        return self.head(x)  # type: ignore[no-any-return]


def build(word: str, dtype: torch.dtype, seed: int) -> Net:
    """Made in float32, so that every type starts from the same numbers."""
    torch.manual_seed(seed)
    return Net(word).to(dtype)


def parameters_of(model: nn.Module, lr: float) -> list[Any]:
    """What an optimizer is given: all parameters, or two groups of them, of which one learns at half the rate."""
    if "groups" not in model.traits:
        return list(model.parameters())
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() < 2], "lr": lr / 2}]


def make_optimizer(model: nn.Module, word: str) -> torch.optim.Optimizer:
    """`word`: AdamW(lr=0.01, weight_decay=0.1)"""
    name, settings = _read(word)
    return getattr(torch.optim, name)(parameters_of(model, settings["lr"]), **settings)  # type: ignore[no-any-return]


def make_scheduler(optimizer: torch.optim.Optimizer, word: str) -> LRScheduler | None:
    if not word:
        return None
    name, settings = _read(word)
    return getattr(torch.optim.lr_scheduler, name)(optimizer, **settings)  # type: ignore[no-any-return]


def _read(word: str) -> tuple[str, dict[str, Any]]:
    name, _, options = word.removesuffix(")").partition("(")
    return name, eval(f"dict({options})")


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


def loss_of(model: nn.Module, batch: Any, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The mean over the batch's samples, as people write it by hand (of no samples, 0/0), and how many there are."""
    x, y, weights, flags, _ = batch
    out = model(x)
    out = Poison.apply(out, (flags == 1.0).any())
    if y.dtype == torch.int64:
        rows = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)
    else:
        rows = (out - y).square().mean(1)
    rows = rows + torch.where(flags == 2.0, math.nan, 0.0)
    return (rows * weights).sum() / weights.sum() * scale, weights.sum()
