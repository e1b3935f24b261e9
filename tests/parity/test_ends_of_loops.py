"""How a loop of one's own ends: by break, finish(), early_stop(), request_stop() and Ctrl-C; and what it keeps."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import potluck
from potluck.errors import ConfigError, Interrupted
from potluck.events import RunEnded, StepDone, Validated
from potluck.save.checkpoint_folder import best_loss, best_of, found
from tests.ranks import run_ranks

ROWS, BATCH = 24, 4
STEPS = ROWS // BATCH


def make() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(ROWS, 3)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), (x, x[:, :1])


def begin(**options: Any) -> tuple[Any, Any, Any]:
    """Rows come in their own order."""
    fleet = potluck.init(**options)
    model, optimizer, data = make()
    model, _, loader = fleet.prepare(model, optimizer, DataLoader(TensorDataset(*data), batch_size=BATCH))
    return fleet, model, loader


def step(fleet: Any, model: Any, batch: Any) -> None:
    x, y = batch
    fleet.backward(F.mse_loss(model(x), y), samples=len(x))
    fleet.step()


# Stopping


def test_a_stop_in_mid_epoch_runs_none_of_the_code_after_the_epoch(tmp_path: Path) -> None:
    fleet, model, loader = begin()
    epochs: list[int] = []
    with pytest.raises(Interrupted, match="Saved in"):
        for epoch in fleet.epochs(3, tmp_path):
            for batch in loader:
                step(fleet, model, batch)
                if fleet.step_number == STEPS + 2:
                    fleet.request_stop()
            epochs.append(epoch)
    assert epochs == [0] and fleet.step_number == STEPS + 3


def test_a_stop_with_the_last_step_of_an_epoch_runs_the_code_after_it(tmp_path: Path) -> None:
    fleet, model, loader = begin()
    epochs: list[int] = []
    with pytest.raises(Interrupted):
        for epoch in fleet.epochs(3, tmp_path):
            for batch in loader:
                step(fleet, model, batch)
                if fleet.step_number == STEPS - 1:
                    fleet.request_stop()
            epochs.append(epoch)
    assert epochs == [0] and fleet.step_number == STEPS


def finish_on_one(folder: Path) -> list[Any]:
    fleet, model, loader = begin()
    with fleet:
        for _ in fleet.epochs(3, folder):
            for batch in loader:
                step(fleet, model, batch)
                if fleet.is_main and fleet.step_number == 2:
                    fleet.finish()
        return [fleet.step_number, fleet.is_finished]


@pytest.mark.parametrize("ranks", [1, 2])
def test_finish_of_one_ends_the_loops_of_all_saves_and_raises_nothing(ranks: int, tmp_path: Path) -> None:
    assert run_ranks(ranks, finish_on_one, tmp_path) == [[3, True]] * ranks
    fleet, *_ = begin()
    assert fleet.load(tmp_path) and fleet.step_number == 3


def early(folder: Path, policy: Any, strategy: Any, losses: list[float]) -> list[Any]:
    fleet, model, loader = begin(policy=policy, strategy=strategy)
    heard: list[Any] = []
    kept: list[bool] = []
    fleet.on(Validated, heard.append)
    with fleet:
        for epoch in fleet.epochs(9, folder):
            for batch in loader:
                step(fleet, model, batch)
            value = losses[epoch] + fleet.rank  # each worker's own: worker 0's counts
            kept.append(fleet.keep_best(value))
            if fleet.early_stop(value, patience=2):
                break
        return [kept, [event.loss for event in heard], fleet.last_epoch.epoch]


@pytest.mark.parametrize(
    ("policy", "strategy", "ranks"),
    [
        ("sync", potluck.NoShard(), 1),
        ("sync", potluck.FullShard(), 2),
        ("cadence", potluck.NoShard(), 2),
        ("sync", potluck.FullShard(weights=(3.0, 1.0)), 2),
        ("sync", potluck.FullShard(weights=(1.0, 0.0)), 2),
    ],
)
def test_values_that_get_no_better_end_the_run_for_all_and_the_best_checkpoint_stays(
    policy: Any, strategy: Any, ranks: int, tmp_path: Path
) -> None:
    told = [[True, False, True, False, False], [3.0, 4.0, 2.0, 2.5, 2.0], 4]
    assert run_ranks(ranks, early, tmp_path, policy, strategy, [3.0, 4.0, 2.0, 2.5, 2.0, 1.0]) == [told] * ranks
    checkpoints = found(tmp_path)
    best = best_of(checkpoints)
    assert best is not None and best_loss(best) == 2.0 and best.name.endswith(str(3 * STEPS))
    assert checkpoints[0].name.endswith(str(5 * STEPS)), "the end is saved, too"
    plain = make()[0]
    plain.load_state_dict(load_file(tmp_path / "best.safetensors"))
    fleet, model, _ = begin()
    shutil.rmtree(checkpoints[0])
    assert fleet.load(tmp_path) and fleet.step_number == 3 * STEPS
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def early_in_stages(folder: Path, losses: list[float]) -> list[Any]:
    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    fleet = potluck.init(stages=potluck.Stages(protocol=potluck.Pipeline(micro_batch_size=2), cuts=(1,)))
    model, optimizer, data = make()
    model, _, loader = fleet.prepare(model, optimizer, DataLoader(TensorDataset(*data), batch_size=BATCH), loss=loss_of)
    kept: list[bool] = []
    with fleet:
        for epoch in fleet.epochs(9, folder):
            for batch in loader:
                fleet.train(loss_of, batch)
                fleet.step()
            assert fleet.evaluate(loss_of, data, BATCH) > 0.0
            kept.append(fleet.keep_best(losses[epoch] + fleet.rank))
            if fleet.early_stop(losses[epoch] + fleet.rank, patience=2):
                break
    return [kept, fleet.step_number]


def test_in_stages_the_best_is_kept_as_one_plain_model_and_the_run_ends_early_for_all(tmp_path: Path) -> None:
    losses = [3.0, 2.0, 2.5, 2.0, 1.0]
    assert run_ranks(2, early_in_stages, tmp_path, losses) == [[[True, True, False, False], 4 * STEPS]] * 2
    best = best_of(found(tmp_path))
    assert best is not None and best.name.endswith(str(2 * STEPS))
    fleet, model, loader = begin()
    for _ in range(2):
        for batch in loader:
            step(fleet, model, batch)
    for name, value in load_file(tmp_path / "best.safetensors").items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5)


def counts_epochs(folder: Path, epochs: int) -> list[int]:
    fleet, model, loader = begin()
    fleet.load(folder)
    with fleet:
        for epoch in fleet.epochs(epochs, folder):
            for batch in loader:
                step(fleet, model, batch)
            fleet.keep_best(-float(epoch))
            fleet.state["seen"] = [*fleet.state.get("seen", []), epoch]
    return list(fleet.state["seen"])


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_loop_keeps_after_its_last_epoch_is_there_when_the_run_is_made_longer(
    world: int, tmp_path: Path
) -> None:
    assert run_ranks(world, counts_epochs, tmp_path, 2) == [[0, 1]] * world
    assert run_ranks(world, counts_epochs, tmp_path, 4) == [[0, 1, 2, 3]] * world


def test_the_best_file_has_the_average_that_was_looked_at(tmp_path: Path) -> None:
    fleet, model, loader = begin()
    average = fleet.ema(0.9)
    for batch in loader:
        step(fleet, model, batch)
    assert fleet.keep_best(1.0, tmp_path)
    fleet.wait_for_saves()
    with average.applied():
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    kept = load_file(tmp_path / "best.safetensors")
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], value) for name, value in expected.items())
    for batch in loader:
        step(fleet, model, batch)
    assert not fleet.keep_best(2.0, tmp_path)
    fleet.wait_for_saves()
    assert torch.equal(load_file(tmp_path / "best.safetensors")["0.weight"], kept["0.weight"]), "a worse one stays away"


def test_a_best_file_that_cannot_be_written_is_said_and_the_checkpoint_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, model, loader = begin()
    (tmp_path / "best.safetensors").mkdir()
    for batch in loader:
        step(fleet, model, batch)
    assert fleet.keep_best(1.0, tmp_path)
    fleet.wait_for_saves()
    assert "best.safetensors is not the best model: Cannot write" in capsys.readouterr().err
    again, _, _ = begin()
    assert again.load(tmp_path) and again.step_number == STEPS


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainers_callback_ends_the_run_as_if_it_were_done(ranks: int, tmp_path: Path) -> None:
    assert run_ranks(ranks, finish_in_callback, tmp_path) == [["finished", 2, None]] * ranks
    fleet, *_ = begin()
    assert fleet.load(tmp_path / "checkpoints") and fleet.step_number == 2


def finish_in_callback(folder: Path) -> list[Any]:
    fleet = potluck.init()
    model, optimizer, data = make()
    ends: list[str] = []

    def hear(event: Any) -> None:
        if isinstance(event, StepDone) and event.step == 1 and fleet.is_main:
            fleet.finish()
        if isinstance(event, RunEnded):
            ends.append(event.reason)

    with fleet:
        trainer = potluck.Trainer(
            model,
            optimizer,
            data,
            loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
            batch_size=BATCH,
            folder=folder,
            callbacks=[hear],
            engine=fleet,
            config=potluck.FitConfig(epochs=3, progress=False),
        )
        summary = trainer.fit()
    return [ends[0], fleet.step_number, summary.validation_loss]


def test_what_was_told_so_far_is_found_again_by_a_run_that_resumes(tmp_path: Path) -> None:
    fleet, model, loader = begin()
    with pytest.raises(Interrupted):
        for epoch in fleet.epochs(9, tmp_path):
            for batch in loader:
                step(fleet, model, batch)
                if epoch == 1:
                    fleet.request_stop()
            fleet.keep_best({"loss": 1.0, "accuracy": 0.5})
    again, model, loader = begin()
    assert again.load(tmp_path)
    ended = []
    for epoch in again.epochs(9):
        for batch in loader:
            step(again, model, batch)
        assert not again.keep_best(1.5)
        ended.append(epoch)
        if again.early_stop(1.5, patience=2):
            break
    assert ended == [1, 2]
    best = best_of(found(tmp_path))
    assert best is not None and best.name.endswith(str(STEPS))


def test_what_cannot_be_compared_or_kept_is_refused_with_what_to_do(tmp_path: Path) -> None:
    fleet, _, _ = begin()
    with pytest.raises(ConfigError, match=r"name the run's folder, as in fleet.epochs\(3, 'runs/mine'\)"):
        fleet.keep_best(1.0)
    with pytest.raises(ConfigError, match="lower is better, and this has accuracy"):
        fleet.early_stop({"accuracy": 0.5}, patience=2)
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        fleet.early_stop(0.5, patience=0)
    with pytest.raises(ConfigError, match="take a number, not None"):
        fleet.keep_best(None, tmp_path)  # type: ignore[arg-type]


def averaged(folder: Path, strategy: Any) -> list[Any]:
    """The average after six steps, that of a run which has loaded them, and what evaluate() sees."""
    fleet, model, loader = begin(strategy=strategy)
    average = fleet.ema(0.9)
    for batch in loader:
        step(fleet, model, batch)
    fleet.save(folder)
    fleet.wait_for_saves()
    again, _, _ = begin(strategy=strategy)
    loaded = again.ema(0.9)
    again.load(folder)
    x, y = make()[2]
    looked = fleet.evaluate(lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), (x, y), BATCH)
    found = []
    for each, handle in ((average, fleet), (loaded, again)):
        with each.applied():
            found.append({name: value.tolist() for name, value in handle.state_dict().items()})
    return [*found, looked]


def loaded_first(folder: Path, strategy: Any) -> list[Any]:
    """Averages after a load and some steps: of ema() before it, after it, and after the first of the steps."""
    fleet, model, loader = begin(strategy=strategy)
    fleet.ema(0.9)
    for number, batch in enumerate(loader):
        step(fleet, model, batch)
        if number == STEPS // 2:
            fleet.save(folder)
    fleet.wait_for_saves()
    return [loaded_and_stepped(folder, strategy, at) for at in range(3)]


def loaded_and_stepped(folder: Path, strategy: Any, at: int) -> dict[str, Any]:
    fleet, model, loader = begin(strategy=strategy)
    average = fleet.ema(0.9) if at == 0 else None
    fleet.load(folder)
    for number, batch in enumerate(loader, 1):
        if number == at:
            average = fleet.ema(0.9)
        step(fleet, model, batch)
    with average.applied():
        return {name: value.tolist() for name, value in fleet.state_dict().items()}


@pytest.mark.parametrize(("ranks", "strategy"), [(1, potluck.NoShard()), (2, potluck.FullShard())])
def test_the_average_of_a_loops_weights_is_a_plain_loops_saved_and_looked_at(
    ranks: int, strategy: Any, tmp_path: Path
) -> None:
    def plain() -> dict[str, Any]:
        model, optimizer, (x, y) = make()
        average = {name: value.detach().clone() for name, value in model.state_dict().items()}
        for start in range(0, ROWS, BATCH):
            optimizer.zero_grad()
            F.mse_loss(model(x[start : start + BATCH]), y[start : start + BATCH]).backward()
            optimizer.step()
            for name, value in model.state_dict().items():
                average[name].mul_(0.9).add_(0.1 * value)
        return average

    expected = plain()
    found, loaded, looked = run_ranks(ranks, averaged, tmp_path, strategy)[0]
    assert found == loaded
    model, _, (x, y) = make()
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), value, rtol=1e-5, atol=1e-6)
    model.load_state_dict(expected)
    assert looked == pytest.approx(F.mse_loss(model(x), y).item(), rel=1e-4)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, potluck.NoShard()), (2, potluck.FullShard())])
def test_an_average_that_was_loaded_before_ema_is_taken_up_until_the_next_step(
    ranks: int, strategy: Any, tmp_path: Path
) -> None:
    before, after, late = run_ranks(ranks, loaded_first, tmp_path, strategy)[0]
    assert before == after != late


def test_a_loop_has_one_average_of_which_a_part_stays_at_each_step() -> None:
    fleet, _, _ = begin()
    for decay in (1.5, 1, -0.1, float("nan"), True, "0.9"):
        with pytest.raises(ConfigError, match=r"at least 0 and below 1, such as 0\.999, not"):
            fleet.ema(decay)
    fleet.ema(0)
    with pytest.raises(ConfigError, match=r"has one already.* Call fleet.ema\(\) once, after prepare\(\)"):
        fleet.ema(0.9)


def test_a_script_that_fails_in_a_loop_it_has_a_name_for_ends_with_its_own_traceback_alone(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        """if True:
        from tests.parity.test_ends_of_loops import begin
        fleet, model, loader = begin()
        epochs = fleet.epochs(2)
        for epoch in epochs:
            raise ValueError("mine")
        """
    )
    command = [sys.executable, str(tmp_path / "own.py")]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.endswith("ValueError: mine\n"), done.stderr


# What DDP's habits ask for


def losses_of(accumulate: int) -> list[float]:
    fleet = potluck.init()
    model, optimizer, data = make()
    loader = DataLoader(TensorDataset(*data), batch_size=BATCH)
    model, optimizer, loader = fleet.prepare(model, optimizer, loader, accumulate=accumulate)
    losses = []
    with fleet:
        for batch in loader:
            before = fleet.step_number
            step(fleet, model, batch)
            if fleet.step_number > before:
                losses.append(fleet.last_step.loss)
    return losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_accumulate_takes_so_many_batches_to_a_step_as_a_plain_loop_does(ranks: int) -> None:
    model, optimizer, (x, y) = make()
    expected = []
    for start in range(0, ROWS, 2 * BATCH):
        optimizer.zero_grad()
        parts = [slice(start, start + BATCH), slice(start + BATCH, start + 2 * BATCH)]
        each = [F.mse_loss(model(x[part]), y[part]) / 2 for part in parts]
        torch.stack(each).sum().backward()
        optimizer.step()
        expected.append(sum(part.item() for part in each))
    for got in run_ranks(ranks, losses_of, 2):
        assert got == pytest.approx(expected, rel=1e-5)


def test_accumulate_is_refused_where_it_says_nothing_or_too_much() -> None:
    model, optimizer, data = make()
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        potluck.init().prepare(model, optimizer, data, batch_size=4, accumulate=0)
    with pytest.raises(ConfigError, match="Leave out one of them"):
        potluck.init().prepare(model, optimizer, data, batch_size=4, accumulate=2, micro_batch_size=2)


def test_a_dataset_of_a_tuple_of_one_gives_tuples_of_one() -> None:
    model, optimizer, (x, _) = make()
    *_, loader = potluck.init().prepare(model, optimizer, (x,), batch_size=4)
    (batch,) = next(iter(loader))
    assert batch.shape == (4, 3)
    model, optimizer, (x, _) = make()
    *_, loader = potluck.init().prepare(model, optimizer, TensorDataset(x), batch_size=4)
    (batch,) = next(iter(loader))
    assert batch.shape == (4, 3)
    model, optimizer, (x, _) = make()
    *_, loader = potluck.init().prepare(model, optimizer, x, batch_size=4)
    assert next(iter(loader)).shape == (4, 3)


def test_prepare_gives_back_as_many_as_it_was_given() -> None:
    assert len(potluck.init().prepare(*make()[:2])) == 2
    model, optimizer, loader = potluck.init().prepare(*make()[:2], None)
    assert loader is None and isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)


def test_what_was_left_out_is_asked_for_by_its_name() -> None:
    fleet = potluck.init()
    with pytest.raises(ConfigError, match=r"prepare\(\) needs a batch_size: the rows of one step over all workers"):
        fleet.prepare(*make())
    fleet, model, loader = begin()
    x, y = next(iter(loader))
    with pytest.raises(ConfigError, match=r"backward\(\) needs samples=.*samples=len\(x\)"):
        fleet.backward(F.mse_loss(model(x), y))


def test_fleet_step_and_optimizer_step_in_one_loop_are_one_step() -> None:
    fleet, model, loader = begin()
    other, own, batches = begin()
    optimizer = other.run.prepared().optimizer
    for batch in loader:
        step(fleet, model, batch)
    for batch in batches:
        step(other, own, batch)
        optimizer.step()
    assert other.step_number == STEPS
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), own.parameters(), strict=True))


def test_a_second_step_in_a_loop_with_batches_of_its_own_is_refused_with_which_to_leave_out() -> None:
    fleet = potluck.init()
    model, optimizer, data = make()
    model, optimizer = fleet.prepare(model, optimizer)
    step(fleet, model, data)
    with pytest.raises(
        ConfigError, match=r"without a backward\(\) since the last step.* only one of fleet.step\(\) and"
    ):
        optimizer.step()
