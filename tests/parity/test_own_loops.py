"""A loop of one's own: epochs, schedulers and kept state, against plain PyTorch with the same scheduler."""

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as lr

import potluck
from potluck.engine.checkpointing import position_as_json, restore_position
from potluck.errors import CheckpointError, ConfigError, Interrupted
from potluck.events import EpochDone
from potluck.save import checkpoint_folder
from potluck.stages import stage_planner
from tests.gathered import gathered, home
from tests.parity.test_sync import STILL
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, BATCH, EPOCHS = 30, 8, 3
STEPS = EPOCHS * -(-ROWS // BATCH)

SCHEDULERS: dict[str, Any] = {
    "cosine": lambda o: lr.CosineAnnealingLR(o, T_max=STEPS),
    "one cycle": lambda o: lr.OneCycleLR(o, max_lr=0.1, total_steps=STEPS),
    "milestones": lambda o: lr.MultiStepLR(o, milestones=[2, 5, 7], gamma=0.3),
    "sequence": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, start_factor=0.1, total_iters=3), lr.ExponentialLR(o, gamma=0.8)], milestones=[3]
    ),
    "chained": lambda o: lr.ChainedScheduler(
        [lr.ConstantLR(o, factor=0.5, total_iters=4), lr.ExponentialLR(o, gamma=0.9)]
    ),
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cyclic": lambda o: lr.CyclicLR(o, base_lr=0.001, max_lr=0.1, step_size_up=3),
}


def make() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(4)
    draw = torch.Generator().manual_seed(2)
    data = torch.randn(ROWS, 4, generator=draw), torch.randn(ROWS, 2, generator=draw)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), data


def plain(name: str) -> tuple[list[list[float]], torch.Tensor]:
    """What PyTorch alone does: rate and momentum at each step, and after the last; and the weights."""
    model, optimizer, (x, y) = make()
    scheduler = SCHEDULERS[name](optimizer)
    told = []
    for epoch in range(EPOCHS):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(BATCH):
            told.append(settings(optimizer))
            optimizer.zero_grad()
            F.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
            scheduler.step()
    return [*told, settings(optimizer)], flat(model)


def settings(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(optimizer.param_groups[0][name]) for name in ("lr", "momentum")]


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def train(
    name: str = "cosine", policy: Any = STILL, *, folder: str = "", stop_at: int = 0, strategy: Any = potluck.NoShard()
) -> dict[str, Any]:
    with potluck.init(policy, strategy) as fleet:
        model, optimizer, data = make()
        scheduler = SCHEDULERS[name](optimizer)
        model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH, scheduler=scheduler)
        told: list[Any] = []
        after: list[int] = []
        fleet.after_step.append(lambda: after.append(fleet.step_number))
        loaded = bool(folder) and fleet.load(folder)
        said = ""
        epochs = []
        try:
            for epoch in fleet.epochs(EPOCHS):
                epochs.append(epoch)
                for x, y in loader:
                    fleet.backward(F.mse_loss(model(x), y), samples=len(x))
                    told.append(settings(optimizer))
                    fleet.step()
                    if fleet.step_number == stop_at:
                        os.kill(os.getpid(), signal.SIGINT)
        except Interrupted as error:
            said = str(error)
        return {
            "told": [*told, settings(optimizer)],
            "after": after,
            "epochs": epochs,
            "steps": fleet.step_number,
            "weights": flat(model) if isinstance(strategy, potluck.NoShard) else None,
            "loaded": loaded,
            "said": said,
        }


@pytest.mark.parametrize("name", first_of(SCHEDULERS))
def test_a_scheduler_is_where_plain_pytorch_has_it_at_every_step(name: str) -> None:
    expected, weights = plain(name)
    found = train(name)
    assert found["told"] == expected
    assert found["after"] == list(range(1, STEPS + 1))
    torch.testing.assert_close(found["weights"].cpu(), weights, rtol=0, atol=1e-6 if home().type == "cpu" else 1e-5)


@pytest.mark.parametrize("strategy", first_of([potluck.NoShard(), potluck.ShardGradOp(), potluck.FullShard()]))
def test_a_scheduler_on_two_workers_is_that_of_one(strategy: Any) -> None:
    expected, weights = plain("one cycle")
    for found in run_ranks(2, train_by, strategy):
        assert found["told"] == expected
        if found["weights"] is not None:
            torch.testing.assert_close(found["weights"], weights, rtol=0, atol=1e-6)


def train_by(strategy: Any) -> dict[str, Any]:
    return train("one cycle", strategy=strategy)


