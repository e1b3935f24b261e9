"""Windows whose changes travel in fewer bits: all replicas hold the same bits, and what was left out comes later."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import Async, Cadence, DataStore, HybridShard, NoShard, Pipeline, Stages, Sync
from potluck.coded_numbers import CODINGS
from potluck.errors import ConfigError
from potluck.link.link import GroupLink
from potluck.replica.moments import Moments
from potluck.replica.replica import Replica, StepConfig
from potluck.sums.means import RESIDUAL, CodedLinkMean
from potluck.sums.window_delta import WindowDelta
from tests.parity.test_cadence import judge, make, whole
from tests.parity.test_cadence import ours as ours_in_fp32
from tests.parity.test_coded_sums import BLOCKS, rounded, rounded_to_levels
from tests.parity.test_staged_windows import ours as ours_in_stages
from tests.parity.test_staged_windows import together
from tests.quick import first_of
from tests.ranks import run_ranks

WINDOWS, WORLD = 4, 3
WEIGHTS = [0.5, 0.3, 0.2]
wires = pytest.mark.parametrize("wire", first_of(BLOCKS))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 300).view(30, 10))
        self.off = nn.Parameter(torch.full((70,), -torch.inf))  # for good
        self.register_buffer("running", torch.zeros(5))


def moved_by(window: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * window + rank)
    return torch.randn(300, generator=draw) * torch.logspace(-3, 0, 300)


def move(model: Small, window: int, rank: int) -> None:
    with torch.no_grad():
        model.weight.view(-1).add_(moved_by(window, rank))
        model.running.add_(rank + 1.0)


def windows(wire: str) -> dict[str, Any]:
    with potluck.init() as fleet:
        link, model = GroupLink(owned=False), Small()
        replica = Replica(model, torch.optim.SGD(model.parameters(), lr=1.0), link, fleet.device, StepConfig())
        delta = WindowDelta(replica, CodedLinkMean(link, CODINGS[wire]))
        weight, states = WEIGHTS[link.rank], []
        for window in range(WINDOWS):
            delta.begin()
            move(model, window, link.rank)
            delta.end(weight)
            delta.apply()
            states.append(model.weight.detach().clone().view(-1))
        delta.settle()
        kept = replica.outer.kept["weight"][RESIDUAL].clone().view(-1)
        return {"weights": model.weight.detach().view(-1), "off": model.off, "states": states, "left": kept} | {
            "running": model.running
        }


def in_one_process(wire: str) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Where each window ends on rank 0, what all agree on at last, and what was left out of what each sent."""
    agreed, own = Small().weight.detach().view(-1), [Small().weight.detach().view(-1) for _ in range(WORLD)]
    left, states = [torch.zeros(370) for _ in range(WORLD)], []
    for window in range(WINDOWS):
        starts = own
        own = [start + moved_by(window, rank) for rank, start in enumerate(starts)]
        total = torch.zeros(370)
        for rank in range(WORLD):
            change = torch.cat([(starts[rank] - own[rank]) * WEIGHTS[rank], torch.zeros(70)]) + left[rank]
            sent = rounded(wire, change)
            left[rank] = change - sent
            total = sent if rank == 0 else total + sent
        agreed = agreed - rounded(wire, total)[:300]
        own = [agreed] * WORLD
        states.append(agreed)
    return states, agreed, left


@wires
def test_replicas_hold_the_bits_of_one_process_with_the_same_rounding(wire: str) -> None:
    found = run_ranks(WORLD, windows, wire)
    states, agreed, left = in_one_process(wire)
    for window, state in enumerate(states):
        assert torch.equal(found[0]["states"][window], state), window
    shared = rounded(wire, sum((rounded(wire, each) for each in left[1:]), rounded(wire, left[0]))) / WORLD
    for each in found:
        assert torch.equal(each["weights"], agreed)
        assert torch.allclose(each["left"], shared[:300], rtol=1e-6)
        assert each["off"].isinf().all()
        expected = WINDOWS * sum(weight * (rank + 1) for rank, weight in enumerate(WEIGHTS))
        assert torch.allclose(each["running"], torch.full((5,), expected))


