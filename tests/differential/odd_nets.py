"""OddNet: a Net of which the model itself is odd: what layers hand on, what it gives, whose weights it reads.

Knows nothing of potluck.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.differential.nets import VOCAB, Layer, Net

PATHS = ("pairs", "dicts", "structs", "nested", "recompute", "reentrant", "skips", "again", "rare", "early")
"""How rows go through the layers; a model has one of them at most."""
HEADS = ("uses", "functional", "given-dict", "given-tuple", "given-struct", "learned")
"""What happens after the layers; one at most."""
WHOLES = ("types", "rotary", "parts")
"""For any inputs."""
WORDS = ("padding", "bag", "maxnorm", "sparse")
"""For tokens."""
ODD_TRAITS = (*PATHS, *HEADS, *WHOLES, *WORDS, "channels")


@dataclass
class Passed:
    """What a layer hands to the next one, as a dataclass: the numbers, and the first ones, which nobody changes."""

    x: Tensor
    first: Tensor


@dataclass
class Given:
    logits: Tensor
    hidden: Tensor


class GivenTuple(NamedTuple):
    logits: Tensor
    hidden: Tensor


class Handing(nn.Module):
    """A layer that hands on, beside what it computes, something that it was given and leaves alone."""

    def __init__(self, kind: str, layer: nn.Module) -> None:
        super().__init__()
        self.kind, self.layer = kind, layer

    def forward(self, given: Any) -> Any:
        if self.kind == "pairs":
            x, first = given
            return self.layer(x), first
        if self.kind == "dicts":
            return {**given, "x": self.layer(given["x"])}
        return Passed(self.layer(given.x), given.first)


class OddNet(Net):
    rotation: Tensor

    def __init__(self, word: str) -> None:
        super().__init__(word)
        inputs, width, _, _ = word.split("/")
        self.inputs, wide = inputs, int(width)
        for kind in {"pairs", "dicts", "structs"} & self.traits:
            self.blocks = nn.ModuleList(Handing(kind, block) for block in self.blocks)
        if "nested" in self.traits:
            self.blocks = _nested(list(self.blocks))  # type: ignore[assignment]
        if "rare" in self.traits:
            self.rare = Layer("bare" if inputs == "images" else "plain", wide, adds=True)
        if "early" in self.traits:
            self.early = nn.Linear(wide, wide)
        if "learned" in self.traits:
            self.learned = nn.Parameter(torch.tensor([0.1, -0.1]))
        if "rotary" in self.traits:
            self.register_buffer("rotation", torch.linspace(0.5, 1.5, wide), persistent=False)
        if "parts" in self.traits:
            self.parts = nn.ParameterList(torch.randn(wide) * 0.2 for _ in range(3))
        if "padding" in self.traits:
            self.padded = nn.Embedding(VOCAB, wide, padding_idx=1)
        if "maxnorm" in self.traits:
            self.padded = nn.Embedding(VOCAB, wide, max_norm=1.0)
        if "sparse" in self.traits:
            self.padded = nn.Embedding(VOCAB, wide, sparse=True)
        if "bag" in self.traits:
            self.bag = nn.EmbeddingBag(VOCAB, wide, mode="sum")

    def adjust(self, dtype: torch.dtype) -> None:
        """What a model gets once it has its type."""
        self.narrow = torch.float32 if dtype == torch.float64 else torch.bfloat16
        if "types" in self.traits:
            self.blocks[0].to(self.narrow)
        if "channels" in self.traits:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def begin(self, x: Tensor) -> Tensor:
        entered: Tensor = self.enter(x)
        if {"padding", "maxnorm", "sparse"} & self.traits:
            entered = entered + self.padded(x)
        if "bag" in self.traits:
            entered = entered + self.bag(x).unsqueeze(1)
        return self._adjusted(entered)

    def through(self, x: Tensor) -> Tensor:
        first = x
        x = self._layers(x)
        if "skips" in self.traits:
            x = x + 0.5 * first
        if "rare" in self.traits and bool((first.flatten(1)[:, 0] > 0.8).any()):
            x = self.rare(x)
        return x

    def _adjusted(self, x: Tensor) -> Tensor:
        if "rotary" in self.traits:
            x = (x.transpose(1, -1) * self.rotation).transpose(1, -1) if x.dim() == 4 else x * self.rotation
        for part in self.parts if "parts" in self.traits else ():
            x = x + (part[:, None, None] if x.dim() == 4 else part)
        if "early" in self.traits and self.inputs != "images" and bool((x.flatten(1)[:, 1] > 0.5).any()):
            x = x + torch.tanh(self.early(x))
        return x

    def _layers(self, x: Tensor) -> Tensor:
        if "pairs" in self.traits:
            pair = (x, x)
            for block in self.blocks:
                pair = block(pair)
            return pair[0] + 0.3 * pair[1]
        if "dicts" in self.traits:
            named = {"x": x, "first": x}
            for block in self.blocks:
                named = block(named)
            return named["x"] + 0.3 * named["first"]
        if "structs" in self.traits:
            passed = Passed(x, x)
            for block in self.blocks:
                passed = block(passed)
            return passed.x + 0.3 * passed.first
        if "nested" in self.traits:
            return self.blocks(x)  # type: ignore[no-any-return]
        if self.traits & {"recompute", "reentrant"}:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant="reentrant" in self.traits)  # type: ignore[assignment]
            return x
        if "types" in self.traits:
            x = self.blocks[0](x.to(self.narrow)).to(x.dtype)
            for block in list(self.blocks)[1:]:
                x = block(x)
            return x
        x = super().through(x)
        return self.blocks[0](x) if "again" in self.traits else x  # type: ignore[no-any-return]

    def leave(self, x: Tensor) -> Any:
        if "uses" in self.traits:
            return F.linear(x.mean((-1, -2)) if x.dim() == 4 else x, self.head.weight)
        if "functional" in self.traits:
            return functional_call(self.head, {"weight": 1.1 * self.head.weight}, (x,))
        out = self.head(x)
        if "given-dict" in self.traits:
            return {"logits": out, "hidden": x}
        if "given-tuple" in self.traits:
            return GivenTuple(out, x)
        return Given(out, x) if "given-struct" in self.traits else out


def _nested(blocks: list[nn.Module]) -> nn.Sequential:
    """Sequential in Sequential, with layers between them that have no parameters."""
    found: list[nn.Module] = []
    for number, block in enumerate(blocks):
        found.append([block, nn.Sequential(block, nn.Tanh()), nn.Sequential(nn.Identity(), block)][number % 3])
        found.append(nn.Identity() if number % 2 else nn.Tanh())
    return nn.Sequential(*found)


def logits_of(out: Any) -> Tensor:
    if isinstance(out, dict):
        return out["logits"]  # type: ignore[no-any-return]
    return out if isinstance(out, Tensor) else out.logits  # type: ignore[no-any-return]
