"""Several optimizers in one run, as for a GAN: against the plain loop that steps one after the other on each batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import potluck
from potluck import Cadence, Direct, FullShard, NoShard, Pipeline, ShardGradOp, Stages
from potluck.data.rows import mix
from potluck.errors import ConfigError
from potluck.events import StepDone
from potluck.stages import stage_planner
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, BATCH, EPOCHS, CLIP = 22, 8, 2, 0.5  # batches of 8, 8 and 6 rows
BATCHES = EPOCHS * 3


class Gan(nn.Module):
    """Both are in one module, whose forward gives the loss of a turn."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))
        self.forger = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 4))

    def forward(self, batch: Tensor, turn: int) -> Tensor:
        return loss_of(self.judge, self.forger, batch, turn)


def loss_of(judge: nn.Module, forger: nn.Module, batch: Tensor, turn: int) -> Tensor:
    """Not detached: what a loss gives the other's parameters is dropped."""
    real, noise = batch[:, :4], batch[:, 4:]
    told = judge(forger(noise))
    return F.softplus(told).mean() + F.softplus(-judge(real)).mean() if turn == 0 else F.softplus(-told).mean()


def rows() -> Tensor:
    return torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(1))


def build() -> tuple[Gan, list[torch.optim.Optimizer], list[Any]]:
    torch.manual_seed(0)
    model = Gan()
    judge = torch.optim.SGD(model.judge.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
    forger = torch.optim.AdamW(model.forger.parameters(), lr=0.02, weight_decay=0.1)
    schedulers = [CosineAnnealingLR(judge, T_max=BATCHES), OneCycleLR(forger, max_lr=0.04, total_steps=BATCHES + 1)]
    return model, [judge, forger], schedulers


def judged(batches: int = BATCHES) -> dict[str, Any]:
    """In plain PyTorch."""
    model, optimizers, schedulers = build()
    losses = []
    order = [
        part
        for epoch in range(EPOCHS)
        for part in torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch))).split(BATCH)
    ]
    for part in order[:batches]:
        for turn, (optimizer, scheduler) in enumerate(zip(optimizers, schedulers, strict=True)):
            loss = model(rows()[part], turn)
            model.zero_grad()
            loss.backward()
            own = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(own, CLIP)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    return {"weights": dict(model.state_dict()), "losses": losses, "rates": rates}


def train(options: dict[str, Any], stop_after: int = 1 << 30, folder: str | None = None) -> dict[str, Any]:
    model, optimizers, schedulers = build()
    losses: list[float] = []
    with potluck.init(**options, step=potluck.StepConfig(clip=CLIP), patience_s=30) as fleet:
        given = {"batch_size": BATCH, "scheduler": schedulers}
        prepared, back, loader = fleet.prepare(model, optimizers, rows(), **given)
        assert back is optimizers
        if folder is not None:
            fleet.load(folder)
        for _ in fleet.epochs(EPOCHS):
            for batch in loader:
                turn = fleet.turn
                assert turn == fleet.step_number % 2 or options.get("policy") is not None
                fleet.backward(prepared(batch, turn), samples=len(batch))
                if isinstance(event := fleet.step(), StepDone):
                    losses.append(event.loss)
                if fleet.step_number == stop_after and folder is not None:
                    fleet.save(folder)
                    fleet.wait_for_saves()
                    return {"losses": losses}
        proof = fleet.last_epoch
        assert proof is not None and proof.used == ROWS, "each row counts once, however many turns it came in"
        rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
        return {"weights": fleet.state_dict(), "losses": losses, "rates": rates, "steps": fleet.step_number}


