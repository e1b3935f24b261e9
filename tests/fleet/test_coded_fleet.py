"""Gradients in fewer bits: weights are those of one process with the same rounding, no matter who was there."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import potluck
from potluck.coded_numbers import Coding
from potluck.engine import slices
from potluck.engine.slices import plan_parts
from potluck.fleet.connection import PayloadLayout
from potluck.fleet.description import BUFFERS, COUNTS
from potluck.fleet.reading import PeerReader
from potluck.sharding.blocks import find_blocks
from potluck.wire.codec import Bulk
from tests.fleet.faults import PHASES, sends_nan
from tests.fleet.fleet import (
    STEPS,
    Fleet,
    Worker,
    assert_same,
    build,
    finish_of_one_and_two,
    start_coordinator,
    wait_until,
)
from tests.fleet.judges import Gradients, plain_run
from tests.fleet.test_peers import PlainPeer
from tests.parity.test_coded_sums import BLOCKS, rounded
from tests.quick import first_of

pytestmark = pytest.mark.timeout(90)
wires = pytest.mark.parametrize("wire", first_of(BLOCKS))


def parts_of_model() -> list[list[tuple[str, torch.nn.Parameter]]]:
    model = build()[0]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    before, slices.SMALL_BYTES = slices.SMALL_BYTES, 1024  # as workers of tests/fleet have it
    try:
        return [[(names[id(p)], p) for p in unit] for _, unit in plan_parts(model, find_blocks(model))]
    finally:
        slices.SMALL_BYTES = before


def one_process(wire: str) -> Gradients:
    parts = parts_of_model()
    assert len(parts) > 3

    def arrives(gradients: Gradients) -> Gradients:
        found: Gradients = {}
        for part in parts:
            flat = torch.cat([gradients.get(name, torch.zeros_like(p)).reshape(-1) for name, p in part])
            pieces = rounded(wire, flat).split([p.numel() for _, p in part])
            found |= {name: piece.view_as(p) for (name, p), piece in zip(part, pieces, strict=True)}
        return {name: found[name] for name in gradients}

    return plain_run(rounded=arrives)


@pytest.fixture(scope="module")
def expected() -> dict[str, Gradients]:
    return {wire: one_process(wire) for wire in BLOCKS}


@wires
@pytest.mark.parametrize("count", first_of([1, 3]))
def test_a_fleet_of_any_size_computes_what_one_process_does(
    wire: str, count: int, tmp_path: Path, expected: dict[str, Gradients]
) -> None:
    fleet = Fleet(tmp_path, at_least=count)
    for number in range(count):
        fleet.add(f"w{number}", wire=wire)
    assert_same(fleet.finish(), expected[wire])
    assert len(fleet.records) == STEPS and fleet.server.core.refused.total() == 0


def test_rounding_matters(expected: dict[str, Gradients]) -> None:
    weights = [expected[wire]["leave.weight"] for wire in BLOCKS]
    assert not any(torch.equal(a, b) for a, b in zip(weights, [*weights[1:], plain_run()["leave.weight"]], strict=True))


@pytest.mark.slow
def test_workers_of_the_hosts_machine_compute_the_same(
    tmp_path: Path, expected: dict[str, Gradients], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []
    read = PeerReader._look_in
    monkeypatch.setattr(PeerReader, "_look_in", lambda reader: (shown.append(1), read(reader))[1])
    fleet = Fleet(tmp_path, encrypted=True, at_least=2)
    fleet.add("near", wire="int4", shared=True)
    fleet.add("far", wire="int4")
    assert_same(fleet.finish(), expected["int4"])
    assert shown


@pytest.mark.parametrize(
    ("phase", "wire"), first_of([("half", "int4"), ("backward", "int8"), ("sent", "bf16"), ("average", "int4")])
)
def test_a_worker_killed_in_any_phase_changes_no_bit(
    phase: str, wire: str, tmp_path: Path, expected: dict[str, Gradients]
) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    victim = fleet.add("victim", PHASES[phase], wire=wire)
    fleet.add("survivor", wire=wire)
    assert_same(fleet.finish(), expected[wire])
    assert (tmp_path / f"fired-{phase}").exists() and victim.process.exitcode == -signal.SIGKILL


def test_a_newcomer_gets_a_state_without_loss_and_changes_no_bit(
    tmp_path: Path, expected: dict[str, Gradients]
) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("first", wire="int4", hold_at=5)
    fleet.wait_for_step(5)
    fleet.add("newcomer", wire="int4")
    fleet.let_in("newcomer")
    assert_same(fleet.finish(), expected["int4"])
    # Its state travelled as it is: what is said to be saved is of gradients and averages alone, 4 and 4 bytes a number.
    floats = sum(p.numel() for part in parts_of_model() for _, p in part)
    assert 0 < fleet.server.now()["bytes"]["saved"] < STEPS * 2 * 8 * floats


@pytest.mark.slow
def test_a_host_that_is_started_again_continues_in_the_same_form(
    tmp_path: Path, expected: dict[str, Gradients]
) -> None:
    coordinator, invite = start_coordinator(tmp_path, at_least=2)
    workers = [Worker(invite, tmp_path, name, None, {"slow_s": 0.05, "wire": "int8"}) for name in ("a", "b")]
    try:
        wait_until(lambda: all((tmp_path / f"{worker.name}.in").exists() for worker in workers))
        coordinator.kill()
        coordinator.join(20)
        coordinator, _ = start_coordinator(tmp_path, port=invite.port, returning=2)
        for worker in workers:
            worker.wait()
            assert_same(worker.weights, expected["int8"])
        coordinator.join(20)
    finally:
        coordinator.kill()
        for worker in workers:
            worker.process.kill()


def test_a_worker_that_sends_otherwise_is_refused(tmp_path: Path, expected: dict[str, Gradients]) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("first", wire="int8", hold_at=3)
    fleet.wait_for_step(3)
    other = fleet.add("other", wire="int4")
    other.process.join(30)
    assert "This run has wire = int8, and you have int4." in (tmp_path / "other.error").read_text()
    (tmp_path / "other.error").unlink()
    fleet.workers.remove(other)
    (tmp_path / "go").touch()
    assert_same(fleet.finish(), expected["int8"])


@pytest.mark.slow
def test_workers_that_leave_the_form_to_the_run_are_among_those_that_chose_int4(
    tmp_path: Path, expected: dict[str, Gradients]
) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("asked", wire="int4")
    fleet.add("auto", wire="auto")
    assert_same(fleet.finish(), expected["int4"])


def test_a_gradient_that_is_not_finite_is_computed_by_somebody_else(
    tmp_path: Path, expected: dict[str, Gradients]
) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("spoiler", sends_nan, wire="int4")
    fleet.add("other", wire="int4")
    assert_same(fleet.finish(), expected["int4"])
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


# Windows: what a worker changed, with what was left out of it before

SHORT: dict[str, Any] = {"anchor": 1, "max_anchor": 2}
POLICIES = {
    "cadence": potluck.Cadence.published(**SHORT),
    "async": potluck.Async.published(**SHORT),
    "moments": potluck.Cadence.published(moments=True, together=0.4, **SHORT),
}


@pytest.mark.parametrize("policy", first_of(POLICIES))
def test_workers_that_step_by_themselves_hold_the_same_bits(policy: str, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    for number in range(2):
        fleet.add(f"w{number}", wire="int4", policy=POLICIES[policy])
    weights = fleet.finish()  # all of them have these
    assert all(tensor.isfinite().all() for name, tensor in weights.items() if "odd" not in name)
    assert fleet.server.core.refused.total() == 0


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
        fleet.add(f"w{number}", wire="int4", policy=POLICIES["moments"])
    fleet.finish()
    described = fleet.server.core.description
    assert described is not None and described.parts[-1].component in (BUFFERS, COUNTS)
    assert any(part.is_moments for part in described.parts)
    assert seen == {index: {each.wire} for index, each in enumerate(described.codings) if each is not None}
    assert {wire for found in seen.values() for wire in found} == {"int4", "log8"}


@pytest.mark.parametrize("phase", first_of(["half", "sent"]))
def test_a_worker_killed_with_its_change_on_the_way_leaves_the_others_alike(phase: str, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=3)
    victim = fleet.add("victim", PHASES[phase], wire="int8", policy=POLICIES["async"])
    for number in range(2):
        fleet.add(f"w{number}", wire="int8", policy=POLICIES["async"])
    fleet.finish()
    assert (tmp_path / f"fired-{phase}").exists() and victim.process.exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_a_newcomer_to_windows_begins_without_anything_left_out(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("first", wire="int4", policy=POLICIES["cadence"], hold_at=4)
    fleet.wait_for_step(2)
    fleet.add("newcomer", wire="int4", policy=POLICIES["cadence"])
    fleet.let_in("newcomer")
    fleet.finish()


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [potluck.ShardGradOp(weights=(2.0, 1.0)), pytest.param(potluck.FullShard(), marks=pytest.mark.slow)]
)
def test_workers_of_two_ranks_round_every_node_no_matter_how_many_they_are(
    strategy: potluck.ShardingStrategy, tmp_path: Path
) -> None:
    """A block's numbers lie on both ranks."""
    assert_same(*finish_of_one_and_two(tmp_path, strategy=strategy, wire="int4", bare=True))


@pytest.mark.slow
def test_workers_of_one_rank_and_of_two_hold_the_same_bits(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add_node("two", strategy=potluck.FullShard(), wire="int4", policy=POLICIES["moments"], bare=True)
    fleet.add("one", wire="int4", policy=POLICIES["moments"], bare=True)
    fleet.finish()


@pytest.mark.slow
def test_workers_of_several_ranks_send_changes_in_fewer_bits_too(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add_node("node", wire="int4", policy=POLICIES["async"])
    fleet.add("single", wire="int4", policy=POLICIES["async"])
    fleet.finish()
