"""survey: a model's layers, found by running it once, and proven by running it once more, cut after every layer.

measure: what each of them costs, run as a stage of its own. Both leave the model, its buffers, its gradients and the
random generators as they were.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from potluck.batch_shapes import tensors_of, to_device
from potluck.errors import ConfigError
from potluck.stages.chain import Chain, buffers_outside, check_one, copies, differing, find_chain, parameters_of
from potluck.stages.cut import CutStage, LossOf, cut, used_by
from potluck.stages.forms import all_tensors
from potluck.stages.plan import Layer, Plan
from potluck.stages.recomputing import OWN_GRADIENTS, THROUGH_LAYERS
from potluck.stages.seats import Activation, generators_of
from potluck.stages.trace import SEED, Crossings, ModelTrace


def survey(model: nn.Module, loss_of: LossOf, batch: Any) -> tuple[Layer, ...]:
    """The layers of the model, from three runs of it where it is: watched, whole, and cut after every layer.

    Nothing is timed. ConfigError if it cannot be cut, or if it gives another loss when it is.
    """
    tried: dict[tuple[str, ...], ConfigError] = {}
    for every, mixed in ((True, True), (True, False), (False, True), (False, False)):
        try:
            chain = find_chain(model, every=every, mixed=mixed)
        except ConfigError as error:
            tried = tried or {(): error}
            continue
        names = tuple(chain.modules)
        if names in tried:
            continue
        try:
            return _survey(model, chain, loss_of, batch)
        except ConfigError as error:  # they do not run one after the other, as those of fewer lists may
            tried[names] = error
    raise list(tried.values())[-1]


def _survey(model: nn.Module, chain: Chain, loss_of: LossOf, batch: Any) -> tuple[Layer, ...]:
    trace = ModelTrace(model, chain)
    with unchanged(model):
        trace.run(loss_of, batch)
    crossings = Crossings(trace)
    layers = tuple(_layers(model, chain, trace, crossings))
    first = 0 if layers[0].module is None else 1
    carried = [crossings.carries(number + first, first) for number in range(len(layers))]
    layers = tuple(replace(layer, carries=each) for layer, each in zip(layers, carried, strict=True))
    seats = buffers_outside(model, chain)
    before = copies(seats)
    with unchanged(model), torch.enable_grad():  # which a loss function may use
        loss = _detached(cut(model, Plan.at(layers), 0).run(loss_of, batch, seed=SEED))
        after = copies(seats)
    plan = Plan.at(layers, range(1, len(layers)))
    wrong: list[set[str]] = []
    result: Activation = ()
    for number, layer in enumerate(layers):
        given = tuple(one.requires_grad_(one.is_floating_point()) for one in result)
        with unchanged(model), torch.enable_grad(), _explained(layer):
            result = _detached(cut(model, plan, number).run(loss_of, batch, given, seed=SEED))
            wrong.append(differing(after, copies(seats), near=1e-4))
    _check_loss(loss, result)
    touching = {
        name: {min(max(crossings.place_of(event) - first, 0), len(layers) - 1) for event in events}
        for name, events in trace.buffer_access.at.items()
    }
    return tuple(_with_buffers(layers, differing(before, after), touching, wrong))


def _with_buffers(
    layers: Sequence[Layer], changed: set[str], touching: dict[str, set[int]], wrong: Sequence[set[str]]
) -> Iterator[Layer]:
    """`touching`: which layers touch a buffer. `wrong`: of each layer, the buffers that it does not leave right."""
    for name in sorted(changed):
        right = [layer.name for layer, each in zip(layers, wrong, strict=True) if name not in each]
        if len(right) < len(layers):
            check_one(name, [layers[number].name for number in sorted(touching[name])], right)
            wrong = [each if number in touching[name] else each | {name} for number, each in enumerate(wrong)]
    for layer, each in zip(layers, wrong, strict=True):
        yield replace(layer, buffers=tuple(sorted(changed - each)))


def _detached(result: Any) -> Activation:
    return tuple(one.detach() for one in all_tensors(result))


@contextmanager
def _explained(layer: Layer) -> Iterator[None]:
    """The whole model has run; so an error is one of running it in stages."""
    try:
        yield
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise ConfigError(
            f"The loss function runs with the whole model, and not with the stage of layer {layer.name} ({error}). Up"
            " to its own layers a stage runs the model's own forward on zeros: what cannot be computed from zeros"
            f" belongs into a layer. {OWN_GRADIENTS}"
        ) from error


def _check_loss(whole: Activation, staged: Activation) -> None:
    for a, b in zip(whole, staged, strict=True):
        if not torch.allclose(a.double(), b.double(), rtol=1e-4, equal_nan=True):
            raise ConfigError(
                f"Cut into stages the model gives another loss than whole ({_told(b)}, not {_told(a)}): a layer uses"
                " something of an earlier one that it does not get as its input. Make that an output of each layer and"
                " an input of the next."
            )


def _told(tensor: Tensor) -> str:
    return f"{tensor.item():.6g}" if tensor.numel() == 1 else f"{tensor.numel()} numbers"


def _layers(model: nn.Module, chain: Chain, trace: ModelTrace, crossings: Crossings) -> Iterator[Layer]:
    used = _parts(model, chain, trace, crossings)
    listed = set().union(*used)
    idle = {name for name, part in chain.parts.items() if name not in listed and parameters_of(part)}
    # A part with buffers has one home: run before a stage's own layers, on zeros, it would change them.
    everywhere = tuple(name for name in chain.parts if name in idle and not _buffers_of(chain.parts[name]))
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    links = trace.links
    for place in range(len(links) + 2):
        parts = tuple(name for name in chain.parts if name in used[place] or (place == 0 and name in idle))
        module = links[place - 1] if 0 < place <= len(links) else None
        counted = used_by(chain, module, parts)
        if module is None and not counted:
            continue  # nothing to own: the stage at that end of the chain runs what there is
        name = module or ("before" if place == 0 else "after")
        end = crossings.ends[place] if place <= len(links) else None
        shared = () if place else everywhere
        yield Layer(
            name=name if module or name not in chain.modules else f"({name})",
            module=module,
            parts=parts,
            output=end.output if end else None,
            operations=end.operations if end else (),
            everywhere=shared,
            everywhere_parameters=_count(parameters_of(chain.parts[name]) for name in shared),
            parameters=sum(parameter.numel() for parameter in counted),
            trained=sum(parameter.numel() for parameter in counted if id(parameter) in trained),
        )


def _parts(model: nn.Module, chain: Chain, trace: ModelTrace, crossings: Crossings) -> list[set[str]]:
    """The parts of the model around its layers that each place uses."""
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    homes = _having({name: list(link.parameters()) for name, link in chain.modules.items()})
    holders = _having({name: parameters_of(part) for name, part in chain.parts.items()})
    parts_of_places: list[set[str]] = [set() for _ in range(len(trace.links) + 2)]
    for number, name in trace.met:
        parts_of_places[crossings.place_of(number)].add(name)
    for place, parts in enumerate(parts_of_places):
        own = trace.links[place - 1] if 0 < place <= len(trace.links) else None
        for key in crossings.parameters(place):
            if key not in names or own in homes.get(key, ()):
                continue
            if key not in holders and any(event.name.startswith("grad@") for event in trace.events):
                raise ConfigError(THROUGH_LAYERS)
            if key not in holders:
                what = f"Layer {own}" if own else f"What runs {'after' if place else 'before'} the layers"
                raise ConfigError(
                    f"{what} uses {names[key]}, a parameter of layer {homes[key][0]}. Cut into stages, a layer has its"
                    " parameters in itself."
                )
            if not parts & set(holders[key]):
                parts.add(holders[key][0])
    return parts_of_places


def _buffers_of(part: nn.Module | nn.Parameter) -> list[Tensor]:
    return [] if isinstance(part, nn.Parameter) else list(part.buffers())


def _count(held: Iterable[list[nn.Parameter]]) -> int:
    """How many numbers they have, each parameter once."""
    return sum({id(parameter): parameter.numel() for each in held for parameter in each}.values())


def _having(held: dict[str, list[nn.Parameter]]) -> dict[int, list[str]]:
    """Map each parameter's id to the names that have it."""
    owners: dict[int, list[str]] = {}
    for name, parameters in held.items():
        for parameter in parameters:
            owners.setdefault(id(parameter), []).append(name)
    return owners


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


