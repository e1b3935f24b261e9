"""A bit that flips in a worker's memory: whoever has it is named and mended, and no bit of the run changes."""

import platform
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from potluck.agree.policy import Cadence
from potluck.devices import kind_of
from potluck.events import EpochDone, Stalled, WorkerCame
from potluck.fleet.description import Description, settings_of
from potluck.fleet.journal import Journal
from potluck.replica.weight_hash import digest
from tests.fleet import fleet as real
from tests.fleet.faults import COORDINATOR, FLIPS, flips_before_joining_again
from tests.fleet.fleet import Worker as RealWorker
from tests.fleet.fleet import assert_same, start_coordinator, wait_until
from tests.fleet.judges import plain_run
from tests.fleet.virtual import EPOCHS, ROWS, STEPS, FaultScript, Fleet, State, described, undisturbed
from tests.quick import first_of

LAPTOP, SERVER = "a laptop, 4 threads; x86_64, torch 2", "a server, 64 threads; x86_64, torch 2"
GPU = "a GPU, torch 2"


def windowed() -> Description:
    return described(policy=Cadence.kind, settings=settings_of(Cadence.published(anchor=2)), batch=4)


def named(run: Fleet) -> list[str]:
    """Of the workers; that nobody has the weights is told too."""
    return [told.name for told in run.told(Stalled) if told.name in run.workers]


@pytest.mark.parametrize("phase", ["applied", "forward", "backward", "sent", "committed"])
@pytest.mark.parametrize("victim", ["w0", "w1"])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_flip_at_any_time_is_found_in_the_one_who_has_it_and_poisons_nothing(
    phase: str, victim: str, workers: int
) -> None:
    """With two there is no majority; what the worker itself told before decides."""
    run = Fleet(workers=workers, faults=FaultScript().flip(victim, at_step=3, phase=phase)).finish(limit_s=300)
    assert run.faults.fired == [f"flip {victim}"]
    assert named(run) == [victim]
    assert all(worker.weights == undisturbed() for worker in run.workers.values())
    assert sum(not epoch.same_weights for epoch in run.told(EpochDone)) <= 1


def test_a_flip_in_the_only_one_who_works_is_seen_by_those_who_wait() -> None:
    """Nobody else computes anything of the step, so slow are they."""
    run = Fleet(faults=FaultScript().flip("w0", at_step=3, phase="applied"), at_least=2, patience_s=1000)
    run.add("w0", slice_s=0.001)
    run.add("w1", slice_s=10.0)
    run.run_until(lambda: bool(named(run)), 3000)
    assert run.faults.fired == ["flip w0"] and named(run) == ["w0"]
    assert not any(step == 4 for step, _ in run.workers["w1"].slices_computed)
    run.finish(limit_s=3000)


@pytest.mark.parametrize("phase", ["forward", "backward", "sent", "committed"])
def test_a_worker_alone_goes_back_to_its_checkpoint(phase: str) -> None:
    faults = FaultScript().flip("w0", at_step=4, phase=phase)
    run = Fleet(workers=1, faults=faults, save_every=2).finish(limit_s=300)
    assert run.faults.fired == ["flip w0"] and run.restores == 1
    assert "changed in its memory; the run goes back to its checkpoint" in run.told(Stalled)[0].doing


def test_a_worker_alone_without_a_checkpoint_is_told_of() -> None:
    run = Fleet(workers=1, faults=FaultScript().flip("w0", at_step=3, phase="forward"))
    run.run_until(lambda: run.host.finish is not None)
    assert "neither a worker nor a checkpoint to mend it" in run.told(Stalled)[0].doing
    assert run.workers["w0"].state.step == STEPS


@pytest.mark.parametrize("victim", ["w0", "w1"])
def test_a_wrong_update_of_one_of_two_is_computed_again_from_the_checkpoint(victim: str) -> None:
    """Both had the same weights before it: nobody can say whose are right."""
    run = Fleet(workers=2, faults=FaultScript().drift(victim, at_step=4), save_every=2).finish(limit_s=300)
    assert run.faults.fired == [f"drift {victim}"] and run.restores == 1
    assert all(worker.weights == undisturbed() for worker in run.workers.values())
    assert "nobody can tell whose are right: all go back to the last checkpoint" in run.told(Stalled)[0].doing


@pytest.mark.parametrize("victim", ["w0", "w1"])
def test_what_is_saved_is_what_was_agreed_on(victim: str) -> None:
    """The first in is the one who saves."""
    faults = FaultScript().flip(victim, at_step=2, phase="applied").flip(victim, at_step=4, phase="save due")
    run = Fleet(workers=2, faults=faults, save_every=2).finish(limit_s=300)
    assert run.faults.fired[0] == f"flip {victim}"
    assert sorted(run.disk.states)[-1] == STEPS
    for step, data in run.disk.states.items():
        assert State.from_bytes(data).weights.tobytes() == undisturbed(step), step


