"""survey: a model's layers, found by running it once, and proven by running it once more, cut after every layer.

Leaves the model, its buffers, its gradients and the random generators as they were.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from potluck.errors import ConfigError
from potluck.stages.chain import Chain, find_chain, parameters_of
from potluck.stages.cut import LossOf, cut
from potluck.stages.forms import arguments, describe, narrow, tensors_in
from potluck.stages.plan import Layer, Plan
from potluck.stages.seats import generators_of, seed_of
from potluck.words import plural

SEED = 0
"""Of the random numbers of a survey, which have to be the same whole and cut."""


def survey(model: nn.Module, loss_of: LossOf, batch: Any) -> tuple[Layer, ...]:
    """The layers of the model, from two runs of it where it is: whole, and cut after every layer.

    Nothing is timed. ConfigError if it cannot be cut, or if it gives another loss when it is.
    """
    chain = find_chain(model)
    watch = _Watch(model, chain)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    with unchanged(model):
        loss = watch.run(model, loss_of, batch)
    layers = tuple(_layers(chain, watch, trained))
    plan = Plan.at(layers, range(1, len(layers)))
    result: Any = ()
    with unchanged(model), torch.no_grad():
        for number in range(len(layers)):
            result = cut(model, plan, number).run(loss_of, batch, result, seed=SEED)
    _check_loss(loss, result)
    return layers


def _check_loss(whole: Any, staged: Any) -> None:
    for a, b in zip(all_tensors(whole), all_tensors(staged), strict=True):
        if not torch.allclose(a.double(), b.double(), rtol=1e-4, equal_nan=True):
            raise ConfigError(
                f"Cut into stages the model gives another loss than whole ({_told(b)}, not {_told(a)}): a layer uses"
                " something of an earlier one that it does not get as its input. Make that an output of each layer and"
                " an input of the next."
            )


def _told(tensor: Tensor) -> str:
    return f"{tensor.item():.6g}" if tensor.numel() == 1 else f"{tensor.numel()} numbers"


def _layers(chain: Chain, watch: "_Watch", trained: set[int]) -> Iterator[Layer]:
    listed = {part for parts in watch.parts for part in parts}
    idle = [name for name, part in chain.parts.items() if name not in listed and parameters_of(part)]
    before = {*watch.parts[0], *idle}
    links = list(chain.modules)
    for place in range(len(links) + 2):
        parts = tuple(name for name in chain.parts if name in (before if place == 0 else watch.parts[place]))
        module = links[place - 1] if 0 < place <= len(links) else None
        counted = [] if module is None else list(chain.modules[module].parameters())
        for name in parts:
            counted += parameters_of(chain.parts[name])
        counted = list({id(parameter): parameter for parameter in counted}.values())
        if module is None and not counted:
            continue  # nothing to own: whoever has the chain's end runs what there is
        name = module or ("before" if place == 0 else "after")
        yield Layer(
            name=name if module or name not in chain.modules else f"({name})",
            module=module,
            parts=parts,
            output=watch.forms[place] if place <= len(links) else None,
            parameters=sum(parameter.numel() for parameter in counted),
            trained=sum(parameter.numel() for parameter in counted if id(parameter) in trained),
        )


class _Watch:
    """Watches one run of the whole model.

    What each link of the chain gives is severed from how it was computed: it goes on as a copy of a leaf of its own.
    So the graph behind anything says which leaves and which parameters it was made from, and from no further back.
    Places count as those of seeds do: 0 before the chain, its links from 1 on, the last what follows.
    """

    def __init__(self, model: nn.Module, chain: Chain) -> None:
        self._chain = chain
        self._links = list(chain.modules)
        self._names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        self._homes: dict[int, set[str]] = {}
        """The links that have a parameter: several, where they share it."""
        for name, link in chain.modules.items():
            for parameter in link.parameters():
                self._homes.setdefault(id(parameter), set()).add(name)
        self._done = 0
        """The place that ran last."""
        self._is_inside = False
        self._leaves: dict[int, tuple[int, int]] = {}
        """Severed leaves: the place each is from, and which of its tensors it is."""
        self._consumed: dict[int, set[int]] = {}
        self._kept: list[Tensor] = []
        self._before: set[int] = set()
        self.parts: list[set[str]] = [set() for _ in range(len(self._links) + 2)]
        self.forms: list[Any] = [None] * (len(self._links) + 1)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def sow(self, place: int) -> None:
        for generator in generators_of(self._device):
            generator.manual_seed(seed_of(SEED, place))

    def run(self, model: nn.Module, loss_of: LossOf, batch: Any) -> Any:
        """What the loss function returned."""
        trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        with torch.enable_grad(), self.hooked():
            try:
                # Every parameter has to show in the graph; what was frozen is so again afterwards.
                for parameter in model.parameters():
                    parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
                self.sow(0)
                result = loss_of(model, batch)
                self.on_end(result)
            finally:
                for parameter in model.parameters():
                    parameter.requires_grad_(id(parameter) in trained)
        return tree_map(lambda one: one.detach() if isinstance(one, Tensor) else one, result)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = []
        for place, link in enumerate(self._chain.modules.values(), start=1):
            handles.append(link.register_forward_pre_hook(self._begin(place), with_kwargs=True, prepend=True))
            handles.append(link.register_forward_hook(self._finish(place)))
        for name, part in self._chain.parts.items():
            if isinstance(part, nn.Module):
                handles.append(part.register_forward_pre_hook(self._meet(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, place: int) -> Callable[..., None]:
        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            name = self._links[place - 1]
            if place != self._done + 1 or self._is_inside:
                raise ConfigError(
                    f"Layer {name} runs out of turn: the layers of a model that is cut into stages run once each, in"
                    " the order in which the model has them."
                )
            self._is_inside = True
            if place == 1:
                given = arguments(args, kwargs)
                coming = {key: one for key, one in given.items() if any(t.requires_grad for t in tensors_in(one))}
                self._before = {id(leaf) for leaf in leaves_behind(tensors_in(coming))}
                self.forms[0] = describe(coming, f"What {name} gets")
                self._note(0, self._before)
            self.sow(place)

        return begin

    def _finish(self, place: int) -> Callable[..., Any]:
        def finish(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            behind = {id(leaf) for leaf in leaves_behind(tensors_in(output))}
            if place == 1:
                behind -= self._before
            self._note(place, behind)
            self._done, self._is_inside = place, False
            severed = self._sever(place, output)
            if place == len(self._links):
                self.sow(place + 1)
            return severed

        return finish

    def _sever(self, place: int, output: Any) -> Any:
        numbers = iter(range(len(tensors_in(output))))
        self.forms[place] = describe(output, f"What layer {self._links[place - 1]} gives")

        def sever(one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            number = next(numbers)
            if not one.is_floating_point():
                self._consumed.setdefault(place, set()).add(number)  # no graph tells, so it is sent
                return one
            leaf = one.detach().requires_grad_()
            self._leaves[id(leaf)] = (place, number)
            self._kept.append(leaf)  # its id has to stay its own
            return leaf.clone()

        return tree_map(sever, output)

    def _meet(self, name: str) -> Callable[..., None]:
        def meet(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._is_inside:
                raise ConfigError(
                    f"{name} runs within layer {self._links[self._done]}, and is not a part of it. Cut into stages, a"
                    " layer has its parameters in itself."
                )
            self.parts[0 if self._done == 0 else self._done + 1].add(name)

        return meet

    def on_end(self, result: Any) -> None:
        """The loss function has returned."""
        last = len(self._links)
        if self._done != last:
            raise ConfigError(
                f"The loss function ran {self._done} of the model's {plural(last, 'layer')}, and each has to run once."
                " It has to run the model that it gets as its argument, and no other."
            )
        self._note(last + 1, {id(leaf) for leaf in leaves_behind(all_tensors(result))})
        for place in range(1, last + 1):
            self.forms[place] = narrow(self.forms[place], self._consumed.get(place, set()))
        self._kept.clear()

    def _note(self, place: int, behind: Iterable[int]) -> None:
        """What a place was made from: its own parameters, what the one before gave, and parts of the model."""
        own = self._links[place - 1] if 0 < place <= len(self._links) else None
        what = (
            f"Layer {own}" if own else ("What runs before the layers" if place == 0 else "What runs after the layers")
        )
        for leaf in behind:
            if leaf in self._leaves:
                origin, number = self._leaves[leaf]
                if origin != place - 1:
                    raise ConfigError(
                        f"{what} uses what layer {self._links[origin - 1]} gave, which is not the one before it."
                        " Between stages goes only what a layer gives to the next: add a residual within the layer, and"
                        " hand on what later layers need as one more output of each."
                    )
                self._consumed.setdefault(origin, set()).add(number)
            elif leaf in self._names and own not in self._homes.get(leaf, ()):
                self._explain(place, leaf, what)

    def _explain(self, place: int, parameter: int, what: str) -> None:
        """A parameter from outside the layer belongs to a part that runs here, or to one that has to be here too."""
        holders = [
            name for name, part in self._chain.parts.items() if any(id(p) == parameter for p in parameters_of(part))
        ]
        if not holders:
            raise ConfigError(
                f"{what} uses {self._names[parameter]}, a parameter of layer {min(self._homes[parameter])}. Cut into"
                " stages, a layer has its parameters in itself."
            )
        if not any(name in self.parts[place] for name in holders):
            self.parts[place].add(holders[0])


def leaves_behind(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The leaves of the graph from which these were computed."""
    found: list[Tensor] = []
    waiting: list[Any] = []
    for tensor in tensors:
        if tensor.grad_fn is not None:
            waiting.append(tensor.grad_fn)
        elif tensor.requires_grad:
            found.append(tensor)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                waiting.append(behind)
    return found


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Buffers, such as running statistics, and generators stand afterwards as before."""
    kept = [(module, dict(module._buffers)) for module in model.modules()]
    # Their memory, since numbers of an expanded one cannot be written by themselves.
    memory = [one.untyped_storage() for _, buffers in kept for one in buffers.values() if one is not None]
    before = [each.clone() for each in memory]  # type: ignore[no-untyped-call]
    generators = generators_of(next((p.device for p in model.parameters()), torch.device("cpu")))
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for each, saved in zip(memory, before, strict=True):
            each.copy_(saved)
        for module, buffers in kept:
            module._buffers.update(buffers)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def all_tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda one: found.append(one) if isinstance(one, Tensor) else None, value)
    return found
