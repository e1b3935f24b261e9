"""The coordinator plans windows, on a virtual clock: who does how much, and why; and whoever is lost, nothing is."""

from typing import Any

import numpy as np
import pytest

from potluck.agree.policy import Async, Cadence, Windowed
from potluck.events import Decided, Stalled, Validated, WorkerCame, WorkerWent
from potluck.fleet.coordinator import Coordinator
from potluck.fleet.description import Description, settings_of
from potluck.fleet.effects import Close, Send
from potluck.wire.messages import (
    PROTOCOL,
    Admitted,
    Hello,
    JoinAccepted,
    JoinRequest,
    Ready,
    Shutdown,
    SliceReport,
    Work,
)
from tests.fleet.virtual import EPOCHS, PATIENCE_S, ROWS, FaultScript, Fleet, described
from tests.fleet.virtual.worker import Worker

pytestmark = pytest.mark.timeout(30)


def windowed(policy: Windowed, **changes: Any) -> Description:
    return described(policy=policy.kind, settings=settings_of(policy), batch=4, **changes)


def decided(run: Fleet) -> list[Decided]:
    return run.told(Decided)


@pytest.mark.parametrize("policy", [Cadence.published(anchor=2), Async.published(anchor=2)], ids=["cadence", "async"])
def test_the_slowest_anchors_and_the_others_fill_its_time(policy: Windowed) -> None:
    run = Fleet(workers=0, at_least=2)
    run.add("fast", description=windowed(policy), batch_s=0.1)
    run.add("slow", description=windowed(policy), batch_s=0.3)
    run.finish()
    first, second = decided(run)[:2]
    assert (first.rows, first.version, first.step) == ((4, 4), 0, 0)
    assert first.reason.startswith("Nothing was measured yet, so all count as equally fast.")
    assert (second.rows, second.version, second.step) == ((12, 4), 1, 2)  # of 4 rows each: 8 are done
    assert second.reason == (
        "slow has 25 % of the rows: it does 6.67 rows/s, and fast 20. Until the next average they do 6 and 2 batches."
    )
    last = [d for d in decided(run) if "These are the last" in d.reason]
    assert last and "shared by speed" in last[0].reason


def test_every_worker_gets_one_slice_and_the_rows_of_its_own_steps() -> None:
    run = Fleet(workers=3, description=windowed(Cadence.published(anchor=3)))
    run.finish()
    for worker in run.workers.values():
        works = [item for item in worker.line.received if isinstance(item, Work)]
        assert works and all(len(work.nodes) == 2 and work.batch == 2 for work in works)  # 4 over 3, rounded up
        assert all(work.slices == len(work.sizes) and sum(work.sizes) == work.rows for work in works)
    sizes = [[end - start for start, end, _ in record.ranges] for record in run.records[:2]]
    assert sizes == [[4, 4, 4], [6, 6, 6]]  # two batches each to begin with, and then the anchor


def test_costly_agreement_makes_windows_longer() -> None:
    """A long way to the host: what agreeing takes is the last payload's way, and the means' and the receipts'."""
    policy = Cadence.published(anchor=1, max_anchor=3)
    run = Fleet(workers=2, description=windowed(policy), batch_s=0.1, latency_s=0.02, epochs=3)
    run.finish()
    anchors = [d.anchor for d in decided(run)]
    assert anchors[0] == 1 and max(anchors) > 1 and max(anchors) <= 3
    told = next(d for d in decided(run) if d.anchor > 1)
    assert told.version == 2  # the way back of the first window is known when the second is measured
    assert told.reason.startswith(
        "Agreeing took 40 % of a window and 10 % are wanted, so the slowest does 3 batches"
    ), told


def test_drift_that_rises_halves_the_anchor_of_async_and_is_told() -> None:
    drifts = {1: 0.01, 2: 0.02, 3: 0.09}
    for policy in (Async.published(anchor=4), Cadence.published(anchor=4)):
        run = Fleet(workers=0, at_least=2, epochs=5)
        run.add("w0", description=windowed(policy), drifts=drifts)
        run.add("w1", description=windowed(policy))
        run.finish()
        anchors = [d.anchor for d in decided(run)]
        if isinstance(policy, Async):
            told = decided(run)[4]  # of the third window, told when the fourth is done
            assert anchors[:5] == [4] * 4 + [2] and told.divergence == 0.09
            assert told.reason.startswith(
                "Replicas drifted apart three windows running, to 0.09 of the mean, above 0.05, so the slowest does 2"
                " batches instead of 4"
            )
        else:
            assert set(anchors) == {4}


