"""The slices of a step, the fixed tree in which their gradients are added, and who computes which part of it. Pure.

A step's rows are cut into the same slices no matter which workers are there. A node (first, last + 1) of the tree
stands for the sum of those slices; its two children are fixed by its bounds alone. A worker sends whole nodes, and the
sum of the root does not depend on which nodes came from whom: only on the tree.
"""

import itertools
from collections.abc import Iterable, Sequence

Node = tuple[int, int]

QUOTA_GAIN = 0.9
"""Quotas change only if the slowest worker would then need at most this part of the time: a change costs traffic."""


def children(node: Node) -> tuple[Node, Node]:
    """The left child is the largest power of two that is smaller than the node."""
    first, end = node
    cut = first + (1 << (end - first - 1).bit_length() - 1)
    return (first, cut), (cut, end)


def path(slices: int, node: Node) -> list[Node]:
    """From the root of a tree of N slices down to the node, both included. ValueError if it has no such node."""
    nodes: list[Node] = [(0, slices)]
    while nodes[-1] != node:
        if nodes[-1][1] - nodes[-1][0] < 2:
            raise ValueError(f"A tree of {slices} slices has no node {node}.")
        left, right = children(nodes[-1])
        nodes.append(left if node[1] <= left[1] else right)
    return nodes


def cover(slices: int, first: int, end: int) -> list[Node]:
    """The fewest nodes that together are the slices [first, end), in order."""
    return _cover((0, slices), first, end)


def _cover(node: Node, first: int, end: int) -> list[Node]:
    if first >= node[1] or end <= node[0] or first >= end:
        return []
    if first <= node[0] and node[1] <= end:
        return [node]
    left, right = children(node)
    return _cover(left, first, end) + _cover(right, first, end)


def tell_slices(node: Node) -> str:
    return str(node[0]) if node[1] - node[0] == 1 else f"{node[0]} to {node[1] - 1}"


def merges(node: Node) -> list[int]:
    """For each slice of the node, in order: how many sums of two are complete once it is there."""
    if node[1] - node[0] == 1:
        return [0]
    left, right = children(node)
    found = merges(left) + merges(right)
    found[-1] += 1
    return found


def slice_rows(row: int, rows: int, slices: int) -> list[tuple[int, int]]:
    """The rows of each slice of a step that starts at `row`: as even as can be, the longer ones first."""
    short, longer = divmod(rows, slices)
    return sized_rows(row, [short + 1] * longer + [short] * (slices - longer))


def sized_rows(row: int, sizes: Iterable[int]) -> list[tuple[int, int]]:
    """The rows of slices of these sizes, one after the other."""
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=row)))


def decide_quotas(slices: int, speeds: Sequence[float | None], before: Sequence[int] | None) -> list[int]:
    """How many slices each worker gets, so that the last to finish finishes soonest.

    `speeds` are in slices per second; none: not measured yet, and taken to be the mean of those that are. `before` is
    what the same workers had in the last step, and stays unless a change is worth its traffic.
    """
    known = [speed for speed in speeds if speed]
    mean = sum(known) / len(known) if known else 1.0
    pace = [speed or mean for speed in speeds]
    quotas = [0] * len(pace)
    for _ in range(slices):  # the next slice goes to the worker that would finish it first
        chosen = min(range(len(pace)), key=lambda worker: ((quotas[worker] + 1) / pace[worker], worker))
        quotas[chosen] += 1
    if before is None or sum(before) != slices or len(before) != len(pace):
        return quotas
    return quotas if _time(quotas, pace) <= QUOTA_GAIN * _time(before, pace) else list(before)


def _time(quotas: Sequence[int], pace: Sequence[float]) -> float:
    return max(quota / speed for quota, speed in zip(quotas, pace, strict=True))


def share_nodes(slices: int, quotas: Sequence[int]) -> list[list[Node]]:
    """Neighbouring slices for each worker, as few nodes as can be."""
    return [cover(slices, first, end) for first, end in sized_rows(0, quotas)]