def test_stages_are_scheduled_alike() -> None:
    expected, _ = plain("one cycle")
    for found in run_ranks(2, staged):
        assert found["told"] == expected and found["epochs"] == [0, 1, 2]


def staged() -> dict[str, Any]:
    with potluck.init(STILL, stages=potluck.Pipeline(micro_batch_size=BATCH), patience_s=30) as fleet:
        model, optimizer, data = make()
        scheduler = SCHEDULERS["one cycle"](optimizer)
        model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH, loss=loss_of, scheduler=scheduler)
        told, epochs = [], []
        for epoch in fleet.epochs(EPOCHS):
            epochs.append(epoch)
            for batch in loader:
                told.append(settings(optimizer))
                fleet.train(loss_of, batch)
                fleet.step()
        return {"told": [*told, settings(optimizer)], "epochs": epochs}


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def test_what_is_kept_also_travels_where_there_are_no_files() -> None:
    """As copies in memory and in a store have it: as JSON."""
    fleet = potluck.init()
    model, optimizer, data = make()
    scheduler = SCHEDULERS["milestones"](optimizer)
    model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH, scheduler=scheduler)
    for x, y in loader:
        fleet.backward(F.mse_loss(model(x), y), samples=len(x))
        fleet.step()
    fleet.state["ema"] = torch.eye(2)
    told = json.loads(json.dumps(position_as_json(fleet.run)))
    expected = settings(optimizer), scheduler.last_epoch, dict(scheduler.milestones)
    fleet.state["ema"] = torch.zeros(2, 2)
    scheduler.step()
    restore_position(fleet.run, told)
    assert (settings(optimizer), scheduler.last_epoch, dict(scheduler.milestones)) == expected
    assert torch.equal(fleet.state["ema"], torch.eye(2))


def test_an_object_of_ones_own_is_saved_as_it_is_then_and_loaded_wherever_the_run_is_put(tmp_path: Path) -> None:
    fleet = potluck.init()
    model, optimizer, data = make()
    fleet.prepare(model, optimizer, data, batch_size=BATCH)
    own, loaded = {"seen": torch.zeros(1)}, []
    fleet.kept("mine", lambda: dict(own), loaded.append)
    fleet.save(tmp_path / "early")
    own["seen"] = torch.ones(1)
    fleet.save(tmp_path / "late")
    assert fleet.load(tmp_path / "early") and fleet.load(tmp_path / "late")
    assert [float(each["seen"]) for each in loaded] == [0.0, 1.0]
    restore_position(fleet.run, {**position_as_json(fleet.run), "kept": None})  # as checkpoints of earlier versions are
    assert len(loaded) == 3
    with pytest.raises(ConfigError, match="object"):
        fleet.kept("wrong", lambda: object(), loaded.append)
        fleet.save(tmp_path / "late")


def test_only_the_checkpoint_of_the_best_step_is_marked_as_the_best(tmp_path: Path) -> None:
    fleet = potluck.init()
    model, optimizer, data = make()
    model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH)
    for x, y in loader:
        fleet.backward(F.mse_loss(model(x), y), samples=len(x))
        fleet.step()
        if fleet.step_number == 2:
            fleet.loop.best = (2, 0.25)
        fleet.save(tmp_path, keep_last=1)
    fleet.wait_for_saves()
    kept = checkpoint_folder.found(tmp_path)
    assert [path.name[-1] for path in kept] == [str(fleet.step_number)[-1], "2"]
    assert checkpoint_folder.best_of(kept) == kept[1]


def test_a_stopped_loop_is_saved_and_trains_the_rest_and_no_more(tmp_path: Path) -> None:
    """The scheduler and the position are in the checkpoint: B8 of the trial."""
    for name in SCHEDULERS:
        expected, _ = plain(name)
        whole = train(name)
        stopped = train(name, folder=str(tmp_path / name), stop_at=5)
        assert stopped["steps"] == 6 and not stopped["loaded"], "the step in which all hear of it is the last"
        assert f"Stopped after step 6. Saved in {tmp_path / name}" in stopped["said"]
        again = train(name, folder=str(tmp_path / name))
        assert again["loaded"] and again["epochs"] == [1, 2] and again["steps"] == STEPS
        assert stopped["told"][:6] + again["told"] == expected
        assert torch.equal(again["weights"], whole["weights"])
        done = train(name, folder=str(tmp_path / name))
        assert done["epochs"] == [] and done["steps"] == STEPS and torch.equal(done["weights"], whole["weights"])


