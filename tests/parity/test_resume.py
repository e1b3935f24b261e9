"""A run that was stopped and resumed ends with the very weights of a run that was not."""

import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import CheckpointConfig, FitConfig, ScheduleConfig
from potluck.data.plan import BatchConfig
from potluck.errors import CheckpointError, Interrupted
from potluck.events import read_events
from potluck.save.checkpoint_folder import body_sha256
from tests.parity.test_sync import STILL
from tests.quick import first_of
from tests.ranks import RankFailed, run_ranks

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}


def make_model() -> nn.Module:
    """Dropout draws random numbers at every step, so a resumed run must go on drawing the same ones."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 2))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def fit(folder: str, *, stop_at: int | None = None, resume: bool = False, optimizer: str = "adamw") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    data = (torch.randn(30, 4, generator=generator), torch.randn(30, 2, generator=generator))
    with potluck.init(STILL) as fleet:
        model = make_model()
        if stop_at is not None:
            fleet.after_step.append(lambda: fleet.request_stop() if fleet.step_number == stop_at - 1 else None)
        trainer = potluck.Trainer(
            model,
            OPTIMIZERS[optimizer](model.parameters()),
            data,
            loss=loss_of,
            batch_size=6,
            folder=folder,
            validation=data,
            engine=fleet,
            config=FitConfig(
                epochs=3,
                schedule=ScheduleConfig(),
                checkpoint=CheckpointConfig(every=4, keep_last=3),
                validate_every=3,
                progress=False,
            ),
        )
        said = ""
        try:
            trainer.fit(resume=resume)
        except Interrupted as error:
            said = str(error)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return {"state": state, "said": said, "step": fleet.step_number, "sentences": trainer.summary.epochs}


@pytest.mark.parametrize(
    ("optimizer", "stop_at"), first_of([("adamw", 2), ("adamw", 7), *((optimizer, 5) for optimizer in OPTIMIZERS)])
)
def test_a_resumed_run_ends_with_bit_identical_weights(tmp_path: Path, optimizer: str, stop_at: int) -> None:
    whole = run_ranks(2, fit_whole, str(tmp_path / "whole"), optimizer)
    stopped = run_ranks(2, fit_until, str(tmp_path / "part"), stop_at, optimizer)
    assert stopped[0]["step"] == stop_at
    assert f"Stopped after step {stop_at}. Saved in" in stopped[0]["said"]
    resumed = run_ranks(2, fit_on, str(tmp_path / "part"), optimizer)
    for name, expected in whole[0]["state"].items():
        assert torch.equal(resumed[0]["state"][name], expected), name
    assert whole[0]["step"] == resumed[0]["step"] == 15
    for sentence in resumed[0]["sentences"]:
        assert "each of its 30 samples was used exactly once; all workers hold the same weights" in sentence


def fit_whole(folder: str, optimizer: str) -> dict[str, Any]:
    return fit(folder, optimizer=optimizer)


def fit_until(folder: str, stop_at: int, optimizer: str) -> dict[str, Any]:
    return fit(folder, stop_at=stop_at, optimizer=optimizer)


def fit_on(folder: str, optimizer: str = "adamw") -> dict[str, Any]:
    return fit(folder, resume=True, optimizer=optimizer)


def train_while_the_disk_is_slow(folder: str) -> dict[str, Any]:
    """The write of step 2 ends only when step 5 is done: training must not wait for it."""
    import threading

    from safetensors.torch import load_file

    from potluck.save import checkpoint

    steps_done, seen = threading.Event(), []
    write = checkpoint.write

    def slow_write(*arguments: Any) -> Path:
        seen.append(steps_done.wait(30))
        return write(*arguments)

    checkpoint.write = slow_write
    with potluck.init(STILL) as fleet:
        model = make_model()
        fleet.prepare(model, torch.optim.AdamW(model.parameters()))
        for step in range(1, 6):
            fleet.backward(model(torch.ones(4, 4, device=fleet.device) * step).square().mean(), samples=4)
            fleet.step()
            if step == 2:
                fleet.save(folder)
                expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        steps_done.set()
        fleet.wait_for_saves()
    saved = load_file(Path(folder) / "step-00000002" / "model.safetensors")
    return {"waited": seen, "same": all(torch.equal(saved[name], expected[name]) for name in expected)}


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(tmp_path: Path) -> None:
    assert run_ranks(1, train_while_the_disk_is_slow, str(tmp_path)) == [{"waited": [True], "same": True}]


@pytest.mark.parametrize("world", first_of([1, 3]))
def test_a_checkpoint_loads_on_another_number_of_workers(tmp_path: Path, world: int) -> None:
    run_ranks(2, fit_until, str(tmp_path), 7, "adamw")
    found = run_ranks(world, fit_on, str(tmp_path))
    assert found[0]["step"] == 15
    assert all("exactly once" in sentence for sentence in found[0]["sentences"])
    steps = [record["step"] for record in read_events(tmp_path / "events.jsonl") if record["event"] == "step_done"]
    assert steps == list(range(1, 16))


def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path: Path) -> None:
    whole = run_ranks(1, fit_whole, str(tmp_path), "adamw")
    newest = tmp_path / "checkpoints" / "step-00000015"
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    found = run_ranks(1, fit_on, str(tmp_path))
    passed = [r for r in read_events(tmp_path / "events.jsonl") if r["event"] == "checkpoint_passed_over"]
    assert [Path(record["folder"]).name for record in passed] == ["step-00000015"]
    assert "model.safetensors does not match its checksum" in passed[0]["reason"]
    for name, expected in whole[0]["state"].items():
        assert torch.equal(found[0]["state"][name], expected), name


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_nothing(tmp_path: Path) -> None:
    run_ranks(1, fit_until, str(tmp_path), 2, "adamw")
    (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").write_text("{}")
    with pytest.raises(RankFailed, match=r"Every checkpoint in .* is damaged"):
        run_ranks(1, fit_on, str(tmp_path))


def test_a_new_run_does_not_take_over_the_folder_of_another(tmp_path: Path) -> None:
    run_ranks(1, fit_until, str(tmp_path), 2, "adamw")
    with pytest.raises(RankFailed, match="already holds a run"):
        run_ranks(1, fit_whole, str(tmp_path), "adamw")


# What else a run may go through before and after it is stopped


class Noisy(torch.utils.data.Dataset[Tensor]):
    """Each row has noise of its own, drawn when it is fetched; one row is not a number."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> Tensor:
        x = torch.randn(4) + np.random.standard_normal() + random.random()
        return x * float("nan") if row == 5 else x


