"""The blocks of most models: what a layer of them does. Odd ones are in odd_blocks.py. Knows nothing of potluck."""

import math

import torch
from torch import Tensor, nn

TOKENS = 4


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


USUAL = (Mlp, Plain, Dropless, Norm, Attention, Experts, Branch, Sometimes, Gain, Empty, Large, Odd, Conv, Bare)
