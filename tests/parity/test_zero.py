"""ShardedOptimizer over real ranks, against the plain optimizer in one process."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.shard_memory import held_bytes
from potluck.errors import ConfigError
from potluck.link.link import connect
from potluck.sharding import collectives
from potluck.sharding import zero as zero_module
from potluck.sharding.zero import ShardedOptimizer
from tests.parity.test_sync import OPTIMIZERS
from tests.quick import first_of
from tests.ranks import run_ranks

STEPS, ROWS = 10, 24
ELEMENTWISE: dict[str, Any] = {name: made for name, made in OPTIMIZERS.items() if name != "adafactor"} | {
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen one, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 13)
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.frozen = nn.Linear(13, 13)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(13, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.frozen(x))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two of them that alternate in the model's order, one with decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, 11, (STEPS, ROWS), generator=draw)
    return tokens, torch.randint(0, 11, (STEPS, ROWS), generator=draw)


def plain(name: str) -> Tensor:
    model = Net()
    optimizer = ELEMENTWISE[name](groups(model))
    for x, y in zip(*data(), strict=True):
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def ours(
    name: str, weights: list[float] | None = None, bucket_bytes: int = 400, delay_s: float = 0.0
) -> dict[str, Any]:
    connect(torch.device("cpu"), 60.0)
    zero_module.BUCKET_BYTES = bucket_bytes
    if delay_s:
        slow_down(delay_s)
    model = Net()
    shadow = Net()
    optimizer = ELEMENTWISE[name](groups(model))
    unsharded = ELEMENTWISE[name](groups(shadow))
    sharded = ShardedOptimizer(model, optimizer, weights=weights, mean=False)
    rank, world = sharded.collectives.rank, sharded.collectives.world
    is_same = True
    for x, y in zip(*data(), strict=True):
        mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
        count = mine.stop - mine.start
        (F.cross_entropy(model(x[mine]), y[mine]) * (count / ROWS)).backward()
        assert all(p.grad is None for p in model.parameters())
        sharded.finish()
        scale = min(1.0, 1.0 / (float(sharded.norm()) + 1e-6))
        whole = gather(sharded)
        sharded.step(scale)
        sharded.broadcast_updated_params()
        # The unsharded optimizer on the same gradients.
        trained = [p for p in shadow.parameters() if p.requires_grad]
        for parameter, piece in zip(trained, whole.split([p.numel() for p in trained]), strict=True):
            parameter.grad = piece.view_as(parameter).mul(scale)
        unsharded.step()
        if not delay_s:
            is_same &= all(torch.equal(a, b) for a, b in zip(model.parameters(), shadow.parameters(), strict=True))
    return {
        "weights": torch.cat([p.detach().reshape(-1) for p in model.parameters()]),
        "same": is_same,
        "bytes": held_bytes(sharded),
        "size": sharded.flats[0].shard.shard_size,
    }


def gather(sharded: ShardedOptimizer) -> Tensor:
    """The whole gradient, from its owners."""
    (flat,) = sharded.flats
    whole = torch.zeros_like(flat.numbers)
    whole[flat.shard.param_start : flat.shard.param_end] = flat.gradient
    if sharded.collectives.world > 1:
        dist.all_reduce(whole)
    return whole


def slow_down(delay_s: float) -> None:
    """Each wait takes longer, and not the same on every rank."""
    start = collectives.Collectives._start

    class Late:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            time.sleep(delay_s * (1 + dist.get_rank()))
            self.work.wait()

    collectives.Collectives._start = lambda *given, **options: Late(start(*given, **options))  # type: ignore[method-assign]


@pytest.mark.parametrize("name", first_of(ELEMENTWISE))
def test_two_ranks_step_as_the_unsharded_optimizer_does(name: str) -> None:
    for told in run_ranks(2, ours, name):
        # To the bit, on the same gradients; torch's fused kernel rounds the last few of a tensor in another way, and
        # a range has other last ones than its parameters.
        assert told["same"] or name == "adamw_fused"
        torch.testing.assert_close(
            told["weights"], plain(name), atol=1e-5, rtol=1e-4
        )  # gradients added in another order


@pytest.mark.parametrize("world", first_of([1, 3, 4]))
@pytest.mark.parametrize("bucket_bytes", first_of([1, 1 << 30]))
def test_any_world_and_any_bucket(world: int, bucket_bytes: int) -> None:
    told = run_ranks(world, ours, "adamw", None, bucket_bytes)
    for rank in told:
        assert rank["same"] and torch.equal(rank["weights"], told[0]["weights"])
        torch.testing.assert_close(rank["weights"], plain("adamw"), atol=1e-5, rtol=1e-4)
    assert max(rank["size"] for rank in told) - min(rank["size"] for rank in told) <= 1


def test_uneven_shards_hold_what_they_were_given_and_compute_the_same() -> None:
    told = run_ranks(3, ours, "adamw", [3.0, 0.0, 1.0])
    total = sum(rank["size"] for rank in told)
    assert [rank["size"] for rank in told] == [total - total // 4, 0, total // 4]
    assert all(rank["same"] and torch.equal(rank["weights"], told[0]["weights"]) for rank in told)
    assert told[0]["bytes"]["state"] == 8 * told[0]["size"] and told[1]["bytes"] == {
        "parameters": 4 * total,
        "gradients": 0,
        "state": 0,
    }


def test_delayed_collectives_change_nothing() -> None:
    told = run_ranks(2, ours, "adamw", None, 400, 0.002)
    torch.testing.assert_close(told[0]["weights"], plain("adamw"), atol=1e-5, rtol=1e-4)
    assert torch.equal(told[0]["weights"], told[1]["weights"])


def forgetful() -> str:
    connect(torch.device("cpu"), 60.0)
    model = Net()
    sharded = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (x, *_), (y, *_) = data()
    F.cross_entropy(model(x), y).backward()
    sharded.step()
    with pytest.raises(ConfigError) as caught:
        model(x)
    return str(caught.value)


def test_a_forgotten_broadcast_is_said() -> None:
    assert "broadcast_updated_params() was not called" in run_ranks(2, forgetful)[0]


def accumulating() -> Tensor:
    connect(torch.device("cpu"), 60.0)
    model = Net()
    sharded = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in zip(*data(), strict=True):
        for part in (slice(0, 7), slice(7, ROWS)):
            (F.cross_entropy(model(x[part]), y[part]) * (part.stop - part.start) / ROWS).backward()
        sharded.step()
        sharded.broadcast_updated_params()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_several_backwards_add_up() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in zip(*data(), strict=True):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(run_ranks(2, accumulating)[1], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    first_of(
        [
            (lambda p: torch.optim.SparseAdam(p), "SparseAdam cannot be sharded.*gradients are sparse"),
            (lambda p: torch.optim.LBFGS(p), "LBFGS cannot be sharded"),
            (lambda p: type("Mine", (torch.optim.Optimizer,), {})(p, {}), "Mine cannot be sharded.*does not know"),
        ]
    ),
)
def test_optimizers_that_do_not_treat_each_parameter_by_itself_are_refused_by_name(optimizer: Any, reason: str) -> None:
    model = Net()
    with pytest.raises(ConfigError, match=reason):
        ShardedOptimizer(model, optimizer(list(model.parameters())))


def test_two_optimizers_over_one_parameter_are_refused() -> None:
    model = Net()
    first = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"Two optimizers hold embed\.weight"):
        ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    del first
