"""UnevenShards over real ranks, against the plain optimizer in one process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import potluck
from bench.shard_memory import held_bytes
from potluck import Direct, ShardGradOp, Stages, Sync
from potluck.errors import ConfigError
from potluck.link.link import connect
from potluck.replica.precision import StepConfig, switch_on
from potluck.replica.replica import find_blocks
from potluck.replica.sharded import shard_over
from potluck.sharding import splitting
from potluck.sharding.optimizer_shard import OptimizerShard
from potluck.sharding.sharded import SplitRequest
from potluck.sharding.strategy import FullShard
from potluck.sharding.uneven import UnevenShards
from tests.parity.test_zero import data, slow_down
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS = 24
CPU = torch.device("cpu")
CLOSE = {"atol": 1e-5, "rtol": 1e-4}
"""Several ranks add the gradients of their rows in another order than one process, and float addition rounds each
time; over ten steps of AdamW the last bits grow, and stay below this. A lost or doubled gradient is a thousand
times larger."""
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(13)
        self.wide = nn.Linear(13, 7)
        self.back = nn.Linear(7, 13)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.back(torch.tanh(self.wide(self.norm(x))))


class Net(nn.Module):
    """Odd sizes, single numbers, tied weights, frozen layers in and outside of blocks, a layer and a block not used."""

    def __init__(self, calls: Callable[..., Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.calls = calls
        self.embed = nn.Embedding(11, 13)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.blocks[4].wide.weight = self.blocks[0].wide.weight
        self.blocks[1].back.requires_grad_(False)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.spare = nn.Linear(3, 5)
        self.head = nn.Linear(13, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in (0, 1, 3, 4):
            x = self.calls(self.blocks[index], x)
        return self.head(self.frozen(x))


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two of them that alternate in the model's order, one with decay."""
    parameters = [p for _, p in trained(model)]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def plain(name: str, clip: float = 1.0) -> dict[str, Tensor]:
    model = Net()
    optimizer = OPTIMIZERS[name](groups(model))
    for x, y in zip(*data(), strict=True):
        F.cross_entropy(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in trained(model)}


def split(model: nn.Module, optimizer: Any, weights: Any = None, **options: Any) -> UnevenShards:
    return UnevenShards(SplitRequest(model, optimizer, CPU, find_blocks(model), mean=False, **options), weights)


def whole(sharded: UnevenShards) -> dict[str, Tensor]:
    """All that is trained, from its owners."""
    found = {name: torch.zeros(p.shape) for name, p in trained(sharded.model)}
    for run in sharded.runs:
        found[run.span.name].view(-1)[run.span.start : run.span.end] += run.parameter.detach().view(-1)
    if sharded.collectives.world > 1:
        for tensor in found.values():
            dist.all_reduce(tensor)
    return found


def gathered_bytes(sharded: UnevenShards) -> int:
    return sum(s.whole.untyped_storage().nbytes() for unit in sharded._units for s in unit.stretches)


