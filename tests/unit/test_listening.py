"""fleet.on(): who is called for what, and what becomes of a callback that fails."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import potluck
from potluck.engine.engine import Engine
from potluck.errors import ConfigError, Interrupted
from potluck.events import EpochDone, Event, EventLog, Noticed, RunEnded, RunStarted, StepDone, Validated
from potluck.train.trainer import FitConfig, Trainer
from tests.ranks import run_ranks

NOTICED = Noticed(sentence="Something.")


def train(fleet: Engine, epochs: int = 2) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(2, 1)
    rows = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    model, _, loader = fleet.prepare(model, torch.optim.SGD(model.parameters(), 0.1), rows, batch_size=4)
    for _ in fleet.epochs(epochs):
        for x, y in loader:
            fleet.backward(nn.functional.mse_loss(model(x), y), samples=len(x))
            fleet.step()


def heard_by_a_rank() -> tuple[list[int], int, list[str], int]:
    fleet = potluck.init()
    losses: list[int] = []
    kinds: list[str] = []
    stop = fleet.on(StepDone, lambda done: losses.append(done.step))
    fleet.on(Event, lambda event: kinds.append(type(event).__name__))
    shares: list[int] = []
    fleet.on(StepDone, lambda done: shares.append(len(done.workers)))
    fleet.on(EpochDone, lambda done: stop())  # after the first epoch
    train(fleet)
    return losses, len(shares), sorted(set(kinds)), shares[0]


def test_every_rank_hears_every_step_with_all_workers_parts_until_it_stops_to_listen() -> None:
    assert run_ranks(2, heard_by_a_rank) == [([1, 2], 4, ["EpochDone", "StepDone"], 2)] * 2


def test_one_that_fails_is_said_once_with_its_line_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    log, heard = EventLog(), []

    def on_notice(event: Noticed) -> None:
        raise KeyError("accuracy")

    log.on(Noticed, on_notice)
    log.on(Event, heard.append)
    for _ in range(3):
        log.emit(NOTICED)
    said = capsys.readouterr().err
    assert said.count("potluck: ") == 1 and len(heard) == 3
    assert "on_notice failed when it heard of Noticed, and is not called again: KeyError: 'accuracy'" in said
    assert "test_listening.py, line " in said and said.endswith("The run continues.\n")


def test_one_may_end_the_run_on_purpose() -> None:
    log = EventLog()

    def leave(event: Event) -> None:
        raise Interrupted("That is enough.")

    log.on(Event, leave)
    with pytest.raises(Interrupted):
        log.emit(NOTICED)


def test_stopping_twice_or_from_within_is_fine() -> None:
    log, heard = EventLog(), []
    stops = [log.on(Event, lambda event: stops[1]()), log.on(Event, heard.append), log.on(Event, heard.append)]
    log.emit(NOTICED)
    stops[1]()
    stops[2]()
    log.emit(NOTICED)
    assert len(heard) == 1, "the second was stopped by the first, the third heard once"


def test_what_is_no_event_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"Event for all or one of RunStarted, StepDone, .*; not 'loss'"):
        EventLog().on("loss", print)  # type: ignore[arg-type]


def test_under_a_trainer_one_that_was_stopped_stays_so(tmp_path: Path) -> None:
    fleet, heard = Engine(), []
    model = nn.Linear(2, 1)
    rows = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        rows,
        loss=lambda net, batch: nn.functional.mse_loss(net(batch[0]), batch[1]),
        batch_size=4,
        folder=tmp_path / "run",
        validation=rows,
        engine=fleet,
        config=FitConfig(progress=False),
    )
    stop = fleet.on(Event, heard.append)
    fleet.on(Validated, lambda event: stop())
    later: list[Event] = []
    fleet.on(RunStarted, lambda event: fleet.on(RunEnded, later.append) and None)
    trainer.fit()
    assert [type(event).__name__ for event in heard] == ["RunStarted", "StepDone", "StepDone", "Validated"]
    assert len(later) == 1, "one that began to listen during the run hears its end"
    fleet.events.emit(NOTICED)
    assert len(heard) == 4
