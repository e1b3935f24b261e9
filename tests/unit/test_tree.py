"""The tree of a step's slices: whoever computes which nodes of it, their sum is the same bits."""

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck.fleet.membership import LEAST_S, Membership
from potluck.fleet.tree import (
    QUOTA_GAIN,
    Node,
    children,
    cover,
    decide_quotas,
    merges,
    path,
    share_nodes,
    slice_rows,
)

Floats = npt.NDArray[np.float32]

counts = st.integers(1, 70)
speeds = st.lists(st.one_of(st.none(), st.floats(0.01, 1000)), min_size=1, max_size=9)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, int]:
    """(slices, first, end)"""
    slices = draw(counts)
    first = draw(st.integers(0, slices))
    return slices, first, draw(st.integers(first, slices))


def all_nodes(slices: int) -> set[Node]:
    found: set[Node] = set()
    todo: list[Node] = [(0, slices)]
    while todo:
        node = todo.pop()
        found.add(node)
        if node[1] - node[0] > 1:
            todo += children(node)
    return found


def plain_sum(node: Node, values: Floats) -> Floats:
    """As the tree is defined."""
    if node[1] - node[0] == 1:
        return values[node[0]]
    left, right = children(node)
    return plain_sum(left, values) + plain_sum(right, values)


def sum_by_merges(node: Node, values: Floats) -> Floats:
    """As a worker adds: each slice as it is done, into the sums that wait for it."""
    waiting: list[Floats] = []
    for number, count in zip(range(*node), merges(node), strict=True):
        value = values[number]
        for _ in range(count):
            value = waiting.pop() + value
        waiting.append(value)
    (total,) = waiting
    return total


def some_values(slices: int) -> Floats:
    """Of sizes so different that the order of additions shows."""
    draw = np.random.default_rng(slices)
    return (draw.standard_normal((slices, 3)) * 10.0 ** draw.integers(-6, 6, (slices, 1))).astype(np.float32)


def test_the_left_child_is_the_largest_power_of_two_below_the_node() -> None:
    assert children((0, 2)) == ((0, 1), (1, 2))
    assert children((0, 5)) == ((0, 4), (4, 5))
    assert children((0, 8)) == ((0, 4), (4, 8))
    assert children((8, 15)) == ((8, 12), (12, 15))


@given(counts)
def test_children_are_the_two_halves_of_their_node_and_the_tree_has_each_slice_once(slices: int) -> None:
    nodes = all_nodes(slices)
    assert len(nodes) == 2 * slices - 1
    for node in nodes:
        if node[1] - node[0] > 1:
            (first, cut), (also_cut, end) = children(node)
            assert (first, end) == node and cut == also_cut and first < cut < end


@given(ranges())
def test_a_cover_is_disjoint_nodes_in_order_whose_union_is_the_range(found: tuple[int, int, int]) -> None:
    slices, first, end = found
    nodes = cover(slices, first, end)
    assert [number for node in nodes for number in range(*node)] == list(range(first, end))
    assert set(nodes) <= all_nodes(slices)


@given(ranges())
def test_a_cover_is_as_few_nodes_as_can_be(found: tuple[int, int, int]) -> None:
    """No two of them are the children of one node, which could stand for both."""
    slices, first, end = found
    nodes = set(cover(slices, first, end))
    for node in all_nodes(slices):
        if node[1] - node[0] > 1:
            assert not set(children(node)) <= nodes
    assert len(nodes) <= 2 * slices.bit_length()


@given(counts)
def test_a_path_leads_from_the_root_down_to_its_node_and_to_no_other(slices: int) -> None:
    nodes = all_nodes(slices)
    for node in nodes:
        steps = path(slices, node)
        assert steps[0] == (0, slices) and steps[-1] == node
        assert all(lower in children(upper) for upper, lower in itertools.pairwise(steps))
    for first in range(min(slices, 20)):
        for end in range(first, min(slices, 20) + 2):
            if (first, end) not in nodes:
                with pytest.raises(ValueError, match=f"no node \\({first}, {end}\\)"):
                    path(slices, (first, end))


@pytest.mark.parametrize("node", [(0, 0), (3, 2), (-1, 1), (0, 9), (8, 9), (1, 3), (2, 6)])
def test_what_is_no_node_has_no_path(node: Node) -> None:
    with pytest.raises(ValueError, match="no node"):
        path(8, node)


@given(counts)
def test_sums_by_merges_are_the_bits_of_the_tree(slices: int) -> None:
    values = some_values(slices)
    assert sum_by_merges((0, slices), values).tobytes() == plain_sum((0, slices), values).tobytes()


