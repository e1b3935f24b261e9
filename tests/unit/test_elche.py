"""ElChe against the published traces, number for number, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from potluck.agree.elche import ElChe

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "elche.json").read_text())


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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"world_size": 0}, "a world needs at least one rank, not 0"),
        ({"world_size": 2, "anchor": 0}, "anchor must be at least 1 batch, not 0"),
        ({"world_size": 2, "max_anchor": 0}, "max_anchor must be at least 1"),
        ({"world_size": 2, "overhead_target": float("nan")}, "overhead_target must be a number"),
        ({"world_size": 2, "max_batch_diff": -1}, "max_batch_diff must be at least 0"),
    ],
)
def test_bad_input_is_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ElChe(**options)


def test_a_rank_outside_the_world_and_reports_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no rank 2 in a world of 2"):
        ElChe.with_speed_ratio(2, 2, 3.0)
    with pytest.raises(ValueError, match="wall_ms has 1 numbers, and the world 2 ranks"):
        ElChe(2).report_timing([1.0], [1, 1], 0.0)


@pytest.mark.parametrize(("given", "taken"), [(0.0, 0.01), (-1.0, 0.01), (0.9, 0.5), (0.2, 0.2)])
def test_an_overhead_target_is_clamped_as_published(given: float, taken: float) -> None:
    assert ElChe(2, overhead_target=given).overhead_target == taken
