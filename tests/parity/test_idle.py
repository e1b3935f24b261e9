"""A parameter that nobody uses in a step is left alone by it, under every strategy, as torch does where grad is None.

The judge is a loop of plain PyTorch in float64, which shares no code with the engine.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import potluck
from potluck import Direct, FullShard, NoShard, ShardGradOp, Stages
from potluck.sharding.strategy import ShardingStrategy
from tests.quick import first_of
from tests.ranks import run_ranks

STEPS, ROWS = 9, 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, weight_decay=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
}


class Net(nn.Module):
    """Branches that some steps use, some rows, and no step at all; sizes that no split falls between."""

    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        for name, size in {"first": (4, 3), "late": (4, 4), "rare": (5,), "never": (3, 3), "last": (4,)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size, generator=draw, dtype=torch.float64) * 0.3))
        self.gate = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = torch.tanh(x @ self.first.T)
        if step >= 3:  # it has no state before that, and fewer steps than the rest ever after
            x = x + torch.tanh(x @ self.late)
        if step % 3 == 1:
            x = x * self.gate
        chosen = x[:, 0] > 0.2
        if step in (2, 6) and chosen.any():  # not on every rank
            x = x + chosen.unsqueeze(1) * self.rare[:4]
        return (x * self.last).sum(dim=1)


def rows_of(step: int) -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def loss_of(model: nn.Module, rows: Tensor, step: int) -> Tensor:
    """Of steps 5 and 7, one row alone uses `rare`, which only one of several ranks has."""
    losses = (model(rows, step) - 1).square()
    if step in (5, 7) and torch.equal(rows[-1], rows_of(step)[-1]):
        assert isinstance(model.rare, Tensor)
        losses = torch.cat([losses[:-1], losses[-1:] * model.rare.square().sum()])
    return losses.mean()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    own = dict(model.named_parameters())
    return [
        {"params": [own[name] for name in ("first", "rare", "never")], "lr": 0.02},
        {"params": [own[name] for name in ("late", "gate", "last")]},
    ]


def plain(name: str, clip: float | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights in the end, and what the optimizer keeps of each parameter."""
    model = Net()
    optimizer = OPTIMIZERS[name](groups(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rows_of(step), step).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return (
        {key: value.detach() for key, value in model.state_dict().items()},
        {key: dict(optimizer.state[p]) for key, p in model.named_parameters() if p in optimizer.state},
    )


def train(fleet: Any, model: nn.Module, upto: int) -> None:
    mine = slice(fleet.rank * ROWS // fleet.world, (fleet.rank + 1) * ROWS // fleet.world)
    while fleet.step_number < upto:
        step = fleet.step_number
        fleet.backward(loss_of(model, rows_of(step)[mine], step), samples=mine.stop - mine.start)
        fleet.step()


def trained_in_two_halves(optimizer: str, first: ShardingStrategy, second: ShardingStrategy, folder: Path) -> None:
    """Half of the steps under one strategy, the rest under another, from its checkpoint; then saved again."""
    for strategy, upto, seed in ((first, 5, 5), (second, STEPS, 6)):
        fleet = potluck.init(strategy=strategy)
        model = Net(seed)
        fleet.prepare(model, OPTIMIZERS[optimizer](groups(model)))
        assert fleet.load(folder) == (seed == 6)
        train(fleet, model, upto)
        fleet.save(folder)
        fleet.wait_for_saves()


def cases(folder: str, wanted: list[tuple[str, ShardingStrategy, ShardingStrategy]]) -> None:
    with potluck.init():
        for number, case in enumerate(wanted):
            trained_in_two_halves(*case, Path(folder, str(number)))


def assert_as_plain(optimizer: str, folder: Path) -> None:
    """One process loads what was saved: every weight, and all that plain PyTorch's optimizer keeps, and no more."""
    weights, kept = plain(optimizer)
    off = 1e-6 if optimizer == "nadam" else 1e-12  # torch makes its mu_product in float32, and loads it as float64
    fleet, model = potluck.Engine(), Net(7)
    _, loaded = fleet.prepare(model, OPTIMIZERS[optimizer](groups(model)))
    assert fleet.load(folder) and fleet.step_number == STEPS
    found = {name: loaded.state[p] for name, p in model.named_parameters() if p in loaded.state}
    assert set(found) == set(kept)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name], rtol=off, atol=off, msg=name)
        assert set(found.get(name, {})) == set(kept.get(name, {}))
        for key, value in kept.get(name, {}).items():
            told = f"{optimizer}: {key} of {name}"
            torch.testing.assert_close(found[name][key], value, rtol=off, atol=off, msg=told, check_dtype=False)


