"""A run with an outer optimizer that is stopped and resumed is the run that was not: it keeps its momentum."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import potluck
from potluck import Async, HybridShard, NoShard, Outer, StepConfig
from tests.parity.test_cadence import OPTIMIZERS, ROWS, Net, judge, make, whole
from tests.parity.test_hybrid_windows import by_node, through_node
from tests.parity.test_hybrid_windows import make as make_deep
from tests.ranks import run_ranks

POLICY = Async.published(anchor=2, max_anchor=2, outer=Outer(lr=0.7, momentum=0.9))


class Mixed(Net):
    """Some parameters have few digits: what they are stepped from has more."""

    def __init__(self) -> None:
        super().__init__()
        self.leave.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.norm(self.enter(x))).bfloat16()).float() * self.frozen


def make_mixed(seed: int = 3) -> tuple[Net, tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    return Mixed(), make(seed)[1]


def in_legs(folder: str, stops: list[int], optimizer: str, strategy: Any = NoShard(), make: Any = make) -> Any:
    """One epoch; after so many windows of each leg it is stopped, saved, and resumed by another engine."""
    windows: list[list[list[list[int]]]] = [[]]
    for turn, stop in enumerate([*stops, None]):
        with potluck.init(POLICY, strategy, step=StepConfig(clip=1.0)) as fleet:
            model, data = make(3)
            numbered = (*data, torch.arange(ROWS))  # a resumed loader counts what is left, and not the epoch's order
            model, _, loader = fleet.prepare(model, OPTIMIZERS[optimizer](model.parameters()), numbered, batch_size=12)
            if turn:
                assert fleet.load(folder)
            fleet.after_agreement.append(lambda: windows.append([]))
            rows: list[list[int]] = []
            for x, y, numbers in loader:
                rows.append(numbers.tolist() if loader.current.counts else [])
                fleet.backward(F.mse_loss(model(x), y), samples=len(x))
                if loader.current.last:
                    windows[-1].append(rows)
                    rows = []
                fleet.step()
                if stop is not None and fleet.version >= stop:
                    fleet.request_stop()
            assert (loader.position.epoch == 0) == (stop is not None)
            found = torch.cat([whole(model), model.norm.running_mean, model.norm.running_var])
            if stop is not None:
                fleet.save(folder)
                fleet.wait_for_saves()
            fleet.link._owned = stop is None  # the group outlives this engine
    return {"weights": found, "windows": windows}


@pytest.mark.parametrize("made", [make, make_mixed], ids=["float32", "some bf16"])
def test_of_one_worker_to_the_bit(made: Any, tmp_path: Path) -> None:
    told = [in_legs(str(tmp_path), stops, "adamw", make=made) for stops in ([], [2, 2])]
    assert len(told[0]["windows"]) > 6 and told[0]["windows"] == told[1]["windows"]
    assert torch.equal(told[0]["weights"], told[1]["weights"])


def test_of_several(tmp_path: Path) -> None:
    told = run_ranks(2, in_legs, str(tmp_path), [2], "plain sgd")
    assert torch.equal(told[0]["weights"], told[1]["weights"])
    torch.testing.assert_close(told[0]["weights"], judge(POLICY, "plain sgd", told), atol=2e-5, rtol=1e-4)


def test_of_nodes(tmp_path: Path) -> None:
    strategy = HybridShard(intra_node_size=2)
    told = run_ranks(4, in_legs, str(tmp_path), [2], "plain sgd", strategy, make_deep)
    expected = judge(POLICY, "plain sgd", by_node(told), make_deep, through_node)
    torch.testing.assert_close(told[0]["weights"], expected, atol=2e-5, rtol=1e-4)