def test_one_alone_trains_and_says_that_nothing_is_averaged() -> None:
    run = Fleet(workers=1, description=windowed(Async.published(anchor=2)))
    run.add("late", at_s=0.55, description=windowed(Async.published(anchor=2)))
    run.finish()
    reasons = [d.reason for d in decided(run)]
    assert reasons[0] == "Only w0 is there, so nothing is averaged: 8 rows."
    assert any(reason.startswith("late came, and the work is shared anew") for reason in reasons)
    (came,) = [came for came in run.told(WorkerCame) if came.name == "late"]
    assert came.step == {told.version: told.step for told in decided(run)}[3] == 6, "of which an agreement has several"


@pytest.mark.parametrize("phase", ["forward", "backward", "half", "sent", "committed", "applied"])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_lost_in_any_phase_loses_nothing(phase: str, workers: int) -> None:
    faults = FaultScript().kill("w1", at_step=2, phase=phase)
    run = Fleet(workers=workers, faults=faults, description=windowed(Cadence.published(anchor=1, max_anchor=1)))
    run.finish()
    assert faults.fired == ["kill w1"]
    assert run.core.refused.total() == 0 and run.restores == 0
    assert [went.name for went in run.told(WorkerWent) if not went.polite] == ["w1"]
    if phase in ("forward", "backward", "half"):
        (second,) = [record for record in run.records if record.step == 2]
        assert len(second.ranges) == workers and len({who for _, _, who in second.ranges}) == workers - 1
    if workers == 3 and phase != "applied":
        assert any(d.reason.startswith("w1 went, and the work is shared anew") for d in decided(run))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_leaver_hands_over_what_it_has_done_of_a_window_and_what_is_left(workers: int) -> None:
    """It is asked before the first of its three batches; one that is alone leaves the rest to a window to come."""
    faults = FaultScript().leave("w0", at_step=2, phase="forward")
    run = Fleet(workers=workers, faults=faults, description=windowed(Cadence.published(anchor=3, max_anchor=3)))
    run.run_until(lambda: run.workers["w0"].done)
    if workers == 1:
        run.add("w9", description=windowed(Cadence.published(anchor=3, max_anchor=3)))
    run.finish()
    assert faults.fired == ["leave w0"] and run.core.refused.total() == 0 and run.restores == (workers == 1)
    (second,) = [record for record in run.records if record.step == 2]
    own = -(-4 // workers)
    done, *rest = second.ranges
    assert done[1] - done[0] == own and len(second.ranges) == (1 if workers == 1 else workers + 1)
    assert workers == 1 or (rest[0][1] - rest[0][0] == 2 * own and rest[0][2] != done[2])
    pieces = [piece for worker in run.workers.values() for piece in worker.slices_computed]
    assert len(pieces) == len(set(pieces))  # nothing was computed twice
    (went,) = [event for event in run.told(WorkerWent) if event.name == "w0"]
    assert went.polite


def test_a_window_of_which_parts_came_from_a_worker_that_was_lost_is_computed_whole_again() -> None:
    """Whoever does, and leaves in the middle, leaves all of it: the sums of one part would be of other rows."""
    faults = FaultScript().kill("w1", at_step=2, phase="half")
    run = Fleet(workers=3, faults=faults, description=windowed(Cadence.published(anchor=3, max_anchor=3)))
    run.run_until(lambda: bool(faults.fired))
    others = [worker for worker in run.workers.values() if worker.name != "w1"]

    def takes_it_over(worker: Worker) -> bool:
        return worker.doing is not None and worker.doing.step == 2 and list(worker.doing.nodes) == [2, 4]

    run.run_until(lambda: any(takes_it_over(worker) for worker in others))
    (leaver,) = filter(takes_it_over, others)
    leaver.ask_to_leave()
    run.finish()
    (second,) = [record for record in run.records if record.step == 2]
    by = {f"w{number}": who for number, (_, _, who) in enumerate(second.ranges)}
    (stays,) = [worker.name for worker in others if worker is not leaver]
    assert len(by) == 3 and by["w1"] == by[stays] != by[leaver.name], second.ranges
    assert run.core.refused.total() == 0 and leaver.member.left


@pytest.mark.parametrize("stopped", [4, 8, 99, 1 << 63])
def test_a_worker_that_says_it_stopped_where_it_cannot_have_is_not_believed(stopped: int) -> None:
    """Its part of the first window is rows 4 to 8."""
    run = Fleet(workers=2, description=windowed(Cadence.published(anchor=2)))
    run.run_until(lambda: run.core.now is not None and run.core.now.step == 1)
    member = run.core.membership.ready[1]
    assert run.core.now is not None and run.core.now.rows_of(member.nodes[0]) == (4, 8)
    none = np.zeros(1)
    report = SliceReport(1, np.array([2], "<u4"), none, none, 0.1, b"", 1, stopped=stopped)
    run.host.act(run.core.at(run.clock.now).on_message(member.peer, report))
    assert run.core.refused["foreign report"] == 1
    run.finish()


@pytest.mark.parametrize("phase", ["forward", "sent", "committed"])
def test_a_worker_whose_connection_breaks_goes_on(phase: str) -> None:
    faults = FaultScript().cut("w1", at_step=2, phase=phase)
    run = Fleet(workers=2, faults=faults, description=windowed(Async.published(anchor=1, max_anchor=1))).finish()
    assert faults.fired == ["cut w1"]
    assert [came.name for came in run.told(WorkerCame)] == ["w0", "w1", "w1"]


@pytest.mark.parametrize("when", [0.25, 0.35, 0.5, 0.72])
def test_a_coordinator_that_is_started_again_measures_anew_and_loses_nothing(when: float) -> None:
    run = Fleet(workers=2, description=windowed(Cadence.published(anchor=1, max_anchor=1)))
    run.run_for(when)
    done = run.standing().version
    run.crash_host()
    run.finish()
    anew = ("Nothing was measured yet", "Only w")  # the first to come back does not wait for the other
    assert done and any(d.reason.startswith(anew) for d in decided(run)[done:])


def behind_a_host_that_died(first_is_back_s: float) -> tuple[Fleet, bytes]:
    """The host dies when one of two has applied the window; the other comes back first. What the one had."""
    run = Fleet(workers=2, description=windowed(Cadence.published(anchor=1, max_anchor=1)))
    first, second = run.workers["w0"], run.workers["w1"]
    run.run_until(lambda: second.state.step == 1)
    assert second.line is not None
    second.line.latency_s = 5.0
    run.run_until(lambda: first.state.step == 2)
    was = first.weights
    run.crash_host(back_after_s=0.2)
    second.lose_connection()
    first.clock.stop(first_is_back_s)
    run.run_until(lambda: second.state.step >= 2)
    return run, was


def waits_of(run: Fleet) -> list[int]:
    """Of the first worker, since it came back: whether it was given other weights."""
    line = run.workers["w0"].line
    return [item.wait for item in line.received if isinstance(item, Admitted)] if line is not None else []


def test_whoever_has_applied_the_last_window_is_waited_for() -> None:
    """Else it would be computed again, with other bits."""
    run, _ = behind_a_host_that_died(0.6 * PATIENCE_S)
    run.finish()
    assert waits_of(run) == [0]


def test_a_window_that_is_computed_again_has_other_bits_so_whoever_had_the_first_catches_up() -> None:
    run, was = behind_a_host_that_died(PATIENCE_S + 0.6)
    assert run.workers["w1"].weights != was  # it was alone this time
    run.finish()
    assert run.workers["w0"].weights == run.workers["w1"].weights and waits_of(run)[0] == 1


def ended_but_one() -> tuple[Fleet, bytes]:
    """The host dies when one of two has ended, and the other has yet to hear of the last window."""
    policy = Cadence.published(anchor=1, max_anchor=1)
    run = Fleet(workers=2, description=windowed(policy, rows_limit=EPOCHS * ROWS), save_every=100)
    first, second = run.workers["w0"], run.workers["w1"]
    run.run_until(lambda: run.standing().rows_seen >= EPOCHS * ROWS - 8)
    assert second.line is not None
    run.run_until(lambda: second.state.step == run.standing().version)
    second.line.latency_s = 5.0
    run.run_until(lambda: first.done)
    assert first.has_finished and second.state.step < run.standing().version
    run.crash_host(back_after_s=0.2)
    return run, first.weights


def test_whoever_lacks_the_last_window_when_the_host_is_back_gets_the_one_that_others_ended_with() -> None:
    run, ended = ended_but_one()
    run.workers["w1"].lose_connection()
    run.finish()
    assert run.workers["w1"].has_finished and run.workers["w1"].weights == ended


def test_a_newcomer_after_all_have_ended_gets_their_weights_and_does_nothing_again() -> None:
    run, ended = ended_but_one()
    run.workers["w1"].kill()
    newcomer = run.add("newcomer", at_s=0.5, description=run.workers["w1"].description)
    run.finish()
    assert newcomer.has_finished and newcomer.weights == ended and not newcomer.slices_computed


def test_a_host_that_is_back_when_all_have_ended_ends() -> None:
    run, _ = ended_but_one()
    run.workers["w1"].kill()
    run.run_until(lambda: run.host.finish is not None, 3 * PATIENCE_S)
    assert run.host.finish is not None and not run.host.finish.failed


def test_no_window_goes_beyond_the_rows_of_the_run() -> None:
    run = Fleet(workers=2, description=windowed(Cadence.published(anchor=2), rows_limit=50))
    run.run_until(lambda: run.standing().rows_seen == 50)
    run.run_for(5.0)
    assert run.core.now is None and run.standing().row == 50 - ROWS


def test_nobody_is_late_before_another_is_done() -> None:
    policy = Cadence.published(anchor=2, max_anchor=2)
    run = Fleet(workers=0, at_least=2, patience_s=PATIENCE_S)
    run.add("quick", description=windowed(policy), batch_s=8.0)
    run.add("slow", description=windowed(policy), batch_s=9.0)
    run.run_until(lambda: run.standing().version >= 1)
    assert not run.told(Stalled)
    run.workers["slow"].batch_s = 40.0
    run.run_until(lambda: run.standing().version >= 2)
    stalled = run.told(Stalled)
    assert stalled and {s.name for s in stalled} == {"slow"} and stalled[0].seconds < 2 * PATIENCE_S


def test_evaluations_are_told_by_batches_of_the_run() -> None:
    run = Fleet(workers=2, description=windowed(Cadence.published(anchor=2, max_anchor=2)), evaluate_every=1)
    run.finish()
    batches = -(-ROWS // 4)
    assert [v.step for v in run.told(Validated)][-1] == 2 * batches
    assert run.core.steps_done == 2 * batches and run.standing().version < 2 * batches


def test_plain_peers_are_turned_away() -> None:
    core = Coordinator(patience_s=10, secret="", plain_peers=True)
    (accepted, *_) = core.at(0.0).on_message(1, JoinRequest("early", 0, "cpu"))
    assert isinstance(accepted.message, JoinAccepted)  # type: ignore[union-attr]
    core.at(0.0).on_message(2, Hello(PROTOCOL, "", "ours", "cpu"))
    effects = core.at(0.0).on_message(2, Ready(windowed(Cadence.published()).to_json(), 0, "hash", 0))
    effects += core.at(0.0).on_message(3, JoinRequest("late", 0, "cpu"))
    for peer in (1, 3):
        assert any(isinstance(e, Send) and e.peer == peer and isinstance(e.message, Shutdown) for e in effects)
        assert [e.why for e in effects if isinstance(e, Close) and e.peer == peer] == [
            "a plain peer trains under sync alone, and this run's policy is cadence"
        ]
    assert core.refused == {"plain peer": 2} and {m.name for m in core.membership.ready} == {"ours"}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_host_and_workers_that_are_all_told_to_end_keep_the_last_agreement(workers: int) -> None:
    """As by one SIGTERM to a whole machine, in the middle of a window."""
    policy = Cadence.published(anchor=3, max_anchor=3)
    run = Fleet(workers=workers, description=windowed(policy), save_every=1000)
    run.run_until(lambda: run.standing().version == 2)
    run.run_for(0.15)
    run.host.act(run.core.at(run.clock.now).ending.request_stop())
    for worker in run.workers.values():
        worker.ask_to_leave()
    run.run_until(lambda: run.host.finish is not None)
    assert run.core.saving.saved.step == run.standing().version >= 2
