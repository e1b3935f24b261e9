"""Sync with gradients in fewer bits: all ranks have the same bits, those of one process with the same rounding."""

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import FullShard, HybridShard, NoShard, ShardGradOp, Sync
from potluck.coded_numbers import CODINGS
from potluck.errors import ConfigError
from potluck.link.coded_sums import ByCollectives, CodedSums, _CodedSum
from potluck.link.link import Done, GroupLink
from potluck.replica.buckets import GradBuckets
from potluck.sharding.collectives import Collectives
from potluck.sharding.fsdp_collectives import CodedScatter
from tests.gathered import sharded_of
from tests.parity.test_cadence import whole
from tests.parity.test_uneven import whole as whole_of_uneven
from tests.quick import first_of
from tests.ranks import run_ranks

BLOCKS = {"bf16": (1, 0), "int8": (256, 127), "int4": (64, 7)}
wires = pytest.mark.parametrize("wire", first_of(BLOCKS))


def rounded(wire: str, numbers: Tensor) -> Tensor:
    """What arrives of them, by the definition. Shares no code with the codec."""
    block, top = BLOCKS[wire]
    if wire == "bf16":
        return numbers.to(torch.bfloat16).float()
    padded = F.pad(numbers, (0, -len(numbers) % block)).view(-1, block)
    scale = (padded.abs().max(dim=1, keepdim=True).values * np.float32(1 / top)).to(torch.bfloat16).float()
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return ((padded * inverse).round() * scale).view(-1)[: len(numbers)]


def rounded_to_levels(numbers: Tensor) -> Tensor:
    """The same of what steps are divided by, where all else travels as int8 or int4."""
    digits, power = torch.frexp(F.pad(numbers, (0, -len(numbers) % 256)).view(-1, 256).double())
    levels = (8 * (power - 2) + torch.floor(16 * digits + 0.5)).clamp(min=8 * -126)
    levels = torch.where(digits > 0, levels, -torch.inf)
    levels = torch.maximum(levels, levels.max(dim=1, keepdim=True).values - 254)
    found = torch.where(digits > 0, torch.exp2(levels // 8) * (8 + levels % 8) / 8, 0.0)
    return found.float().view(-1)[: len(numbers)]


def sum_of(wire: str, terms: list[Tensor]) -> Tensor:
    total = rounded(wire, terms[0])
    for term in terms[1:]:
        total = total + rounded(wire, term)
    return rounded(wire, total) if len(terms) > 2 else total  # two ranks need not send each other the sum


def numbers_of(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank + 10 * size)) * 10.0 ** (rank - 2)


def sums(wire: str, sizes: list[int], inline: bool) -> dict[str, Any]:
    link = GroupLink(owned=False)
    tensors = [numbers_of(link.rank, size) for size in sizes]
    if inline:
        link.coded = CodedSums(None)
        for tensor in tensors:
            _CodedSum(link.coded, tensor, CODINGS[wire], 0).exchange(ByCollectives(link.coded))
    else:
        pending = [link.start_coded_sum(tensor, CODINGS[wire]) for tensor in tensors]
        told = link.gather_rows([float(link.rank)])  # a collective of another thread, in between
        assert told == [[float(rank)] for rank in range(link.world)]
        for each in pending:
            each.wait()
    assert link.coded is not None
    return {"sums": tensors, "bytes": link.coded.sent_bytes}


@wires
@pytest.mark.parametrize("inline", first_of([False, True]))
@pytest.mark.parametrize("world", first_of([2, 3]))
def test_every_rank_has_the_sum_of_what_was_rounded(wire: str, inline: bool, world: int) -> None:
    sizes = [1, 63, 64, 5000, 70_001]
    found = run_ranks(world, in_group, wire, sizes, inline)
    for index, size in enumerate(sizes):
        expected = sum_of(wire, [numbers_of(rank, size) for rank in range(world)])
        for rank in range(world):
            assert torch.equal(found[rank]["sums"][index], expected), (size, rank)
    coded = sum(CODINGS[wire].coded_bytes(size) + 6 * CODINGS[wire].record_bytes for size in sizes)
    assert all(each["bytes"] <= 2 * coded * (world - 1) / world for each in found)


def in_group(wire: str, sizes: list[int], inline: bool) -> dict[str, Any]:
    with potluck.init():
        return sums(wire, sizes, inline)


ROWS, FEATURES = 48, 20


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 70), nn.Tanh(), nn.Linear(70, 3))


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(ROWS, FEATURES, generator=generator), torch.randn(ROWS, 3, generator=generator)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def ours(wire: Any, poison: int = -1, strategy: Any = NoShard()) -> dict[str, Any]:
    with potluck.init(Sync(balance=False), strategy, wire=wire) as fleet:
        model, _, loader = fleet.prepare(
            model := make_model(), torch.optim.AdamW(model.parameters(), lr=1e-2), make_data(), batch_size=12
        )
        events: list[str] = []
        fleet.events.listeners.append(lambda event: events.append(type(event).__name__))
        for epoch in range(2):
            for number, (x, y) in enumerate(loader):
                loss = F.mse_loss(model(x), y)
                if fleet.rank == 1 and epoch == 0 and number == poison:
                    loss = loss * torch.inf
                fleet.backward(loss, samples=len(x))
                fleet.step()
        is_uneven = isinstance(strategy, FullShard) and strategy.weights
        weights = whole_of_uneven(sharded_of(fleet)) if is_uneven else {"": whole(model)}
        return {"weights": torch.cat([one.reshape(-1) for one in weights.values()]), "events": events}