@wires
def test_what_was_left_out_comes_later(wire: str) -> None:
    """What arrived in all is what was sent in all, but for what is still left and how means were rounded."""
    found = run_ranks(WORLD, windows, wire)
    exact = Small().weight.detach().view(-1) + sum(
        weight * moved_by(window, rank) for window in range(WINDOWS) for rank, weight in enumerate(WEIGHTS)
    )
    _, agreed, left = in_one_process(wire)
    off = (agreed - exact).norm() / (exact - Small().weight.detach().view(-1)).norm()
    assert off < {"bf16": 0.01, "int8": 0.02, "int4": 0.2}[wire]
    assert torch.equal(found[1]["weights"], agreed) and all(each.abs().max() < 1 for each in left)


def kept_of(rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    first = torch.randn(370, generator=draw) * torch.logspace(-4, 0, 370)
    second = torch.randn(370, generator=draw).square() * torch.logspace(-25, 0, 370)
    second[5:300:50] = 0.0
    return first, second


def averaged_moments(wire: str) -> tuple[Tensor, Tensor]:
    with potluck.init() as fleet:
        link, model = GroupLink(owned=False), Small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        replica = Replica(model, optimizer, link, fleet.device, StepConfig())
        delta = WindowDelta(replica, CodedLinkMean(link, CODINGS[wire]))
        first, second = (each.split([300, 70]) for each in kept_of(link.rank))
        for parameter, mean, square in zip(model.parameters(), first, second, strict=True):
            kept = {"exp_avg": mean.view_as(parameter), "exp_avg_sq": square.view_as(parameter)}
            optimizer.state[parameter] = {"step": torch.tensor(3.0), **{k: v.clone() for k, v in kept.items()}}
        moments = Moments(optimizer, replica.outer.names, delta.runs)
        for pending in moments.start(link, WEIGHTS[link.rank], CODINGS[wire]):
            pending.wait()
        moments.take()
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        return (
            torch.cat([state["exp_avg"].view(-1) for state in states]),
            torch.cat([state["exp_avg_sq"].view(-1) for state in states]),
        )


@wires
def test_what_optimizers_keep_has_the_bits_of_one_process(wire: str) -> None:
    def of_divisors(numbers: Tensor) -> Tensor:
        return rounded(wire, numbers) if wire == "bf16" else rounded_to_levels(numbers)

    def mean(at: int, arrives: Callable[[Tensor], Tensor]) -> Tensor:
        terms = [arrives(kept_of(rank)[at] * WEIGHTS[rank]) for rank in range(WORLD)]
        return arrives(sum(terms[1:], terms[0]))

    expected = mean(0, lambda numbers: rounded(wire, numbers)), mean(1, of_divisors)
    for first, second in run_ranks(WORLD, averaged_moments, wire):
        assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])
    exact = sum(WEIGHTS[rank] * kept_of(rank)[1] for rank in range(WORLD))
    assert ((expected[1] > 0) == (exact > 0)).all() and (expected[1] >= exact * 0.87).all()


POLICIES = {
    "cadence": Cadence.published(anchor=2),
    "async": Async.published(anchor=2),
    "moments": Async.published(anchor=2, moments=True),
    "together": Cadence.published(anchor=2, together=0.3),
}


def trained(wire: Any, policy: Any, strategy: Any = NoShard()) -> dict[str, Any]:
    with potluck.init(policy, strategy, wire=wire) as fleet:
        model, data = make(3)
        model, _, loader = fleet.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), data, batch_size=12)
        same: list[bool] = []
        fleet.events.listeners.append(lambda event: same.append(getattr(event, "same_weights", True)))
        for _ in fleet.epochs(2):
            for x, y in loader:
                fleet.backward(F.mse_loss(model(x), y), samples=len(x))
                fleet.step()
        return {"weights": whole(model), "same": all(same)}


@pytest.mark.parametrize("policy", first_of(POLICIES))
def test_all_replicas_end_with_the_same_bits(policy: str) -> None:
    found = run_ranks(2, trained, "int4", POLICIES[policy])
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    assert all(each["same"] for each in found) and found[0]["weights"].isfinite().all()


def test_replicas_of_nodes_do_too() -> None:
    found = run_ranks(4, trained, "int8", Async.published(anchor=2), HybridShard(intra_node_size=2))
    assert all(torch.equal(found[0]["weights"], each["weights"]) for each in found)


