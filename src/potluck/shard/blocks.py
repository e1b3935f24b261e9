"""The blocks of a model: its repeated layers, which are compiled, recomputed and split one by one."""

from torch import nn


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated layers: the longest list of two or more modules of one class; in a stage, its own."""
    best: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = list(module)
            real = [child for child in children if not getattr(child, "stands_in", False)]
            parameters = sum(p.numel() for p in module.parameters())
            alike = len({type(child) for child in real}) == 1
            if alike and len(children) >= 2 and parameters and len(real) > len(best):
                best = real
    return best