def of_habit(name: str) -> tuple[list[list[float]], torch.Tensor]:
    """A loop that clears, steps and schedules as a plain one does."""
    with potluck.init(STILL) as fleet:
        model, optimizer, data = make()
        scheduler = SCHEDULERS[name](optimizer)
        model, optimizer, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH, scheduler=scheduler)
        told: list[list[float]] = []
        fleet.after_step.append(lambda: told.append(settings(optimizer)))
        for _ in fleet.epochs(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                fleet.backward(F.mse_loss(model(x), y), samples=len(x))
                optimizer.step()
                scheduler.step()
        return told, flat(model)


@pytest.mark.parametrize("name", first_of(["cosine", "sequence"]))
def test_a_loop_may_step_optimizer_and_scheduler_as_it_did(name: str) -> None:
    """optimizer.step() is fleet.step(), and the scheduler is stepped by the run alone."""
    for told, weights in run_ranks(2, of_habit, name):
        judged = run_ranks(2, train, name, STILL)[0]
        assert torch.equal(weights, judged["weights"])
        assert told == judged["told"][1:], "as after each step"


def test_two_workers_stop_together_at_ctrl_c_and_say_what_is_lost(tmp_path: Path) -> None:
    told = run_ranks(2, stopped_loop, "")
    assert [found["steps"] for found in told] == [6, 6]
    assert all("Stopped after step 6. Nothing was saved" in found["said"] for found in told)
    run_ranks(2, stopped_loop, str(tmp_path))
    again = run_ranks(2, train, "cosine", STILL)  # another run, from the start
    resumed = run_ranks(2, resumed_loop, str(tmp_path))
    for found in resumed:
        assert found["steps"] == STEPS and torch.equal(found["weights"], again[0]["weights"])


def stopped_loop(folder: str) -> dict[str, Any]:
    return train(folder=folder, stop_at=5)


def resumed_loop(folder: str) -> dict[str, Any]:
    return train(folder=folder)


def windows(policy: Any) -> dict[str, Any]:
    """Every own step of this replica: of which step of the run it is, and the rate it was taken with."""
    with potluck.init(policy) as fleet:
        model, optimizer, data = make()
        scheduler = lr.CosineAnnealingLR(optimizer, T_max=STEPS)
        model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH, scheduler=scheduler)
        own: list[tuple[int, float]] = []
        after: list[int] = []
        fleet.after_step.append(lambda: after.append(fleet.step_number))
        step = optimizer.step

        def look(*arguments: Any) -> Any:
            assert fleet.run.scheduled is not None
            own.append((fleet.run.scheduled.steps, optimizer.param_groups[0]["lr"]))
            return step(*arguments)

        optimizer.step = look  # type: ignore[method-assign]
        for _ in fleet.epochs(EPOCHS):
            for x, y in loader:
                fleet.backward(F.mse_loss(model(x), y), samples=len(x))
                fleet.step()
        return {
            "own": own,
            "after": after,
            "stepped": scheduler.last_epoch,
            "lr": optimizer.param_groups[0]["lr"],
            "steps": fleet.step_number,
        }


@pytest.mark.parametrize(
    "policy",
    first_of([potluck.Cadence.published(anchor=2, max_anchor=3), potluck.Async.published(anchor=2, max_anchor=3)]),
)
def test_the_rate_at_a_step_of_the_run_does_not_depend_on_the_policy(policy: Any) -> None:
    expected = [rate for rate, _ in plain("cosine")[0]]
    ranks = run_ranks(2, windows, policy)
    for found in ranks:
        assert found["steps"] == found["stepped"] == STEPS and found["lr"] == pytest.approx(expected[-1], abs=1e-12)
        assert found["own"], "this replica took steps"
        for step, rate in found["own"]:
            assert rate == pytest.approx(expected[step], rel=1e-9, abs=1e-12)
        assert found["own"][0][0] == 0
        assert found["after"] == list(range(1, STEPS + 1)), "once per step of the run"
    last = max(found["own"][-1][0] for found in ranks)
    assert last >= STEPS - 2, "what a fast one does beyond its part is not in the schedule until the window has ended"


def test_what_is_kept_is_saved_and_comes_back(tmp_path: Path) -> None:
    model, optimizer, data = make()
    fleet = potluck.init()
    fleet.prepare(model, optimizer, data, batch_size=BATCH)
    average = torch.arange(6.0).reshape(2, 3)
    fleet.state["best"] = 0.25
    fleet.state["ema"] = {"weights": average, "counts": {1: 2, "x": (3, None)}}
    fleet.save(tmp_path)  # load() waits for it
    fleet.state["ema"]["weights"].add_(1)
    fleet.state["best"] = 0.5
    assert fleet.load(tmp_path)
    assert fleet.state["best"] == 0.25 and fleet.state["ema"]["counts"] == {1: 2, "x": (3, None)}
    assert torch.equal(fleet.state["ema"]["weights"], torch.arange(6.0).reshape(2, 3))
    fleet.close()


