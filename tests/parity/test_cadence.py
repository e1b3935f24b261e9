"""Cadence and Async over real ranks, against replicas that one process steps in turn, in plain PyTorch."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import Async, Cadence, NoShard, StepConfig, Sync
from potluck.errors import ConfigError
from potluck.events import Decided, EpochDone, StepDone
from tests.gathered import gathered
from tests.parity.test_sync import FEATURES, flat
from tests.parity.test_sync import OPTIMIZERS as ANY_OPTIMIZER
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS = 203
SHORT = Cadence.published(anchor=2, max_anchor=2)
POLICIES: dict[str, Any] = {
    "cadence": Cadence.published(anchor=2),
    "async": Async.published(anchor=2),
}

OPTIMIZERS = ANY_OPTIMIZER | {"plain sgd": lambda p: torch.optim.SGD(p, lr=0.1)}
"""The last has no moments: a group's checkpoint keeps the first rank's, which a judge would have to know."""


class Running(nn.Module):
    """Statistics as BatchNorm's, but also of a single row."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(7))
        self.register_buffer("running_var", torch.ones(7))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        out = (x - self.running_mean) / self.running_var.sqrt()
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(x.mean(0), 0.1)
                self.running_var.lerp_(x.var(0, correction=0) + 0.5, 0.1)
                self.seen += 1
        return out