def assert_like(found: dict[str, Any], judge: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found["losses"] == pytest.approx(judge["losses"], rel=tolerance)
    assert found["rates"] == pytest.approx(judge["rates"])
    assert found["steps"] == 2 * BATCHES
    for name, tensor in judge["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=tolerance, atol=tolerance)


def test_one_worker_has_the_numbers_of_the_plain_loop() -> None:
    assert_like(train({}), judged(), 1e-6)


@pytest.mark.parametrize(
    "strategy", first_of([NoShard(), FullShard(), ShardGradOp(), FullShard(weights=(3.0, 1.0))]), ids=str
)
def test_two_ranks_have_them_too(strategy: Any) -> None:
    for rank, found in enumerate(run_ranks(2, train, {"strategy": strategy})):
        assert found["rates"] == pytest.approx(judged()["rates"])
        if rank == 0:
            assert_like(found, judged())


def test_a_run_resumes_between_two_turns_of_a_batch(tmp_path: Path) -> None:
    begun = train({}, stop_after=5, folder=str(tmp_path))
    found = run_ranks(2, train, {}, 1 << 30, str(tmp_path))[0]
    assert len(begun["losses"]) == 5, "the third batch has had its first turn"
    assert_like(found | {"losses": begun["losses"] + found["losses"]}, judged())


def train_in_stages(stages: Stages) -> dict[str, Any]:
    stage_planner.MEASURE_S = 0.0  # what a cut is balanced by does not matter here
    model, optimizers, schedulers = build()
    losses: list[float] = []
    with potluck.init(stages=stages, step=potluck.StepConfig(clip=CLIP), patience_s=30) as fleet:

        def loss_in_turn(model: Any, batch: Tensor) -> Tensor:
            return model(batch, fleet.turn)  # type: ignore[no-any-return]

        given = {"batch_size": BATCH, "scheduler": schedulers, "loss": loss_in_turn}
        model, _, loader = fleet.prepare(model, optimizers, rows(), **given)
        held = [name for name, _ in model.named_parameters()]
        for _ in fleet.epochs(EPOCHS):
            for batch in loader:
                fleet.train(loss_in_turn, batch)
                if isinstance(event := fleet.step(), StepDone):
                    losses.append(event.loss)
        rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
        found = {"losses": losses, "rates": rates, "steps": fleet.step_number, "held": held}
        return found | {"weights": fleet.state_dict()}


@pytest.mark.parametrize("stages", first_of([Pipeline(micro_batch_size=2), Direct()]), ids=["pipeline", "direct"])
def test_stages_of_one_model_that_holds_both_have_them_too(stages: Stages) -> None:
    """The judge is asked twice in one forward; a turn's gradients go through the layers of the other."""
    found, other = run_ranks(2, train_in_stages, stages)
    assert_like(found, judged())
    assert other["losses"] == pytest.approx(judged()["losses"], rel=1e-5)
    held = found["held"], other["held"]
    assert all(held) and not set(held[0]) & set(held[1]) and {*held[0], *held[1]} == set(judged()["weights"])


def train_windows(policy: Any) -> dict[str, Any]:
    model, optimizers, _ = build()
    with potluck.init(policy, step=potluck.StepConfig(clip=CLIP), patience_s=30) as fleet:
        _, _, loader = fleet.prepare(model, optimizers, rows(), batch_size=BATCH)
        windows: dict[str, list[Tensor]] = {}
        for _ in fleet.epochs(EPOCHS):
            last: Tensor | None = None
            for number, batch in enumerate(loader):
                assert fleet.turn == number % 2 and (fleet.turn == 0 or batch is last), "each comes twice"
                last = batch
                if fleet.turn == 0:
                    windows.setdefault(str(fleet.version), []).append(batch.clone())
                fleet.backward(model(batch, fleet.turn), samples=len(batch))
                fleet.step()
            assert fleet.last_epoch is not None and fleet.last_epoch.used == ROWS and fleet.last_epoch.same_weights
        assert fleet.step_number == 2 * BATCHES
        return {"weights": dict(model.state_dict()), "windows": windows}


def judged_windows(told: list[dict[str, list[Tensor]]]) -> dict[str, Tensor]:
    """Replicas in turn in one process, over the rows that they were given; their mean by rows after each window."""
    replicas = [build()[:2] for _ in told]
    for window in sorted({key for windows in told for key in windows}, key=int):
        given = [windows.get(window, []) for windows in told]
        for (model, optimizers), batches in zip(replicas, given, strict=True):
            for batch in batches:
                for turn, optimizer in enumerate(optimizers):
                    model.zero_grad()
                    model(batch, turn).backward()
                    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], CLIP)
                    optimizer.step()
        counts = [sum(map(len, batches)) for batches in given]
        states = [model.state_dict() for model, _ in replicas]
        mean = {n: sum(s[n] * c for s, c in zip(states, counts, strict=True)) / sum(counts) for n in states[0]}
        for model, _ in replicas:
            model.load_state_dict(mean)  # type: ignore[arg-type]
    return dict(replicas[0][0].state_dict())


