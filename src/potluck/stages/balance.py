"""balance: cuts a chain of layers so that the slowest stage is as fast as it can be. Pure.

Each stage has its device, which has a speed and perhaps a limit of memory; stages follow the order of the devices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from potluck.errors import ConfigError
from potluck.stages.plan import HasLayers, Layer, Plan, tuple_of
from potluck.stages.schedule import in_flight
from potluck.words import check_at_least, size

FROZEN_BYTES = 4
"""Of a parameter that is not trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Where a stage is to run."""

    speed: float = 1.0
    """Against the device that was measured: 0.5 takes twice as long."""
    memory_bytes: int | None = None
    """What a stage may use of it; none: no limit."""

    def __post_init__(self) -> None:
        if not 0 < self.speed < math.inf:
            raise ValueError(f"speed must be above 0, not {self.speed}")
        check_at_least(1, memory_bytes=self.memory_bytes)


def balance(
    layers: Sequence[Layer] | HasLayers,
    devices: Sequence[Device],
    *,
    micro_batches: int = 1,
    rows: int = 1,
    bytes_per_parameter: int = 16,
) -> Plan:
    """One stage for each device, in their order.

    The largest of the stages' times (seconds by speed) is as small as it can be, and among such plans the times are as
    even as they can be. No stage exceeds its device's memory: `bytes_per_parameter` of those that are trained (16:
    parameter, gradient and AdamW's two states in fp32), and what it keeps for the backwards of the micro-batches, of
    `rows` rows each, that are under way at once: min(micro_batches, in_flight(...)), as 1f1b has it. A parameter
    that two layers share counts for each of them.
    """
    chain = tuple_of(layers)
    Plan(chain)
    if not devices:
        raise ConfigError("A model needs at least one device to be cut for.")
    if len(devices) > len(chain):
        raise ConfigError(
            f"{len(devices)} stages need as many layers, and the model has {len(chain)}. Give it fewer devices."
        )
    if min(micro_batches, rows, bytes_per_parameter) < 1:
        raise ConfigError(
            f"micro_batches, rows and bytes_per_parameter are at least 1, not {micro_batches}, {rows} and"
            f" {bytes_per_parameter}."
        )
    costs = _Costs(chain, devices, micro_batches, rows, bytes_per_parameter)
    slowest, _ = _best(costs, math.inf, max)
    if slowest == math.inf:
        raise ConfigError(costs.complaint())
    _, cuts = _best(costs, slowest, lambda so_far, seconds: so_far + seconds * seconds)
    return Plan(chain, tuple(cuts))


class _Costs:
    """Time and memory of any stage, from sums over the layers before."""

    def __init__(
        self, layers: Sequence[Layer], devices: Sequence[Device], micro_batches: int, rows: int, per_parameter: int
    ) -> None:
        self.layers = layers
        self.devices = devices
        self.under_way = [min(micro_batches, in_flight(stage, len(devices))) for stage in range(len(devices))]
        self._seconds = list(accumulate((layer.seconds for layer in layers), initial=0.0))
        held = (layer.trained * per_parameter + (layer.parameters - layer.trained) * FROZEN_BYTES for layer in layers)
        self._held = list(accumulate(held, initial=0))
        self._kept = list(accumulate((layer.kept_bytes * rows for layer in layers), initial=0))

    def seconds(self, stage: int, start: int, end: int) -> float:
        return (self._seconds[end] - self._seconds[start]) / self.devices[stage].speed

    def bytes(self, stage: int, start: int, end: int) -> int:
        return self._held[end] - self._held[start] + (self._kept[end] - self._kept[start]) * self.under_way[stage]

    def fits(self, stage: int, start: int, end: int) -> bool:
        limit = self.devices[stage].memory_bytes
        return limit is None or self.bytes(stage, start, end) <= limit

    def complaint(self) -> str:
        limits = [device.memory_bytes for device in self.devices]
        told = ", ".join("no limit" if limit is None else size(limit) for limit in limits)
        way_out = "Add devices, make the micro-batches smaller, or keep less of each layer (checkpoint_activations)."
        for number, layer in enumerate(self.layers):
            if not any(self.fits(stage, number, number + 1) for stage in range(len(self.devices))):
                need = min(self.bytes(stage, number, number + 1) for stage in range(len(self.devices)))
                return f"Layer {layer.name} alone needs {size(need)}, and the devices have {told}. {way_out}"
        held, kept = self._held[-1], self._kept[-1]
        return (
            f"No cut of the model fits: its parameters need {size(held)} and each micro-batch under way"
            f" {size(kept)}, and the devices, in their order, have {told}. {way_out}"
        )


def _best(costs: _Costs, limit: float, add: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """The least of `add` over the stages' times, none of which is above the limit, and the cuts that have it."""
    layers, stages = len(costs.layers), len(costs.devices)
    best = [0.0] + [math.inf] * layers  # of the first `end` layers in the stages so far
    start_of: list[list[int]] = []
    for stage in range(stages):
        row, starts = [math.inf] * (layers + 1), [0] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                seconds = costs.seconds(stage, start, end)
                # Time and memory only grow as the stage begins earlier.
                if seconds > limit or not costs.fits(stage, start, end) or add(0.0, seconds) > row[end]:
                    break
                if (value := add(best[start], seconds)) < row[end]:
                    row[end], starts[end] = value, start
        best = row
        start_of.append(starts)
    cuts, end = [], layers
    for starts in reversed(start_of[1:]):
        end = starts[end]
        cuts.append(end)
    return best[layers], cuts[::-1]
