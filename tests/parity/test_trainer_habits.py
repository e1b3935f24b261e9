"""What a Trainer does beside training: an average of the weights, an early end, the best checkpoint, callbacks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import potluck
from potluck import CheckpointConfig, FitConfig
from potluck.agree.records import Position
from potluck.data.rows import mix
from potluck.errors import ConfigError, Interrupted, PotluckError
from potluck.events import StepDone, Validated, read_events
from potluck.save.checkpoint_folder import best_loss, found
from potluck.save.export import export
from potluck.sharding.united_optimizers import JointOptimizer
from potluck.show.picture import draw_losses, read_timeline
from potluck.train.trainer import Summary
from potluck.validations import Validations
from tests.parity.test_sync import STILL
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, BATCH, EPOCHS, DECAY = 30, 6, 3, 0.8


def make(*, joint: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(2)
    data = torch.randn(ROWS, 4, generator=draw), torch.randn(ROWS, 2, generator=draw)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(4, 2))
    if joint:
        first, *rest = model
        optimizers = (
            torch.optim.SGD(first.parameters(), lr=1e-2, momentum=0.9),
            torch.optim.AdamW([p for each in rest for p in each.parameters()], lr=1e-2),
        )
        return model, JointOptimizer(*optimizers), data
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), data


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def fit(
    folder: str,
    options: dict[str, Any],
    engine: dict[str, Any],
    *,
    resume: bool = False,
    stop_at: int = 0,
    joint: bool = False,
) -> dict[str, Any]:
    """Of one rank: the losses of its validations, and what its summary says."""
    found: list[float] = []
    stopping: list[Any] = []
    with potluck.init(**({"policy": STILL} | engine)) as fleet:
        model, optimizer, data = make(joint=joint)
        if stop_at:
            stopping.append(lambda: fleet.request_stop() if fleet.step_number == stop_at - 1 else None)
            fleet.after_step.append(stopping[0])
        trainer = potluck.Trainer(
            model,
            optimizer,
            data,
            loss=loss_of,
            batch_size=BATCH,
            folder=folder,
            validation=data,
            callbacks=[lambda event: found.append(event.loss) if isinstance(event, Validated) else None],
            engine=fleet,
            config=FitConfig(**({"epochs": EPOCHS, "progress": False} | options)),
        )
        try:
            summary = trainer.fit(resume=resume)
        except Interrupted:
            return {"losses": found}
        return {
            "losses": found,
            "steps": summary.steps,
            "best": str(summary.best),
            "best_loss": summary.best_loss,
            "metrics": summary.metrics,
        }


# The average of the weights


def averaged_losses(*, joint: bool = False) -> list[float]:
    """A plain loop's, whose average follows its weights after every step; at the end of each epoch."""
    model, optimizer, (x, y) = make(joint=joint)
    average = [p.detach().clone() for p in model.parameters()]
    losses = []
    for epoch in range(EPOCHS):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch)))
        for start in range(0, ROWS, BATCH):
            rows = order[start : start + BATCH]
            optimizer.zero_grad()
            F.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
            average = [DECAY * a + (1 - DECAY) * p.detach() for a, p in zip(average, model.parameters(), strict=True)]
        with torch.no_grad():
            own = [p.clone() for p in model.parameters()]
            torch._foreach_copy_(list(model.parameters()), average)
            losses.append(F.mse_loss(model(x), y).item())
            torch._foreach_copy_(list(model.parameters()), own)
    return losses


STAGES = potluck.Stages(protocol=potluck.Pipeline(micro_batch_size=2), count=2)
SPLITS = {
    "none": {},
    "stages": {"stages": STAGES},
    "full": {"strategy": potluck.FullShard()},
    "zero": {"strategy": potluck.ShardGradOp()},
    "uneven": {"strategy": potluck.FullShard(weights=(3, 1)), "policy": potluck.Sync(balance=False)},
}


