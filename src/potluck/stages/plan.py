"""Plan: which layers of a model make up which stage; and balance, which cuts a chain of layers for some devices. Pure.

A plan is data that prints, is checked and is saved. A model is a chain of layers: "before" (what runs before the first
block: embeddings and the like), every block, "after" (the last norm, the head). A stage owns some of them, next to each
other. balance makes the slowest stage as fast as it can be, within each device's memory.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from typing import Any

from potluck.errors import ConfigError
from potluck.stages.schedule import in_flight
from potluck.words import check_at_least, plural, size

FORMAT = 3
"""Version of a plan as JSON."""

Form = dict[str, Any]
"""How a layer's output looks, as JSON: {"tensor": number} or {"tensor": null} for one that is not sent,
{"tuple": [...]}, {"list": [...]}, {"dict": {...}}, {"object": [its class, {...}]} of a dataclass, {"value": null, a
truth, a number or a text}."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One link of the chain, and what it costs."""

    name: str
    module: str | None
    """Where the model has it; none for "before" and "after", which are parts of the model rather than one module."""
    parts: tuple[str, ...] = ()
    """Modules and parameters outside of the chain that it uses, by name."""
    output: Form | None = None
    """Form of what it hands to the next one; in "before", the arguments of the first block that come from it, by
    name."""
    operations: tuple[str, ...] = ()
    """Operations of the model's own forward that follow it and belong to it, such as the sum of `x = x + block(x)`.
    With some, `output` is a list: the module's result, then each operation's."""
    carries: tuple[tuple[int, int], ...] = ()
    """Tensors of earlier layers that later ones use, and that it hands on beside its output: the number of the layer
    that gave it, and of the tensor among those that this layer sends."""
    everywhere: tuple[str, ...] = ()
    """In the first layer: its parts that the survey did not see in use. Every stage has them, so that a later batch may
    use them on any."""
    everywhere_parameters: int = 0
    buffers: tuple[str, ...] = ()
    """Buffers outside of the chain that a forward changes, and that it leaves as the whole model would."""
    seconds: float = 0.0
    """Forward and backward of the rows that were measured."""
    parameters: int = 0
    trained: int = 0
    """How many of the parameters are trained."""
    sent_bytes: int = 0
    """Bytes of its output per row that the next layer uses."""
    kept_bytes: int = 0
    """Kept from its forward for its backward, per row."""

    @property
    def sends(self) -> int:
        """How many tensors go to the next layer."""
        return count_sent(self.output or {"value": None}) + len(self.carries)


