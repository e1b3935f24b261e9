"""Overlap under a host, on a virtual clock: the next window is computed while the last one is agreed on."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from potluck.agree.policy import Async, Cadence, Windowed
from potluck.events import Decided, Stalled, WorkerWent
from potluck.fleet.description import Description, settings_of
from potluck.fleet.member import Member
from potluck.fleet.member_effects import Apply, Compute, DropAhead, SendToHost
from potluck.wire.messages import Admitted, Committed, Leave, SliceReport, Welcome, Work
from tests.fleet.virtual import EPOCHS, ROWS, FaultScript, Fleet, described

pytestmark = pytest.mark.timeout(60)
OVERLAP = Cadence.published(anchor=1, max_anchor=1, overlap=True)


def windowed(policy: Windowed = OVERLAP, **changes: Any) -> Description:
    return described(policy=policy.kind, settings=settings_of(policy), batch=4, **changes)


def works(run: Fleet, name: str) -> list[Work]:
    line = run.workers[name].line
    assert line is not None
    return [item for item in line.received if isinstance(item, Work)]


# Planning


@pytest.mark.parametrize(
    "policy", [OVERLAP, Async.published(anchor=1, max_anchor=1, overlap=True)], ids=["cadence", "async"]
)
def test_each_window_but_an_epochs_first_is_in_all_hands_while_the_one_before_is_under_way(policy: Windowed) -> None:
    run = Fleet(workers=3, description=windowed(policy, rows_limit=EPOCHS * ROWS)).finish()
    assert run.core.refused.total() == 0
    for name, worker in run.workers.items():
        assert worker.line is not None
        heard = [item for item in worker.line.received if isinstance(item, Work | Committed)]
        found = works(run, name)
        assert max(Counter(work.step for work in found).values()) == 1, "it was sent again"
        assert {work.epoch for work in found} == set(range(EPOCHS)) and len(found) > 3 * EPOCHS
        for work in found:
            committed = [item.step for item in heard[: heard.index(work)] if isinstance(item, Committed)]
            # None beyond an epoch: at its end all hold what was agreed on and nothing else.
            assert max(committed, default=0) == max(0, work.step - (1 if work.row == 0 else 2))
    assert len(run.told(Decided)) == run.standing().step


@pytest.mark.parametrize("latency_s", [0.01, 0.04])
def test_agreeing_takes_no_time_of_a_run_whose_windows_are_longer(latency_s: float) -> None:
    seconds = {}
    for policy in (OVERLAP, Cadence.published(anchor=1, max_anchor=1)):
        run = Fleet(workers=2, description=windowed(policy, rows_limit=ROWS), latency_s=latency_s, epochs=1)
        run.run_until(lambda run=run: run.core.standing.rows_seen == ROWS)  # type: ignore[misc]
        seconds[policy.overlap] = run.clock.now - 100.0
        windows = run.standing().step
    assert seconds[False] - seconds[True] == pytest.approx((windows - 1) * 2 * latency_s, rel=0.2)


def test_what_is_hidden_by_the_next_window_costs_nothing_and_what_is_not_makes_windows_longer() -> None:
    for latency_s, grows in ((0.02, False), (0.3, True)):
        policy = Cadence.published(anchor=1, max_anchor=3, overlap=True)
        run = Fleet(workers=2, description=windowed(policy), latency_s=latency_s, epochs=3).finish()
        assert (max(decided.anchor for decided in run.told(Decided)) > 1) == grows


def test_a_newcomer_has_a_part_of_the_first_window_that_nobody_had_yet() -> None:
    run = Fleet(workers=2, description=windowed(), epochs=3)
    run.run_until(lambda: run.standing().step == 2)
    run.add("late", description=windowed())
    run.finish()
    first = works(run, "late")[0]
    (record,) = [record for record in run.records if record.step == first.step]
    assert len(record.ranges) == 3 and run.core.refused.total() == 0


def test_a_worker_with_another_setting_is_refused() -> None:
    run = Fleet(workers=1, description=windowed())
    run.add("other", description=windowed(Cadence.published(anchor=1, max_anchor=1)))
    run.finish()
    assert run.workers["other"].error is not None
    assert "This run has policy.overlap = True, and you have False." in run.workers["other"].error


# Faults


@pytest.mark.parametrize("phase", ["forward", "ahead", "backward", "half", "sent", "committed", "applied"])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_lost_in_any_phase_loses_nothing(phase: str, workers: int) -> None:
    faults = FaultScript().kill("w1", at_step=3, phase=phase)
    run = Fleet(workers=workers, faults=faults, description=windowed()).finish()
    assert faults.fired == ["kill w1"]
    assert run.core.refused.total() == 0 and run.restores == 0
    assert [went.name for went in run.told(WorkerWent) if not went.polite] == ["w1"]


def test_whoever_is_ahead_does_a_lost_workers_part_first_and_keeps_what_it_has_done() -> None:
    faults = FaultScript().kill("slow", at_step=2, phase="forward")
    run = Fleet(at_least=2, faults=faults)
    run.add("quick", description=windowed(), batch_s=0.05)
    run.add("slow", description=windowed(), batch_s=0.5)
    run.finish()
    assert faults.fired == ["kill slow"] and run.core.refused.total() == 0
    times = Counter(run.workers["quick"].slices_computed)
    assert max(times.values()) == 1  # its own part of step 3 was done when it heard of the lost one of step 2
    assert {(2, 0), (2, 2), (3, 0), (3, 2)} <= set(times)
    steps = [work.step for work in works(run, "quick")]
    assert steps[:6] == [1, 2, 3, 2, 3, 4], "the lost one's part of step 3 comes once that is under way"


@pytest.mark.parametrize("phase", ["forward", "ahead", "sent", "committed"])
def test_a_worker_whose_connection_breaks_forgets_what_it_has_done_ahead(phase: str) -> None:
    faults = FaultScript().cut("w1", at_step=3, phase=phase)
    run = Fleet(workers=2, faults=faults, description=windowed()).finish()
    assert faults.fired == ["cut w1"] and run.core.refused.total() == 0


@pytest.mark.parametrize("when", [0.25, 0.35, 0.5, 0.72])
def test_a_host_that_is_started_again_has_told_nobody_anything_ahead(when: float) -> None:
    run = Fleet(workers=3, description=windowed())
    run.run_for(when)
    run.crash_host()
    run.finish()


def test_one_that_is_no_longer_waited_for_is_called_back() -> None:
    faults = FaultScript().stall("w1", at_step=2, seconds=80.0)
    run = Fleet(workers=3, faults=faults, description=windowed(), epochs=3).finish()
    assert any(stalled.then for stalled in run.told(Stalled)), "nobody was relieved"
    empty = [work.step for work in works(run, "w1") if not len(work.nodes)]
    assert empty == [3] and (3, 1) not in run.workers["w1"].slices_computed


def test_one_that_was_called_back_and_is_all_that_is_left_is_given_the_next_window_anew() -> None:
    faults = FaultScript().stall("w1", at_step=2, seconds=80.0)
    run = Fleet(workers=2, faults=faults, description=windowed())
    run.run_until(lambda: run.standing().step == 1)
    run.run_until(lambda: run.member("w1").relieved == 2)
    run.workers["w0"].kill()
    run.finish()
    assert run.member("w1") is None and faults.fired == ["stall w1"]
    assert [len(work.nodes) for work in works(run, "w1") if work.step == 3] == [2, 0, 2, 2]  # and the other's


def test_a_window_that_begins_anew_is_followed_by_another() -> None:
    """A worker's weights flip once it has sent something of them: all begin the window again."""
    faults = FaultScript().flip("w1", at_step=3, phase="sent")
    run = Fleet(workers=3, faults=faults, description=windowed(), save_every=1)
    run.add("slow", description=windowed(), batch_s=0.4)
    run.finish()
    assert faults.fired == ["flip w1"] and run.core.refused["drifted"] == 1
    assert any(not len(work.nodes) for work in works(run, "w0"))


