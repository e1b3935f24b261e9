"""Gradients in fewer bits: weights are those of one process with the same rounding, no matter who was there."""

import itertools
from pathlib import Path

import pytest
import torch

from potluck.coded_numbers import Coding
from potluck.fleet.connection import PayloadLayout
from potluck.fleet.description import BUFFERS, COUNTS
from potluck.fleet.reading import PeerReader
from potluck.wire.codec import Bulk
from tests.fleet.faults import sends_nan
from tests.fleet.fleet import STEPS, Fleet, assert_same, wait_until
from tests.fleet.kinds import CODED_MOMENTS, one_process, parts_of_model
from tests.fleet.test_peers import PlainPeer
from tests.parity.test_coded_sums import BLOCKS

pytestmark = pytest.mark.timeout(90)


def test_rounding_matters() -> None:
    weights = [one_process(wire)["leave.weight"] for wire in (*BLOCKS, "fp32")]
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(weights))


@pytest.mark.slow
def test_workers_of_the_hosts_machine_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    read = PeerReader._look_in
    monkeypatch.setattr(PeerReader, "_look_in", lambda reader: (shown.append(1), read(reader))[1])
    fleet = Fleet(tmp_path, encrypted=True, at_least=2)
    fleet.add("near", wire="int4", shared=True)
    fleet.add("far", wire="int4")
    assert_same(fleet.finish(), one_process("int4"))
    assert shown


def test_a_newcomer_gets_a_state_without_loss_and_changes_no_bit(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("first", wire="int4", hold_at=5)
    fleet.wait_for_step(5)
    fleet.add("newcomer", wire="int4")
    fleet.let_in("newcomer")
    assert_same(fleet.finish(), one_process("int4"))
    # Its state travelled as it is: what is said to be saved is of gradients and averages alone, 4 and 4 bytes a number.
    floats = sum(p.numel() for part in parts_of_model() for _, p in part)
    assert 0 < fleet.server.now()["bytes"]["saved"] < STEPS * 2 * 8 * floats


def test_a_worker_that_sends_otherwise_is_refused(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("first", wire="int8", hold_at=3)
    fleet.wait_for_step(3)
    other = fleet.add("other", wire="int4")
    other.process.join(30)
    assert "This run has wire = int8, and you have int4." in (tmp_path / "other.error").read_text()
    (tmp_path / "other.error").unlink()
    fleet.workers.remove(other)
    (tmp_path / "go").touch()
    assert_same(fleet.finish(), one_process("int8"))


@pytest.mark.slow
def test_workers_that_leave_the_form_to_the_run_are_among_those_that_chose_int4(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("asked", wire="int4")
    fleet.add("auto", wire="auto")
    assert_same(fleet.finish(), one_process("int4"))


def test_a_gradient_that_is_not_finite_is_computed_by_somebody_else(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("spoiler", sends_nan, wire="int4")
    fleet.add("other", wire="int4")
    assert_same(fleet.finish(), one_process("int4"))
    assert (tmp_path / "fired-spoiled").exists()


def test_a_plain_peer_sends_floats_and_holds_the_same_weights(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, plain_peers=True, at_least=2)
    peer = PlainPeer(fleet.server.port, "entrenar")
    peer.start()
    wait_until(lambda: len(fleet.server.core.membership.ready) == 1)
    fleet.add("ours", bare=True, wire="int8")
    weights = fleet.finish()
    peer.join(10)
    assert len(peer.losses) == STEPS
    assert_same(peer.model.state_dict(), weights)


@pytest.mark.slow
def test_what_optimizers_keep_travels_in_codings_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, set[str]] = {}
    check = PayloadLayout.check_coded

    def see(layout: PayloadLayout, bulk: Bulk) -> tuple[int, Coding]:
        part, coding = check(layout, bulk)
        seen.setdefault(part, set()).add(coding.wire)
        return part, coding

    monkeypatch.setattr(PayloadLayout, "check_coded", see)
    fleet = Fleet(tmp_path, at_least=2)
    for number in range(2):
        fleet.add(f"w{number}", wire="int4", policy=CODED_MOMENTS)
    fleet.finish()
    described = fleet.server.core.description
    assert described is not None and described.parts[-1].component in (BUFFERS, COUNTS)
    assert any(part.is_moments for part in described.parts)
    assert seen == {index: {each.wire} for index, each in enumerate(described.codings) if each is not None}
    assert {wire for found in seen.values() for wire in found} == {"int4", "log8"}
