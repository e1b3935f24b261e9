"""Net: what goes in, blocks of any kind, and a head; traits say what else the model has. Knows nothing of potluck."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.differential import odd_blocks
from tests.differential.blocks import TOKENS, USUAL, Block

VOCAB, FEATURES, CHANNELS, PIXELS, CLASSES = 11, 6, 2, 4, 3
POISONED = VOCAB - 1
"""A token that makes the gradient of the embedding NaN, where the loss is finite. Other inputs have 60.0 for it."""
TRAITS = ("residual", "position", "frozen", "tied", "twins", "never", "center", "counter", "scalar", "groups", "mixed")
KINDS: dict[str, type[Block]] = {kind.__name__.lower(): kind for kind in (*USUAL, *odd_blocks.ANY, *odd_blocks.IMAGES)}


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

    def forward(self, x: Tensor) -> Any:
        if "counter" in self.traits and self.training:
            self.calls += 1
        x = self.begin(x)
        if "position" in self.traits:
            x = x + self.position
        x = self.through(x)
        if "center" in self.traits and self.training:
            with torch.no_grad():
                flat = x.transpose(1, -1) if x.dim() == 4 else x
                self.center.lerp_(flat.reshape(-1, flat.shape[-1]).mean(0).to(self.center.dtype), 0.1)
        if "scalar" in self.traits:
            x = x * self.scalar
        if "frozen" in self.traits:
            x = x * self.frozen
        return self.leave(x)

    def begin(self, x: Tensor) -> Tensor:
        return self.enter(x)  # type: ignore[no-any-return]

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) if "residual" in self.traits else block(x)
        return x

    def leave(self, x: Tensor) -> Any:
        return self.head(x)