def backward(sharded: UnevenShards, x: Tensor, y: Tensor, parts: int = 1) -> None:
    """This rank's rows, in so many backwards."""
    rank, world = sharded.collectives.rank, sharded.collectives.world
    mine = torch.arange(rank * ROWS // world, (rank + 1) * ROWS // world)
    for index, part in enumerate(mine.chunk(parts)):
        sharded.arm(last=index == parts - 1)
        (F.cross_entropy(sharded.model(x[part]), y[part]) * (len(part) / ROWS)).backward()
    assert all(p.grad is None for p in sharded.model.parameters())


def train(sharded: UnevenShards, clip: float = 1.0, parts: int = 1) -> None:
    for x, y in zip(*data(), strict=True):
        backward(sharded, x, y, parts)
        sharded.start_sums()
        sharded.finish()
        scale = min(1.0, clip / (float(sharded.norm()) + 1e-6)) if clip else 1.0
        assert sharded.has_unused
        sharded.drop_unused()
        sharded.step(scale)
        sharded.share()
        assert gathered_bytes(sharded) == 0


def ours(name: str, weights: Any = None, how: str = "") -> dict[str, Tensor]:
    connect(CPU, 60.0)
    if how == "late":
        slow_down(0.0002)
    recomputing = how == "recomputed by the model"
    model = Net(lambda block, x: checkpoint(block, x, use_reentrant=False)) if recomputing else Net()
    if how == "recomputed":
        switch_on(model, CPU, StepConfig(checkpoint_activations=True))
    sharded = split(model, OPTIMIZERS[name](groups(model)), weights)
    train(sharded, parts=3 if how == "in parts" else 1)
    return whole(sharded)


def assert_same(told: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for found in told:
        assert all(torch.equal(found[name], told[0][name]) for name in expected)
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("name", first_of(OPTIMIZERS))
def test_two_uneven_ranks_train_as_one_process_does(name: str) -> None:
    assert_same(run_ranks(2, ours, name, (3, 1)), plain(name))


@pytest.mark.parametrize("weights", first_of([(1,), (1, 0, 2), (5, 1, 1, 3), (0, 1)], are_single=True))
def test_any_world_and_any_weights(weights: tuple[float, ...]) -> None:
    assert_same(run_ranks(len(weights), ours, "adamw", weights), plain("adamw"))


@pytest.mark.parametrize("how", first_of(["in parts", "recomputed", "recomputed by the model", "late"]))
def test_however_it_computes(how: str) -> None:
    assert_same(run_ranks(2, ours, "adamw", (1, 2), how), plain("adamw"))


@pytest.mark.parametrize("name", first_of(["adamw", "sgd"]))
def test_one_rank_alone_is_the_plain_optimizer_to_the_bit(name: str) -> None:
    """But for clipping, whose norm adds up in another order; and the fused kernel, which rounds last numbers apart."""
    model = Net()
    sharded = split(model, OPTIMIZERS[name](groups(model)))
    train(sharded, clip=0.0)
    found = whole(sharded)
    for name_, expected in plain(name, clip=0.0).items():
        assert torch.equal(found[name_], expected), name_
    assert len(sharded.runs) == len(trained(model))  # each has a state of its own


# Memory


class Tower(nn.Module):
    """Blocks that are nearly all of it, and a frozen layer in each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inwards = nn.Linear(8, 48)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 16).requires_grad_(False), nn.Linear(16, 48))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.inwards(x)
        for block in self.blocks:
            x = block(x)
        return x


def weigh(weights: tuple[float, ...]) -> dict[str, Any]:
    connect(CPU, 60.0)
    model = Tower()
    sharded = split(model, OPTIMIZERS["adamw_fused"]([p for _, p in trained(model)]), weights)
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, gathered_bytes(sharded))

    for block in model.blocks:
        block[1].register_forward_hook(look)
        block[0].register_full_backward_hook(look)
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        between = gathered_bytes(sharded)
        sharded.step()
    return {**held_bytes(sharded), "most": most, "between": between}


def test_each_rank_holds_its_share_and_a_block_or_two() -> None:
    weights = (3, 1, 2)
    model = Tower()
    steps = sum(p.numel() for _, p in trained(model))
    everything = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.blocks[0].parameters())
    root = sum(p.numel() for p in model.inwards.parameters())
    for weight, told in zip(weights, run_ranks(3, weigh, weights), strict=True):
        share = weight / sum(weights)
        assert told["parameters"] == pytest.approx(4 * everything * share, rel=0.05)
        assert told["gradients"] == pytest.approx(4 * steps * share, rel=0.05)
        assert told["state"] == pytest.approx(8 * steps * share, rel=0.05)
        assert told["between"] == 0
        assert told["most"] == 4 * (root + 2 * block)  # the one that computes, and the one that comes next


def test_shares_of_every_type_are_those_of_the_weights() -> None:
    model = Net()
    sharded = split(model, OPTIMIZERS["sgd"](groups(model)), (1,))
    sizes = [stretch.starts[-1] for unit in sharded._units for stretch in unit.stretches if stretch.is_trained]
    assert sum(sizes) == sum(p.numel() for _, p in trained(model))
    assert sum(OptimizerShard.for_weights(0, (3, 1), size).shard_size for size in sizes) == pytest.approx(
        0.75 * sum(sizes), rel=0.05
    )


# What a step leaves


def dropping() -> dict[str, Any]:
    connect(CPU, 60.0)
    (x, *_), (y, *_) = data()
    model = Net()
    sharded = split(model, OPTIMIZERS["adamw"](groups(model)), (2, 1))
    before = whole(sharded)
    backward(sharded, x, y)
    sharded.drop()
    is_same = all(torch.equal(before[name], after) for name, after in whole(sharded).items())
    is_empty = not any(gradient.any() for gradient in sharded.gradients()) and not sharded.optimizer.state
    train(sharded)
    return {"same": is_same, "empty": is_empty, "weights": whole(sharded)}


def test_a_dropped_step_leaves_no_trace() -> None:
    told = run_ranks(2, dropping)
    assert all(rank["same"] and rank["empty"] for rank in told)
    assert_same([rank["weights"] for rank in told], plain("adamw"))


def looking() -> list[Any]:
    connect(CPU, 60.0)
    model = Net()
    sharded = split(model, OPTIMIZERS["sgd"](groups(model)), (2, 1))
    (x, *_), _ = data()
    with torch.no_grad():
        seen = model(x)
    between = gathered_bytes(sharded)
    with torch.no_grad():
        part = model.embed(x)  # without the model around it
    sharded.drop()
    try:
        model.head.weight.isnan()
    except ConfigError as refusal:
        return [seen, part, between, str(refusal)]
    raise AssertionError("a weight that is not here was read")


def test_looking_without_a_backward_keeps_nothing_and_sees_the_model() -> None:
    (x, *_), _ = data()
    with torch.no_grad():
        expected, part = Net()(x), Net().embed(x)
    for told in run_ranks(2, looking):
        assert torch.equal(told[0], expected) and torch.equal(told[1], part)
        assert told[2] == 0 and told[3].startswith("embed.weight was used outside of its module's forward.")


# Models out of the ordinary


@dataclass
class Opaque:
    tensor: Tensor


class Choosy(nn.Module):
    """One block runs three times, one hides its output, and what is used within a block depends on the rows."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor, hidden: bool = False) -> Any:
            y = x + (self.left(x) if x.sum() > 0 else self.right(x)).tanh()
            return Opaque(y) if hidden else y

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(Choosy.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for _ in range(3):
            x = self.blocks[1](x)
        x = self.blocks[2](x, hidden=True).tensor
        return self.blocks[0](x).square().mean()


def choose(world: int) -> dict[str, Tensor]:
    connect(CPU, 60.0)
    model = Choosy()
    sharded = split(model, torch.optim.SGD(model.parameters(), lr=0.1), [1.0] * world)
    for _ in range(3):
        if world == 1:
            (model(torch.ones(2, 5)) + model(-torch.ones(2, 5))).backward()
        else:
            model((-1) ** sharded.collectives.rank * torch.ones(2, 5)).backward()
        sharded.step()
    return whole(sharded)


def test_ranks_may_use_different_parameters_and_blocks_may_run_again() -> None:
    model = Choosy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        (model(torch.ones(2, 5)) + model(-torch.ones(2, 5))).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: p.detach() for name, p in trained(model)}
    assert_same(run_ranks(1, choose, 1), expected)  # two forwards before one backward
    assert_same(run_ranks(2, choose, 2), expected)


def in_bf16() -> list[Any]:
    connect(CPU, 60.0)
    model = Net()
    sharded = split(model, OPTIMIZERS["adamw"](groups(model)), (3, 1), bf16=True)
    losses = []
    for x, y in zip(*data(), strict=True):
        logits = model(x)
        losses.append(F.cross_entropy(logits.float(), y).item())
        F.cross_entropy(logits.float(), y).div(2).backward()
        sharded.step()
    return [str(logits.dtype), str(sharded.runs[0].parameter.dtype), torch.tensor(losses)]


def test_bf16_gathers_halves_and_steps_whole_numbers() -> None:
    model = Net()
    optimizer = OPTIMIZERS["adamw"](groups(model))
    losses = []
    for x, y in zip(*data(), strict=True):
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for computed, stepped, found in run_ranks(2, in_bf16):
        assert (computed, stepped) == ("torch.bfloat16", "torch.float32")
        torch.testing.assert_close(found, torch.tensor(losses), atol=0.05, rtol=0.02)  # eight bits of each number


# Its optimizer, and the engine around it


def test_what_the_optimizer_knew_before_is_kept() -> None:
    (x, *_), (y, *_) = data()
    model, other = Net(), Net()
    optimizer, expected = OPTIMIZERS["adamw"](groups(model)), OPTIMIZERS["adamw"](groups(other))
    for net, own in ((model, optimizer), (other, expected), (other, expected)):
        F.cross_entropy(net(x), y).backward()
        own.step()
        own.zero_grad()
    sharded = split(model, optimizer)
    backward(sharded, x, y)
    sharded.drop_unused()
    sharded.step()
    found = whole(sharded)
    assert all(torch.equal(found[name], p) for name, p in trained(other))


def test_two_optimizers_over_one_parameter_are_refused() -> None:
    model = Net()
    first = split(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"Two optimizers hold .*embed\.weight"):
        split(model, torch.optim.SGD(model.parameters(), lr=0.1))
    del first


def test_optimizers_that_do_not_treat_each_parameter_by_itself_are_refused() -> None:
    model = Net()
    with pytest.raises(ConfigError, match="LBFGS cannot be sharded"):
        split(model, torch.optim.LBFGS(list(model.parameters())))


def test_as_many_weights_as_ranks() -> None:
    model = Net()
    with pytest.raises(ValueError, match="there are 2 weights, and 1 ranks"):
        split(model, torch.optim.SGD(model.parameters(), lr=0.1), (1, 2))


def driver(weights: Any) -> dict[str, Any]:
    """Through the fleet, as a person would."""
    torch.manual_seed(3)
    fleet = potluck.init(strategy=FullShard(weights=weights), step=StepConfig(clip=1.0))
    model = Tower()
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    _, _, loader = fleet.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rows, batch_size=4)
    losses = []
    for batch in loader:
        fleet.backward(model(batch).square().mean(), samples=len(batch))
        losses.append(fleet.step().loss)
    held = fleet.run.prepared().sharded
    fleet.close()
    return {"losses": torch.tensor(losses), "kind": type(held).__name__, "held": held_bytes(held)["state"]}


def test_full_shard_with_weights_is_uneven() -> None:
    alone = run_ranks(1, driver, (1.0,))[0]["losses"]
    uneven, by_memory = run_ranks(2, driver, (3.0, 1.0)), run_ranks(2, driver, "memory")
    for rank in uneven + by_memory:
        assert rank["kind"] == "UnevenShards"
        torch.testing.assert_close(rank["losses"], alone, **CLOSE)
    assert uneven[0]["held"] == pytest.approx(3 * uneven[1]["held"], rel=0.05)


def test_without_weights_torch_splits_it() -> None:
    assert run_ranks(2, by_torch) == ["FullySharded", "FullySharded"]


def by_torch() -> str:
    connect(CPU, 60.0)
    model = Tower()
    return type(shard_over(model, torch.optim.AdamW(model.parameters()), FullShard(), CPU)).__name__


def by_memory() -> dict[str, Any]:
    """Two groups of two ranks, whose free memory is 1, 2, 3 and 4; then stages, each split over two of them."""
    with potluck.init() as fleet:
        rank = dist.get_rank()
        splitting.free_bytes = lambda device: rank + 1
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        shares = []
        for strategy in (ShardGradOp(weights="memory"), FullShard(weights="memory")):
            model = nn.Linear(9, 10, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            split_one = splitting.shard_over(model, optimizer, strategy, CPU, group=groups[rank // 2])
            shares.append(sum(run.parameter.numel() for run in split_one.runs))
        staged = potluck.init(
            Sync(balance=False), ShardGradOp(weights="memory"), stages=Stages(protocol=Direct(), count=2, cuts=(2,))
        )
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = torch.ones(8, 3)
        _, _, loader = staged.prepare(model, optimizer, rows, batch_size=8, loss=squares)
        for batch in loader:
            staged.train(squares, batch)
            staged.step()
        assert staged.run.replica is not None and staged.last_step is not None
        own = staged.run.replica.sharded.runs  # type: ignore[attr-defined]
        fleet.link.gather_rows([0.0])
        return {"shares": shares, "stage": sum(run.parameter.numel() for run in own), "loss": staged.last_step.loss}


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def test_memory_is_weighed_within_the_ranks_that_split_a_replica() -> None:
    told = run_ranks(4, by_memory)
    assert [rank["shares"] for rank in told] == [[30] * 2, [60] * 2, [39] * 2, [51] * 2]
    # Ranks 0 and 2 split the first stage's 12 numbers, 1 and 3 the second's 36.
    assert [rank["stage"] for rank in told] == [3, 12, 9, 24]
    assert all(rank["loss"] == told[0]["loss"] for rank in told)
