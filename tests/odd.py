"""A layer whose buffers are of every kind: with a mean and without, constant, counted, replaced."""

import math
from typing import Any

import torch
from torch import Tensor, nn

SEEN, BIG = 200_000_000, (1 << 53) + 1
LIKE_PLAIN = ("mask", "gap", "third", "flags", "seen", "big", "short", "steps", "wide", "mean")
"""What every worker changes alike, or in proportion to its rows: as many forwards as in one process give the same."""


class Odd(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        constants: dict[str, Any] = {"mask": torch.tensor([0.0, -math.inf]), "gap": torch.tensor(math.nan)}
        constants |= {"third": torch.tensor([0.1, -0.0]), "pairs": torch.arange(4).expand(2, 4)}
        counted = {"seen": torch.tensor(SEEN), "big": torch.tensor(BIG), "steps": torch.tensor(0.0)}
        counted |= {"short": torch.zeros(2, dtype=torch.int16), "flags": torch.tensor([True, False])}
        means = {"mean": torch.zeros(width), "wide": torch.zeros(width, dtype=torch.float64)}
        for name, buffer in (constants | counted | means).items():
            self.register_buffer(name, buffer)
        self.register_buffer("best", torch.tensor(-math.inf))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen += 10
                self.big += 2
                self.short += 1
                self.steps += 1
                self.flags.logical_not_()
                self.wide.lerp_(x.double().mean(0), 0.1)
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)  # as many write it: another tensor each time
                self.best = torch.maximum(self.best, x.max())
        return x * torch.softmax(self.mask, 0)[0]


def assert_constant(found: dict[str, Tensor], prefix: str = "") -> None:
    """What no forward changes is as it was, to the bit."""
    fresh = Odd(1)
    for name in ("mask", "third", "pairs"):
        assert torch.equal(found[prefix + name], getattr(fresh, name)), name
    assert math.copysign(1.0, found[prefix + "third"][1].item()) == -1.0
    assert found[prefix + "gap"].isnan()
    for name, buffer in fresh.named_buffers():
        assert found[prefix + name].dtype == buffer.dtype, name