def plain(
    wire: str, world: int, arrives: Callable[[list[Tensor]], Tensor] | None = None, *, by_bucket: bool = True
) -> Tensor:
    """One process, plain PyTorch: each rank's gradient by itself, rounded; then their sum, rounded; or as `arrives`
    has it."""
    arrives = arrives or (lambda terms: sum_of(wire, terms))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = make_data()
    order = bucket_order(model) if by_bucket else list(model.parameters())
    for epoch in range(2):
        for rows in torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).split(12):
            terms = []
            for part in rows.split(12 // world):
                optimizer.zero_grad()
                (F.mse_loss(model(x[part]), y[part]) * (len(part) / 12)).backward()
                terms.append(torch.cat([p.grad.reshape(-1) for p in order]))  # type: ignore[union-attr]
            for parameter, grad in zip(order, arrives(terms).split([p.numel() for p in order]), strict=True):
                parameter.grad = grad.view_as(parameter)
            optimizer.step()
    return flat(model)


def owned_by_range(wire: str, sizes: list[int], terms: list[Tensor]) -> Tensor:
    """Each owner has a range of all parameters end to end, and adds up what each rank has rounded of it."""
    assert sum(sizes) == len(terms[0])
    return torch.cat([added(wire, list(pieces)) for pieces in zip(*(t.split(sizes) for t in terms), strict=True)])


def owned_by_rows(wire: str, terms: list[Tensor]) -> Tensor:
    """Each owner has some rows of each parameter, and as many as the others, be they zeros."""
    shapes, world = [tuple(p.shape) for p in make_model().parameters()], len(terms)

    def rows_of(term: Tensor, rank: int) -> list[Tensor]:
        pieces = term.split([math.prod(shape) for shape in shapes])
        each = [(piece.view(shape), -(-shape[0] // world)) for piece, shape in zip(pieces, shapes, strict=True)]
        return [piece[rank * rows : (rank + 1) * rows] for piece, rows in each]

    found: list[list[Tensor]] = []
    for rank in range(world):
        full = [(-(-shape[0] // world), *shape[1:]) for shape in shapes]
        padded = [
            torch.cat([F.pad(piece.reshape(-1), (0, math.prod(size) - piece.numel())) for piece, size in pairs])
            for pairs in (list(zip(rows_of(term, rank), full, strict=True)) for term in terms)
        ]
        pieces = added(wire, padded).split([math.prod(size) for size in full])
        found.append(
            [piece[: own.numel()].view_as(own) for piece, own in zip(pieces, rows_of(terms[0], rank), strict=True)]
        )
    return torch.cat([torch.cat(ranks).reshape(-1) for ranks in zip(*found, strict=True)])


def added(wire: str, terms: list[Tensor]) -> Tensor:
    total = rounded(wire, terms[0])
    for term in terms[1:]:
        total = total + rounded(wire, term)
    return total


SPLITS: dict[str, tuple[Any, Callable[..., Tensor]]] = {
    "ShardGradOp": (ShardGradOp(), lambda wire, terms: owned_by_range(wire, [561, 561, 561], terms)),
    "whole gradients": (
        ShardGradOp(keep_gradients=True),
        lambda wire, terms: owned_by_range(wire, [561, 561, 561], terms),
    ),
    "uneven": (ShardGradOp(weights=(1.0, 3.0, 2.0)), lambda wire, terms: owned_by_range(wire, [281, 841, 561], terms)),
    "FullShard": (FullShard(), owned_by_rows),
    "HybridShard": (HybridShard(intra_node_size=3), owned_by_rows),
    "uneven FullShard": (
        FullShard(weights=(1.0, 3.0, 2.0)),
        lambda wire, terms: owned_by_range(wire, [281, 841, 561], terms),
    ),
}


@pytest.mark.parametrize("split", first_of(SPLITS))
@pytest.mark.parametrize("wire", first_of(["int8", "int4"]))
def test_ranks_of_one_replica_send_coded_gradients_to_their_owners(wire: str, split: str) -> None:
    strategy, judge = SPLITS[split]
    found = run_ranks(3, ours, wire, -1, strategy)
    assert all(torch.equal(found[0]["weights"], each["weights"]) for each in found)
    expected = plain(wire, 3, lambda terms: judge(wire, terms), by_bucket=False)
    assert torch.equal(found[0]["weights"], expected)


def test_collectives_of_a_stream_scatter_the_same_bits() -> None:
    for each in run_ranks(3, scattered):
        assert torch.equal(each[0], each[1])


def scattered() -> tuple[Tensor, Tensor]:
    with potluck.init() as fleet:
        ranks = Collectives()
        ranks.coding = CODINGS["int4"]
        terms = [numbers_of(rank, 3 * 1000).view(3, -1)[fleet.rank].clone() for rank in range(3)]
        found, world = torch.empty(1000), dist.group.WORLD
        assert world is not None
        CodedScatter(ranks)(found, numbers_of(fleet.rank, 3 * 1000), world, dist.ReduceOp.SUM)
        return found, added("int4", terms)


def bucket_order(model: nn.Module) -> list[nn.Parameter]:
    (bucket,) = GradBuckets(model, [], lambda tensor: Done()).buckets
    return bucket.parameters


@wires
def test_weights_are_those_of_one_process_with_the_same_rounding(wire: str) -> None:
    found = run_ranks(3, ours, wire)
    assert torch.equal(found[0]["weights"], found[1]["weights"]) and torch.equal(
        found[0]["weights"], found[2]["weights"]
    )
    assert torch.equal(found[0]["weights"], plain(wire, 3))


@wires
def test_nodes_send_each_other_coded_gradients(wire: str) -> None:
    found = run_ranks(4, ours, wire, -1, HybridShard(intra_node_size=2))
    assert all(torch.equal(found[0]["weights"], each["weights"]) for each in found)
    exact, expected = run_ranks(2, ours, "fp32")[0]["weights"], flat(make_model())
    moved, off = (exact - expected).norm(), (found[0]["weights"] - exact).norm()
    assert 0 < off / moved < {"bf16": 0.05, "int8": 0.1, "int4": 0.5}[wire]


@wires
def test_a_gradient_that_is_not_finite_makes_all_skip_the_step(wire: str) -> None:
    found = run_ranks(2, ours, wire, 2)
    assert [each["events"].count("StepSkipped") for each in found] == [1, 1]
    assert torch.equal(found[0]["weights"], found[1]["weights"]) and found[0]["weights"].isfinite().all()


def test_all_must_send_in_the_same_form() -> None:
    found = run_ranks(2, one_differs)
    assert all("wire = " in each for each in found)


def one_differs() -> str:
    try:
        ours("int8" if os.environ["RANK"] == "0" else "bf16")
    except ConfigError as error:
        return str(error)
    return ""


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="wire must be one of fp32, bf16, int8, int4, auto, not 'int3'"):
        potluck.init(wire="int3")  # type: ignore[arg-type]
