"""ShardGradOp with one slow rank: whoever reads or writes parameters, and by whatever way, has those of one process."""

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune

import potluck
from potluck import NoShard, ShardGradOp, StepConfig
from potluck.data.rows import mix
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, BATCH, EPOCHS = 24, 8, 2
LATE_S = 0.05
FORMS = {"even": ShardGradOp(), "weights": ShardGradOp(weights=(5.0, 2.0)), "kept": ShardGradOp(keep_gradients=True)}


class Attention(nn.Module):
    """MultiheadAttention never calls its out_proj, and TransformerEncoderLayer may call none of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.leave = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).unsqueeze(1).repeat(1, 2, 1)
        h = self.attention(h, h, h, need_weights=False)[0]
        return self.leave(self.layer(h)[:, 0])  # type: ignore[no-any-return]


class Lists(nn.Module):
    """Lists and tables of parameters are never called, and a parent may use its child's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.child, self.leave = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.each = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))])
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.ones(8))})

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x)) * self.each[0] + self.each[1]
        return self.leave(F.linear(h, self.child.weight, self.child.bias) * self.table["a"])  # type: ignore[no-any-return]


class Changed(nn.Module):
    """Hooks of others, which change a weight before its module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.utils.weight_norm(nn.Linear(4, 8))
        self.middle = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.leave = nn.Linear(8, 1)
        prune.custom_from_mask(self.leave, "weight", torch.arange(8).remainder(2).view(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.middle(torch.tanh(self.enter(x)))))  # type: ignore[no-any-return]


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        smaller = {name: 0.9 * parameter for name, parameter in self.inner.named_parameters()}
        return self.leave(functional_call(self.inner, smaller, torch.tanh(self.enter(x))))  # type: ignore[no-any-return]


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


class Habit:
    """What a loop does after each step, and what it keeps."""

    def __init__(self, model: nn.Module) -> None:
        self.kept: dict[str, Tensor] = {}

    def after(self, model: nn.Module) -> None:
        pass


class OwnAverage(Habit):
    """Of references that were taken once, to parameters and to what a state_dict says of them."""

    def __init__(self, model: nn.Module) -> None:
        self.held, self.live = list(model.parameters()), model.state_dict()
        self.kept = {name: tensor.clone() for name, tensor in self.live.items()}
        self.sums = [torch.zeros(()).double() for _ in self.held]

    def after(self, model: nn.Module) -> None:
        for name, tensor in self.live.items():
            self.kept[name].lerp_(tensor, 0.5)
        for index, (total, parameter) in enumerate(zip(self.sums, self.held, strict=True)):
            total.add_(parameter.data.sum())
            self.kept[f"sum {index}"] = total


class Copies(Habit):
    def after(self, model: nn.Module) -> None:
        self.kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        probe = copy.deepcopy([parameter.detach() for parameter in model.parameters()])
        self.kept |= {f"copy {index}": tensor for index, tensor in enumerate(probe)}


class ClampData(Habit):
    def after(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class ClampInPlace(Habit):
    @torch.no_grad()
    def after(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)
        next(model.parameters()).mul_(0.9)


class Rebound(Habit):
    """Weights are put back to what they were: as lookahead optimizers and Reptile do it."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def after(self, model: nn.Module) -> None:
        halfway = {name: (tensor + self.kept[name]) / 2 for name, tensor in model.state_dict().items()}
        model.load_state_dict(halfway)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "lists": Lists,
    "changed": Changed,
    "functional": Functional,
}
HABITS: dict[str, type[Habit]] = {
    "own average": OwnAverage,
    "copies": Copies,
    "clamp data": ClampData,
    "clamp in place": ClampInPlace,
    "rebound": Rebound,
}


def make(model: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = MODELS.get(model, plain_net)().double()
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def rows() -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True).sin()


def judged(kind: str) -> dict[str, Tensor]:
    """In plain PyTorch."""
    torch.set_num_threads(1)
    model, optimizer = make(kind)
    habit = HABITS.get(kind, Habit)(model)
    x, y = rows()
    for epoch in range(EPOCHS):
        for part in torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch))).split(BATCH):
            optimizer.zero_grad()
            (model(x[part]) - y[part]).square().mean().backward()
            optimizer.step()
            habit.after(model)
    return habit.kept | {f"model {name}": tensor for name, tensor in model.state_dict().items()}


