"""What an invited worker may do, and what it may not: docs/security.md names each of these tests."""

import pytest

from potluck.events import WorkerWent
from potluck.fleet.coordinator import PROTOCOL
from potluck.fleet.effects import Finish
from potluck.wire.messages import Heartbeat, Hello, Leave, Ready
from tests.fleet.virtual import (
    EPOCHS,
    PATIENCE_S,
    ROWS,
    SECRET,
    STEPS,
    FaultScript,
    Fleet,
    described,
    digest_of,
    fresh_weights,
    undisturbed,
)

pytestmark = pytest.mark.timeout(60)
LIMITED = described(rows_limit=EPOCHS * ROWS)


def hello(name: str = "insider", kind: str = "cpu") -> Hello:
    return Hello(PROTOCOL, SECRET, name, kind)


def ready(**changes: object) -> Ready:
    return Ready(described(**changes).to_json(), 0, digest_of(fresh_weights()), 0)


# Ending the run


@pytest.mark.parametrize("description", [LIMITED, described()], ids=["length known", "length unknown"])
@pytest.mark.parametrize("quitter", ["w0", "w1"])
def test_a_script_that_ends_early_leaves_and_ends_the_run_for_nobody_else(quitter: str, description: object) -> None:
    faults = FaultScript().quit(quitter, at_step=2)
    run = Fleet(workers=3, faults=faults, description=description).finish()
    assert faults.fired == [f"quit {quitter}"]
    assert run.standing().step == STEPS and run.host.finish == Finish("finished")
    assert run.workers[quitter].state.step == 2
    (went,) = [event for event in run.told(WorkerWent) if event.name == quitter]
    assert went.polite


def test_a_lone_worker_that_ends_early_leaves_its_weights_and_the_run_goes_on_with_the_next() -> None:
    faults = FaultScript().quit("w0", at_step=2)
    run = Fleet(workers=1, faults=faults, description=LIMITED)
    run.run_for(30)
    assert faults.fired == ["quit w0"] and run.host.finish is None
    assert list(run.disk.states) == [2]
    run.add("next", description=LIMITED)
    run.finish()


def test_of_a_run_whose_length_nobody_told_the_last_workers_end_is_the_end() -> None:
    faults = FaultScript().quit("w0", at_step=2).quit("w1", at_step=4)
    run = Fleet(workers=2, faults=faults)
    run.run_until(lambda: run.host.finish is not None)
    assert run.host.finish == Finish("finished") and run.standing().step == 4
    assert run.workers["w1"].weights == undisturbed(4)


def test_a_run_that_one_called_finished_is_finished_if_the_others_die_at_that_step() -> None:
    """Else the host would wait for weights that were on no disk, though all was done."""
    faults = FaultScript().quit("w0", at_step=4).kill("w1", at_step=4, phase="applied")
    run = Fleet(workers=2, faults=faults)
    run.run_until(lambda: run.host.finish is not None, limit_s=60)
    assert sorted(faults.fired) == ["kill w1", "quit w0"] and run.host.finish == Finish("finished")


def test_a_worker_that_does_not_hold_the_weights_cannot_end_the_run() -> None:
    run = Fleet(workers=2)
    run.run_until(lambda: run.standing().step == 2)
    for opening in ([hello("greeted")], [hello("catching up"), ready()]):
        line = run.stranger()
        for message in (*opening, Leave(1, "finished")):
            line.send(message)
    run.finish()


def test_whoever_calls_the_run_finished_at_its_end_costs_nobody_the_last_checkpoint() -> None:
    """It says so the moment that the last step is on record; the others have not evaluated or saved yet."""
    run = Fleet(workers=2, description=LIMITED, save_every=100, evaluate_every=STEPS)
    run.add("insider", description=LIMITED, at_s=0.5)
    run.run_until(lambda: run.standing().step == STEPS - 1 and run.member("insider").is_ready)
    run.run_until(lambda: run.workers["insider"].state.step == STEPS)
    run.finish()
    assert list(run.disk.states) == [STEPS]
    assert set(run.workers["w0"].validated) == {STEPS}


@pytest.mark.parametrize("finished", [0, 1])
def test_whoever_leaves_and_stays_is_closed_after_patience(finished: int) -> None:
    """The host would wait for it for ever once the run is over."""
    run = Fleet(workers=2, description=LIMITED)
    insider = run.add("insider", description=LIMITED)
    run.run_until(lambda: insider.state.step == 1)
    line = insider.line
    insider.dead = True  # from now on the test speaks for it
    line.send(Leave(finished, "so it says"))

    def beat() -> None:
        line.send(Heartbeat("insider", 0))
        run.clock.after(PATIENCE_S / 4, beat)

    beat()
    run.finish(limit_s=10 * PATIENCE_S)
    assert run.host.finish == Finish("finished")
    (went,) = [event for event in run.told(WorkerWent) if event.name == "insider"]
    assert "has not gone" in went.reason


def test_a_holder_that_has_nothing_left_to_do_and_does_not_say_so_does_not_hold_up_the_end() -> None:
    faults = FaultScript().stall("w1", at_step=STEPS, seconds=100 * PATIENCE_S, phase="applied")
    run = Fleet(workers=2, faults=faults, description=LIMITED)
    run.run_until(lambda: run.host.finish is not None, limit_s=5 * PATIENCE_S)
    assert faults.fired == ["stall w1"] and run.host.finish == Finish("finished")


def test_how_long_the_run_is_is_not_for_a_newcomer_to_say() -> None:
    run = Fleet(workers=2, description=LIMITED)
    run.add("insider", description=described(rows_limit=1), at_s=0.5)
    run.run_until(lambda: run.member("insider") is not None and run.member("insider").is_ready)
    assert run.core._rows_limit == EPOCHS * ROWS
    run.finish()
