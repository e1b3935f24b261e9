"""Nobody comes, nobody goes: slices, shared memory and encryption change no bit; see test_kinds.py for all else."""

from pathlib import Path

import pytest
import torch

import potluck
from potluck.fleet import invite
from potluck.fleet.pipe import Pipe
from potluck.fleet.reading import PeerReader
from tests.fleet.fleet import EPOCHS, Fleet, assert_same
from tests.fleet.judges import plain_run
from tests.quick import first_of


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return plain_run()


@pytest.mark.slow
def test_a_steps_batch_is_handed_out_in_as_many_slices_as_were_asked_for(tmp_path: Path) -> None:
    """Of 32 rows, 16; of the last 20 of an epoch, 10."""
    fleet = Fleet(tmp_path)
    fleet.add("w0", fit={"epochs": EPOCHS, "slices": 16})
    assert_same(fleet.finish(), plain_run(slices_of_step=16))


def test_slices_are_refused_where_workers_step_by_themselves(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    worker = fleet.add("w0", fit={"epochs": 1, "slices": 3}, policy=potluck.Cadence.published())
    worker.process.join(30)
    assert "Under Cadence each gets rows by its speed: leave batch.slices out." in (tmp_path / "w0.error").read_text()


@pytest.mark.parametrize("shared", first_of([(True,), (True, True), (True, False, True)], are_single=True), ids=len)
def test_workers_that_share_memory_with_the_host_compute_the_same(
    shared: tuple[bool, ...], tmp_path: Path, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []
    read = PeerReader._read_part_at
    monkeypatch.setattr(
        PeerReader, "_read_part_at", lambda *told: (shown.append(told[0]._connection.peer), read(*told))[1]
    )
    fleet = Fleet(tmp_path, encrypted=True, at_least=len(shared))  # the others' way is
    for number, is_shared in enumerate(shared):
        fleet.add(f"w{number}", shared=is_shared)
    assert_same(fleet.finish(), expected)
    assert len(set(shown)) == sum(shared)  # and the others sent theirs


@pytest.mark.parametrize("can_seal", first_of([True, False]))
def test_an_encrypted_fleet_computes_the_same(
    can_seal: bool, tmp_path: Path, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its host can seal what is sent, or leaves all inside TLS."""
    sealed: list[Pipe] = []
    seal = Pipe.seal_receiving
    monkeypatch.setattr(Pipe, "seal_receiving", lambda pipe, key: (sealed.append(pipe), seal(pipe, key))[1])
    monkeypatch.setattr(invite, "can_seal", lambda: can_seal)
    fleet = Fleet(tmp_path, encrypted=True, at_least=2)
    fleet.add("w0")
    fleet.add("w1")
    assert_same(fleet.finish(), expected)
    assert len(sealed) == (2 if can_seal else 0)