@pytest.mark.parametrize(
    "policy", first_of([Sync(balance=False), Async.published(anchor=2), Cadence.published(anchor=2)])
)
@pytest.mark.parametrize("meets", first_of(["group", "store"]))
def test_replicas_of_stages_do_too(policy: Any, meets: str, tmp_path: Path) -> None:
    protocol = Pipeline(micro_batch_size=4) if meets == "group" else DataStore(url=f"file://{tmp_path}")
    told = run_ranks(4, staged, policy, Stages(protocol=protocol, count=2))
    together(told)  # who has the same stage has the same bits
    assert all(each["epochs"] == told[0]["epochs"] and each["epochs"][-1][2] for each in told)


def staged(policy: Any, stages: Any) -> dict[str, Any]:
    started = potluck.init
    potluck.init = lambda *told, **how: started(*told, **how, wire="int4")  # type: ignore[assignment]
    return ours_in_stages(policy, "adamw", 24, stages)


def test_what_was_left_out_is_saved_and_loaded() -> None:
    for each in run_ranks(2, saved_and_loaded):
        assert torch.equal(each["continued"], each["loaded"])
        assert not torch.equal(each["continued"], each["without"])


def saved_and_loaded() -> dict[str, Tensor]:
    with potluck.init() as fleet:
        link = GroupLink(owned=False)

        def begin(saved: dict[str, Any] | None = None, weights: Any = None) -> tuple[Small, Replica, WindowDelta]:
            model = Small()
            replica = Replica(model, torch.optim.SGD(model.parameters(), lr=1.0), link, fleet.device, StepConfig())
            delta = WindowDelta(replica, CodedLinkMean(link, CODINGS["int4"]))
            if saved is not None:
                model.load_state_dict(weights)
                replica.optimizer.load_state_dict(saved)
                delta.start_anew()
            return model, replica, delta

        def go(model: Small, delta: WindowDelta, numbers: range) -> Tensor:
            for window in numbers:
                delta.begin()
                move(model, window, link.rank)
                delta.end(0.5)
                delta.apply()
            return model.weight.detach().clone()

        model, replica, delta = begin()
        go(model, delta, range(2))
        delta.settle()
        saved, weights = copy.deepcopy((replica.optimizer.state_dict(), model.state_dict()))
        assert saved["state"][0][RESIDUAL].any()
        continued = go(model, delta, range(2, 4))
        model, _, delta = begin(saved, weights)
        loaded = go(model, delta, range(2, 4))
        model, _, delta = begin(saved | {"state": {}}, weights)
        return {"continued": continued, "loaded": loaded, "without": go(model, delta, range(2, 4))}


def test_a_run_continues_from_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, cut_run, str(tmp_path), True)
    first, second = run_ranks(2, cut_run, str(tmp_path), False)
    assert torch.equal(first, second) and first.isfinite().all()


def cut_run(folder: str, cut: bool) -> Tensor:
    """Two epochs with a checkpoint after each; `cut`: only the first."""
    with potluck.init(Async.published(anchor=3), wire="int4") as fleet:
        model, data = make(3)
        model, _, loader = fleet.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), data, batch_size=12)
        assert fleet.load(folder) is not cut
        for _ in fleet.epochs(2):
            for x, y in loader:
                fleet.backward(F.mse_loss(model(x), y), samples=len(x))
                fleet.step()
            fleet.save(folder)
            fleet.wait_for_saves()
            if cut:
                break
        return whole(model)


def test_bf16_is_near_what_fp32_gives() -> None:
    told = run_ranks(2, coded_run, "bf16")
    expected = judge(Async.published(anchor=2), "adamw", told)
    assert (told[0]["weights"] - expected).norm() / expected.norm() < 0.02


def coded_run(wire: Any) -> dict[str, Any]:
    started = potluck.init
    potluck.init = lambda *told, **how: started(*told, **how, wire=wire)  # type: ignore[assignment]
    return ours_in_fp32(Async.published(anchor=2), "adamw", 12)


def test_parameters_of_half_the_digits_are_refused() -> None:
    assert all("Keep parameters in float32" in each for each in run_ranks(2, half))


def half() -> str:
    try:
        with potluck.init(Cadence.published(), wire="int8") as fleet:
            model = nn.Linear(5, 3).bfloat16()
            data = torch.zeros(8, 5, dtype=torch.bfloat16), torch.zeros(8, 3)
            fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=4)
    except ConfigError as error:
        return str(error)
    return ""
