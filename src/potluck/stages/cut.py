"""cut: one stage of a model, which runs the same loss function as the whole model and computes its own layers only.

A stage's model has the class and the names of the whole one. Its own layers are the whole model's; a layer of another
stage has a stand-in without parameters. Those before ours hand on what was received; after our last layer the loss
function is left, and what that layer gave is the stage's result. So whatever else the model's forward does between its
layers (masks, tables, positions) is done on every stage, and nothing has to be traced.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from potluck.errors import ConfigError
from potluck.stages.chain import Chain, chain_of, left_alone, parameters_of, seats_of_buffers
from potluck.stages.forms import Crossing, Way, forms_of, renumbered
from potluck.stages.plan import Plan
from potluck.stages.seats import (
    AbsentLayer,
    AbsentPart,
    Activation,
    Pass,
    StageExit,
    StandIn,
    hollow,
    left,
    seated,
    shallow,
)
from potluck.words import plural

LossOf = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True, slots=True, eq=False)
class CutStage:
    """One stage of a plan."""

    model: nn.Module
    """The stage's model, of the whole model's class; its parameters have the whole model's names and are its
    parameters."""
    plan: Plan
    index: int
    blocks: list[nn.Module]
    """Its own links of the chain, to be compiled, recomputed or sharded one by one."""
    receives: int
    """How many tensors the stage before sends."""
    foreign: set[str]
    """Buffers that another stage has to itself: a run leaves them alone."""
    _now: "Pass" = field(repr=False)

    @property
    def is_last(self) -> bool:
        return self.index == len(self.plan.stages) - 1

    def run(self, loss_of: LossOf, batch: Any, activation: Activation | None = None, *, seed: int | None = None) -> Any:
        """The forward of one micro-batch: what goes to the next stage, or from the last one what `loss_of` returned.

        `activation`: what the stage before gave. Set requires_grad_() on its floating-point tensors to get their
        gradients; a layer that works in place may change them. With a seed, each layer's random numbers come from it
        and the layer's place alone, however the model is cut, and the global generators stand afterwards as before.
        """
        received = tuple(activation or ())
        if len(received) != self.receives:
            raise ConfigError(
                f"Stage {self.index} takes {plural(self.receives, 'tensor')} from the stage before, and got"
                f" {len(received)}."
            )
        try:
            with left_alone(self.model, self.foreign), self._now.begin(received, seed, self._device(received)):
                result = loss_of(self.model, batch)
        except StageExit as reached:
            if reached.by is not self._now:
                raise
            return reached.activation
        if not self.is_last or not self._now.has_entered:
            raise ConfigError(
                f"The loss function returned without running the layers of stage {self.index}. It has to run the model"
                " that it gets as its argument, and no other."
            )
        return result

    def _device(self, given: Activation) -> torch.device:
        for tensor in itertools.chain(given, self.model.parameters()):
            return tensor.device
        return torch.device("cpu")


def cut(model: nn.Module, plan: Plan, index: int) -> CutStage:
    """A stage of the model. The model itself stays as it is and works on; the stage holds nothing of other stages.

    So to free what the others own, let go of the model. It may also be without memory, on the meta device: then only
    the stage is to be given memory and loaded.
    """
    if not 0 <= index < len(plan.stages):
        raise ConfigError(f"The plan has stages 0 to {len(plan.stages) - 1}, and no stage {index}.")
    chain = chain_of(model, [layer.module for layer in plan.layers if layer.module is not None])
    _check(model, plan, chain)
    now = Pass(hears=any(layer.operations for layer in plan.layers))
    now.has_skips = any(layer.carries for layer in plan.layers)
    now.arrivals, now.carries = plan.arrivals(index), plan.layers[plan.stages[index].stop - 1].carries
    own = plan.layers[plan.stages[index].start : plan.stages[index].stop]
    everywhere = {name: parameters_of(chain.parts[name]) for name in plan.everywhere}
    used = {id(parameter) for layer in own for parameter in used_by(chain, layer.module, layer.parts)}
    used |= {id(parameter) for parameters in everywhere.values() for parameter in parameters}
    replaced: dict[int, nn.Module] = {}
    blocks = _place_layers(plan, index, chain, now, replaced)
    kept = everywhere.keys() | {name for layer in own for name in layer.parts}
    for name, part in chain.parts.items():
        if name not in kept and isinstance(part, nn.Module):
            if isinstance(part, nn.modules.dropout._DropoutNd):
                replaced[id(part)] = nn.Identity()
            elif parameters_of(part):
                replaced[id(part)] = AbsentPart(part, now, name)
    for original in (*chain.modules.values(), *(part for part in chain.parts.values() if isinstance(part, nn.Module))):
        if isinstance(stand_in := replaced.get(id(original)), StandIn):
            _hang(stand_in, original, used)
    if now.hears:
        _place_parts(chain, now, replaced)
    for path, holder in chain.holders.items():
        replaced[id(holder)] = _hollow(holder, path, now, kept, used)
    for holder in chain.holders.values():
        copy = replaced[id(holder)]
        copy._modules = {
            name: None if child is None else replaced.get(id(child), child) for name, child in copy._modules.items()
        }
    own_model = replaced[id(model)]
    own_model.__class__ = left(type(own_model))
    if index < len(plan.stages) - 1:
        own_model._forward_hooks.clear()  # the whole model's, which wait for what the whole forward gives
    first = plan.stages[index].start
    return CutStage(
        model=own_model,
        plan=plan,
        index=index,
        blocks=blocks,
        receives=plan.layers[first - 1].sends if first else 0,
        foreign={name for layer in plan.layers for name in layer.buffers}.difference(*(layer.buffers for layer in own)),
        _now=now,
    )


def give_up_foreign(stages: Sequence[CutStage]) -> None:
    """Buffers that no stage of a worker has to itself are no part of its state_dict from now on.

    What several would change alike, the first has to itself.
    """
    taken: set[str] = set()
    for stage in stages:
        changed = {name for layer in stage.plan.layers for name in layer.buffers}
        stage.foreign.update(taken)
        taken |= changed - stage.foreign
    foreign = set.intersection(*(stage.foreign for stage in stages))
    for stage in stages:
        for name, (module, key) in seats_of_buffers(stage.model):
            if name in foreign:
                module._non_persistent_buffers_set = module._non_persistent_buffers_set | {key}


def used_by(chain: Chain, module: str | None, parts: Iterable[str]) -> list[nn.Parameter]:
    """List the parameters of a layer that is this module and has these parts around the chain, each once."""
    found = [] if module is None else list(chain.modules[module].parameters())
    for name in parts:
        found += parameters_of(chain.parts[name])
    return list({id(parameter): parameter for parameter in found}.values())


def _check(model: nn.Module, plan: Plan, chain: Chain) -> None:
    """The plan is of this model."""
    listed = {name for layer in plan.layers for name in (*layer.parts, *layer.everywhere)}
    if unknown := sorted(listed - chain.parts.keys()):
        raise ConfigError(f"The model has no {unknown[0]} outside of its layers: the plan is of another model.")
    for name, part in chain.parts.items():
        if name not in listed and parameters_of(part):
            raise ConfigError(f"The plan does not know {name}: it is of another model.")
    for layer in plan.layers:
        count = sum(parameter.numel() for parameter in used_by(chain, layer.module, layer.parts))
        if count != layer.parameters:
            raise ConfigError(
                f"Layer {layer.name} has {count:,} parameters, and in the plan {layer.parameters:,}: the plan is of"
                " another model."
            )
    for path, holder in chain.holders.items():
        if "forward" in holder.__dict__ or holder._compiled_call_impl is not None:
            raise ConfigError(
                f"The forward of {path or type(holder).__name__} has been compiled or replaced. Cut the model first,"
                " and do so with the stages."
            )


def _place_layers(plan: Plan, index: int, chain: Chain, now: Pass, replaced: dict[int, nn.Module]) -> list[nn.Module]:
    """Gives every link of the chain its own seat or a stand-in, and returns those with a seat."""
    own = plan.stages[index]
    links = [number for number, layer in enumerate(plan.layers) if layer.module is not None]
    before = plan.layers[0] if links[0] == 1 else None
    opening = before.output if before is not None and not before.operations else None  # arguments of the first link
    carried = {number for number, _ in now.arrivals}
    if before is not None and before.operations and (own.start <= 1 or 0 in carried):
        now.opening = _crossing(plan, index, 0, 2 * len(links) + 1)
    blocks = []
    for place, number in enumerate(links, start=1):
        layer = plan.layers[number]
        assert layer.module is not None
        module = chain.modules[layer.module]
        # Place 0 is what runs before the chain, then come its links, what follows it, and what follows each link.
        crossing = _crossing(plan, index, number, place + 1 if number == links[-1] else len(links) + 1 + place)
        if number in own:
            takes = opening if number == own.start == 1 else None
            layer_here = shallow(module, seated(type(module)))
            layer_here.__dict__["_seat"] = partial(now.run_layer, place, takes, crossing)
            blocks.append(layer_here)
            replaced[id(module)] = layer_here
        else:
            replaced[id(module)] = AbsentLayer(
                module,
                now,
                layer.name,
                output=forms_of(layer)[0] if number < own.start else None,
                crossing=crossing if number in carried or crossing.is_door else None,
                leaves=opening if number == own.stop == 1 else None,
            )
    return blocks


def _crossing(plan: Plan, index: int, number: int, place: int) -> Crossing:
    """The end of a layer, as it is for this stage."""
    own = plan.stages[index]
    is_exit = number == own.stop - 1 and index < len(plan.stages) - 1
    way: Way = "in" if number < own.start else "out" if is_exit else "through"
    layer, forms = plan.layers[number], forms_of(plan.layers[number])
    if way == "in":
        places = {sent: place for (origin, sent), place in plan.arrivals(index).items() if origin == number}
        forms = tuple(renumbered(form, places) for form in forms)
    return Crossing(
        layer=layer.name,
        operations=layer.operations,
        forms=forms,
        way=way,
        number=number,
        place=place,
        is_last=all(later.module is None for later in plan.layers[number + 1 :]),
        is_door=number == own.start - 1,
        is_carried=any(origin == number for origin, _ in plan.layers[own.stop - 1].carries),
    )


def _place_parts(chain: Chain, now: Pass, replaced: dict[int, nn.Module]) -> None:
    """Wrap each module around the chain, so that it counts as one operation, also if a stand-in runs in its place."""
    parts = {id(part): (name, part) for name, part in reversed(chain.parts.items()) if isinstance(part, nn.Module)}
    for name, part in parts.values():
        here = replaced.get(id(part), part)
        replaced[id(part)] = shallow(here, seated(type(here)))
        replaced[id(part)].__dict__["_seat"] = partial(now.run_part, name)


def _hollow(holder: nn.Module, path: str, now: Pass, kept: set[str], used: set[int]) -> nn.Module:
    """A copy without those of its own parameters that the stage does not use; zeros are in their place."""
    copy = shallow(holder, hollow(type(holder)))
    absent = {
        name: torch.empty_like(parameter, device="meta", requires_grad=False)
        for name, parameter in holder._parameters.items()
        if parameter is not None and (f"{path}.{name}" if path else name) not in kept and id(parameter) not in used
    }
    copy._parameters = {name: one for name, one in holder._parameters.items() if name not in absent}
    copy.__dict__ |= {"_now": now, "_absent": absent}
    return copy


def _hang(stand_in: nn.Module, original: nn.Module, used: set[int]) -> None:
    """Parameters that the stage uses elsewhere under another name keep the whole model's first name for them."""
    for name, parameter in original.named_parameters(remove_duplicate=False):
        if id(parameter) in used:
            *steps, last = name.split(".")
            place = stand_in
            for step in steps:
                place = place._modules.setdefault(step, nn.Module())  # type: ignore[assignment]
            place._parameters[last] = parameter
