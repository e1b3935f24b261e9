"""Runs of a host whose workers have the real engine, on a virtual clock.

`python -m tests.fleet.simulation --policy engine` draws more of them.
"""

from collections import Counter
from unittest import mock

import pytest

from potluck.agree.policy import ApplyPolicy, Cadence, Sync
from potluck.sums.slices import SliceSums
from tests.fleet.seeds import hurried, seeds
from tests.fleet.simulation import HANG_S, again, simulate_engine
from tests.fleet.virtual.engine_run import living, undisturbed
from tests.fleet.virtual.engine_worker import Task
from tests.fleet.virtual.faults import FaultScript
from tests.fleet.virtual.toy import ROWS
from tests.quick import first_of

TODAY = seeds(40)


@pytest.mark.parametrize("seed", first_of(TODAY, 4))
def test_whatever_happens_to_engines_under_a_host_all_that_must_hold_does(seed: int) -> None:
    try:
        with hurried(HANG_S):
            simulate_engine(seed, Counter())
    except Exception as error:
        raise AssertionError(f"again: {again(seed, 'engine')}") from error


def test_a_seed_is_a_run() -> None:
    first, again = (simulate_engine(17, Counter()) for _ in range(2))
    assert first.events == again.events and first.clock.count == again.clock.count


def test_one_worker_and_three_end_with_the_same_bits_under_sync() -> None:
    task = Task(policy=Sync(), model="norm", optimizer="adamw", epochs=2, seed=1, evaluate_every=1, gather_every=2)
    faults = FaultScript().kill("w1", at_step=3, phase="part").stall("w2", at_step=4, seconds=30)
    with living(task, at_least=3, faults=faults) as run:
        for name in ("w0", "w1", "w2"):
            run.add(name)
        run.finish()
        assert faults.fired == ["kill w1", "stall w2"]
        assert {worker.ended_with for worker in run.engine_workers} == {"", undisturbed(task)}


@pytest.mark.parametrize("policy", [Sync(), Cadence(anchor=1)], ids=["sync", "cadence"])
def test_a_worker_whose_run_goes_back_before_its_end_is_kept_trains_on(policy: ApplyPolicy) -> None:
    """It had done the last step, and nobody could keep that: it would have ended with the weights of an earlier one."""
    task = Task(policy=policy, model="plain", optimizer="sgd", epochs=1, seed=0)
    with living(task, at_least=1, patience_s=2.0) as run:
        run.disk.is_full = True
        first = run.add("w0")
        run.run_until(lambda: run.standing().rows_seen == ROWS)
        first.clock.stop(6.0)
        run.run_until(lambda: run.member("w0") is None)
        run.disk.is_full = False
        second = run.add("w1", slice_s=3.0)
        run.finish()
        assert first.ended_with == second.ended_with != "" and run.restores == 1


@pytest.mark.parametrize("policy", [Sync(), Cadence(anchor=1)], ids=["sync", "cadence"])
def test_a_loop_that_evaluates_before_its_backward_and_is_moved_meanwhile_gets_those_rows_again(
    policy: ApplyPolicy,
) -> None:
    """It ended with an IndexError: its backward went into sums that were there no more."""
    task = Task(policy=policy, model="norm", optimizer="sgd", epochs=2, seed=0, evaluate_every=1, is_in_loop=True)
    with living(task, at_least=2) as run:
        first, second = run.add("w0"), run.add("w1", slice_s=0.3)
        run.run_until(lambda: run.standing().version == 1 and bool(run.core.evaluations.open))
        first.lose_connection()
        run.finish()
        assert first.ended_with == second.ended_with != ""
        assert not isinstance(policy, Sync) or first.ended_with == undisturbed(task)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(112, id="the run goes back before its end is kept, under Sync"),
        pytest.param(5000209, id="the run goes back in a pass, and comes to where it was"),
        pytest.param(4152, id="the run goes back while its last step is kept as the best"),
    ],
)
def test_seeds_that_found_a_fault_are_right(seed: int) -> None:
    simulate_engine(seed, Counter())


def test_a_fault_that_is_put_back_is_found() -> None:
    """A worker keeps the sums of slices that it computed in vain."""
    with mock.patch.object(SliceSums, "reset", lambda self: None), pytest.raises(AssertionError):
        for seed in range(100, 120):
            try:
                with hurried(HANG_S):
                    simulate_engine(seed, Counter())
            except Exception as error:
                raise AssertionError(f"seed {seed} finds it: {error}") from error