def measure(
    model: nn.Module,
    loss_of: LossOf,
    batch: Any,
    device: torch.device | str | None = None,
    *,
    repeats: int = 3,
    at_least_s: float = 0.0,
) -> tuple[Layer, ...]:
    """Surveys the model, then runs every layer as a stage of its own: its time, and what it keeps.

    `device`: where to measure, if not where the model is; then one layer at a time is there, so the model need not fit.
    What a layer costs beside the others is its shortest time. But a worker that is held back now and then, by a CPU
    quota or by others on its machine, is as fast as ever in between: so all times are lengthened to what the runs
    took on average, and `at_least_s` says for how long to look, in all.
    """
    home = next(model.parameters()).device
    device = home if device is None else torch.device(device)
    layers = survey(model, loss_of, to_device(batch, home))
    plan = Plan.at(layers, range(1, len(layers)))
    batch = to_device(batch, device)
    rows = max(1, next((tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()), 1))
    measured: list[Layer] = []
    took_s = least_s = 0.0
    activation: Activation = ()
    with unchanged(model):
        for number, layer in enumerate(layers):
            stage = cut(model, plan, number)
            if device != home:
                stage.model.to(device)
            result, times, kept = _measure_layer(stage, loss_of, batch, activation, repeats, at_least_s / len(layers))
            seconds = min(times)
            took_s, least_s = took_s + sum(times), least_s + seconds * len(times)
            if device != home:
                stage.model.to(home)
            sent = 0
            if not stage.is_last:
                activation = tuple(tensor.detach() for tensor in result)
                sent = sum(tensor.nbytes for tensor in activation)
            measured.append(replace(layer, seconds=seconds, sent_bytes=-(-sent // rows), kept_bytes=-(-kept // rows)))
    pace = took_s / least_s if least_s else 1.0
    return tuple(replace(each, seconds=each.seconds * pace) for each in measured)


def _measure_layer(
    stage: CutStage, loss_of: LossOf, batch: Any, activation: Activation, repeats: int, at_least_s: float
) -> tuple[Any, list[float], int]:
    """Return a layer's result, the seconds of each forward and backward, and the bytes it keeps in between."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*stage.model.parameters(), *stage.model.buffers())}
    own |= {tensor.untyped_storage().data_ptr() for tensor in tensors_of(batch)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    trained = [parameter for parameter in stage.model.parameters() if parameter.requires_grad]
    device, started_s = stage._device(activation), 0.0

    def start() -> None:
        nonlocal started_s
        started_s = _now_s(device)

    times: list[float] = []
    until_s = time.perf_counter() + at_least_s
    while len(times) <= repeats or time.perf_counter() < until_s:
        received = tuple(tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in activation)
        stage._now.on_enter = start
        # The first warms up, and its bytes are counted.
        counting = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with nullcontext() if times else counting:
            result = stage.run(loss_of, batch, received, seed=SEED)
        stage._now.on_enter = None
        outputs = [one for one in all_tensors(result) if one.requires_grad]
        inputs = [*trained, *(one for one in received if one.requires_grad)]
        if outputs and inputs:
            torch.autograd.grad(outputs, inputs, [torch.ones_like(one) for one in outputs], allow_unused=True)
        times.append(_now_s(device) - started_s)
    return result, times[1:], sum(kept.values())


def _now_s(device: torch.device) -> float:
    """A GPU may run behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
