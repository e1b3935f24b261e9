"""Cadence and Async under a host: whoever comes, goes or lags, all hold the same weights after each window."""

import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from potluck.agree.policy import Async, Cadence, Windowed
from potluck.events import CheckpointSaved, Decided, Validated, WorkerCame, WorkerWent
from potluck.save.checkpoint import CheckpointConfig
from potluck.train.schedule import ScheduleConfig
from tests.fleet.faults import after_recording, at
from tests.fleet.fleet import (
    BATCH,
    EPOCHS,
    ROWS,
    STEPS,
    Fleet,
    Worker,
    assert_same,
    build,
    die,
    start_coordinator,
    wait_until,
)
from tests.fleet.judges import assert_close, judge, rows_of
from tests.odd import BIG, SEEN, assert_constant
from tests.quick import first_of

pytestmark = pytest.mark.timeout(60)

SHORT: dict[str, Any] = {"anchor": 1, "max_anchor": 2}
"""Several windows to an epoch, also where agreeing costs more than so small a model."""


@pytest.mark.parametrize(
    ("policy", "count", "options"),
    first_of(
        [
            (Cadence.published(**SHORT), 1, {}),
            (Cadence.published(**SHORT), 2, {}),
            (Cadence.published(**SHORT), 3, {"shared": True}),
            (Async.published(**SHORT), 2, {"shared": True}),
            (Async.published(**SHORT), 3, {}),
        ]
    ),
    ids=lambda value: getattr(type(value), "kind", None) or (str(value) if isinstance(value, int) else ""),
)
def test_windows_are_what_plain_replicas_and_their_mean_compute(
    policy: Windowed, count: int, options: dict[str, Any], tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, at_least=count)
    for number in range(count):
        fleet.add(f"w{number}", policy=policy, bare=True, **options)
    weights = fleet.finish()  # the same on all of them, and each row used once
    assert_close(weights, judge(fleet))
    assert len(fleet.records) > EPOCHS
    assert all(rows_of(fleet, f"w{number}") for number in range(count))
    assert fleet.server.core.refused.total() == 0
    decided = [event for event in fleet.events if isinstance(event, Decided)]
    assert [d.version for d in decided[: len(fleet.records)]] == list(range(len(fleet.records)))
    if count == 1:
        assert decided[0].reason == f"Only w0 is there, so nothing is averaged: {BATCH} rows."
    else:
        assert decided[0].reason.startswith("Nothing was measured yet, so all do the same")
        assert any(d.divergence > 0 for d in decided)


