"""A host that cannot write: its workers train on, keep the weights, and nobody sees a stack of frames."""

import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from potluck.errors import ConfigError
from potluck.events import CheckpointFailed, CheckpointSaved, EventFile, RunEnded, WorkerWent
from potluck.save.checkpoint import CheckpointConfig
from tests.fleet.fleet import STEPS, Fleet, assert_same, wait_until
from tests.fleet.judges import plain_run

pytestmark = pytest.mark.timeout(60)
FIT: dict[str, Any] = {"epochs": 2, "checkpoint": CheckpointConfig(every=3)}


def told(fleet: Fleet, kind: type) -> list[int]:
    return [event.step for event in fleet.events if isinstance(event, kind)]


@pytest.mark.slow
def test_workers_train_on_where_the_host_cannot_write_and_wait_for_it_at_the_end(tmp_path: Path) -> None:
    """Its place for checkpoints is a file until all steps are done."""
    (tmp_path / "checkpoints").write_text("in the way")
    fleet = Fleet(tmp_path, at_least=2, patience_s=2.0)
    for number in range(2):
        fleet.add(f"w{number}", fit=FIT)
    wait_until(lambda: told(fleet, CheckpointFailed)[-1:] == [STEPS])
    assert set(told(fleet, CheckpointFailed)) > {3, STEPS}
    assert not told(fleet, CheckpointSaved) and len(fleet.server.core.membership.ready) == 2
    assert "The host cannot keep the checkpoint of step" in fleet.server.core.saving.fault
    (tmp_path / "checkpoints").unlink()
    assert_same(fleet.finish(), plain_run())
    assert told(fleet, CheckpointSaved) == [STEPS]


@pytest.mark.slow
def test_the_last_worker_that_leaves_waits_until_its_weights_are_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    fleet = Fleet(tmp_path, patience_s=2.0)
    worker = fleet.add("w0", slow_s=0.2)
    fleet.wait_for_step(3)
    worker.send(signal.SIGUSR1)
    wait_until(lambda: len(told(fleet, CheckpointFailed)) >= 2)
    assert worker.process.is_alive() and len(set(told(fleet, CheckpointFailed))) == 1
    (tmp_path / "checkpoints").unlink()
    worker.wait()
    wait_until(lambda: any(isinstance(event, WorkerWent) for event in fleet.events))  # they come by a thread
    assert told(fleet, CheckpointSaved) == [told(fleet, CheckpointFailed)[0]]
    assert [event.polite for event in fleet.events if isinstance(event, WorkerWent)] == [True]
    fleet.close()


def test_a_journal_that_cannot_be_written_ends_the_host_with_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(tmp_path)
    record = fleet.journal.record

    def fail(step: Any) -> None:
        if step.step < 3:
            record(step)
            return
        raise ConfigError("Cannot write to the journal: database or disk is full.")

    fleet.journal.record = fail  # type: ignore[method-assign]
    fleet.add("w0")
    finish = fleet.server.wait(30)
    assert finish is not None and finish.failed and finish.reason.endswith("disk is full.")
    assert fleet.server.core.standing.version == 3 and fleet.journal.steps() == [1, 2]
    assert not any(entry.exc_info for entry in caplog.records)
    fleet.close()


def test_an_event_file_that_cannot_be_written_closes_all_the_same(tmp_path: Path) -> None:
    """A file system of one block, which is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    usual = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    file = EventFile(tmp_path / "events.jsonl")
    ended = RunEnded(reason="x" * 9000, step=1, rows_seen=1, seconds=1.0, loss=None, validation_loss=None, skipped=0)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(ConfigError, match=r"Cannot write to .*events.jsonl: File too large"):
            file(ended)
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, usual)
