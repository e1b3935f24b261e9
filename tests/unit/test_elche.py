"""ElChe against the published traces, number for number, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from potluck.agree.elche import ElChe
from potluck.agree.policy import Async, Cadence

FOLDER = Path(__file__).parents[1] / "vectors"
VECTORS = json.loads((FOLDER / "elche.json").read_text())
RANDOM = [
    json.loads(line)
    for name in ("elche_random.jsonl", "elche_unmeasured.jsonl")  # of the published code; and by hand from its rule
    for line in (FOLDER / name).read_text().splitlines()
]


@pytest.mark.parametrize("number", range(len(VECTORS["elche"])))
def test_a_published_trace_is_followed_to_the_bit(number: int) -> None:
    told = VECTORS["elche"][number]
    config = dict(told["config"])
    world, ratio = config.pop("world"), config.pop("speed_ratio", None)
    elche = ElChe(world, **config) if ratio is None else ElChe.with_speed_ratio(world, *ratio, **config)
    for operation in told["trace"]:
        _do(elche, operation)


def _do(elche: ElChe, told: dict[str, Any]) -> None:
    match told["op"]:
        case "clamp":
            assert elche.clamp_total(told["max"]) == told["result"]
            return
        case "report":
            elche.report_timing(told["wall_ms"], told["batches"], told["sync_ms"])
            assert elche.ms_per_batch == told["ms_per_batch"]
            assert elche.parts(1000) == told["part_1000"]
        case "nudge":
            elche.nudge_anchor_down(told["factor"])
    assert (elche.anchor, elche.batch_counts) == (told["anchor"], told["counts"])
    if "wall_target" in told:
        assert elche.anchor_wall_ms == told["wall_target"]


@pytest.mark.parametrize("number", range(len(RANDOM)))
def test_a_random_trace_of_the_published_code_is_followed_to_the_bit(number: int) -> None:
    told = RANDOM[number]
    config = {name: value for name, value in told["config"].items() if value is not None}
    world, slow_rank, ratio = config.pop("world"), config.pop("slow_rank", None), config.pop("speed_ratio", None)
    elche = ElChe(world, **config) if ratio is None else ElChe.with_speed_ratio(world, slow_rank, ratio, **config)
    assert _state(elche, told["at_first"]) == told["at_first"]
    for operation in told["trace"]:
        match operation["op"]:
            case "clamp":
                assert elche.clamp_total(operation["max"]) == operation["result"]
                continue
            case "report":
                elche.report_timing(operation["wall_ms"], operation["batches"], operation["sync_ms"])
            case "nudge":
                elche.nudge_anchor_down(operation["factor"])
        assert _state(elche, operation) == operation


def _state(elche: ElChe, told: dict[str, Any]) -> dict[str, Any]:
    """What was told, with our own state in place of the published one: floats compare to the last bit."""
    return told | {
        "anchor": elche.anchor,
        "counts": elche.batch_counts,
        "ms_per_batch": elche.ms_per_batch,
        "is_measured": elche.is_measured,
        "anchor_wall_ms": elche.anchor_wall_ms,
    }


def test_where_the_published_rule_rounds_it_is_followed() -> None:
    """Each of these comes out otherwise if one multiplies first, counts in whole numbers or keeps a count."""
    elche = ElChe(2, 3, overhead_target=0.05)
    elche.report_timing([100.0, 100.0], [3, 3], 10.0)
    assert elche.anchor == 6
    elche = ElChe(2, 30)
    elche.report_timing([1230.0, 600.0], [30, 30], 0.0)
    assert elche.batch_counts == [30, 61]
    elche = ElChe(2, 10, overhead_target=0.1)
    elche.report_timing([100.0, 0.0], [10, 0], 30.0)
    assert elche.batch_counts == [30, 30]
    assert ElChe.with_speed_ratio(2, 0, 2.0, 10, max_anchor=5).batch_counts == [5, 10]
    assert ElChe.with_speed_ratio(2, 0, 5.0, 11).clamp_total(18) == [4, 14]
    elche = ElChe(3)
    assert elche.parts(100) == [34, 33, 33]
    elche.report_timing([10.0, 5.0, 0.0], [1, 1, 0], 0.0)
    assert elche.parts(1000) == [0, 0, 1000]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"world_size": 0}, "a world needs at least one rank, not 0"),
        ({"world_size": 2, "anchor": 0}, "anchor must be at least 1, not 0"),
        ({"world_size": 2, "max_anchor": 0}, "max_anchor must be at least 1"),
        ({"world_size": 2, "overhead_target": float("nan")}, "overhead_target must be a number"),
        ({"world_size": 2, "max_batch_diff": -1}, "max_batch_diff must be at least 0"),
    ],
)
def test_bad_input_is_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ElChe(**options)


def test_counts_end_where_the_published_ones_do_and_infinite_ratios_fail_nobody() -> None:
    elche = ElChe(2, 10)
    elche.report_timing([1e-300, 1e-300], [1, 1], 1e300)
    assert (elche.anchor, elche.batch_counts) == (200, [200, 200])
    assert ElChe(2, 500).anchor == 200  # the published one keeps 500, and panics at its first report


def test_a_rank_outside_the_world_and_reports_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no rank 2 in a world of 2"):
        ElChe.with_speed_ratio(2, 2, 3.0)
    with pytest.raises(ValueError, match="ratio must be a number, not inf"):
        ElChe.with_speed_ratio(2, 0, float("inf"))
    with pytest.raises(ValueError, match="wall_ms has 1 numbers, and the world 2 ranks"):
        ElChe(2).report_timing([1.0], [1, 1], 0.0)


@pytest.mark.parametrize(("given", "taken"), [(0.0, 0.01), (-1.0, 0.01), (0.9, 0.5), (0.2, 0.2)])
def test_an_overhead_target_is_clamped_as_published(given: float, taken: float) -> None:
    assert ElChe(2, overhead_target=given).overhead_target == taken


def test_the_published_policies_have_the_published_target() -> None:
    assert Cadence.published().overhead_target == Async.published().overhead_target == ElChe(2).overhead_target == 0.10