def test_buffers_dropout_and_unused_parameters_agree_too(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    for number in range(2):
        fleet.add(f"w{number}", policy=Cadence.published(**SHORT))
    weights = fleet.finish()
    assert weights["norm.num_batches_tracked"] > 0
    assert_constant(weights, "odd.")
    steps = int(weights["norm.num_batches_tracked"])  # of whoever had the first slice of each window
    assert weights["odd.seen"] == SEEN + 10 * steps and weights["odd.big"] == BIG + 2 * steps
    assert weights["odd.flags"].tolist() == [steps % 2 == 0, steps % 2 == 1]
    assert not torch.equal(weights["norm.running_mean"], torch.zeros(24))


def test_trainer_counts_batches_of_the_run_and_ends_where_it_should(tmp_path: Path) -> None:
    """Of 32 rows: 7 to an epoch, and 10 in all. It looks every 3, and saves every 4, at the next agreement."""
    fleet = Fleet(tmp_path, at_least=2)
    settings: dict[str, Any] = {
        "epochs": 5,
        "max_steps": 10,
        "validate_every": 3,
        "checkpoint": CheckpointConfig(every=4),
        "schedule": ScheduleConfig(warmup=0.5),
    }
    for number in range(2):
        fleet.add(f"w{number}", policy=Cadence.published(**SHORT), fit=settings, steps=10)
    fleet.finish(epochs=1)
    last = fleet.records[-1]
    assert last.rows_seen == ROWS + 3 * BATCH and fleet.server.core.steps_done == 10
    ended = [fleet.server.core.description.steps_at(r.epoch, r.row + r.rows) for r in fleet.records]  # type: ignore[union-attr]
    looked = [e.step for e in fleet.events if isinstance(e, Validated)]
    assert looked == sorted({next(step for step in ended if step >= at) for at in (3, 6, 9)} | {10})
    saved = [e.step for e in fleet.events if isinstance(e, CheckpointSaved)]
    assert saved == sorted({next(step for step in ended if step >= at) for at in (4, 8)} | {10})
    # A window's last step has the rate of the rows that all have done by then.
    rates = [0.01 * settings["schedule"].factor(r.rows_seen, last.rows_seen) for r in fleet.records]
    assert fleet.rates == pytest.approx(rates)


def test_steps_that_are_not_finite_are_skipped_where_they_occur(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    for number in range(2):
        fleet.add(f"w{number}", policy=Async.published(**SHORT), spoiled=17)
    weights = fleet.finish()
    assert_constant(weights, "odd.")
    never = ("odd.mask", "odd.gap")
    assert all(torch.isfinite(value).all() for name, value in weights.items() if name not in never)
    assert all(record.loss > 0 for record in fleet.records)
    assert fleet.server.core.refused.total() == 0
    assert [int((tmp_path / f"w{number}.skipped").read_text()) for number in range(2)] == [EPOCHS, EPOCHS]


def save_and_look_at_every_batch(place: Path) -> None:
    """As an own loop might that was written for steps that all take together."""
    from potluck.engine.engine import Engine

    step = Engine.step

    def busy(self: Any) -> Any:
        found = step(self)
        if self.version and not self.stopping and self.version < 4:
            self.save(place)
            x, y = build()[2]
            self.evaluate(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (x[:9], y[:9]), 4)
        return found

    Engine.step = busy  # type: ignore[method-assign]


def test_saving_and_looking_within_a_window_see_what_was_agreed_on(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("only", save_and_look_at_every_batch, policy=Cadence.published(anchor=2, max_anchor=2), bare=True)
    assert_close(fleet.finish(), judge(fleet))
    assert len({e.loss for e in fleet.events if isinstance(e, Validated)}) == 3  # one for each version


# Coming and going


def in_a_window(place: Path) -> None:
    """Some of its batches are done, in the second window."""

    def fatal(step: int, worker: Any, done: int) -> None:
        if step == 2 and done == 1:
            die(place, "window")

    at("batch", fatal)


def while_sending(place: Path) -> None:
    """The report and one part are sent."""

    def fatal(step: int, worker: Any, part: int, gradients: Any) -> None:
        if step == 2 and part == 1:
            worker.client.flush()
            time.sleep(0.05)
            die(place, "sending")

    at("part", fatal)


@pytest.mark.parametrize(
    ("what", "fault", "count"),
    first_of([("window", in_a_window, 2), ("sending", while_sending, 3)]),
    ids=["window", "sending"],
)
def test_a_worker_killed_in_a_window_loses_nothing(what: str, fault: Any, count: int, tmp_path: Path) -> None:
    policy = Cadence.published(anchor=2, max_anchor=2)
    fleet = Fleet(tmp_path, at_least=count)
    victim = fleet.add("victim", fault, policy=policy)
    for number in range(count - 1):
        fleet.add(f"survivor{number}", policy=policy, slow_s=0.02)
    fleet.finish()
    assert (tmp_path / f"fired-{what}").exists() and victim.process.exitcode == -signal.SIGKILL
    second = fleet.records[1]
    assert second.step == 2 and len(second.ranges) == count
    assert len({worker for _, _, worker in second.ranges}) == count - 1  # one of them did two parts
    assert any(isinstance(e, Decided) and "victim went" in e.reason for e in fleet.events) or count == 2


def test_a_worker_that_joins_in_mid_run_takes_part_from_the_next_window(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("first", policy=Async.published(**SHORT), slow_s=0.15, hold_at=3)
    fleet.wait_for_step(2)
    fleet.add("newcomer", policy=Async.published(**SHORT), slow_s=0.15)
    fleet.let_in("newcomer")
    fleet.finish()
    (came,) = [e for e in fleet.events if isinstance(e, WorkerCame) and e.name == "newcomer"]
    assert came.step >= 2 and any(rows_of(fleet, "newcomer"))
    assert any(isinstance(e, Decided) and e.reason.startswith("newcomer came, and the work") for e in fleet.events)


def test_a_polite_leaver_and_a_checkpoint(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    for name in ("leaver", "stayer"):
        fleet.add(name, policy=Cadence.published(**SHORT), slow_s=0.05, save_every=2)
    fleet.wait_for_step(2)
    fleet.workers[0].send(signal.SIGUSR1)
    fleet.finish()
    (went,) = [e for e in fleet.events if isinstance(e, WorkerWent) and e.name == "leaver"]
    assert went.polite
    saved = [e for e in fleet.events if isinstance(e, CheckpointSaved)]
    # Named and told by batches of the run; the host counts agreements.
    assert saved and all(Path(e.folder).name.startswith(f"step-{e.step:08d}") for e in saved)
    assert max(e.step for e in saved) > len(fleet.records) or max(e.step for e in saved) == STEPS


@pytest.mark.slow
def test_a_run_that_everybody_died_in_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, patience_s=1.0)
    first = fleet.add("first", policy=Cadence.published(**SHORT), slow_s=0.2, save_every=2)
    fleet.wait_for_step(3)
    wait_until(lambda: any((tmp_path / "checkpoints").glob("step-*")))
    first.kill()
    wait_until(lambda: not fleet.server.core.membership.members)
    fleet.add("second", policy=Cadence.published(**SHORT))
    fleet.finish()


def test_a_coordinator_killed_after_its_record_loses_and_repeats_nothing(tmp_path: Path) -> None:
    outlive_a_host(tmp_path, PHASES_OF_HOST, {"policy": Cadence.published(**SHORT), "slow_s": 0.02})


def outlive_a_host(folder: Path, fault: Any, options: dict[str, Any]) -> None:
    """The host dies of this fault, and another continues: two workers end with the same weights, each row used once."""
    process, invite = start_coordinator(folder, fault=fault, at_least=2)
    workers = [Worker(invite, folder, f"w{number}", None, options) for number in range(2)]
    process.join(20)
    assert (folder / "fired-after").exists()
    process, _ = start_coordinator(folder, port=invite.port, returning=2)
    for worker in workers:
        worker.wait(30)
    found = [worker.weights for worker in workers if (folder / f"{worker.name}.pt").exists()]
    assert found
    for other in found[1:]:
        assert_same(found[0], other)
    process.join(10)
    check_ledger(folder)


PHASES_OF_HOST = partial(after_recording, step=3)


def check_ledger(folder: Path) -> None:
    from potluck.fleet.journal import Journal
    from potluck.fleet.ledger import prove

    journal = Journal(folder / "journal.sqlite")
    try:
        for epoch in range(EPOCHS):
            assert prove(journal.ranges(epoch), ROWS).holds
    finally:
        journal.close()


# Speeds


def every_batch_takes(place: Path, seconds: float) -> None:
    at("batch", lambda step, **what: time.sleep(seconds))


def test_a_slow_worker_soon_gets_fewer_rows_in_proportion(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    policy = Cadence.published(anchor=1, max_anchor=1)
    fleet.add("fast", partial(every_batch_takes, seconds=0.03), policy=policy)
    fleet.add("slow", partial(every_batch_takes, seconds=0.12), policy=policy)
    fleet.finish()
    fast, slow = rows_of(fleet, "fast"), rows_of(fleet, "slow")
    assert fast[0] == slow[0]
    assert 1.5 * sum(slow[2:]) < sum(fast[2:]) < 8 * sum(slow[2:]), (fast, slow)  # 4, if quiet
    reasons = [e.reason for e in fleet.events if isinstance(e, Decided)]
    assert any(reason.startswith("slow is the slowest, at ") for reason in reasons), reasons


# What a host refuses


def test_another_policy_or_other_settings_are_refused(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("first", policy=Cadence.published(**SHORT), hold_at=2)
    fleet.wait_for_step(1)
    others = {
        "other": Cadence.published(anchor=7),
        "another": Async.published(**SHORT),
        "third": Cadence.published(**SHORT, max_batch_diff=3),
    }
    for name, policy in others.items():
        worker = fleet.add(name, policy=policy)
        worker.process.join(20)
        fleet.workers.remove(worker)
    told = [(tmp_path / f"{name}.error").read_text() for name in others]
    assert "This run has policy.anchor = 1, and you have 7. Build the same" in told[0]
    assert "This run's policy is cadence, and yours is async. Build the same" in told[1]
    assert "This run has policy.max_batch_diff = None, and you have 3. Build the same" in told[2]
    assert fleet.server.core.refused == {"wrong model": 3}