@given(ranges())
def test_the_root_does_not_depend_on_who_added_which_branches(found: tuple[int, int, int]) -> None:
    """One worker pre-adds a range, others the rest; what is left to add are whole nodes."""
    slices, first, end = found
    values = some_values(slices)
    sums = {
        node: sum_by_merges(node, values)
        for part in ((0, first), (first, end), (end, slices))
        for node in cover(slices, *part)
    }

    def total(node: Node) -> Floats:
        if node in sums:
            return sums[node]
        left, right = children(node)
        return total(left) + total(right)

    assert total((0, slices)).tobytes() == plain_sum((0, slices), values).tobytes()


@given(st.integers(0, 1000), st.integers(1, 5000), counts)
def test_slices_cut_a_steps_rows_as_evenly_as_can_be(row: int, rows: int, slices: int) -> None:
    slices = min(slices, rows)
    bounds = slice_rows(row, rows, slices)
    assert [number for start, end in bounds for number in range(start, end)] == list(range(row, row + rows))
    sizes = [end - start for start, end in bounds]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(counts, speeds)
def test_quotas_are_whole_and_the_last_to_finish_could_not_finish_sooner(
    slices: int, found: list[float | None]
) -> None:
    quotas = decide_quotas(slices, found, None)
    assert sum(quotas) == slices and min(quotas) >= 0
    known = [speed for speed in found if speed]
    pace = [speed or (sum(known) / len(known) if known else 1.0) for speed in found]
    longest = max(quota / speed for quota, speed in zip(quotas, pace, strict=True))
    for loser, quota in enumerate(quotas):
        for winner in range(len(quotas)):
            if quota and loser != winner:  # to move any slice elsewhere would not help
                assert (quotas[winner] + 1) / pace[winner] >= longest * (1 - 1e-9) or quota / pace[loser] < longest


def test_a_worker_three_times_as_fast_gets_three_quarters() -> None:
    assert decide_quotas(8, [3.0, 1.0], None) == [6, 2]
    assert decide_quotas(64, [30.0, 10.0], None) == [48, 16]


def test_who_was_not_measured_yet_is_taken_for_the_mean() -> None:
    assert decide_quotas(9, [2.0, None, 4.0], None) == [2, 3, 4]
    assert decide_quotas(9, [None, None, None], None) == [3, 3, 3]
    assert decide_quotas(4, [0.0, 1.0], None) == [2, 2]


@given(counts, st.floats(0.5, 2.0), st.floats(0.5, 2.0))
def test_quotas_change_only_if_it_is_worth_it(slices: int, one: float, other: float) -> None:
    before = decide_quotas(slices, [1.0, 1.0], None)
    after = decide_quotas(slices, [one, other], before)
    if after != before:

        def time_of(quotas: list[int]) -> float:
            return max(quotas[0] / one, quotas[1] / other)

        assert time_of(after) <= QUOTA_GAIN * time_of(before)


def test_quotas_of_another_step_or_fleet_do_not_stay() -> None:
    assert decide_quotas(8, [1.0, 1.0], [3, 2]) == [4, 4]
    assert decide_quotas(8, [1.0, 1.0], [8]) == [4, 4]


@given(counts, speeds)
def test_shared_nodes_give_each_worker_its_quota_and_each_slice_to_one_worker(
    slices: int, found: list[float | None]
) -> None:
    quotas = decide_quotas(slices, found, None)
    shared = share_nodes(slices, quotas)
    assert [sum(end - first for first, end in nodes) for nodes in shared] == quotas
    assert [number for nodes in shared for node in nodes for number in range(*node)] == list(range(slices))


@given(st.lists(st.tuples(st.integers(0, 8), st.floats()), min_size=1, max_size=8))
@example([(4, 5e-324)])
@example([(4, 1e308), (4, math.inf)])
def test_whatever_seconds_a_worker_tells_the_others_keep_a_speed_and_every_slice_is_handed_out(
    told: list[tuple[int, float]],
) -> None:
    liar = Membership().add(0.0, 1, "liar", "k", plain=False)
    for slices, busy_s in told:
        liar.measure(slices, busy_s)
        assert liar.speed is None or 0 <= liar.speed <= 1.0001 / LEAST_S
        assert sum(decide_quotas(8, [liar.speed, 4.0, None], None)) == 8
    for _ in range(100):  # an honest report is believed again after a while
        liar.measure(4, 1.0)
    assert min(decide_quotas(8, [liar.speed, 4.0], None)) > 0