def strategies(world: int) -> list[ShardingStrategy]:
    uneven = tuple(float(rank + 1) for rank in range(world))
    return [
        ShardGradOp(),
        ShardGradOp(keep_gradients=True),
        ShardGradOp(weights=uneven),
        FullShard(weights=uneven),
        NoShard(),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_every_optimizer_leaves_alone_what_nobody_has_used_and_checkpoints_count_its_steps(
    world: int, tmp_path: Path
) -> None:
    every = strategies(world)
    wanted = [
        (optimizer, every[number % 5], every[(number + 1 + number // 5) % 5])
        for number, optimizer in enumerate(OPTIMIZERS)
    ]
    run_ranks(world, cases, str(tmp_path), wanted)
    for number, (optimizer, _, _) in enumerate(wanted):
        assert_as_plain(optimizer, tmp_path / str(number))


@pytest.mark.slow
def test_every_strategy_goes_on_from_every_others_counts(tmp_path: Path) -> None:
    wanted = [("adamw", one, other) for one in strategies(2) for other in strategies(2)]
    run_ranks(2, cases, str(tmp_path), wanted)
    for number in range(len(wanted)):
        assert_as_plain("adamw", tmp_path / str(number))


def by_hand(strategies: list[ShardingStrategy]) -> list[dict[str, Tensor]]:
    """Without an engine: a loop of one's own around potluck.shard."""
    told = []
    with potluck.init() as fleet:
        mine = slice(fleet.rank * ROWS // fleet.world, (fleet.rank + 1) * ROWS // fleet.world)
        for strategy in strategies:
            model = Net()
            sharded = potluck.shard(model, OPTIMIZERS["adamw"](groups(model)), strategy)
            for step in range(STEPS):
                loss_of(model, rows_of(step)[mine], step).backward()
                sharded.step()
                sharded.share()
            whole = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in sharded.split.items()}
            for run in sharded.runs:
                whole[run.span.name].view(-1)[run.span.start : run.span.end] = run.parameter.detach().view(-1)
            for tensor in whole.values():
                if dist.is_initialized():
                    dist.all_reduce(tensor)
            told.append(whole)
    return told


@pytest.mark.parametrize("world", first_of([1, 2]))
def test_a_loop_of_ones_own_around_shard_leaves_it_alone_too(world: int) -> None:
    weights, _ = plain("adamw")
    for told in run_ranks(world, by_hand, strategies(world)[:-1]):
        for found in told:
            for name, tensor in weights.items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("strategy", first_of(strategies(1)), ids=lambda strategy: strategy.kind)
def test_what_a_skipped_step_did_not_use_is_stepped_by_the_next(strategy: ShardingStrategy) -> None:
    fleet, model, judge = potluck.Engine(strategy=strategy), Net(), Net()
    fleet.prepare(model, OPTIMIZERS["adamw"](groups(model)))
    optimizer = OPTIMIZERS["adamw"](groups(judge))
    for step in (0, 2, 4, 5):  # `late` is not used by the first two
        loss = loss_of(model, rows_of(step), step)
        fleet.backward(loss * float("nan") if step == 2 else loss, samples=ROWS)
        fleet.step()
        if step != 2:
            optimizer.zero_grad()
            loss_of(judge, rows_of(step), step).backward()
            optimizer.step()
    assert fleet.skipped == 1
    sharded = getattr(fleet.run.replica, "sharded", None)
    own = dict(model.named_parameters()) if sharded is None else {r.span.name: r.parameter for r in sharded.runs}
    for name, expected in judge.named_parameters():
        torch.testing.assert_close(own[name].detach().view_as(expected), expected.detach(), rtol=1e-12, atol=1e-12)


clock = [0]
"""Which step it is."""


class Moody(nn.Module):
    """A layer of which a part is used in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.late = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.always(x))
        return x + self.late(x) if clock[0] in (1, 2, 4) else x


def moody() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Moody() for _ in range(4))).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def square(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).square().mean()  # type: ignore[no-any-return]


def in_stages(folder: str, strategies: list[ShardingStrategy]) -> None:
    with potluck.init():
        for number, strategy in enumerate(strategies):
            clock[0] = 1  # the model is looked at with all that it has
            fleet = potluck.init(strategy=strategy, stages=Stages(protocol=Direct(), cuts=(2,)))
            model, optimizer = moody()
            _, _, loader = fleet.prepare(model, optimizer, rows_of(0), batch_size=ROWS, loss=square)
            for epoch in fleet.epochs(6):
                clock[0] = epoch
                for batch in loader:
                    fleet.train(square, batch)
                    fleet.step()
            fleet.save(Path(folder, str(number)))
            fleet.wait_for_saves()


def test_stages_leave_alone_what_nobody_has_used(tmp_path: Path) -> None:
    wanted: list[ShardingStrategy] = [NoShard(), ShardGradOp(), FullShard(weights=(1.0, 1.0))]
    run_ranks(2, in_stages, str(tmp_path), wanted)
    expected, judge = moody()
    for step in range(6):
        clock[0] = step
        judge.zero_grad()
        square(expected, rows_of(0)).backward()
        judge.step()
    for number in range(len(wanted)):
        fleet, (model, optimizer) = potluck.Engine(), moody()
        fleet.prepare(model, optimizer)
        assert fleet.load(tmp_path / str(number))
        for found, right in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
            assert optimizer.state[found]["step"] == judge.state[right]["step"]
