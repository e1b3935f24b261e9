"""The blocks of a model: its repeated layers, which are compiled, recomputed and split one by one."""

from torch import nn


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated layers: the longest list of at least two modules of one class."""
    best: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = [child for child in module if not getattr(child, "stands_in", False)]  # of another stage
            parameters = sum(p.numel() for p in module.parameters())
            alike = len({type(child) for child in children}) == 1
            if alike and len(module) >= 2 and parameters and len(children) > len(best):
                best = children
    return best