@pytest.mark.parametrize("strategy", first_of([potluck.NoShard(), potluck.FullShard()]))
def test_what_is_kept_reaches_every_rank(tmp_path: Path, strategy: Any) -> None:
    for found in run_ranks(2, keep, str(tmp_path), strategy):
        assert torch.equal(found["ema"], torch.zeros(3)) and found["who"] == 0


def keep(folder: str, strategy: Any) -> dict[str, Any]:
    with potluck.init(strategy=strategy) as fleet:
        model, optimizer, data = make()
        fleet.prepare(model, optimizer, data, batch_size=BATCH)
        fleet.state["ema"] = torch.full((3,), float(fleet.rank))
        fleet.state["who"] = fleet.rank
        fleet.save(folder)
        fleet.wait_for_saves()
        fleet.load(folder)
        return dict(fleet.state)


def test_what_cannot_be_kept_is_refused_at_once() -> None:
    fleet = potluck.init()
    endless: list[Any] = []
    endless.append(endless)
    for value in (object(), {"f": print}, [torch.eye(3).to_sparse()], endless):
        with pytest.raises(ConfigError, match=r"fleet\.state/x"):
            fleet.state["x"] = value
    with pytest.raises(ConfigError, match="names for keys"):
        fleet.state[3] = 1  # type: ignore[index]
    assert "x" not in fleet.state


def test_schedulers_that_cannot_be_kept_or_stepped_are_refused() -> None:
    for wrong, sentence in [
        (lambda model, o: lr.ReduceLROnPlateau(o), "plateau.step"),
        (lambda model, o: "cosine", "not a str"),
        (lambda model, o: lr.ConstantLR(torch.optim.SGD(model.parameters(), lr=1.0)), "another optimizer"),
        (lambda model, o: lr.CyclicLR(o, 0.1, 0.2, scale_fn=lambda x: x), None),
    ]:
        model, optimizer, data = make()
        scheduler = wrong(model, optimizer)
        if sentence is None:
            potluck.init().prepare(model, optimizer, data, batch_size=BATCH, scheduler=scheduler)
            continue
        with pytest.raises(ConfigError, match=sentence):
            potluck.init().prepare(model, optimizer, data, batch_size=BATCH, scheduler=scheduler)


def test_a_scheduler_that_is_too_short_says_so() -> None:
    fleet = potluck.init()
    model, optimizer, data = make()
    scheduler = lr.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)
    model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH, scheduler=scheduler)
    with pytest.raises(ConfigError, match="OneCycleLR does not go beyond step 2 of the run: Tried to step 3 times"):
        for x, y in loader:
            fleet.backward(F.mse_loss(model(x), y), samples=len(x))
            fleet.step()


@pytest.mark.parametrize(
    "damage",
    first_of(
        [
            {"kept": []},
            {"kept": {"dict": {"x": {"tensor": "absent"}}}},
            {"kept": {"pickle": "x"}},
            {
                "scheduler": {
                    "class": "CosineAnnealingLR",
                    "steps": 1 << 60,
                    "state": {"dict": {}},
                    "groups": {"list": []},
                }
            },
            {"scheduler": {"class": "CosineAnnealingLR", "steps": 0, "state": {"list": []}, "groups": {"list": []}}},
            {"scheduler": {"class": "CosineAnnealingLR"}},
        ]
    ),
)
def test_whatever_a_peer_sends_as_kept_is_a_sentence_at_most(damage: dict[str, Any]) -> None:
    fleet = potluck.init()
    model, optimizer, data = make()
    fleet.prepare(model, optimizer, data, batch_size=BATCH, scheduler=SCHEDULERS["cosine"](optimizer))
    with pytest.raises(CheckpointError):
        restore_position(fleet.run, position_as_json(fleet.run) | damage)


def test_a_checkpoint_without_a_scheduler_puts_it_where_the_run_is(tmp_path: Path) -> None:
    """As checkpoints of earlier versions are."""
    model, optimizer, data = make()
    fleet = potluck.init()
    model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH)
    for x, y in loader:
        fleet.backward(F.mse_loss(model(x), y), samples=len(x))
        fleet.step()
    fleet.save(tmp_path)
    fleet.close()
    again = train("one cycle", folder=str(tmp_path))
    assert again["told"] == plain("one cycle")[0][4:]
    with pytest.raises(CheckpointError, match="holds the state of a OneCycleLR, and this run's scheduler is LambdaLR"):
        train("lambda", folder=str(tmp_path))