def fit_noisy(folder: str, config: FitConfig, batch: BatchConfig, resume: bool, stop_at: int = 0) -> dict[str, Any]:
    with potluck.init(STILL) as fleet:
        model = make_model()
        if stop_at:
            fleet.after_step.append(lambda: fleet.request_stop() if fleet.step_number == stop_at - 1 else None)
        seen: list[Tensor] = []

        def loss_of(model: nn.Module, x: Tensor) -> Tensor:
            seen.append(x)
            return model(x).square().mean()

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trainer = potluck.Trainer(
            model, optimizer, Noisy(), loss=loss_of, batch_size=batch, folder=folder, engine=fleet, config=config
        )
        try:
            trainer.fit(resume=resume)
        except Interrupted:
            assert stop_at
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        summary = trainer.summary
        rows = torch.cat(seen or [torch.ones(1)])
        return {"state": state, "steps": summary.steps, "rows": summary.rows_seen, "seen": rows,
                "sentences": summary.epochs, "skipped": summary.skipped, "total": trainer.rows_total,
                "lr": optimizer.param_groups[0]["lr"]}  # fmt: skip


def quiet(**settings: Any) -> FitConfig:
    return FitConfig(progress=False, checkpoint=CheckpointConfig(every=1), **settings)


@pytest.mark.parametrize(
    ("fetchers", "stop_at"), first_of([(0, 1), (0, 3), (0, 6), pytest.param(2, 3, marks=pytest.mark.slow)])
)
def test_skipped_steps_random_rows_and_fetchers_resume_to_the_bit(tmp_path: Path, fetchers: int, stop_at: int) -> None:
    batch, config = BatchConfig(size=8, fetchers=fetchers), quiet(epochs=2, max_steps=5)
    if stop_at > 5:
        config = quiet(epochs=3)
    whole = run_ranks(2, fit_noisy, str(tmp_path / "whole"), config, batch, False)
    assert whole[0]["skipped"] >= 1
    run_ranks(2, fit_noisy, str(tmp_path / "part"), config, batch, False, stop_at)
    resumed = run_ranks(2, fit_noisy, str(tmp_path / "part"), config, batch, True)
    for name, expected in whole[0]["state"].items():
        assert torch.equal(resumed[0]["state"][name], expected), name
        assert torch.equal(whole[1]["state"][name], expected), name
        assert torch.isfinite(expected).all(), name
    assert resumed[0]["steps"] == whole[0]["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("fetchers", [0, 2])
def test_random_rows_differ_between_epochs_and_workers(tmp_path: Path, fetchers: int) -> None:
    found = run_ranks(2, fit_noisy, str(tmp_path), quiet(epochs=2), BatchConfig(size=8, fetchers=fetchers), False)
    drawn = torch.cat([result["seen"] for result in found])
    drawn = drawn[torch.isfinite(drawn).all(dim=1)]
    assert len(torch.unique(drawn, dim=0)) == len(drawn) == 46
    assert (
        "each of its 24 samples was used exactly once, 8 of them in steps that were skipped" in found[0]["sentences"][0]
    )


@pytest.mark.parametrize(("before", "after"), first_of([(4, 12), (12, 4)]))
def test_another_batch_size_on_resume_still_trains_each_row_once(tmp_path: Path, before: int, after: int) -> None:
    run_ranks(1, fit_noisy, str(tmp_path), quiet(), BatchConfig(size=before), False, 1)
    found = run_ranks(1, fit_noisy, str(tmp_path), quiet(), BatchConfig(size=after), True)[0]
    assert found["rows"] == found["total"] == 24
    assert "each of its 24 samples was used exactly once" in found["sentences"][0]


@pytest.mark.parametrize(("max_steps", "rows"), first_of([(2, 20), (3, 24), (4, 34), (None, 72)]))
def test_the_schedule_knows_how_many_rows_a_run_has(tmp_path: Path, max_steps: int | None, rows: int) -> None:
    config = quiet(epochs=3, max_steps=max_steps, schedule=ScheduleConfig(warmup=0, floor=0))
    found = run_ranks(1, fit_noisy, str(tmp_path), config, BatchConfig(size=10), False)[0]
    assert found["total"] == found["rows"] == rows
    assert found["lr"] == pytest.approx(0, abs=1e-9)  # the cosine ends where the run does


def test_the_learning_rate_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    rates = []
    for world in (1, 2):
        run_ranks(world, fit_whole, str(tmp_path / str(world)), "adamw")
        records = read_events(tmp_path / str(world) / "events.jsonl")
        rates.append([record["lr"] for record in records if record["event"] == "step_done"])
    assert rates[0] == rates[1] and len(set(rates[0])) > 10


def load_into_another_model(folder: str) -> str:
    with potluck.init(STILL) as fleet:
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 5))
        fleet.prepare(model, torch.optim.AdamW(model.parameters()))
        try:
            fleet.load(folder)
        except CheckpointError as error:
            return str(error)
        return ""