@pytest.mark.parametrize("phase", ["forward", "applied"])
def test_a_newcomer_is_given_the_right_weights(phase: str) -> None:
    run = Fleet(workers=2, faults=FaultScript().flip("w0", at_step=3, phase=phase))
    run.run_until(lambda: run.standing().version == 2)
    run.add("late")
    run.finish(limit_s=300)
    assert run.faults.fired and named(run) == ["w0"]
    assert run.workers["late"].weights == undisturbed()


@pytest.mark.parametrize("is_first_back", [True, False])
def test_after_a_restart_of_the_host_its_journal_says_who_is_believed(is_first_back: bool) -> None:
    faults = FaultScript().flip("w0", at_step=4, phase="joined")
    run = Fleet(faults=faults, at_least=2)
    run.add("w0", latency_s=0.001 if is_first_back else 0.05)
    run.add("w1", latency_s=0.02)
    run.run_until(lambda: 3 in run.journal.agreed() and all(w.state.step == 3 for w in run.workers.values()))
    run.crash_host()
    run.finish(limit_s=300)
    assert faults.fired == ["flip w0"]
    assert all(worker.weights == undisturbed() for worker in run.workers.values())
    came = [(told.name, told.step) for told in run.told(WorkerCame) if told.step]
    assert came[0] == ("w1", 3)
    if is_first_back:
        assert named(run) == ["w0"] and "are not those that were agreed on" in run.told(Stalled)[0].doing


def test_nobody_who_comes_back_is_right_and_the_run_goes_back_to_its_checkpoint() -> None:
    faults = FaultScript().flip("w0", at_step=4, phase="joined")
    run = Fleet(workers=1, faults=faults, save_every=2)
    run.run_until(lambda: 3 in run.journal.agreed())
    run.crash_host()
    run.finish(limit_s=300)
    assert faults.fired == ["flip w0"] and run.restores == 1 and named(run) == ["w0"]


@pytest.mark.parametrize("seed", range(40))
def test_a_flip_somewhere_a_restart_of_the_host_and_a_lost_connection_change_no_bit(seed: int) -> None:
    draw = random.Random(seed)
    workers, phases = draw.choice([2, 3, 4]), ["applied", "forward", "backward", "sent", "committed", "save due"]
    victim = f"w{draw.randrange(workers)}"
    faults = FaultScript().flip(victim, at_step=draw.randint(2, 4), phase=draw.choice(phases))
    if draw.random() < 0.5:
        faults.cut(f"w{draw.randrange(workers)}", at_step=draw.randint(2, 6), phase=draw.choice(phases[:5]))
    run = Fleet(faults=faults, at_least=workers)
    for number in range(workers):
        run.add(
            f"w{number}",
            latency_s=draw.choice([0.001, 0.01, 0.05]),
            slice_s=draw.choice([0.05, 0.1, 0.3]),
            save_every=draw.choice([0, 2]),
        )
    if draw.random() < 0.5:
        step = draw.randint(1, 5)
        run.run_until(lambda: run.standing().version >= step)
        run.crash_host()
    run.finish()
    for saved, data in run.disk.states.items():
        assert State.from_bytes(data).weights.tobytes() == undisturbed(saved)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_every_loop_does_to_the_weights_between_steps_is_no_fault(workers: int) -> None:
    run = Fleet(workers=workers, own_code=lambda weights: weights * np.float32(0.5), save_every=2)
    run.run_until(lambda: run.host.finish is not None, 300)
    assert run.core.refused["drifted"] == 0 and not run.restores and not run.told(Stalled)
    assert len({worker.weights for worker in run.workers.values()}) == 1
    assert [epoch.same_weights for epoch in run.told(EpochDone)] == [True, True]


@pytest.mark.parametrize("phase", ["applied", "forward", "sent"])
@pytest.mark.parametrize("victim", ["w0", "w1"])
def test_a_flip_in_what_a_window_began_with_is_found(phase: str, victim: str) -> None:
    windows = windowed()
    faults = FaultScript().flip(victim, at_step=2, phase=phase)
    run = Fleet(workers=2, faults=faults, epochs=4, description=windows).finish(limit_s=600)
    assert faults.fired == [f"flip {victim}"] and named(run) == [victim]


# Kinds


def kinds(*found: str, **options: Any) -> Fleet:
    run = Fleet(at_least=len(found), faults=options.pop("faults", None))
    for number, kind in enumerate(found):
        run.add(f"w{number}", kind=kind, latency_s=0.001 * (number + 1), **options)
    return run


def test_two_processors_with_other_counts_of_threads_are_compared() -> None:
    run = kinds(LAPTOP, SERVER, LAPTOP, faults=FaultScript().drift("w1", at_step=3)).finish(limit_s=300)
    assert run.faults.fired and named(run) == ["w1"]


