"""Several optimizers under a host: each batch is trained once for each of them, whoever comes and goes meanwhile."""

from pathlib import Path
from typing import Any

import pytest
import torch

import potluck
from potluck.data.rows import mix
from potluck.events import WorkerWent
from tests.fleet import fleet as fleets
from tests.fleet.fleet import BATCH, EPOCHS, ROWS, STEPS, Fleet, wait_until
from tests.parity import test_turns as turns

pytestmark = pytest.mark.timeout(90)


def rows() -> torch.Tensor:
    return torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(1))


def train_gan(engine: Any, *, on_step: Any, epochs: int, **unused: Any) -> Any:
    model, optimizers, _ = turns.build()
    model, _, loader = engine.prepare(model, optimizers, rows(), batch_size=BATCH, seed=1)
    engine.after_agreement.append(lambda: on_step(engine))
    for _ in engine.epochs(epochs):
        for batch in loader:
            engine.backward(model(batch, engine.turn), samples=len(batch))
            engine.step()
    return model


def gan(place: Path) -> None:
    """What the worker trains."""
    fleets.train = train_gan  # type: ignore[assignment]


def judged() -> dict[str, torch.Tensor]:
    model, optimizers, _ = turns.build()
    for epoch in range(EPOCHS):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(1, epoch)))
        for part in order.split(BATCH):
            for turn, optimizer in enumerate(optimizers):
                model.zero_grad()
                model(rows()[part], turn).backward()
                optimizer.step()
    return dict(model.state_dict())


def assert_close(found: dict[str, torch.Tensor]) -> None:
    for name, tensor in judged().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def test_two_joiners_and_a_kill_train_what_the_plain_loop_trains(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    victim = fleet.add("victim", gan, slow_s=0.03, steps=2 * STEPS)
    fleet.add("survivor", gan, slow_s=0.03, steps=2 * STEPS)
    fleet.wait_for_step(7)  # in the middle of a batch's turns
    victim.kill()
    fleet.wait_for_step(11)
    fleet.add("late", gan, slow_s=0.03, steps=2 * STEPS)
    assert_close(fleet.finish())
    assert [e.name for e in fleet.events if isinstance(e, WorkerWent) and not e.polite][:1] == ["victim"]
    assert fleet.server.core.standing.step == 2 * STEPS
    assert fleet.server.core.standing.rows_seen == EPOCHS * ROWS


@pytest.mark.slow
@pytest.mark.parametrize("policy", [potluck.Auto(), potluck.Cadence.published(anchor=1, max_anchor=2)], ids=str)
def test_windows_and_steps_between_them_take_turns(tmp_path: Path, policy: Any) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("one", gan, policy=policy, steps=2 * STEPS, slow_s=0.02)
    fleet.add("two", gan, policy=policy, steps=2 * STEPS, slow_s=0.02)
    found = fleet.finish()
    assert fleet.server.core.standing.rows_seen == EPOCHS * ROWS
    assert all(tensor.isfinite().all() for tensor in found.values())


@pytest.mark.slow
def test_a_host_that_is_started_again_knows_whose_turn_it_is(tmp_path: Path) -> None:
    """Killed in the middle of a batch's turns."""
    process, invite = fleets.start_coordinator(tmp_path)
    workers = [fleets.Worker(invite, tmp_path, name, gan, {"slow_s": 0.05, "steps": 2 * STEPS}) for name in ("a", "b")]
    wait_until(lambda: fleets.step_of(tmp_path) >= 7)
    process.kill()
    process.join()
    process, _ = fleets.start_coordinator(tmp_path, port=invite.port)
    for worker in workers:
        worker.wait()
    for worker in workers:
        assert_close(worker.weights)