def test_a_checkpoint_of_another_model_is_refused_by_the_first_parameter_that_differs(tmp_path: Path) -> None:
    run_ranks(1, fit_until, str(tmp_path), 2, "adamw")
    for said in run_ranks(2, load_into_another_model, str(tmp_path / "checkpoints")):
        assert "its 3.weight is (2, 8) float32, and this model's is (5, 8) float32" in said


def load_with_another_optimizer(folder: str) -> str:
    with potluck.init(STILL) as fleet:
        model = make_model()
        fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            fleet.load(folder)
        except CheckpointError as error:
            return str(error)
        return ""


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    run_ranks(1, fit_until, str(tmp_path), 2, "adamw")
    for said in run_ranks(2, load_with_another_optimizer, str(tmp_path / "checkpoints")):
        assert said == "The checkpoint holds the state of AdamW, and this run uses SGD."


def load_on_other_data(folder: str) -> str:
    with potluck.init(STILL) as fleet:
        model = make_model()
        fleet.prepare(model, torch.optim.AdamW(model.parameters()), torch.zeros(31, 4), batch_size=6)
        try:
            fleet.load(folder)
        except CheckpointError as error:
            return str(error)
        return ""


def test_a_checkpoint_within_an_epoch_of_other_data_is_refused(tmp_path: Path) -> None:
    run_ranks(1, fit_until, str(tmp_path), 2, "adamw")
    said = run_ranks(1, load_on_other_data, str(tmp_path / "checkpoints"))[0]
    assert "stands in an epoch of 30 rows, and the data now has 31" in said