def test_a_processor_whose_updates_have_other_bits_is_set_apart_and_said_so() -> None:
    """As an optimizer that multiplies matrices: its bits depend on the threads."""
    run = kinds(LAPTOP, SERVER, LAPTOP)
    run.workers["w1"].update = lambda weights: np.nextafter(weights, np.float32(9))
    run.run_until(lambda: run.host.finish is not None, 300)
    assert run.core.refused["drifted"] == 0 and not run.told(Stalled)
    for epoch in run.told(EpochDone):
        assert epoch.same_weights and epoch.not_compared == ("w1",)
        assert epoch.sentence.endswith(
            "the 2 workers of one kind (w0, w2) hold the same weights;"
            f" w1 is alone of its kind ({SERVER}) and was not compared."
        )


def test_a_device_of_another_kind_is_not_said_to_hold_the_same_weights() -> None:
    run = kinds(LAPTOP, GPU)
    run.workers["w1"].update = lambda weights: np.nextafter(weights, np.float32(9))
    run.run_until(lambda: run.host.finish is not None, 300)
    for epoch in run.told(EpochDone):
        assert "same weights" not in epoch.sentence and epoch.not_compared == ("w0", "w1")
        assert f"w1 is alone of its kind ({GPU}) and was not compared" in epoch.sentence


def test_after_a_window_all_kinds_are_compared() -> None:
    """Its average is only subtracted: that is the same bits on every device."""
    windows = windowed()
    run = kinds(LAPTOP, GPU, description=windows).finish(limit_s=600)
    assert all(
        epoch.sentence.endswith("exactly once; all workers hold the same weights.") for epoch in run.told(EpochDone)
    )


def test_where_some_steps_are_taken_together_kinds_are_compared_apart() -> None:
    """An optimizer's step has other bits on a device of another kind."""
    policy = Cadence.published(anchor=1, together=0.3)
    description = described(policy="cadence", settings=settings_of(policy), rows_limit=EPOCHS * ROWS)
    run = kinds(LAPTOP, GPU, description=description)
    run.workers["w1"].update = lambda weights: np.nextafter(weights, np.float32(9))
    run.run_until(lambda: run.host.finish is not None, 300)
    assert run.core.refused["drifted"] == 0 and not run.told(Stalled) and run.restores == 0
    assert all(epoch.not_compared == ("w0", "w1") for epoch in run.told(EpochDone))


def test_threads_do_not_make_two_processors_two_kinds() -> None:
    kinds = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        kinds.append(kind_of(torch.device("cpu")))
    torch.set_num_threads(before)
    assert kinds[0] != kinds[1]  # their gradients may differ in the last bits, and people want to know
    assert {kind.rpartition("; ")[2] for kind in kinds} == {f"{platform.machine()}, torch {torch.__version__}"}


@pytest.mark.parametrize("make", first_of([torch.optim.AdamW, torch.optim.SGD]))
def test_an_update_has_the_same_bits_with_any_number_of_threads(make: Any) -> None:
    """What kinds are made by; bench/bits.py looks at more of them, and at gradients, of which this is not true."""
    before, found = torch.get_num_threads(), set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        draw = torch.Generator().manual_seed(1)
        parameter = torch.nn.Parameter(torch.randn(300_001, generator=draw))
        optimizer = make([parameter], lr=0.1, weight_decay=0.1)
        for _ in range(3):
            parameter.grad = torch.randn(300_001, generator=draw)
            norm = torch.nn.utils.get_total_norm([parameter.grad])
            parameter.grad.mul_(1 / float(norm))
            optimizer.step()
        found.add(digest([parameter]))
    torch.set_num_threads(before)
    assert len(found) == 1


# Real processes


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return plain_run()


@pytest.mark.parametrize(
    ("phase", "victim"), first_of([*((phase, "first") for phase in FLIPS), ("computing", "second")])
)
def test_a_flip_in_a_real_workers_memory_changes_no_bit(
    phase: str, victim: str, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    fleet = real.Fleet(tmp_path, at_least=2)
    for name in ("first", "second"):
        fleet.add(name, FLIPS[phase] if name == victim else None)
        wait_until(lambda name=name: any(m.name == name for m in fleet.server.core.membership.ready))
    assert_same(fleet.finish(), expected)
    assert (tmp_path / "fired-flipped").exists()
    assert [told.name for told in fleet.events if isinstance(told, Stalled)] == [victim]
    journal = Journal(tmp_path / "journal.sqlite")
    assert sorted(journal.agreed()) == list(range(real.STEPS + 1))
    journal.close()


@pytest.mark.slow
def test_a_flip_while_the_host_is_away_is_seen_by_its_journal(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    coordinator, invite = start_coordinator(tmp_path, fault=COORDINATOR["after"], at_least=2)
    flipped = RealWorker(invite, tmp_path, "flipped", flips_before_joining_again, {})
    other = RealWorker(invite, tmp_path, "other", None, {})
    coordinator.join(60)
    assert coordinator.exitcode == -signal.SIGKILL
    wait_until((tmp_path / "fired-flipped").exists)
    start_coordinator(tmp_path, port=invite.port, returning=2)
    for worker in (flipped, other):
        worker.wait()
        assert_same(worker.weights, expected)
