"""Sync with gradients in fewer bits: all ranks have the same bits, those of one process with the same rounding."""

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import HybridShard, NoShard, Sync
from potluck.coded_numbers import CODINGS
from potluck.engine.buckets import GradBuckets
from potluck.errors import ConfigError
from potluck.link.coded_sums import CodedSums, _CodedSum
from potluck.link.link import Done, GroupLink
from tests.parity.test_cadence import whole
from tests.ranks import run_ranks

BLOCKS = {"bf16": (1, 0), "int8": (256, 127), "int4": (64, 7)}
wires = pytest.mark.parametrize("wire", BLOCKS)


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
    return rounded(wire, total)


def numbers_of(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank + 10 * size)) * 10.0 ** (rank - 2)


def sums(wire: str, sizes: list[int], inline: bool) -> dict[str, Any]:
    link = GroupLink(owned=False)
    tensors = [numbers_of(link.rank, size) for size in sizes]
    if inline:
        link.coded = CodedSums(None)
        for tensor in tensors:
            _CodedSum(link.coded, tensor, CODINGS[wire], 0).exchange(None)
    else:
        pending = [link.start_coded_sum(tensor, CODINGS[wire]) for tensor in tensors]
        told = link.gather_rows([float(link.rank)])  # a collective of another thread, in between
        assert told == [[float(rank)] for rank in range(link.world)]
        for each in pending:
            each.wait()
    assert link.coded is not None
    return {"sums": tensors, "bytes": link.coded.sent_bytes}


@wires
@pytest.mark.parametrize("inline", [False, True])
def test_every_rank_has_the_sum_of_what_was_rounded(wire: str, inline: bool) -> None:
    sizes = [1, 63, 64, 5000, 70_001]
    found = run_ranks(3, in_group, wire, sizes, inline)
    for index, size in enumerate(sizes):
        expected = sum_of(wire, [numbers_of(rank, size) for rank in range(3)])
        for rank in range(3):
            assert torch.equal(found[rank]["sums"][index], expected), (size, rank)
    coded = sum(CODINGS[wire].coded_bytes(size) + 6 * CODINGS[wire].record_bytes for size in sizes)
    assert all(each["bytes"] <= 2 * coded * 2 / 3 for each in found)


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
        return {"weights": whole(model), "events": events}


def plain(wire: str, world: int) -> Tensor:
    """One process, plain PyTorch: each rank's gradient by itself, rounded; then their sum, rounded."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = make_data()
    order = bucket_order(model)
    for epoch in range(2):
        for rows in torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).split(12):
            terms = []
            for part in rows.split(12 // world):
                optimizer.zero_grad()
                (F.mse_loss(model(x[part]), y[part]) * (len(part) * 2.0**-4)).backward()
                terms.append(torch.cat([p.grad.reshape(-1) for p in order]))  # type: ignore[union-attr]
            total = sum_of(wire, terms) * (1 / (12 * 2.0**-4))
            for parameter, grad in zip(order, total.split([p.numel() for p in order]), strict=True):
                parameter.grad = grad.view_as(parameter)
            optimizer.step()
    return flat(model)


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
    with pytest.raises(ConfigError, match="wire must be one of fp32, bf16, int8, int4, not 'int3'"):
        potluck.init(wire="int3")  # type: ignore[arg-type]