def own_loop(folder: str, resume: bool) -> Tensor:
    with potluck.init(STILL) as fleet:
        model = make_model()
        data = torch.arange(48, dtype=torch.float32).reshape(12, 4)
        _, _, loader = fleet.prepare(model, torch.optim.AdamW(model.parameters()), data, batch_size=4)
        assert fleet.load(folder) == resume
        torch.manual_seed(fleet.rank) if not resume else None
        while loader.position.epoch < 4:
            for batch in loader:
                fleet.backward(model(batch).square().mean(), samples=len(batch))
                fleet.step()
            if loader.position.epoch == 2 and not resume:
                fleet.save(folder)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_your_own_loop_saves_and_goes_on_too(tmp_path: Path) -> None:
    whole = run_ranks(2, own_loop, str(tmp_path), False)
    assert torch.equal(run_ranks(2, own_loop, str(tmp_path), True)[0], whole[0])


def go_on(folder: Path, **changes: Any) -> str:
    """One step more of a run whose checkpoint is in the folder; with what it says."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told), potluck.init(STILL) as fleet:
        model = nn.Linear(4, 2)
        rows = torch.arange(120.0).reshape(30, 4) + changes.get("shift", 0)
        data = (rows, rows[:, :2].clone())
        model, _, loader = fleet.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-5),
            data,
            batch_size=changes.get("batch", 6),
            seed=changes.get("seed", 3),
        )
        fleet.load(folder)
        for batch in loader:
            fleet.backward(loss_of(model, batch), samples=len(batch[0]))
            fleet.step()
            break
        assert loader.seed == 3
        fleet.save(folder)
    return told.getvalue()


def test_going_on_with_other_data_another_seed_or_batch_is_said(tmp_path: Path) -> None:
    assert go_on(tmp_path) == "" and go_on(tmp_path) == ""
    said = go_on(tmp_path, shift=1)
    assert "OTHER DATA than those this run was trained on up to step 2: as many rows, but what is in them" in said
    assert go_on(tmp_path, shift=1) == ""  # it has been said
    said = go_on(tmp_path, shift=1, seed=4)
    assert said == (
        "potluck: This run was begun with seed 3, and keeps it: the order of its rows depends on it. Seed 4, which was"
        " given now, is not used.\n"
    )
    assert go_on(tmp_path, shift=1, batch=10) == "potluck: Batches had 6 rows up to step 5, and from here on 10.\n"


def test_a_checkpoint_of_before_fingerprints_loads_without_a_word(tmp_path: Path) -> None:
    go_on(tmp_path)
    manifest = next(tmp_path.glob("step-*")) / "manifest.json"
    body = json.loads(manifest.read_text())["body"]
    del body["data"], body["batch"]
    manifest.write_text(json.dumps({"sha256": body_sha256(body), "body": body}))
    assert go_on(tmp_path, shift=1) == ""


def fit_again(folder: Path, *, resume: bool = True, **settings: Any) -> str:
    """What a run says that has two epochs of 5 steps, and is then asked for these."""
    model, rows = nn.Linear(4, 2), torch.randn(30, 4, generator=torch.Generator().manual_seed(2))
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        config, optimizer = FitConfig(progress=False, **settings), torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = potluck.Trainer(
            model, optimizer, (rows, rows[:, :2]), loss=loss_of, batch_size=6, folder=folder, config=config
        )
        trainer.fit(resume=resume)
    return told.getvalue()


def test_a_run_that_is_asked_for_less_than_it_has_done_says_so(tmp_path: Path) -> None:
    assert fit_again(tmp_path / "run", resume=False, epochs=2) == ""
    assert fit_again(tmp_path / "run", epochs=1) == (
        "potluck: This run has done 2 of its epochs, and 1 was asked for: nothing is left to train. Ask for more"
        " epochs to continue it.\n"
    )
    assert fit_again(tmp_path / "run", epochs=3, max_steps=10) == (
        "potluck: This run has done 10 steps, and fit.max_steps is 10: nothing is left to train. Raise it to continue"
        " the run.\n"
    )
    assert fit_again(tmp_path / "run", epochs=3) == ""