@pytest.mark.parametrize(
    "policy",
    first_of([Cadence.published(anchor=2, max_anchor=2), potluck.Async.published(anchor=1, max_anchor=1)]),
    ids=["cadence", "async"],
)
def test_replicas_that_step_by_themselves_each_take_all_turns_of_their_batches(policy: Any) -> None:
    found = run_ranks(2, train_windows, policy)
    judge = judged_windows([each["windows"] for each in found])
    for each in found:
        for name, tensor in judge.items():
            torch.testing.assert_close(each["weights"][name], tensor, rtol=1e-5, atol=1e-6)


def test_steps_that_all_take_together_between_windows_take_turns_too() -> None:
    """Cadence begins as Sync: here it stays there."""
    found = run_ranks(2, train_windows, Cadence(together=1.0))[0]
    model, optimizers, _ = build()
    for epoch in range(EPOCHS):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch)))
        for part in order.split(BATCH):
            for turn, optimizer in enumerate(optimizers):
                model.zero_grad()
                model(rows()[part], turn).backward()
                nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], CLIP)
                optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-5, atol=1e-6)


class Shell(nn.Module):
    """Of another class than the other model."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)  # type: ignore[no-any-return]


def train_several(strategy: Any) -> dict[str, Tensor]:
    model, optimizers, schedulers = build()
    with potluck.init(strategy=strategy, step=potluck.StepConfig(clip=CLIP), patience_s=30) as fleet:
        given = {"judge": model.judge, "forger": Shell(model.forger)}
        models, _, loader = fleet.prepare(given, optimizers, rows(), batch_size=BATCH, scheduler=schedulers)
        assert models == given and len(loader) == BATCHES
        for _ in fleet.epochs(EPOCHS):
            for batch in loader:
                loss = loss_of(models["judge"], models["forger"], batch, fleet.turn)
                fleet.backward(loss, samples=len(batch))
                fleet.step()
        return fleet.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world"),
    first_of([(NoShard(), 1), (FullShard(), 2), (ShardGradOp(), 2), (FullShard(weights=(2.0, 1.0)), 2)], 2),
)
def test_several_models_are_given_back_as_they_were_given(strategy: Any, world: int) -> None:
    found = run_ranks(world, train_several, strategy)[0]
    for name, tensor in judged()["weights"].items():
        mine = found[name.replace("forger.", "forger.inside.")]
        torch.testing.assert_close(mine, tensor, rtol=1e-5, atol=1e-5)


def test_mistakes_with_several_optimizers_are_told() -> None:
    model, (judge, forger), schedulers = build()
    both = torch.optim.SGD(model.parameters(), lr=0.1)
    with potluck.init() as fleet, pytest.raises(ConfigError, match="Give each parameter to one of them"):
        fleet.prepare(model, [judge, both], rows(), batch_size=BATCH)
    with potluck.init() as fleet, pytest.raises(ConfigError, match="1 scheduler, and there are 2 optimizers"):
        fleet.prepare(model, [judge, forger], rows(), batch_size=BATCH, scheduler=schedulers[:1])
    with potluck.init() as fleet:
        _, _, loader = fleet.prepare(model, [judge, forger], rows(), batch_size=BATCH)
        with pytest.raises(ConfigError, match="for one optimizer's turn, but step"):
            for batch in loader:
                model(batch, 0)
        with pytest.raises(ConfigError, match=r"the turn of optimizer 0, and step\(\) of another was called"):
            forger.step()
