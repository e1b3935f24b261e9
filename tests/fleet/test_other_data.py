"""Workers that bring something else than the run trains: refused by name, and the run does not feel it."""

from pathlib import Path
from typing import Any

import pytest

from potluck.events import EpochDone
from tests.fleet.fleet import Fleet, Worker, assert_same
from tests.fleet.judges import plain_run

pytestmark = pytest.mark.timeout(90)


def refusal(worker: Worker) -> str:
    """What a worker was told that may not take part."""
    worker.process.join(60)
    told = worker.folder / f"{worker.name}.error"
    said = told.read_text()
    told.unlink()
    return said


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"data_seed": 6}, "Your data have as many rows as this run's, but what is in them is not the same."),
        pytest.param({"lr": 0.02}, "This run has optimizer.lr = 0.01, and you have 0.02.", marks=pytest.mark.slow),
    ],
    ids=["data", "lr"],
)
def test_a_joiner_with_other_data_or_settings_is_refused_and_changes_no_bit(
    other: dict[str, Any], said: str, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("right", slow_s=0.05)
    fleet.wait_for_step(1)
    wrong = fleet.add("wrong", **other)
    told = refusal(wrong)
    assert (f"ConfigError: {said}" in told and "on every worker" in told) or "Give every worker" in told
    fleet.workers.remove(wrong)
    assert_same(fleet.finish(), plain_run())
    proved = [event.sentence for event in fleet.events if isinstance(event, EpochDone)]
    assert proved and not any("counted by their places" in sentence for sentence in proved)