def ours(kinds: list[str], strategy: Any, offload: bool = False) -> list[dict[str, Tensor]]:
    found, meeting = [], os.environ["POTLUCK_RENDEZVOUS"]
    for kind in kinds:
        os.environ["POTLUCK_RENDEZVOUS"] = f"{meeting} {kind}"
        model, optimizer = make(kind)
        policy, config = potluck.Sync(balance=False), StepConfig(offload_optimizer=offload)
        with potluck.init(strategy=strategy, policy=policy, step=config, patience_s=60) as fleet:
            if fleet.rank == fleet.world - 1:  # it is late with what it owns
                optimizer.register_step_post_hook(lambda *_: time.sleep(LATE_S))
            model, _, loader = fleet.prepare(model, optimizer, rows(), batch_size=BATCH)
            habit = HABITS.get(kind, Habit)(model)
            for _ in fleet.epochs(EPOCHS):
                for x, y in loader:
                    fleet.backward((model(x) - y).square().mean(), samples=len(x))
                    fleet.step()
                    habit.after(model)
            found.append(habit.kept | {f"model {name}": tensor for name, tensor in model.state_dict().items()})
    return found


def check(kinds: list[str], strategy: Any, **options: bool) -> None:
    for told in run_ranks(2, ours, kinds, strategy, *options.values()):
        for kind, found in zip(kinds, told, strict=True):
            torch.testing.assert_close({kind: found}, {kind: judged(kind)}, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("form", first_of(FORMS))
def test_a_forward_reads_what_arrives_late_by_any_way(form: str) -> None:
    check([*MODELS], FORMS[form])


@pytest.mark.parametrize("form", first_of(FORMS))
def test_a_loop_reads_and_writes_weights_between_steps(form: str) -> None:
    check([*HABITS], FORMS[form])


@pytest.mark.parametrize("strategy", first_of([NoShard(), ShardGradOp()]), ids=["whole", "split"])
def test_what_a_loop_writes_counts_where_the_optimizer_is_in_host_memory(strategy: Any) -> None:
    check(["clamp data", "rebound"], strategy, offload=True)


def clamped(folder: str, kind: str) -> dict[str, dict[str, Tensor]]:
    """After the last step a loop writes into the weights, and whoever reads them then reads that."""
    torch.manual_seed(0)
    model = plain_net().double()
    free = kind == "schedulefree"
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if free:
        import schedulefree

        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
        optimizer.train()
    with potluck.init(strategy=ShardGradOp(), step=StepConfig(offload_optimizer=True), patience_s=60) as fleet:
        model, _, loader = fleet.prepare(model, optimizer, rows(), batch_size=BATCH)
        for _ in fleet.epochs(1):
            for x, y in loader:
                fleet.backward((model(x) - y).square().mean(), samples=len(x))
                fleet.step()
        ClampData(model).after(model)
        if free:  # which puts a mean of them into their place, and then themselves again
            fleet.evaluate(lambda m, batch: (m(batch[0]) - batch[1]).square().mean(), rows(), BATCH)
        found = {"as they are": {name: tensor.clone() for name, tensor in model.state_dict().items()}}
        if not free:  # of which it tells the mean
            found["told"] = fleet.state_dict()
        fleet.save(folder)
        fleet.wait_for_saves()
        ClampInPlace(model).after(model)  # which what is loaded takes the place of
        fleet.load(folder)
        found["loaded"] = dict(model.state_dict())
    return found


@pytest.mark.parametrize("kind", first_of(["torch", "schedulefree"]))
def test_what_a_loop_writes_after_the_last_step_is_saved(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(kind)
    for found in run_ranks(2, clamped, str(tmp_path), kind):
        as_they_are = found.pop("as they are")
        assert max(tensor.abs().max() for tensor in as_they_are.values()) == 0.2
        for how, told in found.items():
            if told:  # fleet.state_dict() has the weights on one rank
                torch.testing.assert_close({how: told}, {how: as_they_are}, atol=0, rtol=0)
