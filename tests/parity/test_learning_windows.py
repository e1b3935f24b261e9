"""Cadence and Async that begin as Sync, average moments and stretch steps, against replicas stepped in turn."""

import copy
import math
from itertools import chain, permutations, repeat
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import potluck
from potluck import Async, Auto, Cadence, StepConfig
from potluck.agree.costs import WindowCosts
from potluck.events import Decided, EpochDone
from potluck.replica.moments import Moments, can_average, look_at_state
from potluck.sharding.runs import FlatRun, Span
from tests.parity.test_cadence import ROWS, make, state, through, whole
from tests.parity.test_sync import OPTIMIZERS as KNOWN
from tests.parity.test_sync import flat
from tests.quick import first_of
from tests.ranks import run_ranks

BATCH, EPOCHS = 12, 3
STEPS = EPOCHS * -(-ROWS // BATCH)
POLICIES: dict[str, Any] = {
    "together": Cadence.published(anchor=2, together=0.3),
    "moments": Async.published(anchor=2, moments=True),
    "both": Cadence.published(anchor=3, max_anchor=3, together=0.2, moments=True),
    "sync": Cadence.published(together=1.0),
    "auto": Auto(together=0.2),
    "default": Cadence(anchor=3),
}


class Eager(torch.optim.Optimizer):
    """Adagrad as older versions of torch have it: only its constructor begins the state."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["step"] += 1
                state["sum"].addcmul_(parameter.grad, parameter.grad)
                rate = self.param_groups[0]["lr"]
                parameter.addcdiv_(parameter.grad, state["sum"].sqrt().add_(1e-10), value=-rate)


OPTIMIZERS = KNOWN | {"eager": Eager}


def ours(policy: Any, optimizer_name: str, micro: int | None = None, has_schedule: bool = True) -> dict[str, Any]:
    with potluck.init(policy, step=StepConfig(clip=1.0)) as fleet:
        model, data = make(3 + fleet.rank)
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        schedule = {"scheduler": CosineAnnealingLR(optimizer, T_max=STEPS)} if has_schedule else {}
        model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH, micro_batch_size=micro, **schedule)
        windows: list[list[list[list[int]]]] = [[]]
        events: list[Any] = []
        fleet.events.listeners.append(events.append)
        fleet.after_agreement.append(lambda: windows.append([]))
        rows: list[list[int]] = []
        for epoch in fleet.epochs(EPOCHS):
            order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()
            for x, y in loader:
                rows.append(order[loader.current.start : loader.current.end])
                fleet.backward(F.mse_loss(model(x), y), samples=len(x))
                if loader.current.last:
                    windows[-1].append(rows)
                    rows = []
                fleet.step()
        return {
            "weights": torch.cat([whole(model), model.norm.running_mean.cpu(), model.norm.running_var.cpu()]),
            "windows": windows,
            "planned": [[event.anchor, list(event.rows)] for event in events if isinstance(event, Decided)],
            "epochs": [[event.used, event.same_weights] for event in events if isinstance(event, EpochDone)],
            "steps": fleet.step_number,
        }


def lr_at(rows: float, peak: float, has_schedule: bool) -> float:
    """Of the step that ends there."""
    epoch, row = divmod(rows - 1e-9, ROWS)
    step = epoch * -(-ROWS // BATCH) + math.floor(row / BATCH)
    return peak * 0.5 * (1 + math.cos(math.pi * step / STEPS)) if has_schedule else peak


@torch.no_grad()
def judge(policy: Any, optimizer_name: str, told: list[dict[str, Any]], has_schedule: bool = True) -> Tensor:
    world, averages = len(told), policy.moments is not False
    replicas = [make()[0] for _ in range(world)]
    optimizers = [OPTIMIZERS[optimizer_name](replica.parameters()) for replica in replicas]
    peak, is_divided = optimizers[0].param_groups[0]["lr"], optimizer_name != "sgd"
    x, y = make()[1]
    seen = 0
    for window, (anchor, planned) in enumerate(told[0]["planned"]):
        done = [rank["windows"][window] for rank in told]
        counts = [sum(len(rows) for batch in batches for rows in batch) for batches in done]
        weights = [count / sum(counts) for count in counts]
        if anchor == 0:
            step_together(replicas, optimizers, done, weights, x, y, lr_at(seen + sum(counts), peak, has_schedule))
        else:
            own = -(-BATCH // world)
            steps = sum(p * p / own for p in planned) / sum(planned)
            factor = sum(planned) / BATCH * math.sqrt(BATCH / own) / steps if averages and is_divided else 1.0
            for batches, part, replica, optimizer in zip(done, planned, replicas, optimizers, strict=True):
                rows = 0
                for batch in batches:
                    with torch.enable_grad():
                        rows += through(replica, batch, x, y)
                    lr = lr_at(seen + round(min(1.0, rows / part) * sum(planned)), peak, has_schedule)
                    most = peak * factor ** (1 / 3) if has_schedule else lr
                    optimizer.param_groups[0]["lr"] = max(lr, min(most, lr * factor))
                    nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            average([state(replica) for replica in replicas], weights)
            if averages:
                average_moments(replicas, optimizers, weights)
        seen += sum(counts)
    norm = replicas[0].norm
    return torch.cat([flat(replicas[0]), norm.running_mean, norm.running_var])


def step_together(
    replicas: Any, optimizers: Any, done: Any, weights: list[float], x: Tensor, y: Tensor, lr: float
) -> None:
    for replica, batches, weight in zip(replicas, done, weights, strict=True):
        for batch in batches:
            with torch.enable_grad():
                through(replica, batch, x, y)
        for parameter in replica.parameters():
            if parameter.requires_grad:
                parameter.grad = parameter.grad * weight if batches else torch.zeros_like(parameter)
    given = ([p.grad for p in replica.parameters() if p.requires_grad] for replica in replicas)
    gradients = [sum(same) for same in zip(*given, strict=True)]
    for replica, optimizer in zip(replicas, optimizers, strict=True):
        for parameter, mean in zip((p for p in replica.parameters() if p.requires_grad), gradients, strict=True):
            parameter.grad = mean.clone()
        optimizer.param_groups[0]["lr"] = lr
        nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    average([[b for b in replica.buffers() if b.is_floating_point()] for replica in replicas], weights)


def average(tensors: list[list[Tensor]], weights: list[float]) -> None:
    for same in zip(*tensors, strict=True):
        mean = sum(weight * tensor for weight, tensor in zip(weights, same, strict=True))
        for tensor in same:
            tensor.copy_(mean)


def average_moments(replicas: Any, optimizers: Any, weights: list[float]) -> None:
    for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
        states = [optimizer.state.get(p, {}) for optimizer, p in zip(optimizers, parameters, strict=True)]
        for key in states[0]:
            values = [own[key] for own in states]
            mean = sum(weight * value for weight, value in zip(weights, values, strict=True))
            for own in states:
                own[key] = mean.round(decimals=4).round() if key == "step" else mean.clone()


@pytest.mark.parametrize(
    ("policy", "optimizer", "world", "micro"),
    first_of(
        [
            ("together", "adamw", 2, None),
            ("together", "sgd", 3, 3),
            ("moments", "adamw", 2, None),
            ("moments", "sgd", 2, None),
            ("moments", "eager", 2, None),
            ("both", "adamw_fused", 3, None),
            ("both", "adamw", 2, 2),
            ("sync", "adamw", 2, None),
            ("both", "adamw", 1, None),
            ("auto", "adamw", 3, None),
        ]
    ),
)
def test_the_weights_are_those_of_replicas_that_do_so_in_turn(
    policy: str, optimizer: str, world: int, micro: int | None
) -> None:
    told = run_ranks(world, ours, POLICIES[policy], optimizer, micro)
    for rank in told:
        assert torch.equal(rank["weights"], told[0]["weights"])  # to the bit
        assert rank["epochs"] == [[ROWS, True]] * EPOCHS and rank["steps"] == STEPS
    kinds = [anchor == 0 for anchor, _ in told[0]["planned"]]
    assert any(kinds) == (POLICIES[policy].together > 0 and world > 1) and (
        all(kinds) == (policy == "sync") or policy == "auto"
    )
    assert kinds == sorted(kinds, reverse=True) or policy == "auto"
    torch.testing.assert_close(told[0]["weights"], judge(POLICIES[policy], optimizer, told), atol=2e-5, rtol=1e-4)


def back_and_forth(optimizer: str) -> dict[str, Any]:
    """Auto finds windows the shorter way once, and then steps of all."""
    anchors = chain([0, 2], repeat(0))
    with mock.patch.object(WindowCosts, "decide", lambda costs, most: setattr(costs, "anchor", next(anchors))):
        return ours(Auto(), optimizer)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_auto_steps_together_again_only_where_all_optimizers_hold_the_same(optimizer: str) -> None:
    """What Adafactor keeps has no mean: after a window, one mean gradient would be another step on each worker."""
    told = run_ranks(2, back_and_forth, optimizer)
    for rank in told:
        assert torch.equal(rank["weights"], told[0]["weights"])
        assert rank["epochs"] == [[ROWS, True]] * EPOCHS
    kinds = [anchor == 0 for anchor, _ in told[0]["planned"]]
    assert kinds[0] and not all(kinds)
    assert (kinds == sorted(kinds, reverse=True)) == (optimizer == "adafactor")


def test_a_constant_rate_is_not_raised() -> None:
    told = run_ranks(2, ours, POLICIES["moments"], "adamw", None, False)
    torch.testing.assert_close(
        told[0]["weights"], judge(POLICIES["moments"], "adamw", told, False), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("name", "keys"), first_of([("adamw", {"step", "exp_avg", "exp_avg_sq"}), ("sgd", {"momentum_buffer"})])
)
def test_what_an_optimizer_keeps_is_known_before_it_steps(name: str, keys: set[str]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS[name]([parameter])
    assert set(look_at_state(optimizer)) == keys
    assert not optimizer.state and torch.equal(parameter, torch.ones(3))
    assert can_average(optimizer)


def test_what_only_the_constructor_begins_is_known_too() -> None:
    parameter = nn.Parameter(torch.ones(3))
    assert set(look_at_state(Eager([parameter]))) == {"step", "sum"}
    assert can_average(Eager([parameter])) and torch.equal(parameter, torch.ones(3))


def test_what_has_no_mean_is_not_averaged() -> None:
    assert not can_average(OPTIMIZERS["adafactor"]([nn.Parameter(torch.ones(3, 3))]))


def test_moments_are_those_of_the_state_that_was_loaded_last() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS["adamw"]([parameter])
    moments = Moments(optimizer, {id(parameter): "p"}, [[FlatRun(parameter, Span("p", (3,), 0, 3))]])
    parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    moments.fill(1.0)
    assert torch.equal(moments.flats[0], optimizer.state[parameter]["exp_avg"]) and moments.flats[0].all()
    moments.flats[1].neg_()
    moments.take()
    assert not optimizer.state[parameter]["exp_avg_sq"].any()  # a root is taken of it


@pytest.mark.parametrize(("steps", "want"), [((2, 3, 2), 2), ((3, 4, 3), 4), ((2, 1, 2), 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # over a link, and from a host
def test_half_a_step_is_rounded_alike_in_whatever_order_ranks_add_up(
    steps: tuple[int, ...], want: int, dtype: torch.dtype
) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS["adamw"]([parameter])
    moments = Moments(optimizer, {id(parameter): "p"}, [[FlatRun(parameter, Span("p", (3,), 0, 3))]])
    parameter.grad = torch.ones(3)
    optimizer.step()
    for order in permutations(zip((1 / 3, 1 / 2, 1 / 6), steps, strict=True)):
        total = torch.zeros_like(moments.counts, dtype=dtype)
        for weight, done in order:
            optimizer.state[parameter]["step"].fill_(done)
            moments.fill(weight)
            total += moments.counts.to(dtype)
        moments.counts.copy_(total)
        moments.take()
        assert float(optimizer.state[parameter]["step"]) == want