def test_one_who_leaves_has_sent_what_it_did_ahead() -> None:
    faults = FaultScript().leave("w1", at_step=3, phase="forward")
    run = Fleet(workers=3, faults=faults, description=windowed(), epochs=3).finish()
    done = Counter(step for worker in run.workers.values() for step, _ in worker.slices_computed)
    assert done[3] == 3 and run.core.refused.total() == 0
    assert not any(went.name == "w1" and not went.polite for went in run.told(WorkerWent))


def test_after_the_last_window_of_a_run_that_is_stopped_nothing_is_sent() -> None:
    run = Fleet(workers=2, description=windowed(), save_every=1)
    run.run_until(lambda: run.standing().step == 2)
    run.host.act(run.core.at(run.clock.now).ending.request_stop())
    run.run_until(lambda: run.host.finish is not None)
    assert run.core.refused.total() == 0 and run.standing().step == 3
    assert len({worker.weights for worker in run.workers.values()}) == 1


# A member by itself


def work(step: int, *nodes: int) -> Work:
    return Work(step, 0, 0, 8, 2, np.array(nodes, "<u4"), np.array([4, 4], "<u4"), 2)


def committed(step: int, stop: int = 0) -> Committed:
    return Committed(step, 8, 8.0, 1.0, b"", 0, stop, "{}", b"")