class Net(nn.Module):
    """Running statistics too, and a parameter that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 7)
        self.norm = Running()
        self.leave = nn.Linear(7, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.norm(self.enter(x)))) * self.frozen


def make(seed: int = 3) -> tuple[Net, tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(11)
    return Net(), (torch.randn(ROWS, FEATURES, generator=draw), torch.randn(ROWS, 3, generator=draw))


def ours(
    policy: Any,
    optimizer_name: str,
    world_batch: int,
    epochs: int = 2,
    micro: int | None = None,
    slow: float = 0.0,
    strategy: Any = NoShard(),
    make: Callable[..., Any] = make,
) -> dict[str, Any]:
    """Trains, and notes which rows each step of this rank used, window by window."""
    with potluck.init(policy, strategy, step=StepConfig(clip=1.0)) as fleet:
        model, data = make(3 + fleet.rank)
        model, _, loader = fleet.prepare(
            model, OPTIMIZERS[optimizer_name](model.parameters()), data, batch_size=world_batch, micro_batch_size=micro
        )
        windows: list[list[list[list[int]]]] = [[]]
        events: list[Any] = []
        fleet.events.listeners.append(events.append)
        fleet.after_agreement.append(lambda: windows.append([]))
        rows: list[list[int]] = []
        for _ in range(epochs):
            order = torch.randperm(
                len(data[0]), generator=torch.Generator().manual_seed(loader.position.epoch)
            ).tolist()
            for x, y in loader:
                rows.append(order[loader.current.start : loader.current.end] if loader.current.counts else [])
                time.sleep(slow * len(x) if fleet.rank == 0 else 0.0)
                fleet.backward(F.mse_loss(model(x), y), samples=len(x))
                if loader.current.last:
                    windows[-1].append(rows)
                    rows = []
                fleet.step()
        return {
            "weights": torch.cat([whole(model), model.norm.running_mean.cpu(), model.norm.running_var.cpu()]),
            "windows": windows,
            "reasons": [event.reason for event in events if isinstance(event, Decided)],
            "epochs": [
                [event.used, event.total, event.same_weights] for event in events if isinstance(event, EpochDone)
            ],
            "steps": fleet.step_number,
            "rows_seen": fleet.rows_seen,
            "losses": [event.loss for event in events if isinstance(event, StepDone)],
        }


def whole(model: nn.Module) -> Tensor:
    """All parameters, also where they are split over ranks: then all of those call this."""
    return torch.cat([gathered(parameter).reshape(-1) for parameter in model.parameters()])


def state(model: nn.Module) -> list[Tensor]:
    trained = [parameter.data for parameter in model.parameters() if parameter.requires_grad]
    return trained + running(model)


def running(model: nn.Module) -> list[Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def through(replica: nn.Module, batch: list[list[int]], x: Tensor, y: Tensor) -> int:
    """The gradient of a batch, in micro-batches. How many rows it has."""
    size = sum(len(rows) for rows in batch)
    for rows in batch:
        (F.mse_loss(replica(x[rows]), y[rows]) * (len(rows) / size)).backward()
    return size


@torch.no_grad()
def judge(
    policy: Any,
    optimizer_name: str,
    told: list[dict[str, Any]],
    make: Callable[..., Any] = make,
    through: Callable[..., int] = through,
) -> Tensor:
    """The same windows in one process: every replica by itself, then the mean by samples."""
    world = len(told)
    replicas = [make()[0] for _ in range(world)]
    optimizers = [OPTIMIZERS[optimizer_name](replica.parameters()) for replica in replicas]
    x, y = make()[1]
    for window in range(max(len(rank["windows"]) for rank in told)):
        counts = [0] * world
        for replica, optimizer, rank, number in zip(replicas, optimizers, told, range(world), strict=True):
            for batch in rank["windows"][window]:
                with torch.enable_grad():
                    size = through(replica, batch, x, y)
                nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                counts[number] += size
        if not sum(counts):
            continue
        weights = [count / sum(counts) for count in counts]

        own = [[tensor.clone() for tensor in state(replica)] for replica in replicas]
        mean = [sum(w * t for w, t in zip(weights, each, strict=True)) for each in zip(*own, strict=True)]
        for replica in replicas:
            for tensor, value in zip(state(replica), mean, strict=True):
                tensor.copy_(value)
    norm = replicas[0].norm
    return torch.cat([flat(replicas[0]), norm.running_mean, norm.running_var])


@pytest.mark.parametrize(
    ("policy", "optimizer", "world", "micro"),
    first_of(
        [
            ("cadence", "adamw", 2, None),
            ("cadence", "sgd", 3, 3),
            ("async", "adamw_fused", 2, None),
            ("async", "adafactor", 3, None),
            ("cadence", "adamw", 1, None),
            ("async", "sgd", 1, 3),
        ]
    ),
)
def test_the_weights_are_those_of_replicas_stepped_in_turn(
    policy: str, optimizer: str, world: int, micro: int | None
) -> None:
    told = run_ranks(world, ours, POLICIES[policy], optimizer, 12, 2, micro)
    for rank in told:
        assert torch.equal(rank["weights"], told[0]["weights"])  # to the bit
        assert rank["epochs"] == [[ROWS, ROWS, True]] * 2
        assert rank["steps"] == 2 * -(-ROWS // 12) and rank["rows_seen"] == 2 * ROWS
    # Sums of floats in another order; a few dozen steps of a model whose weights are around 1.
    torch.testing.assert_close(told[0]["weights"], judge(POLICIES[policy], optimizer, told), atol=2e-5, rtol=1e-4)


def test_a_slow_replica_does_less_and_the_reason_says_who() -> None:
    told = run_ranks(2, ours, Cadence.published(anchor=3), "sgd", 4, 4, None, 0.004)
    done = [sum(len(rows) for window in rank["windows"] for batch in window for rows in batch) for rank in told]
    assert sum(done) == 4 * ROWS and done[1] > 1.3 * done[0]
    assert any(reason.startswith("worker 0 has ") and ": it does " in reason for reason in told[1]["reasons"])
    assert told[0]["reasons"] == told[1]["reasons"]  # everybody decides alike


@pytest.mark.parametrize("policy", first_of(POLICIES))
def test_a_script_that_nobody_started_is_a_run_of_one(policy: str) -> None:
    """How people debug: no launcher, no group."""
    told = ours(POLICIES[policy], "adamw", 12)
    assert told["epochs"] == [[ROWS, ROWS, True]] * 2
    assert told["reasons"][0] == "Only worker 0 is there, so nothing is averaged: 24 rows."
    torch.testing.assert_close(told["weights"], judge(POLICIES[policy], "adamw", [told]), atol=2e-5, rtol=1e-4)


def own_batches() -> str:
    with potluck.init(Async.published()) as fleet:
        model, _ = make()
        with pytest.raises(ConfigError) as caught:
            fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return str(caught.value)


def test_batches_that_are_not_the_loaders_are_refused() -> None:
    assert "Pass it to prepare()" in run_ranks(2, own_batches)[0]


def bad_rows(limit: int) -> list[Any]:
    with potluck.init(Cadence.published(anchor=2), step=StepConfig(nonfinite_limit=limit)) as fleet:
        model, (x, y) = make()
        x[17] = torch.nan
        model, _, loader = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), (x, y), batch_size=8)
        for _ in fleet.epochs(1):
            for a, b in loader:
                fleet.backward(F.mse_loss(model(a), b), samples=len(a))
                event = fleet.step()
                assert (
                    event is None
                    or isinstance(event, StepDone)
                    or event.reason == f"on worker {fleet.rank}, the loss is not finite"
                )
        return [
            fleet.skipped,
            ", 4 of them in steps that were skipped" in fleet.last_epoch.sentence,
            bool(torch.isfinite(flat(model)).all()),
            bool(torch.isfinite(model.norm.running_mean).all()),
        ]


def test_a_gradient_that_is_not_finite_is_skipped_and_reaches_nobody() -> None:
    assert run_ranks(2, bad_rows, 5) == [[1, True, True, True]] * 2


def stop_and_go_on(folder: str, policies: list[Any]) -> list[Any]:
    """Some windows under one policy, a save, and the rest under another."""
    found: list[Any] = []
    rows: list[int] = []
    for turn, policy in enumerate(policies):
        with potluck.init(policy) as fleet:
            model, data = make(3)
            numbered = (*data, torch.arange(ROWS))
            model, _, loader = fleet.prepare(
                model, torch.optim.AdamW(model.parameters(), lr=0.01), numbered, batch_size=8
            )
            if turn:
                assert fleet.load(folder)
            for x, y, numbers in loader:
                rows += numbers.tolist()
                if fleet.rank == 0 and not turn:
                    time.sleep(0.01)
                fleet.backward(F.mse_loss(model(x), y), samples=len(x))
                fleet.step()
                if not turn and fleet.rows_seen:
                    fleet.request_stop()
            if not turn:
                fleet.save(folder)
                fleet.wait_for_saves()
            found.append([fleet.rows_seen, loader.position.epoch])
            del fleet.link._owned  # the group outlives this engine
            fleet.link._owned = turn == len(policies) - 1
    return [found, rows]


@pytest.mark.parametrize(
    "policies",
    first_of([(SHORT, Sync()), (Sync(), SHORT), (SHORT, Async.published(anchor=3, max_anchor=3))], are_single=True),
)
def test_a_run_goes_on_under_another_policy_and_each_row_is_used_once(policies: tuple[Any, ...], tmp_path: Any) -> None:
    told = run_ranks(2, stop_and_go_on, str(tmp_path), list(policies))
    assert [rank[0][1] for rank in told] == [[ROWS, 1]] * 2
    assert 0 < told[0][0][0][0] < ROWS
    assert sorted(told[0][1] + told[1][1]) == list(range(ROWS))


def with_reader(rows: list[Tensor]) -> tuple[Tensor, int]:
    return torch.stack(rows), os.getpid()


def fetched() -> dict[str, Any]:
    with potluck.init(SHORT) as fleet:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        data = torch.arange(ROWS).view(-1, 1).float()
        model, _, loader = fleet.prepare(model, optimizer, list(data), batch_size=20, fetchers=1, collate=with_reader)
        rows: list[int] = []
        readers: set[int] = set()
        for x, reader in loader:
            rows += x.flatten().int().tolist()
            readers.add(reader)
            fleet.backward(model(x).mean(), samples=len(x))
            fleet.step()
        return {"rows": rows, "elsewhere": os.getpid() not in readers}


@pytest.mark.slow
def test_rows_of_windows_are_fetched_by_processes_that_are_asked_for() -> None:
    found = run_ranks(2, fetched)
    assert all(each["elsewhere"] for each in found)
    assert sorted(row for each in found for row in each["rows"]) == list(range(ROWS))
