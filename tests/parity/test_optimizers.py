"""Optimizers that are not elementwise, or have other weights for looking: against plain PyTorch, however split."""

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import potluck
from potluck import Cadence, FullShard, HybridShard, JointOptimizer, NoShard, ShardGradOp
from potluck.data.rows import mix
from potluck.errors import ConfigError
from potluck.events import Noticed
from potluck.sharding.optimizer_traits import is_elementwise
from potluck.sharding.whole_steps import check_can_split
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, BATCH, EPOCHS = 40, 8, 2
STEPS = EPOCHS * ROWS // BATCH
SPLITS = [FullShard(), ShardGradOp(), FullShard(weights=(3.0, 1.0))]


class Net(nn.Module):
    """One matrix has the 4,096 numbers from which on 8-bit optimizers code what they keep."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.leave = nn.Linear(64, 3, bias=False)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.leave(x)  # type: ignore[no-any-return]


class Lion(torch.optim.Optimizer):
    """As published: the sign of a mean of gradients."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(mean.lerp(p.grad, 1 - group["betas"][0]).sign_(), alpha=-group["lr"])
                mean.lerp_(p.grad, 1 - group["betas"][1])


KnownLion = type("Lion", (Lion,), {"__module__": "lion_pytorch.lion_pytorch", "__qualname__": "Lion"})
"""What has this name in the package that most people have it from does the same; its cautious one, which takes a mean
over each parameter, has another."""


class Lamb(torch.optim.Optimizer):
    """As published: Adam, times the ratio of a parameter's norm to its step's. It counts in Python."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].lerp_(p.grad.square(), 0.001)
                mean = state["exp_avg"] / (1 - 0.9 ** state["step"])
                wide = (state["exp_avg_sq"] / (1 - 0.999 ** state["step"])).sqrt() + 1e-6
                move = mean / wide + 0.01 * p
                own, other = p.norm(), move.norm()
                ratio = (own / other).item() if own > 0 and other > 0 else 1.0
                p.add_(move, alpha=-group["lr"] * ratio)


class CentredSGD(torch.optim.SGD):
    """Derived from an elementwise one, and not elementwise: the mean of each row's gradient is taken off."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        return super().step(closure)


