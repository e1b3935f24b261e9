"""A run that finds out in which form gradients travel: all change in the same step, and hold the same bits after it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import Async, FullShard, HybridShard, NoShard, ShardGradOp, Sync
from potluck.agree.wire_choice import WireChoice
from potluck.sums.means import CodedLinkMean, LinkMean
from tests.parity.test_cadence import whole
from tests.parity.test_coded_sums import make_data, make_model, plain, sum_of
from tests.quick import first_of
from tests.ranks import run_ranks

SWITCH_AT = 3


def switch_at(*steps: int) -> None:
    """After these steps the form becomes the other one, as if it had been measured so."""
    count = 0

    def report(choice: WireChoice, agree_s: float, step_s: float) -> str | None:
        nonlocal count
        assert 0 <= agree_s <= step_s
        count += 1
        if count not in steps:
            return None
        choice.wire = "int4" if choice.wire == "fp32" else "fp32"
        return f"From here on it is {choice.wire}."

    WireChoice.report = report  # type: ignore[method-assign]


def trained(strategy: Any, *steps: int) -> dict[str, Any]:
    switch_at(*steps)
    with potluck.init(Sync(balance=False), strategy, wire="auto") as fleet:
        model, _, loader = fleet.prepare(
            model := make_model(), torch.optim.AdamW(model.parameters(), lr=1e-2), make_data(), batch_size=12
        )
        told: list[str] = []
        fleet.events.listeners.append(lambda event: told.append(getattr(event, "sentence", "")))
        for _ in range(2):
            for x, y in loader:
                fleet.backward(F.mse_loss(model(x), y), samples=len(x))
                fleet.step()
        return {"weights": whole(model), "told": [sentence for sentence in told if sentence.startswith("From")]}


def summed(terms: list[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def test_weights_are_those_of_one_process_that_rounds_from_that_step_on() -> None:
    number = 0

    def arrives(terms: list[Tensor]) -> Tensor:
        nonlocal number
        number += 1
        return sum_of("int4", terms) if SWITCH_AT < number <= 6 else summed(terms)

    found = run_ranks(2, trained, NoShard(), SWITCH_AT, 6)
    expected = plain("int4", 2, arrives)
    assert all(torch.equal(each["weights"], expected) for each in found)
    assert found[0]["told"] == ["From here on it is int4.", "From here on it is fp32."]
    without = run_ranks(2, trained, NoShard())
    assert not torch.equal(without[0]["weights"], expected)


@pytest.mark.parametrize(
    "strategy",
    first_of([FullShard(), ShardGradOp(), HybridShard(intra_node_size=2)]),
    ids=lambda each: type(each).__name__,
)
def test_replicas_that_are_split_switch_together(strategy: Any) -> None:
    never, switched = run_ranks(4, trained, strategy), run_ranks(4, trained, strategy, SWITCH_AT)
    for found in (never, switched):
        assert all(torch.equal(found[0]["weights"], each["weights"]) for each in found)
    assert not torch.equal(never[0]["weights"], switched[0]["weights"])
    moved = (never[0]["weights"] - torch.cat([p.detach().reshape(-1) for p in make_model().parameters()])).norm()
    assert (never[0]["weights"] - switched[0]["weights"]).norm() < 0.5 * moved


def test_a_run_that_is_loaded_continues_with_what_it_had_chosen(tmp_path: Path) -> None:
    straight = run_ranks(2, saved, str(tmp_path / "a"), 2)
    run_ranks(2, saved, str(tmp_path / "b"), 1)
    cut = run_ranks(2, saved, str(tmp_path / "b"), 2)
    assert torch.equal(straight[0], cut[0]) and torch.equal(cut[0], cut[1])


def saved(folder: str, epochs: int) -> Tensor:
    switch_at(SWITCH_AT)
    with potluck.init(Sync(balance=False), wire="auto") as fleet:
        model, _, loader = fleet.prepare(
            model := make_model(), torch.optim.AdamW(model.parameters(), lr=1e-2), make_data(), batch_size=12
        )
        if fleet.load(folder):
            switch_at()
        for _ in fleet.epochs(epochs):
            for x, y in loader:
                fleet.backward(F.mse_loss(model(x), y), samples=len(x))
                fleet.step()
            fleet.save(folder)
            fleet.wait_for_saves()
        return whole(model)


@pytest.mark.parametrize(("dtype", "expected"), first_of([(torch.float32, CodedLinkMean), (torch.bfloat16, LinkMean)]))
def test_what_windows_change_is_coded_where_it_can_be(dtype: torch.dtype, expected: type) -> None:
    assert run_ranks(2, kind_of_mean, dtype) == [expected.__name__] * 2


def kind_of_mean(dtype: torch.dtype) -> str:
    with potluck.init(Async(), wire="auto") as fleet:
        model, data = nn.Linear(5, 3, dtype=dtype), (torch.zeros(8, 5, dtype=dtype), torch.zeros(8, 3))
        fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=4)
        return type(fleet.table._alone.delta._mean).__name__
