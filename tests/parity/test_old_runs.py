"""What older versions of Potluck left in the middle of a run is resumed, and has the losses that it had then."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet import fleet as fleets
from tests.parity import old_runs
from tests.parity.bits import TOLERANCE

QUICK = (
    "sync, stopped in an epoch",
    "sync, trainer with EMA, stopped in an epoch",
    "FullShard, stopped in an epoch",
    "ShardGradOp, stopped in an epoch",
    "cadence, moments, stopped in an epoch",
    "cadence, stream, stopped in an epoch",
    "stages, stopped in an epoch",
    "a host, sync",
)
CASES = [
    pytest.param(archive, name, id=f"{name}: {archive.name}", marks=[pytest.mark.slow] * (name not in QUICK))
    for archive in old_runs.archives()
    for name in old_runs.numbers_in(archive)
]


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    fleets.close_all()


@pytest.mark.parametrize(("archive", "name"), CASES)
def test_an_old_run_is_resumed_and_has_its_losses(archive: Path, name: str, tmp_path: Path) -> None:
    old_runs.extract(archive, name, tmp_path)
    digits = old_runs.GROUPS[name].digits if name in old_runs.GROUPS else "float32"
    expected = old_runs.numbers_in(archive)[name]
    assert old_runs.resume(name, tmp_path) == pytest.approx(expected, rel=TOLERANCE[digits], abs=0)


def test_there_are_some() -> None:
    assert {name for case in CASES for name in case.values[1:]} == set(old_runs.KINDS)