def a_member(*heard: Any) -> Member:
    member = Member()
    member.present(Welcome(0, 1000, ""), "", "", rows_seen=0, is_same=True)
    member.hear(0.0, Admitted(0, 0, '{"step": 0, "epoch": 0, "row": 0, "rows_seen": 0}'))
    for message in heard:
        member.hear(0.0, message)
    return member


def test_a_member_continues_with_what_it_was_told_ahead_and_sends_it_after_the_commit() -> None:
    now, later = work(1, 0, 1), work(2, 0, 1)
    member = a_member(now, later)
    assert member.take() == [Compute(now)] and member.begin() is now
    assert member.take() == [Compute(later)] and member.begin() is later and member.is_ahead
    assert member.take() == [] and member.begin() is None
    member.hear(0.0, end := committed(1))
    assert member.take() == [Apply(end)]
    assert member.agree(end) and not member.is_ahead and member.begin() is None


def test_a_lost_workers_part_comes_before_what_was_done_ahead_is_sent() -> None:
    member = a_member(work(1, 0, 1), work(2, 0, 1), lost := work(1, 1, 2))
    for _ in range(2):
        member.take()
        member.begin()
    assert member.take() == [Compute(lost)] and member.begin() is lost
    assert member.is_ahead and member.begin() is None and member.agree(committed(1))


def test_what_is_called_back_is_dropped() -> None:
    member = a_member(work(1, 0, 1), work(2, 0, 1), work(2))
    for _ in range(2):
        member.take()
        member.begin()
    assert member.take() == [DropAhead()] and member.begin() is None
    assert not member.agree(committed(1)) and member.begin() is None


def test_another_plan_takes_the_place_of_what_was_told_ahead() -> None:
    member = a_member(work(1, 0, 1), work(2, 0, 1), work(2), again := work(1, 0, 1), other := work(2, 1, 2))
    for _ in range(2):
        member.take()
        member.begin()
    assert member.take() == [DropAhead(), Compute(again)] and member.begin() is again
    assert member.take() == [Compute(other)] and member.begin() is other


def test_after_a_stop_nothing_that_was_done_ahead_is_sent() -> None:
    member = a_member(work(1, 0, 1), work(2, 0, 1))
    for _ in range(2):
        member.take()
        member.begin()
    assert not member.agree(committed(1, stop=1)) and member.begin() is None


def test_a_lost_connection_ends_it() -> None:
    member = a_member(work(1, 0, 1), work(2, 0, 1))
    for _ in range(2):
        member.take()
        member.begin()
    member.lost("it broke")
    assert member.ahead is None and not member.is_ahead


def test_one_who_wants_to_stop_begins_nothing_ahead_and_leaves_once_all_is_sent() -> None:
    member = a_member(work(1, 0, 1), work(2, 0, 1))
    member.take()
    member.begin()
    member.wants_stop = "asked to stop"
    member.take()
    assert member.begin() is None
    assert [type(effect.message) for effect in member.nothing(0.0) if isinstance(effect, SendToHost)] == [Leave]


def test_one_who_wants_to_stop_waits_until_what_it_did_ahead_can_be_sent() -> None:
    member = a_member(work(1, 0, 1), work(2, 0, 1))
    for _ in range(2):
        member.take()
        member.begin()
    member.wants_stop = "asked to stop"
    assert member.nothing(0.0) == [] and member.agree(committed(1))
    assert member.nothing(0.0) != []


def test_a_report_of_a_window_to_come_is_turned_away() -> None:
    """Whoever does not wait for the commit, as no worker of ours: what it sends has no place yet."""
    run = Fleet(workers=2, description=windowed())
    run.run_until(lambda: run.core.now is not None and run.core.now.step == 2)
    worker = run.workers["w0"]
    early = SliceReport(3, np.array([0], "<u4"), np.array([4.0]), np.array([1.0]), 0.1, b"", 1)
    worker.send(early)
    run.finish()
    assert run.core.refused["stale report"] == 1
