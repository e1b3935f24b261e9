"""A plan of stages: every layer once, in order; balanced as well as can be; and nothing odd is read from outside."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ConfigError
from potluck.stages.plan import Device, Layer, Plan, balance

TENSOR = {"tensor": 0}


def chain(
    seconds: Sequence[float], parameters: Sequence[int] | None = None, kept: Sequence[int] | None = None
) -> list[Layer]:
    counts = parameters or [1] * len(seconds)
    return [
        Layer(
            name=f"layers.{number}",
            module=f"layers.{number}",
            output=TENSOR,
            seconds=one,
            parameters=counts[number],
            trained=counts[number],
            kept_bytes=kept[number] if kept else 0,
        )
        for number, one in enumerate(seconds)
    ]


def slowest(plan: Plan, devices: Sequence[Device]) -> float:
    return max(
        sum(plan.layers[number].seconds for number in stage) / device.speed
        for stage, device in zip(plan.stages, devices, strict=True)
    )


def held_bytes(plan: Plan, micro_batches: int, rows: int) -> list[int]:
    """By hand: sixteen bytes a parameter, and what is kept for each micro-batch under way."""
    count = len(plan.stages)
    return [
        sum(16 * plan.layers[n].trained + plan.layers[n].kept_bytes * rows * under_way for n in own)
        for own, under_way in zip(
            plan.stages, (min(micro_batches, 2 * (count - s) - 1) for s in range(count)), strict=True
        )
    ]


times = st.lists(st.integers(0, 50).map(float), min_size=1, max_size=8)


@given(st.data(), times)
def test_every_layer_is_in_one_stage_in_order(data: st.DataObject, seconds: list[float]) -> None:
    points = data.draw(st.sets(st.integers(1, len(seconds) - 1))) if len(seconds) > 1 else set()
    plan = Plan.at(chain(seconds), sorted(points))
    assert [number for stage in plan.stages for number in stage] == list(range(len(seconds)))
    assert all(len(stage) for stage in plan.stages)
    assert Plan.from_json(plan.to_json()) == plan
    assert str(plan).count("\n") == len(plan.stages)


@given(st.data(), times)
def test_no_cut_is_better_than_the_balanced_one(data: st.DataObject, seconds: list[float]) -> None:
    count = data.draw(st.integers(1, len(seconds)))
    small = st.lists(st.integers(0, 20), min_size=len(seconds), max_size=len(seconds))
    layers = chain(seconds, data.draw(small), data.draw(small))
    limits = st.none() | st.integers(1, 1500)
    devices = [
        Device(speed=data.draw(st.sampled_from([0.5, 1.0, 3.0])), memory_bytes=data.draw(limits)) for _ in range(count)
    ]
    micro_batches, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))

    def fits(plan: Plan) -> bool:
        needs = held_bytes(plan, micro_batches, rows)
        return all(d.memory_bytes is None or need <= d.memory_bytes for need, d in zip(needs, devices, strict=True))

    every = [Plan.at(layers, cuts) for cuts in itertools.combinations(range(1, len(layers)), count - 1)]
    fitting = [plan for plan in every if fits(plan)]
    if not fitting:
        with pytest.raises(ConfigError, match="devices"):
            balance(layers, devices, micro_batches=micro_batches, rows=rows)
        return
    ours = balance(layers, devices, micro_batches=micro_batches, rows=rows)
    assert fits(ours)
    assert math.isclose(slowest(ours, devices), min(slowest(plan, devices) for plan in fitting))


def test_a_device_of_twice_the_speed_gets_twice_the_work() -> None:
    plan = balance(chain([1.0] * 30), [Device(speed=1.0), Device(speed=2.0)])
    assert [len(stage) for stage in plan.stages] == [10, 20]


def test_stages_are_even_where_one_long_layer_leaves_room() -> None:
    plan = balance(chain([10.0, *[1.0] * 12]), [Device(), Device(), Device()])
    assert [len(stage) for stage in plan.stages] == [1, 6, 6]


def test_several_hundred_layers_for_many_devices_are_balanced_exactly() -> None:
    plan = balance(chain([1.0 + number % 7 for number in range(400)]), [Device()] * 32)
    assert slowest(plan, [Device()] * 32) <= 400 * 4 / 32 + 7


def test_memory_moves_the_cut() -> None:
    layers = chain([1.0] * 8, [100] * 8, [50] * 8)
    assert balance(layers, [Device(), Device()]).cuts == (4,)
    small = Device(memory_bytes=2 * (1600 + 3 * 50))  # three micro-batches are under way on the first of two stages
    assert balance(layers, [small, Device()], micro_batches=4).cuts == (2,)
    assert balance(layers, [small, Device()], micro_batches=4, rows=2).cuts == (1,)
    assert balance(layers, [small, Device()], micro_batches=4, bytes_per_parameter=8).cuts == (3,)


def test_frozen_parameters_need_less() -> None:
    layers = [replace(layer, trained=0) for layer in chain([1.0] * 8, [100] * 8)]
    assert balance(layers, [Device(memory_bytes=800), Device()]).cuts == (2,)


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (
            lambda: Plan.at(chain([1.0] * 4), (4,)),
            "A model of 4 layers can be cut before layer 1 to 3, and not before 4",
        ),
        (lambda: Plan.at(chain([1.0] * 4), (0, 2)), "not before 0"),
        (lambda: Plan.at(chain([1.0] * 4), (True,)), "not before True"),
        (lambda: Plan.at(chain([1.0] * 4), (3, 2)), "2 after 3 would leave a stage without layers"),
        (lambda: Plan.at(chain([1.0] * 4), (2, 2)), "would leave a stage without layers"),
        (lambda: Plan.at([]), "at least one layer"),
        (lambda: Plan.at(chain([1.0]) * 2), "layers.0 is in the plan twice"),
        (lambda: Plan.at([replace(chain([1.0])[0], output=None), *chain([1.0] * 2)[1:]]), "hands to the next"),
        (lambda: balance(chain([1.0] * 2), [Device()] * 3), "3 stages need as many layers, and the model has 2"),
        (lambda: balance(chain([1.0] * 2), []), "at least one device"),
        (lambda: balance(chain([1.0] * 2), [Device()], rows=0), "at least 1"),
        (
            lambda: balance(chain([1.0] * 2, [10, 1000]), [Device(memory_bytes=1500)] * 2),
            r"Layer layers.1 alone needs 16 kB, and the devices have 1.5 kB, 1.5 kB. Add devices",
        ),
        (
            lambda: balance(chain([1.0] * 3, [100] * 3), [Device(memory_bytes=1700)] * 2),
            r"parameters need 4.8 kB and each micro-batch under way 0 bytes, and the devices, in their order",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(ask: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ask()  # type: ignore[operator]


@pytest.mark.parametrize("options", [{"speed": 0}, {"speed": math.inf}, {"memory_bytes": 0}])
def test_a_device_has_a_speed_and_memory(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Device(**options)  # type: ignore[arg-type]


def altered(**changes: object) -> str:
    data = json.loads(Plan.at(chain([1.0] * 3), (1,)).to_json())
    return json.dumps(data | changes)


def altered_layer(**changes: object) -> str:
    data = json.loads(Plan.at(chain([1.0] * 3), (1,)).to_json())
    data["layers"][1] |= changes
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "This is no plan of stages"),
        ("[" * 100_000, "This is no plan of stages"),
        ("[]", "is a table of fields"),
        ("{}", "has no field"),
        (altered(format=1), "has format 1, and we read format 3"),
        (altered(more=1), "a field too many: more"),
        (altered(cuts=[3]), "not before 3"),
        (altered(cuts=["1"]), "not before '1'"),
        (altered(cuts=1), "a list of cuts"),
        (altered(layers=[]), "at least one layer"),
        (altered(layers=[1]), "is a table of fields"),
        (altered_layer(name=1), "have names"),
        (altered_layer(name="layers.0"), "twice"),
        (altered_layer(module=None), "only the ends"),
        (altered_layer(parts="x"), "not a list of names"),
        (altered_layer(operations=[1]), "The operations of layer layers.1 are not a list of names"),
        (altered_layer(operations=["add"]), "does not say what each operation of layer layers.1 hands"),
        (altered_layer(seconds=-1), "cannot take -1 seconds"),
        (altered_layer(seconds=math.nan), "cannot take nan seconds"),
        (altered_layer(parameters=1.5), "parameters of layer layers.1 is a whole number"),
        (altered_layer(trained=2), "trains 2 of 1"),
        (altered_layer(output=None), "does not say what layer layers.1 hands"),
        (altered_layer(output={"tensor": 1}), "numbered"),
        (altered_layer(output={"tensor": True}), "does not say how"),
        (altered_layer(output={"object": []}), "does not say how"),
        (altered_layer(output={"tuple": [{"tensor": 0}, 3]}), "does not say how"),
        (altered_layer(extra=1), "a field too many: extra"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Plan.from_json(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda one: (
            st.lists(one) | st.dictionaries(st.sampled_from(["format", "cuts", "layers", "name", "tensor"]), one)
        ),
        max_leaves=8,
    )
)
def test_whatever_is_read_is_a_plan_or_refused(data: object) -> None:
    with pytest.raises(ConfigError):
        Plan.from_json(json.dumps(data))


def test_a_plan_prints_as_a_table() -> None:
    layers = [
        Layer(name="before", module=None, parts=("e",), output={"dict": {"0": TENSOR}}, parameters=10, sent_bytes=2048),
        *chain([1.0] * 4, [1000] * 4, [100] * 4),
    ]
    assert str(Plan.at(layers, (1, 4))).splitlines() == [
        "stage  layers                        parameters  time   kept/row  sent/row",
        "0      0       before                        10    0%    0 bytes   2.05 kB",
        "1      1-3     layers.0 to layers.2       3,000   75%  300 bytes   0 bytes",
        "2      4       layers.3                   1,000   25%  100 bytes         -",
    ]