@pytest.mark.parametrize("split", first_of(SPLITS))
def test_validation_is_with_the_average_also_after_a_resume(tmp_path: Path, split: str) -> None:
    options, engine = {"ema": DECAY, "checkpoint": CheckpointConfig()}, SPLITS[split]
    run_ranks(2, _stopped, str(tmp_path), options, engine)
    first, other = run_ranks(2, _resumed, str(tmp_path), options, engine)
    expected = averaged_losses()
    assert first["losses"] == other["losses"] == pytest.approx(expected[1:], rel=1e-4)
    assert first["best_loss"] == pytest.approx(min(expected), rel=1e-4)
    export(tmp_path, tmp_path / "average.safetensors", ema=True)
    model, _, (x, y) = make()
    model.load_state_dict(load_file(tmp_path / "average.safetensors"))
    with torch.no_grad():
        assert F.mse_loss(model(x), y).item() == pytest.approx(expected[-1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_several_optimizers_have_one_average(tmp_path: Path, split: str) -> None:
    first, other = run_ranks(2, _joined, str(tmp_path), {"ema": DECAY}, SPLITS[split])
    assert first["losses"] == other["losses"] == pytest.approx(averaged_losses(joint=True), rel=1e-4)


def _joined(folder: str, options: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    return fit(folder, options, engine, joint=True)


def _stopped(folder: str, options: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    return fit(folder, options, engine, stop_at=7)


def _resumed(folder: str, options: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    return fit(folder, options, engine, resume=True)


def test_a_window_counts_as_its_steps() -> None:
    """Alone each window's end is a plain step's; the average follows there, by as many steps."""
    with potluck.init(potluck.Cadence.published(anchor=5, max_anchor=5)) as fleet:
        model, optimizer, data = make()
        fleet.prepare(model, optimizer, data, batch_size=BATCH)
        from potluck.engine.eval_weights import WeightAverage

        average = WeightAverage(fleet.run, DECAY)
        before = [p.detach().clone() for p in model.parameters()]
        fleet.run.progress.seek(Position(step=5))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1
        fleet.run.tell_agreed(0)
        with average.applied():
            for parameter, was in zip(model.parameters(), before, strict=True):
                assert torch.allclose(parameter, was + 1 - DECAY**5)
        for parameter, was in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, was + 1)


# The early end and the best checkpoint


RISING = [0.5, 0.3, 0.4, math.nan, 0.35, 0.1]


def fit_by_script(folder: str, *, resume: bool = False, patience: int | None = 3) -> dict[str, Any]:
    """A loss that falls, and then does not; it is a function of the step."""
    with potluck.init(STILL) as fleet:
        model, optimizer, data = make()
        trainer = potluck.Trainer(
            model,
            optimizer,
            data,
            loss=loss_of,
            batch_size=BATCH,
            folder=folder,
            validation=data,
            validate=lambda model, batch: {"loss": RISING[fleet.step_number // 2 - 1], "step": fleet.step_number},
            engine=fleet,
            config=FitConfig(
                epochs=EPOCHS,
                validate_every=2,
                patience=patience,
                progress=False,
                checkpoint=CheckpointConfig(every=2, keep_last=1, best=True),
            ),
        )
        summary = trainer.fit(resume=resume)
        return {"steps": summary.steps, "best": str(summary.best), "loss": summary.best_loss, "last": summary.metrics}


def test_a_run_ends_early_and_its_best_checkpoint_stays(tmp_path: Path) -> None:
    first, other = run_ranks(2, fit_by_script, str(tmp_path))
    assert first["steps"] == other["steps"] == 10, "the third validation after the best"
    assert first["loss"] == other["loss"] == pytest.approx(0.3) and first["last"]["step"] == 10.0
    best = tmp_path / "checkpoints" / "step-00000004"
    assert first["best"] == str(best) and best_loss(best) == pytest.approx(0.3)
    assert [path.name for path in found(tmp_path / "checkpoints")] == ["step-00000010", "step-00000004"]
    said = [e["sentence"] for e in read_events(tmp_path / "events.jsonl") if e["event"] == "noticed"]
    assert "of the last 3 validations none was better than 0.3000, at step 4" in said[0]
    told = [e["metrics"] for e in read_events(tmp_path / "events.jsonl") if e["event"] == "validated"]
    assert [each["step"] for each in told] == [2, 4, 6, 8, 10] and math.isnan(told[3]["loss"])
    again, _ = run_ranks(2, _again, str(tmp_path))
    assert (again["steps"], again["best"]) == (10, str(best)), "nothing is left to train"
    longer, _ = run_ranks(2, _longer, str(tmp_path))
    with pytest.raises(ConfigError, match="has no average of its weights"):
        export(tmp_path, tmp_path / "average.safetensors", ema=True)
    assert longer["steps"] == 15 and longer["best"].endswith("step-00000012") and longer["loss"] == pytest.approx(0.1)


def _again(folder: str) -> dict[str, Any]:
    return fit_by_script(folder, resume=True)


def _longer(folder: str) -> dict[str, Any]:
    RISING.append(0.2)
    return fit_by_script(folder, resume=True, patience=9)


def test_a_validation_that_is_no_number_is_never_the_best() -> None:
    seen = Validations()
    assert [seen.take(step, loss) for step, loss in enumerate([math.nan, 2.0, math.nan, 2.0, 1.0, 1.0])] == [
        False, True, False, False, True, False,
    ]  # fmt: skip
    assert (seen.best, seen.best_step, seen.since_best) == (1.0, 4, 1)
    assert not seen.take(5, 0.5), "the same step again"
    late = Validations()
    late.follow([{**vars(late)}, {**vars(seen)}])
    assert vars(late) == vars(seen)


def fit_without_loss(folder: Path, **options: Any) -> tuple[Summary, list[Validated]]:
    model, optimizer, data = make()
    heard: list[Validated] = []
    trainer = potluck.Trainer(
        model,
        optimizer,
        data,
        loss=loss_of,
        batch_size=BATCH,
        folder=folder,
        validation=data,
        validate=lambda model, batch: {"accuracy": 0.75, "two": 2.0},
        callbacks=[lambda event: heard.append(event) if isinstance(event, Validated) else None],
        config=FitConfig(epochs=1, validate_every=2, progress=False, **options),
    )
    return trainer.fit(), heard


def test_figures_without_a_loss_are_shown_by_their_own_names(tmp_path: Path) -> None:
    summary, heard = fit_without_loss(tmp_path)
    assert [event.loss for event in heard] == [None] * 3
    assert heard[0].in_words == "validation accuracy 0.7500, two 2.0000"
    assert summary.validation_loss is None and summary.best_loss is None
    assert summary.metrics == pytest.approx({"accuracy": 0.75, "two": 2.0})
    drawn = draw_losses(tmp_path / "events.jsonl", tmp_path / "loss.png")
    assert drawn.read_bytes().startswith(b"\x89PNG") and not read_timeline(tmp_path / "events.jsonl").looks


@pytest.mark.parametrize("options", first_of([{"patience": 2}, {"checkpoint": CheckpointConfig(best=True)}]), ids=str)
def test_the_best_of_figures_without_a_loss_is_refused_with_what_to_do(options: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'validate gave accuracy, two\. Name one of its figures "loss"'):
        fit_without_loss(tmp_path, **options)
    assert [path.name for path in found(tmp_path / "checkpoints")] == ["step-00000002"], "nothing is lost"


# Callbacks


def test_a_callback_hears_every_event_and_may_stop_the_run(tmp_path: Path) -> None:
    model, optimizer, data = make()
    heard: list[str] = []
    fleet = potluck.init()

    def stop(event: object) -> None:
        heard.append(type(event).__name__)
        if isinstance(event, StepDone) and event.step == 3:
            fleet.request_stop()

    options: dict[str, Any] = {"loss": loss_of, "batch_size": 6, "validation": data, "engine": fleet}
    config = FitConfig(epochs=1, progress=False, validate_every=2)
    trainer = potluck.Trainer(model, optimizer, data, folder=tmp_path, callbacks=[stop], config=config, **options)
    with fleet, pytest.raises(Interrupted, match="Stopped after step 4"):
        trainer.fit()
    assert heard[:2] == ["RunStarted", "StepDone"] and heard.count("StepDone") == 4
    assert "Validated" in heard and heard[-1] == "RunEnded"
    assert (tmp_path / "checkpoints" / "step-00000004").exists()


def test_a_callback_that_fails_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    model, optimizer, data = make()

    def broken(event: object) -> None:
        if isinstance(event, StepDone):
            raise KeyError("loss")

    with potluck.init() as fleet, pytest.raises(PotluckError, match="callback broken failed when it heard of StepDone"):
        potluck.Trainer(
            model,
            optimizer,
            data,
            loss=loss_of,
            batch_size=6,
            folder=tmp_path,
            callbacks=[broken],
            engine=fleet,
            config=FitConfig(progress=False),
        ).fit()
