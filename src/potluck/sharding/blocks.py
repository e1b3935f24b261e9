"""The blocks of a model: its repeated layers, which are compiled, recomputed and split one by one."""

from collections.abc import Sequence

from torch import Tensor, nn

from potluck.sharding.runs import stays_whole


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated layers: the longest list of two or more modules of one class; in each stage, its own. Where
    a model is several, those."""
    if getattr(model, "holds_models", False):
        return list(model.children())  # nobody calls what holds them, so each is by itself
    if is_staged(model) and (stages := [child for child in model.children() if is_staged(child)]):
        return [block for stage in stages for block in find_blocks(stage)]
    best: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = list(module)
            # A stage is left in the middle of what holds its layers, so that this is no block: its forward never ends.
            real = [
                child for child in children if not getattr(child, "stands_in", getattr(child, "holds_layers", False))
            ]
            parameters = sum(p.numel() for p in module.parameters())
            alike = len({type(child) for child in real}) == 1
            if alike and len(children) >= 2 and parameters and len(real) > len(best):
                best = real
    return best


def is_staged(model: nn.Module) -> bool:
    """A part of a model, which may have none of its blocks; or several parts."""
    return getattr(model, "holds_stages", False)


def untied(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Select the blocks that can be gathered by themselves. One that runs in several places, or has a weight that
    another block or the rest of the model has too, is left to what is around it."""
    units = [block for block in dict.fromkeys(blocks) if sum(block is other for other in blocks) == 1]
    while True:
        inside = {unit: set(unit.modules()) for unit in units}
        homes: dict[int, set[nn.Module | None]] = {}
        for module in model.modules():
            around = [unit for unit in units if module in inside[unit]]
            nearest = [unit for unit in around if not any(other in inside[unit] for other in around if other != unit)]
            for parameter in module.parameters(recurse=False):
                homes.setdefault(id(parameter), set()).update(nearest or [None])
        tied = {unit for found in homes.values() if len(found) > 1 for unit in found}
        if tied <= {None}:
            return units
        units = [unit for unit in units if unit not in tied]


def fits_fully_shard(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Whether fully_shard trains all parameters of a model right. It replaces them, and so drops their hooks; cuts them
    along their first dimension; and sums those of a unit as one, which must be of one type and lie row by row."""
    trained = [each for each in model.parameters() if not stays_whole(each)]
    if any(
        not each.dim() or not each.is_contiguous() or each.is_complex() or has_hooks(each) for each in trained
    ):  # fmt: skip
        return False
    units = untied(model, blocks)
    inside = {id(each) for unit in units for each in unit.parameters()}
    root = [each for each in trained if id(each) not in inside]
    return all(
        len({each.dtype for each in unit if each.requires_grad and not stays_whole(each)}) <= 1
        for unit in (root, *(list(unit.parameters()) for unit in units))
    )


def has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
