"""Passes, on ranks that are threads: whatever each wants, all begin the same things in the same order."""

import random
import threading

import torch
from torch import Tensor

from potluck.sharding.passes import Passes

UNITS, WORLD = 4, 3


class Fleet:
    """Ranks whose collective is a barrier."""

    def __init__(self) -> None:
        self.begun: list[list[int]] = [[] for _ in range(WORLD)]
        self.asked = 0
        self._told: list[list[int]] = [[] for _ in range(WORLD)]
        self._barrier = threading.Barrier(WORLD, timeout=20)
        self.passes = [
            Passes(
                UNITS,
                begin=lambda operation, wanted, rank=rank: self.begun[rank].append(operation),
                skip=lambda operation: None,
                may_begin_early=lambda operation: operation < UNITS,
                used=list,
                agree=lambda told, rank=rank: self._agree(rank, told),
            )
            for rank in range(WORLD)
        ]

    def _agree(self, rank: int, told: Tensor) -> None:
        self._told[rank] = told.tolist()
        self._barrier.wait()
        told.copy_(torch.tensor(self._told).amax(0))  # of the same length on all, or this fails
        self.asked += rank == 0
        self._barrier.wait()

    def run(self, kind: str, wants: list[list[int]]) -> list[int]:
        """What all ranks began."""
        for each in self.begun:
            each.clear()
        failures: list[BaseException] = []

        def be(rank: int) -> None:
            try:
                self.passes[rank].start(kind)  # type: ignore[arg-type]
                for operation in wants[rank]:
                    self.passes[rank].want(operation)
                    assert operation in self.begun[rank]
                self.passes[rank].end(kind)  # type: ignore[arg-type]
            except BaseException as failure:
                failures.append(failure)
                self._barrier.abort()

        threads = [threading.Thread(target=be, args=(rank,)) for rank in range(WORLD)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not failures, failures
        assert self.begun[0] == self.begun[1] == self.begun[2]
        return list(self.begun[0])


def test_whatever_ranks_want_all_begin_the_same_in_the_same_order() -> None:
    fleet = Fleet()
    for seed in range(60):
        draw = random.Random(seed)
        wants = [[draw.randrange(2 * UNITS) for _ in range(draw.randrange(9))] for _ in range(WORLD)]
        begun = fleet.run(("forward", "backward")[seed % 2], wants)
        for each in wants:
            assert all(begun.count(operation) >= each.count(operation) for operation in each)


def test_what_fits_the_plan_is_asked_for_once_and_an_order_is_learnt() -> None:
    fleet = Fleet()
    assert fleet.run("forward", [[0, 1, 2, 3], [1, 3], []]) == [0, 1, 2, 3]
    assert fleet.asked == 1
    there_and_back = [3, 2, 1, 0, 0]
    assert fleet.run("forward", [there_and_back] * 3) == [0, 1, 2, 3, 2, 1, 0, 0]  # the plan was another
    fleet.asked = 0
    assert fleet.run("forward", [there_and_back] * 3) == there_and_back
    assert fleet.asked == 1
    backward = [3, 2, UNITS + 3, 1, UNITS + 2, 0, UNITS + 1, UNITS]  # gathers, and sums one behind them
    wanted = [3, UNITS + 3, 2, UNITS + 2, 1, UNITS + 1, 0, UNITS]
    assert fleet.run("backward", [wanted, wanted[2:], []]) == backward
    assert fleet.asked == 2
