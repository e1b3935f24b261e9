"""The chain of a model's layers: which modules follow each other, and what lies around them. Runs nothing."""

from dataclasses import dataclass

from torch import nn

from potluck.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Chain:
    """The modules of a model that run one after the other, and everything else in it."""

    modules: dict[str, nn.Module]
    """The links of the chain by name, in order."""
    holders: dict[str, nn.Module]
    """The modules that hold them, from the model itself (named "") down, and lists of parts."""
    parts: dict[str, nn.Module | nn.Parameter]
    """What else the holders hold: other modules, and parameters of their own."""


def find_chain(model: nn.Module) -> Chain:
    """Of an nn.Sequential its children, else the blocks: the list of layers that holds most of the parameters."""
    if is_sequential(model):
        names = _flat(model, "")
    else:
        lists: dict[str, list[str]] = {}
        _collect(model, "", lists)
        if not lists:
            raise ConfigError(
                f"{type(model).__name__} cannot be cut into stages: it is no nn.Sequential, and holds no nn.ModuleList"
                " of at least two layers of one class and no nn.Sequential. Arrange its layers so."
            )
        sizes = {name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in lists}
        names = lists[max(sizes, key=sizes.__getitem__)]
    if len(names) < 2:
        raise ConfigError(f"{type(model).__name__} has a single layer, and cannot be cut into stages.")
    return chain_of(model, names)


def chain_of(model: nn.Module, names: list[str]) -> Chain:
    """The chain with these links; ConfigError for a name that the model does not have."""
    modules: dict[str, nn.Module] = {}
    holders: dict[str, nn.Module] = {"": model}
    for name in names:
        module = model
        steps = name.split(".")
        for depth, step in enumerate(steps):
            child = module._modules.get(step)
            if child is None:
                raise ConfigError(f"The model has no layer {name}: the plan is of another model.")
            module = child
            if depth < len(steps) - 1:
                holders[".".join(steps[: depth + 1])] = module
        modules[name] = module
    if len({id(module) for module in modules.values()}) < len(modules):
        raise ConfigError("A layer that is in the chain twice cannot be cut from itself. Give each place its own.")
    if both := modules.keys() & holders.keys():
        raise ConfigError(f"The plan has {min(both)} both as a layer and as what holds layers.")
    parts: dict[str, nn.Module | nn.Parameter] = {}
    links = {id(module) for module in modules.values()}
    waiting = list(holders.items())
    for path, holder in waiting:  # grows by those found on the way
        for name, one in (*holder._modules.items(), *holder._parameters.items()):
            where = f"{path}.{name}" if path else name
            if one is None or id(one) in links or where in holders:
                continue
            if isinstance(one, nn.Module) and type(one).forward is nn.Module.forward:
                holders[where] = one  # a list or a table of parts, each of which is used by itself
                waiting.append((where, one))
            else:
                parts[where] = one
    return Chain(modules, holders, parts)


def is_sequential(module: nn.Module) -> bool:
    """Whether it runs its children one after the other and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def parameters_of(part: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    return [part] if isinstance(part, nn.Parameter) else list(part.parameters())


def _flat(module: nn.Module, path: str) -> list[str]:
    """The children of a Sequential, those of Sequentials within it in their place."""
    names = []
    for name, child in module._modules.items():
        assert child is not None
        where = f"{path}.{name}" if path else name
        names += _flat(child, where) if is_sequential(child) and len(list(child.children())) else [where]
    return names


def _collect(module: nn.Module, path: str, found: dict[str, list[str]]) -> None:
    """The outermost lists of layers: a list within a layer, of experts or heads, is that layer's own business."""
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if is_sequential(child):
            names = _flat(child, where)
        elif isinstance(child, nn.ModuleList) and len({type(one) for one in child}) == 1:
            names = [f"{where}.{number}" for number in range(len(child))]
        else:
            names = []
        if len(names) >= 2 and any(True for _ in child.parameters()):
            found[where] = names
        else:
            _collect(child, where, found)
