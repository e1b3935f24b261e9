"""Odd blocks: modules that read weights which are not their own, compute weights from others, or have odd ones.

Each was written by somebody: HiFi-GAN has the old weight_norm, ALBERT one layer many times, CLIP a number without a
dimension. Knows nothing of potluck.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune

from tests.differential.blocks import Block


class Mha(Block):
    """Its out_proj is never called: a function of torch reads it."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def change(self, x: Tensor) -> Tensor:
        rows = _sequence(x)
        return self.attention(rows, rows, rows, need_weights=False)[0].view_as(x)  # type: ignore[no-any-return]


class Encoder(Block):
    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)

    def change(self, x: Tensor) -> Tensor:
        return self.layer(_sequence(x)).view_as(x)  # type: ignore[no-any-return]


class Linears(Block):
    """A linear layer whose weight is computed, by old hooks or by new parametrizations."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        with warnings.catch_warnings(action="ignore"):  # the old ones are deprecated, and in use
            self.linear = self.wrap(nn.Linear(width, width))

    def wrap(self, linear: nn.Linear) -> nn.Module:
        return linear

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class OldWeightNorm(Linears):
    def wrap(self, linear: nn.Linear) -> nn.Module:
        return torch.nn.utils.weight_norm(linear)


class OldSpectralNorm(Linears):
    def wrap(self, linear: nn.Linear) -> nn.Module:
        return torch.nn.utils.spectral_norm(linear)


class WeightNorm(Linears):
    def wrap(self, linear: nn.Linear) -> nn.Module:
        return parametrizations.weight_norm(linear)


class SpectralNorm(Linears):
    def wrap(self, linear: nn.Linear) -> nn.Module:
        return parametrizations.spectral_norm(linear)


class Orthogonal(Linears):
    def wrap(self, linear: nn.Linear) -> nn.Module:
        return parametrizations.orthogonal(linear)


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Symmetric(Linears):
    """With a parametrization of one's own."""

    def wrap(self, linear: nn.Linear) -> nn.Module:
        return parametrize.register_parametrization(linear, "weight", _Symmetric())


class Pruned(Linears):
    def wrap(self, linear: nn.Linear) -> nn.Module:
        return prune.l1_unstructured(linear, "weight", amount=0.3)  # type: ignore[no-any-return]


class Lists(Block):
    """ParameterList and ParameterDict, which nobody calls."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.matrices = nn.ParameterList(torch.randn(width, width) * 0.3 for _ in range(2))
        self.vectors = nn.ParameterDict({"shift": torch.zeros(width), "scale": torch.ones(width)})

    def change(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix)
        return x * self.vectors["scale"] + self.vectors["shift"]


class Child(Block):
    """Uses its child's weight without calling it, forward and transposed."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.child = nn.Linear(width, 2 * width)

    def change(self, x: Tensor) -> Tensor:
        inner = torch.tanh(F.linear(x, self.child.weight, self.child.bias))
        return F.linear(inner, self.child.weight.T)


class Transposed(Block):
    """Calls a layer, and uses its weight a second time, transposed."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.linear = nn.Linear(width, 2 * width)

    def change(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.linear(x)), self.linear.weight.T)


class Functional(Block):
    """Calls a part with other weights than its own, made from them."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.linear = nn.Linear(width, width)

    def change(self, x: Tensor) -> Tensor:
        weights = {name: parameter * 0.9 for name, parameter in self.linear.named_parameters()}
        return torch.tanh(functional_call(self.linear, weights, (x,)))


class Lstm(Block):
    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.cells = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def change(self, x: Tensor) -> Tensor:
        return self.cells(_sequence(x))[0].reshape(x.shape)  # type: ignore[no-any-return]


class Gru(Block):
    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.cells = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)

    def change(self, x: Tensor) -> Tensor:
        return self.cells(_sequence(x))[0].reshape(x.shape)  # type: ignore[no-any-return]


class _Reversed(torch.autograd.Function):
    """Its gradient is turned around, which is linear."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class Reversal(Block):
    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.linear = nn.Linear(width, width)

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(_Reversed.apply(x)))


class Complex(Block):
    """A weight of complex numbers; build() makes it as wide as the rest."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.weight = nn.Parameter(torch.randn(width, width, 2) * 0.3)

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh((x.to(self.weight.dtype) @ self.weight).abs())


class Passing(Block):
    """Gives what it was given, itself and no copy, to rows of which it has nothing to say."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if bool((x[..., 0] > 0.3).any()) else x

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Adapter(Block):
    """A frozen layer, and beside it two small ones that are trained, as LoRA has it."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + 2 * self.up(self.down(x)))


class Bilinear(Block):
    """Two inputs of one layer, a weight of three dimensions, and an in-place activation."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.both = nn.Bilinear(width, width, width)
        self.elu = nn.ELU(inplace=True)

    def change(self, x: Tensor) -> Tensor:
        return self.elu(0.2 * self.both(x, x.flip(-1)))  # type: ignore[no-any-return]


def _sequence(x: Tensor) -> Tensor:
    """Rows without tokens are sequences of one."""
    return x if x.dim() == 3 else x.unsqueeze(1)


ANY = (
    Mha,
    Encoder,
    OldWeightNorm,
    OldSpectralNorm,
    WeightNorm,
    SpectralNorm,
    Orthogonal,
    Symmetric,
    Pruned,
    Lists,
    Child,
    Transposed,
    Functional,
    Lstm,
    Gru,
    Reversal,
    Complex,
    Passing,
    Adapter,
    Bilinear,
)
"""For vectors and for tokens."""


class ConvChild(Block):
    """A kernel of channels_last, where the model is, read by its parent."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(F.conv2d(x, self.conv.weight, self.conv.bias, padding=1))


class ConvNorm(Block):
    """The old weight_norm on a convolution, and GroupNorm."""

    def __init__(self, width: int, *, adds: bool) -> None:
        super().__init__(adds=adds)
        with warnings.catch_warnings(action="ignore"):
            self.conv = torch.nn.utils.weight_norm(nn.Conv2d(width, width, 3, padding=1))
        self.norm = nn.GroupNorm(2, width)

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.conv(x)))


IMAGES = (ConvChild, ConvNorm)
