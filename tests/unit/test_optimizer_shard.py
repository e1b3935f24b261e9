"""OptimizerShard against the published vectors and its contract."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck.sharding.optimizer_shard import OptimizerShard

LINES = (Path(__file__).parents[1] / "vectors" / "zero.jsonl").read_text().splitlines()


@pytest.mark.parametrize("line", LINES)
def test_ranges_are_those_of_the_published_vectors(line: str) -> None:
    told = json.loads(line)
    shards = [OptimizerShard.for_rank(rank, told["world"], told["total"]) for rank in range(told["world"])]
    assert [[shard.param_start, shard.param_end] for shard in shards] == told["shards"]


@given(st.integers(1, 12), st.integers(0, 1 << 20) | st.integers(1 << 52, 1 << 70))
@example(1, 9007199254740995)
@example(5, 9007199254740989)
def test_equal_shares_keep_the_contract_at_every_size(world: int, total: int) -> None:
    shards = [OptimizerShard.for_rank(rank, world, total) for rank in range(world)]
    ends = [0, *(shard.param_end for shard in shards)]
    assert [shard.param_start for shard in shards] == ends[:-1] and ends[-1] == total
    assert [shard.shard_size - total // world for shard in shards] == [
        int(rank < total % world) for rank in range(world)
    ]


@given(
    st.lists(st.floats(0, 1e9), min_size=1, max_size=9).filter(any),
    st.integers(0, 10**7) | st.integers(1 << 52, 1 << 70),
)
def test_the_union_is_everything_no_two_overlap_and_each_is_within_one_of_its_share(
    weights: list[float], total: int
) -> None:
    shards = [OptimizerShard.for_weights(rank, weights, total) for rank in range(len(weights))]
    ends = [0, *(shard.param_end for shard in shards)]
    assert [shard.param_start for shard in shards] == ends[:-1] and ends[-1] == total
    for shard, weight in zip(shards, weights, strict=True):
        assert abs(shard.shard_size - total * Fraction(weight) / sum(map(Fraction, weights))) < 1


def test_what_it_owns_and_what_it_saves() -> None:
    shard = OptimizerShard.for_rank(rank=1, world_size=4, total_params=10)
    assert (shard.param_start, shard.param_end, shard.shard_size) == (3, 6, 3)
    assert [shard.owns_param(index) for index in (2, 3, 5, 6)] == [False, True, True, False]
    assert (shard.shard_memory_bytes, shard.full_memory_bytes) == (24, 80)


@pytest.mark.parametrize("total", [0, 1, 10, 100, 1 << 60])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_what_a_rank_saves_is_one_less_its_even_share_as_published(world: int, total: int) -> None:
    assert OptimizerShard.for_rank(0, world, total).memory_savings == 1.0 - 1.0 / world
    assert OptimizerShard.for_weights(0, [5.0] + [1.0] * (world - 1), total).memory_savings == 1.0 - 1.0 / world


def test_a_card_with_a_third_of_the_memory_holds_a_third_of_the_bytes() -> None:
    sizes = [OptimizerShard.for_weights(rank, [24, 8], 1000).shard_size for rank in range(2)]
    assert sizes == [750, 250]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((2, 2, 10), "there is no rank 2 in a world of 2"),
        ((-1, 2, 10), "there is no rank -1"),
        ((0, 0, 10), "a world needs at least one rank, not 0"),
        ((0, 1, -1), "total_params must be at least 0, not -1"),
    ],
)
def test_bad_input_is_a_sentence(arguments: tuple[int, int, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        OptimizerShard.for_rank(*arguments)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="at least"):
        OptimizerShard.for_weights(0, weights, 10)