def test_a_pass_of_exactly_len_batches_leaves_the_next_pass_whole() -> None:
    model, optimizer, data = make()
    fleet = potluck.init()
    model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH)
    found = []
    for _ in range(4):
        assert len(loader) == 4
        taken = 0
        for x, y in itertools.islice(loader, len(loader)):
            fleet.backward(F.mse_loss(model(x), y), samples=len(x))
            fleet.step()
            taken += 1
        found.append((taken, loader.position.epoch))
    assert found == [(4, 0), (4, 1), (4, 2), (4, 3)]


def by_len(policy: Any, rows: int, how: str, stages: Any = None) -> dict[str, Any]:
    """Passes of exactly len(loader) batches, or plain ones."""
    stage_planner.MEASURE_S = 0.0
    with potluck.init(policy, stages=stages, patience_s=20) as fleet:
        model, optimizer, (x, y) = make()
        x, y = (torch.cat([part] * 2)[:rows] for part in (x, y))
        model, _, loader = fleet.prepare(model, optimizer, (x, y), batch_size=BATCH, loss=mse)
        proofs: list[str] = []
        fleet.events.listeners.append(lambda e: proofs.append(e.sentence) if isinstance(e, EpochDone) else None)
        taken = []
        # Where a worker may have fewer batches than the others, the run counts its epochs.
        for _ in fleet.epochs(EPOCHS) if rows in (33, 60) else range(EPOCHS):
            taken.append(0)
            for batch in itertools.islice(loader, len(loader)) if how == "len" else loader:
                fleet.train(mse, batch)
                fleet.step()
                taken[-1] += 1
        weights = {name: gathered(p) for name, p in model.named_parameters()}
        return {"taken": taken, "proofs": proofs, "weights": weights, "rows": fleet.rows_seen}


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


STAGES = potluck.Stages(protocol=potluck.Pipeline(micro_batch_size=4), count=2)


@pytest.mark.parametrize(
    ("rows", "stages"), first_of([(30, None), (33, None), (30, STAGES)]), ids=["all", "one idle", "stages"]
)
def test_passes_of_exactly_len_batches_are_whole(rows: int, stages: Any) -> None:
    plain, found = (run_ranks(2, by_len, STILL, rows, how, stages, timeout_s=20) for how in ("plain", "len"))
    for ours, theirs in zip(found, plain, strict=True):
        assert [count for count in ours["taken"] if count] == theirs["taken"]
        assert ours["rows"] == theirs["rows"] == EPOCHS * rows
        # The last epoch's proof comes with the pass that follows it, or with epochs().
        assert ours["proofs"] == theirs["proofs"][: EPOCHS if rows == 33 else EPOCHS - 1]
        assert all(torch.equal(ours["weights"][name], one) for name, one in theirs["weights"].items())


@pytest.mark.parametrize(
    ("world", "policy", "stages"),
    first_of(
        [
            (2, potluck.Cadence.published(anchor=1, max_anchor=1), None),
            (2, potluck.Async.published(anchor=2, max_anchor=2), None),
            (4, potluck.Cadence.published(anchor=1, max_anchor=1), STAGES),
        ]
    ),
    ids=["cadence", "async", "stages"],
)
def test_passes_of_exactly_len_batches_use_each_row_once_in_windows(world: int, policy: Any, stages: Any) -> None:
    found = run_ranks(world, by_len, policy, 60, "len", stages, timeout_s=30)
    proof = "Epoch {}: each of its 60 samples was used exactly once; all workers hold the same weights."
    whole: dict[str, torch.Tensor] = {}
    for each in found:
        assert all(each["taken"]) and each["rows"] == EPOCHS * 60
        assert each["proofs"] == [proof.format(epoch + 1) for epoch in range(EPOCHS)]
        for name, weight in each["weights"].items():
            assert torch.equal(weight, whole.setdefault(name, weight))


def test_epochs_that_are_no_epochs_are_refused() -> None:
    model, optimizer, data = make()
    fleet = potluck.init()
    with pytest.raises(ConfigError, match="give prepare"):
        fleet.epochs(3)
    fleet.prepare(model, optimizer, data, batch_size=BATCH)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="at least 1"):
            fleet.epochs(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without a step"):
        for _ in fleet.epochs(2):
            pass