@dataclass(frozen=True, slots=True)
class Plan:
    """The layers, and where they are cut."""

    layers: tuple[Layer, ...]
    cuts: tuple[int, ...] = ()
    """The first layer of each stage but the first."""

    def __post_init__(self) -> None:
        """Every layer is in one stage, in order, and no stage is empty; ConfigError otherwise."""
        check_layers(self.layers)
        count = len(self.layers)
        for cut in self.cuts:
            if isinstance(cut, bool) or not isinstance(cut, int) or not 0 < cut < count:
                raise ConfigError(
                    f"A model of {plural(count, 'layer')} can be cut before layer 1 to {count - 1}, and not before"
                    f" {cut!r}."
                )
        for earlier, later in pairwise(self.cuts):
            if earlier >= later:
                raise ConfigError(
                    f"Cut points go up, and {list(self.cuts)} do not: {later} after {earlier} would leave a stage"
                    " without layers."
                )

    @staticmethod
    def at(layers: Sequence[Layer], cuts: Sequence[int] = ()) -> "Plan":
        """Cut points given: the first layer of every stage but the first."""
        return Plan(tuple(layers), tuple(cuts))

    @property
    def stages(self) -> tuple[range, ...]:
        """The layers of each stage, by number."""
        return tuple(range(start, end) for start, end in pairwise((0, *self.cuts, len(self.layers))))

    @property
    def everywhere(self) -> tuple[str, ...]:
        """The parts that every stage has."""
        return self.layers[0].everywhere

    def arrivals(self, stage: int) -> dict[tuple[int, int], int]:
        """Number the tensors that a stage receives, named as in `carries`, by their place among all that it
        receives."""
        if not (start := self.stages[stage].start):
            return {}
        before = self.layers[start - 1]
        own = before.sends - len(before.carries)
        sent = [*((start - 1, number) for number in range(own)), *before.carries]
        return {each: place for place, each in enumerate(sent)}

    def __str__(self) -> str:
        total = sum(layer.seconds for layer in self.layers)
        rows = [("stage", "layers", "", "parameters", "time", "kept/row", "sent/row")]
        for number, stage in enumerate(self.stages):
            own = self.layers[stage.start : stage.stop]
            seconds = sum(layer.seconds for layer in own)
            rows.append(
                (
                    str(number),
                    f"{stage.start}-{stage.stop - 1}" if len(stage) > 1 else f"{stage.start}",
                    f"{own[0].name} to {own[-1].name}" if len(own) > 1 else own[0].name,
                    f"{sum(layer.parameters for layer in own):,}",
                    f"{seconds / total:.0%}" if total else "-",
                    size(sum(layer.kept_bytes for layer in own)),
                    size(own[-1].sent_bytes) if number < len(self.cuts) else "-",
                )
            )
        return _table(rows)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "cuts": self.cuts, "layers": [asdict(layer) for layer in self.layers]})

    @staticmethod
    def from_json(text: str | bytes) -> "Plan":
        """The reverse of to_json, of text from outside: ConfigError for what is no plan."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"This is no plan of stages: {error}.") from None
        _expect_fields(data, {"format", "cuts", "layers"}, "A plan of stages")
        if data["format"] is True or data["format"] != FORMAT:
            raise ConfigError(f"This plan of stages has format {data['format']!r}, and we read format {FORMAT}.")
        if not isinstance(data["cuts"], list) or not isinstance(data["layers"], list):
            raise ConfigError("A plan of stages has a list of cuts and a list of layers; this one has not.")
        return Plan(tuple(map(_layer_from_json, data["layers"])), tuple(data["cuts"]))


def check_layers(layers: Sequence[Layer]) -> None:
    """A chain: "before" can only be first and "after" only last; all but the last say what they hand on."""
    if not layers:
        raise ConfigError("A plan of stages needs at least one layer.")
    names = [layer.name for layer in layers]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"Layer {twice} is in the plan twice, and every layer is in it once.")
    inner = [layer.name for layer in layers[1:-1] if layer.module is None]
    if inner or (len(layers) == 1 and layers[0].module is None):
        raise ConfigError(f"{inner[0] if inner else names[0]} is not a module, and only the ends of a chain can be so.")
    for layer in layers:
        if layer.output is not None:
            count_sent(layer.output)
        elif layer is not layers[-1]:
            raise ConfigError(f"The plan does not say what layer {layer.name} hands to the next one.")
        if layer.operations and len((layer.output or {}).get("list", ())) != 1 + len(layer.operations):
            raise ConfigError(f"The plan does not say what each operation of layer {layer.name} hands to the next one.")
    there: set[tuple[int, int]] = set()
    for number, layer in enumerate(layers):
        if not there.issuperset(layer.carries) or len(set(layer.carries)) < len(layer.carries):
            raise ConfigError(f"Layer {layer.name} cannot hand on {list(layer.carries)}: the one before it does not.")
        own = layer.sends - len(layer.carries)
        there = {*layer.carries, *((number, each) for each in range(own))}
    if layers[0].module is None and not layers[0].operations and "dict" not in (layers[0].output or {}):
        raise ConfigError(f"What {names[0]} hands on has to be a dict of arguments.")


def count_sent(form: Form) -> int:
    """How many tensors are sent; ConfigError unless they are numbered in order from 0."""
    numbers: list[int] = []

    def visit(form: object, depth: int) -> None:
        if not isinstance(form, dict) or len(form) != 1 or depth > 8:
            raise ConfigError(f"This does not say how a layer's output looks: {str(form)[:80]}.")
        [(kind, inner)] = form.items()
        match kind, inner:
            case "tensor", None:
                pass
            case "tensor", int() if not isinstance(inner, bool):
                numbers.append(inner)
            case "tuple" | "list", list() | tuple():
                for one in inner:
                    visit(one, depth + 1)
            case "dict", dict() if all(isinstance(key, str) for key in inner):
                for one in inner.values():
                    visit(one, depth + 1)
            case "object", [str(), dict() as named] if all(isinstance(key, str) for key in named):
                for one in named.values():
                    visit(one, depth + 1)
            case "value", None | bool() | int() | float() | str():
                pass
            case _:
                raise ConfigError(f"This does not say how a layer's output looks: {str(form)[:80]}.")

    visit(form, 0)
    if numbers != list(range(len(numbers))):
        raise ConfigError(f"The tensors that a layer hands on are numbered {numbers}, and not from 0 in order.")
    return len(numbers)


_NAMES = ("parts", "operations", "everywhere", "buffers")
_COUNTS = ("parameters", "trained", "everywhere_parameters", "sent_bytes", "kept_bytes")


def _layer_from_json(data: Any) -> Layer:
    _expect_fields(data, {field.name for field in fields(Layer)}, "A layer of a plan of stages")
    name, seconds = data["name"], data["seconds"]
    if not isinstance(name, str) or not name or not isinstance(data["module"], str | None):
        raise ConfigError(f"A layer and its module have names, not {name!r} and {data['module']!r}.")
    for key in _NAMES:
        if not isinstance(data[key], list) or not all(isinstance(each, str) for each in data[key]):
            raise ConfigError(f"The {key} of layer {name} are not a list of names.")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise ConfigError(f"Layer {name} cannot take {seconds!r} seconds.")
    for count in _COUNTS:
        if isinstance(data[count], bool) or not isinstance(data[count], int) or data[count] < 0:
            raise ConfigError(f"{count} of layer {name} is a whole number from 0 on, not {data[count]!r}.")
    carries = data["carries"]
    if not isinstance(carries, list) or not all(
        isinstance(each, list) and len(each) == 2 and all(type(number) is int for number in each) for each in carries
    ):
        raise ConfigError(f"What layer {name} carries is not a list of pairs of numbers.")
    if data["trained"] > data["parameters"]:
        raise ConfigError(f"Layer {name} trains {data['trained']} of {data['parameters']} parameters.")
    return Layer(**data | {key: tuple(data[key]) for key in _NAMES} | {"carries": tuple(map(tuple, carries))})


def _expect_fields(data: object, known: set[str], what: str) -> None:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{what} is a table of fields, not {str(data)[:40]!r}.")
    if odd := sorted(data.keys() ^ known):
        raise ConfigError(f"{what} has {'a field too many' if odd[0] in data else 'no field'}: {str(odd[0])[:40]}.")


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns as wide as they need to be; what holds names is flush left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


FROZEN_BYTES = 4
"""Bytes for a parameter that is not trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Where a stage is to run."""

    speed: float = 1.0
    """Against the device that was measured: 0.5 takes twice as long."""
    memory_bytes: int | None = None
    """Bytes that a stage may use of it; none: no limit."""

    def __post_init__(self) -> None:
        if not 0 < self.speed < math.inf:
            raise ValueError(f"speed must be above 0, not {self.speed}")
        check_at_least(1, memory_bytes=self.memory_bytes)


def balance(
    layers: Sequence[Layer],
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
    chain = Plan.at(layers).layers
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
        self._everywhere = layers[0].everywhere_parameters * per_parameter
        self._kept = list(accumulate((layer.kept_bytes * rows for layer in layers), initial=0))

    def seconds(self, stage: int, start: int, end: int) -> float:
        return (self._seconds[end] - self._seconds[start]) / self.devices[stage].speed

    def bytes(self, stage: int, start: int, end: int) -> int:
        copies = self._everywhere if start else 0  # the first layer counts its own
        kept = (self._kept[end] - self._kept[start]) * self.under_way[stage]
        return self._held[end] - self._held[start] + copies + kept

    def fits(self, stage: int, start: int, end: int) -> bool:
        limit = self.devices[stage].memory_bytes
        return limit is None or self.bytes(stage, start, end) <= limit

    def complaint(self) -> str:
        limits = [device.memory_bytes for device in self.devices]
        memories = ", ".join("no limit" if limit is None else size(limit) for limit in limits)
        way_out = "Add devices, make the micro-batches smaller, or keep less of each layer (checkpoint_activations)."
        for number, layer in enumerate(self.layers):
            if not any(self.fits(stage, number, number + 1) for stage in range(len(self.devices))):
                need = min(self.bytes(stage, number, number + 1) for stage in range(len(self.devices)))
                return f"Layer {layer.name} alone needs {size(need)}, and the devices have {memories}. {way_out}"
        held, kept = self._held[-1], self._kept[-1]
        return (
            f"No cut of the model fits: its parameters need {size(held)} and each micro-batch under way"
            f" {size(kept)}, and the devices, in their order, have {memories}. {way_out}"
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
