"""measure: what each layer of a model costs, run as a stage of its own.

Leaves the model, its buffers, its gradients and the random generators as they were.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from potluck.stages.cut import LossOf, Stage, cut
from potluck.stages.forms import all_tensors
from potluck.stages.plan import Layer, Plan, table, tell_bytes
from potluck.stages.seats import Activation
from potluck.stages.survey import survey, unchanged
from potluck.stages.watch import SEED


@dataclass(frozen=True, slots=True)
class Profile:
    """What the layers of a model cost, measured."""

    layers: tuple[Layer, ...]
    device: str
    rows: int
    """Of the batch with which the seconds were measured."""

    def __str__(self) -> str:
        rows = [("layer", "", "", "parameters", "ms", "kept/row", "sent/row")]
        for number, layer in enumerate(self.layers):
            counts = (f"{layer.parameters:,}", f"{layer.seconds * 1000:.2f}")
            sizes = (tell_bytes(layer.kept_bytes), tell_bytes(layer.sent_bytes) if layer.output else "-")
            rows.append((str(number), layer.name, "", *counts, *sizes))
        return table(rows)


def measure(
    model: nn.Module,
    loss_of: LossOf,
    batch: Any,
    device: torch.device | str | None = None,
    *,
    repeats: int = 3,
    at_least_s: float = 0.0,
) -> Profile:
    """Surveys the model, then runs every layer as a stage of its own: its time, and what it keeps.

    `device`: where to measure, if not where the model is; then one layer at a time is there, so the model need not fit.
    What a layer costs beside the others is its shortest time. But a worker that is held back now and then, by a CPU
    quota or by others on its machine, is as fast as ever in between: so all times are lengthened to what the runs
    took on average, and `at_least_s` says for how long to look, in all.
    """
    home = next(model.parameters()).device
    device = home if device is None else torch.device(device)
    layers = survey(model, loss_of, _moved(batch, home))
    plan = Plan.at(layers, range(1, len(layers)))
    batch = _moved(batch, device)
    rows = max(1, next((tensor.shape[0] for tensor in all_tensors(batch) if tensor.dim()), 1))
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
    return Profile(tuple(replace(each, seconds=each.seconds * pace) for each in measured), str(device), rows)


def _measure_layer(
    stage: Stage, loss_of: LossOf, batch: Any, activation: Activation, repeats: int, at_least_s: float
) -> tuple[Any, list[float], int]:
    """Its result, the seconds of each forward and backward, and the bytes it keeps in between."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*stage.model.parameters(), *stage.model.buffers())}
    own |= {tensor.untyped_storage().data_ptr() for tensor in all_tensors(batch)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    trained = [parameter for parameter in stage.model.parameters() if parameter.requires_grad]
    clock = _Clock(stage._device(activation))
    times: list[float] = []
    until_s = time.perf_counter() + at_least_s
    while len(times) <= repeats or time.perf_counter() < until_s:
        given = tuple(tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in activation)
        stage._now.on_enter = clock.start
        if not times:  # the first warms up, and its bytes are counted
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                result = stage.run(loss_of, batch, given, seed=SEED)
        else:
            result = stage.run(loss_of, batch, given, seed=SEED)
        stage._now.on_enter = None
        outputs = [one for one in all_tensors(result) if one.requires_grad]
        inputs = [*trained, *(one for one in given if one.requires_grad)]
        if outputs and inputs:
            torch.autograd.grad(outputs, inputs, [torch.ones_like(one) for one in outputs], allow_unused=True)
        times.append(clock.seconds())
    return result, times[1:], sum(kept.values())


class _Clock:
    """Of a device that may run behind."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started_s = 0.0

    def start(self) -> None:
        self._started_s = self._now_s()

    def seconds(self) -> float:
        return self._now_s() - self._started_s

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, value)