class OwnDefaults(torch.optim.AdamW):
    """Derived from an elementwise one, with settings of its own alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01, weight_decay=0.1)


OWN = {"lion": Lion, "known lion": KnownLion, "lamb": Lamb, "centred": CentredSGD, "defaults": OwnDefaults}


def build(kind: str) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    if kind == "muon":
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() != 2]
        return model, JointOptimizer(torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(vectors, lr=0.01))
    if kind in OWN:
        return model, OWN[kind](model.parameters())
    if kind == "adafactor":
        return model, torch.optim.Adafactor(model.parameters(), lr=0.01)
    module, _, name = {
        "free": "schedulefree.AdamWScheduleFree",
        "bnb": "bitsandbytes.optim.AdamW8bit",
        "ao": "torchao.optim.AdamW8bit",
    }[kind].rpartition(".")
    return model, getattr(importlib.import_module(module), name)(model.parameters(), lr=0.01)


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 8, generator=draw), torch.randint(0, 3, (ROWS,), generator=draw)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def schedulers_of(optimizer: torch.optim.Optimizer) -> list[Any] | None:
    if not isinstance(optimizer, JointOptimizer):
        return None
    return [CosineAnnealingLR(each, T_max=STEPS) for each in optimizer.each]


def judged(kind: str) -> dict[str, Any]:
    """In plain PyTorch."""
    torch.set_num_threads(1)
    model, optimizer = build(kind)
    schedulers, losses = schedulers_of(optimizer) or [], []
    x, y = data()
    if kind == "free":
        optimizer.train()  # type: ignore[attr-defined]
    for epoch in range(EPOCHS):
        for part in torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch))).split(BATCH):
            optimizer.zero_grad()
            loss = loss_of(model, (x[part], y[part]))
            loss.backward()
            for each in optimizer.each if isinstance(optimizer, JointOptimizer) else [optimizer]:
                each.step()
            for scheduler in schedulers:
                scheduler.step()
            losses.append(loss.item())
    if kind == "free":
        optimizer.eval()  # type: ignore[attr-defined]
    with torch.no_grad():
        seen = loss_of(model, (x, y)).item()
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "losses": losses,
        "seen": seen,
    }


def train(kind: str, options: dict[str, Any], folder: str = "", stop_after: int = 1 << 30) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, optimizer = build(kind)
    losses, seen, heard = [], [], []
    with potluck.init(**options, patience_s=60) as fleet:
        fleet.events.listeners.append(lambda each: heard.append(each.sentence) if isinstance(each, Noticed) else None)
        given = {"batch_size": BATCH, "scheduler": schedulers_of(optimizer)}
        prepared, _, loader = fleet.prepare(model, optimizer, data(), **given)
        if folder:
            fleet.load(folder)
        for _ in fleet.epochs(EPOCHS):
            for batch in loader:
                fleet.backward(loss_of(prepared, batch), samples=len(batch[0]))
                if (event := fleet.step()) is not None:
                    losses.append(event.loss)
                if fleet.step_number == stop_after:
                    fleet.save(folder)
                    fleet.wait_for_saves()
                    return {"losses": losses}
        seen.append(fleet.evaluate(loss_of, data(), BATCH))
        return {"weights": fleet.state_dict(), "losses": losses, "seen": seen[0], "heard": heard}


def assert_like(found: dict[str, Any], judge: dict[str, Any], tolerance: float) -> None:
    assert found["losses"] == pytest.approx(judge["losses"], rel=tolerance)
    assert found["seen"] == pytest.approx(judge["seen"], rel=tolerance)
    for name, tensor in judge["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=tolerance, atol=tolerance)


TOLERANCE = {"muon": 2e-3, "adafactor": 1e-4, "free": 1e-4, "bnb": 5e-3, "ao": 5e-3} | dict.fromkeys(OWN, 1e-4)
"""Muon computes in bfloat16, and 8-bit ones round: a last bit of a gradient may make another code of it."""


def test_muon_under_every_split_and_from_one_to_another(tmp_path: Path) -> None:
    judge = judged("muon")
    assert_like(train("muon", {}), judge, 1e-6)
    for strategy in (NoShard(), FullShard()):
        assert_like(run_ranks(2, train, "muon", {"strategy": strategy})[0], judge, TOLERANCE["muon"])
    begun = run_ranks(2, train, "muon", {"strategy": FullShard()}, str(tmp_path), 5)[0]
    found = train("muon", {}, str(tmp_path))
    assert_like(found | {"losses": begun["losses"] + found["losses"]}, judge, TOLERANCE["muon"])


@pytest.mark.parametrize("strategy", first_of(SPLITS, 0), ids=str)
@pytest.mark.parametrize("kind", ["muon", "adafactor", "free", "bnb"])
def test_any_optimizer_under_any_split(kind: str, strategy: Any) -> None:
    check_installed(kind)
    found = run_ranks(2, train, kind, {"strategy": strategy}, timeout_s=110)
    assert_like(found[0], judged(kind), TOLERANCE[kind])


@pytest.mark.parametrize("strategy", first_of([ShardGradOp(), FullShard(), FullShard(weights=(3.0, 1.0))]), ids=str)
@pytest.mark.parametrize("kind", first_of(["lamb", "lion", "known lion", "centred", "defaults"]))
def test_optimizers_of_ones_own_step_whole_parameters_and_are_saved(kind: str, strategy: Any, tmp_path: Path) -> None:
    """Begun split, and ended on one rank from its checkpoint."""
    judge = judged(kind)
    begun = run_ranks(2, train, kind, {"strategy": strategy}, str(tmp_path / "split"), 5)[0]
    shutil.copytree(tmp_path / "split", tmp_path / "whole")
    found = run_ranks(2, train, kind, {"strategy": strategy}, str(tmp_path / "split"))[0]
    assert_like(found | {"losses": begun["losses"] + found["losses"]}, judge, TOLERANCE[kind])
    found = train(kind, {}, str(tmp_path / "whole"))
    assert_like(found | {"losses": begun["losses"] + found["losses"]}, judge, TOLERANCE[kind])


def test_which_optimizers_step_numbers_parameters_or_neither() -> None:
    parameters = list(Net().parameters())

    class NormOfAll(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
            return super().step(closure)

    class Chance(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                p.grad.add_(torch.randn_like(p))
            return super().step(closure)

    class Around(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            self.inner = torch.optim.SGD(self.param_groups, lr=0.1)

    class Closure(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()

    assert is_elementwise(KnownLion(parameters)) and not is_elementwise(Lion(parameters))
    assert is_elementwise(OwnDefaults(parameters)) and not is_elementwise(CentredSGD(parameters, lr=0.1))
    for kind in (Lion, Lamb, CentredSGD, OwnDefaults):
        optimizer: Any = kind(parameters, lr=0.0) if kind is CentredSGD else kind(parameters)
        before = [parameter.clone() for parameter in parameters]
        check_can_split(optimizer)
        assert not optimizer.state and getattr(optimizer, "calls", 0) == 0
        assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    for kind, why in (
        (NormOfAll, "depends on the other parameters"),
        (Chance, "or on chance"),
        (Around, "self.inner"),
        (Closure, "ended with TypeError"),
    ):
        with pytest.raises(ConfigError, match=f"{kind.__name__} cannot be sharded.*{why}"):
            check_can_split(kind(parameters))


@pytest.mark.slow
def test_muon_in_nodes() -> None:
    found = run_ranks(4, train, "muon", {"strategy": HybridShard(intra_node_size=2)})
    assert_like(found[0], judged("muon"), TOLERANCE["muon"])


def check_installed(kind: str) -> None:
    pytest.importorskip({"free": "schedulefree", "bnb": "bitsandbytes", "ao": "torchao"}.get(kind, "torch"))


@pytest.mark.parametrize("kind", first_of(["free", pytest.param("bnb", marks=pytest.mark.slow), "adafactor"]))
def test_on_whole_replicas_and_from_a_checkpoint(kind: str, tmp_path: Path) -> None:
    check_installed(kind)
    judge = judged(kind)
    begun = train(kind, {}, str(tmp_path), 5)
    found = train(kind, {}, str(tmp_path))
    assert_like(found | {"losses": begun["losses"] + found["losses"]}, judge, 1e-5)
    assert_like(run_ranks(2, train, kind, {})[0], judge, TOLERANCE[kind])


@pytest.mark.slow
def test_torchao_keeps_its_codes_from_checkpoint_to_checkpoint(tmp_path: Path) -> None:
    """Its step is compiled, which takes a while on a CPU."""
    check_installed("ao")
    judge = judged("ao")
    begun = train("ao", {}, str(tmp_path), 5)
    found = train("ao", {}, str(tmp_path))
    assert_like(found | {"losses": begun["losses"] + found["losses"]}, judge, 1e-5)
    assert_like(run_ranks(2, train, "ao", {"strategy": FullShard()}, timeout_s=110)[0], judge, TOLERANCE["ao"])


def look_often(kind: str) -> dict[str, Any]:
    model, optimizer = build(kind)
    with potluck.init() as fleet:
        model, _, loader = fleet.prepare(model, optimizer, data(), batch_size=BATCH)  # type: ignore[assignment]
        for _ in fleet.epochs(EPOCHS):
            for batch in loader:
                fleet.backward(loss_of(model, batch), samples=len(batch[0]))
                fleet.step()
                fleet.evaluate(loss_of, data(), BATCH)
                fleet.state_dict()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("strategy", first_of([NoShard(), ShardGradOp()]))
def test_a_look_is_right_where_the_optimizer_steps_in_host_memory(strategy: Any) -> None:
    check_installed("free")
    step = potluck.StepConfig(offload_optimizer=True)
    found = run_ranks(2, train, "free", {"strategy": strategy, "step": step})[0]
    assert_like(found, judged("free"), TOLERANCE["free"])


def test_a_look_between_steps_changes_no_bit() -> None:
    check_installed("free")
    model, optimizer = build("free")
    with potluck.init() as fleet:
        model, _, loader = fleet.prepare(model, optimizer, data(), batch_size=BATCH)  # type: ignore[assignment]
        for _ in fleet.epochs(EPOCHS):
            for batch in loader:
                fleet.backward(loss_of(model, batch), samples=len(batch[0]))
                fleet.step()
    for name, tensor in look_often("free").items():
        assert torch.equal(tensor, model.state_dict()[name])


@pytest.mark.parametrize("kind", ["adafactor", pytest.param("bnb", marks=pytest.mark.slow)])
def test_what_has_no_mean_stays_each_replicas_own_and_is_told(kind: str) -> None:
    check_installed(kind)
    policy = Cadence(anchor=1, max_anchor=2, together=0.0)
    found = run_ranks(2, train, kind, {"policy": policy})
    assert sum("has no mean, so policy.moments has no effect" in each for each in found[0]["heard"]) == 1
    assert all(tensor.isfinite().all() for tensor in found[0]["weights"].values())


def test_what_lies_with_one_of_the_ranks_that_split_a_parameter_is_each_replicas_own_and_is_told() -> None:
    policy = Cadence(anchor=1, max_anchor=2, together=0.0)
    found = run_ranks(4, train, "centred", {"policy": policy, "strategy": HybridShard(intra_node_size=2)})
    told = (
        "What CentredSGD keeps of a parameter lies with one of the ranks that split it, so policy.moments has no effect"
    )
    assert sum(told in each for each in found[0]["heard"]) == 1
