"""The coordinator on a virtual clock: whoever comes, goes, lags, drifts or lies, the weights are the same bits."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from potluck.agree.policy import Async
from potluck.events import (
    CheckpointFailed,
    CheckpointSaved,
    EpochDone,
    Noticed,
    Stalled,
    Validated,
    WentBack,
    WorkerCame,
    WorkerWent,
    record_of,
)
from potluck.fleet.coordinator import LEGAL, Coordinator, feed
from potluck.fleet.coordinator_state import Resumed
from potluck.fleet.description import BAD_BUFFERS, BUFFERS, Part, settings_of
from potluck.fleet.effects import (
    Close,
    Describe,
    Effect,
    Emit,
    Expect,
    Finish,
    Record,
    Restore,
    Send,
    SendCheckpoint,
)
from potluck.fleet.file_stream import Parcels
from potluck.fleet.membership import Lateness, Membership, WorkerPhase, beat_s
from potluck.show.sentences import sentence_of
from potluck.wire.messages import (
    OURS,
    PROTOCOL,
    SAVE,
    Admitted,
    Applied,
    AverageAt,
    BaseFiles,
    BasePiece,
    BaseWanted,
    CodedAverage,
    CodedPart,
    Committed,
    EndRun,
    Evaluated,
    EvaluateNext,
    Gather,
    Gathered,
    Heartbeat,
    Hello,
    JoinAccepted,
    JoinRequest,
    Leave,
    LookOn,
    Message,
    PartAt,
    Ready,
    Refusal,
    Saved,
    SaveDue,
    SealKey,
    ShardAssignment,
    ShareMemory,
    Shutdown,
    SliceReport,
    StateBegin,
    StateChunk,
    StateMore,
    StateRequest,
    Using,
    Watched,
    Welcome,
    Work,
    Wrote,
)
from tests.fleet.virtual import (
    BATCH,
    EPOCHS,
    PARTS,
    PATIENCE_S,
    ROWS,
    SECRET,
    SLICES,
    STEPS,
    VALIDATION_ROWS,
    Average,
    FaultScript,
    Fleet,
    Line,
    Payload,
    State,
    described,
    digest_of,
    fresh_weights,
    loss_of,
    undisturbed,
    validation_of,
)
from tests.fleet.virtual.disk import stood

pytestmark = pytest.mark.timeout(30)
KNOWN_LENGTH = described(rows_limit=EPOCHS * ROWS)


# Losing workers


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("phase", ["forward", "backward", "half", "sent", "committed", "applied"])
def test_a_worker_lost_in_any_phase_changes_no_bit_and_no_step_is_discarded(phase: str, workers: int) -> None:
    faults = FaultScript().kill("w1", at_step=2, phase=phase)
    run = Fleet(workers=workers, faults=faults).finish()
    assert faults.fired == ["kill w1"]
    assert [went.name for went in run.told(WorkerWent) if not went.polite] == ["w1"]
    assert run.core.refused.total() == 0
    assert run.restores == 0


@pytest.mark.parametrize("phase", ["forward", "backward", "half"])
def test_all_but_one_may_be_lost_in_one_step(phase: str) -> None:
    faults = FaultScript()
    for name in ("w0", "w2", "w3"):
        faults.kill(name, at_step=3, phase=phase)
    run = Fleet(workers=4, faults=faults).finish()
    assert sorted(faults.fired) == ["kill w0", "kill w2", "kill w3"]
    assert {number for step, number in run.workers["w1"].slices_computed if step == 4} == set(range(SLICES))


def test_a_lost_workers_slices_are_computed_by_the_others_within_the_same_step() -> None:
    faults = FaultScript().kill("w1", at_step=2)
    run = Fleet(workers=3, faults=faults).finish()
    assert faults.fired == ["kill w1"]
    others = [number for name in ("w0", "w2") for step, number in run.workers[name].slices_computed if step == 2]
    assert sorted(others) == list(range(SLICES))
    assert not run.workers["w1"].slices_computed or run.workers["w1"].slices_computed[-1][0] == 1


def test_the_ledger_names_who_computed_a_lost_workers_rows() -> None:
    """It reported them, and died before it had sent them."""
    faults = FaultScript().kill("w1", at_step=2, phase="backward")
    run = Fleet(workers=2, faults=faults).finish()
    assert faults.fired == ["kill w1"]
    (second,) = [record for record in run.records if record.step == 2]
    assert {worker for _, _, worker in second.ranges} == {0}
    assert sum(row["rows"] for row in second.workers) == second.rows


def test_a_worker_whose_connection_breaks_goes_on_with_its_own_weights() -> None:
    faults = FaultScript().cut("w1", at_step=3, phase="sent")
    run = Fleet(workers=2, faults=faults).finish()
    assert faults.fired == ["cut w1"]
    assert [came.name for came in run.told(WorkerCame)] == ["w0", "w1", "w1"]
    assert not any(isinstance(item, Admitted) and item.wait for item in run.workers["w1"].line.received)


@pytest.mark.parametrize("phase", ["forward", "backward", "sent"])
def test_a_worker_that_comes_back_within_the_step_gets_all_of_its_averages(phase: str) -> None:
    """Some of them were formed before it was there."""
    faults = FaultScript().cut("w1", at_step=3, phase=phase).stall("w0", at_step=3, seconds=1.0, phase="backward")
    run = Fleet(workers=2, faults=faults).finish()
    assert sorted(faults.fired) == ["cut w1", "stall w0"]
    assert run.workers["w1"].weights == undisturbed()


# Silence and stalls


def test_a_silent_worker_is_given_up_after_patience_and_named_with_phase_and_seconds() -> None:
    faults = FaultScript().silence("w1", at_step=3, seconds=600)
    run = Fleet(workers=2, faults=faults, slice_s=1.0).finish()
    assert faults.fired == ["silence w1"]
    (went,) = [went for went in run.told(WorkerWent) if went.name == "w1"]
    assert not went.polite
    assert went.reason.startswith("silent for 10.") and went.reason.endswith(" s while computing its gradient")


@pytest.mark.parametrize(
    ("phase", "step", "doing"),
    [
        ("joined", 1, "building its model"),
        ("backward", 2, "sending its gradient"),
        ("sent", 2, "waiting for the others"),
        ("committed", 1, "applying step 2"),
    ],
)
def test_what_a_silent_worker_was_doing_is_told(phase: str, step: int, doing: str) -> None:
    faults = FaultScript().silence("w1", at_step=step, seconds=600, phase=phase)
    if phase == "sent":
        faults.stall("w0", at_step=step, seconds=30)
    run = Fleet(workers=2, faults=faults, at_least=1, slice_s=1.0)
    run.run_until(lambda: bool(run.told(WorkerWent)), limit_s=60)
    assert "silence w1" in faults.fired
    (went,) = run.told(WorkerWent)
    assert went.name == "w1" and went.reason.endswith(f" s while {doing}")


def test_others_do_the_work_of_one_whose_plug_is_pulled_as_soon_as_its_link_was_never_that_late() -> None:
    """It has no chance to say so. The others need not wait for half of patience: its heart beat in time until then."""
    faults = FaultScript().silence("w1", at_step=5, seconds=600)
    run = Fleet(workers=3, faults=faults, slice_s=1.0)
    run.run_until(lambda: bool(run.told(Stalled)), limit_s=60)
    assert faults.fired == ["silence w1"]
    (stall,) = run.told(Stalled)
    assert stall.name == "w1" and "the others compute its part" in stall.then
    assert PATIENCE_S / 10 < stall.seconds < PATIENCE_S / 4 and not run.told(WorkerWent)  # it may come back
    run.finish()


def test_one_who_is_silent_and_keeps_averages_from_being_written_over_goes_and_gets_the_weights_on_its_return() -> None:
    """The virtual host takes averages of every other peer for such that fill buffers: those of w2, but not of w1."""
    faults = FaultScript().silence("w2", at_step=3, seconds=PATIENCE_S / 2)
    run = Fleet(workers=3, faults=faults, slice_s=1.0, epochs=2 * EPOCHS).finish()
    (went,) = [went for went in run.told(WorkerWent) if not went.polite]
    assert went.name == "w2" and went.reason.endswith("the others waited for it to take averages")
    assert PATIENCE_S / 10 < float(went.reason.split()[2]) < PATIENCE_S / 2
    assert [came.name for came in run.told(WorkerCame)].count("w2") == 2
    assert run.workers["w2"].weights == undisturbed(2 * STEPS)


def test_a_host_that_paused_judges_nobodys_silence_before_it_had_time_to_read() -> None:
    run = Fleet(workers=2, slice_s=1.0)
    run.run_until(lambda: run.core.standing.version >= 5, limit_s=60)
    core = run.core
    first, second = core.membership.holders
    now = run.clock.now + PATIENCE_S / 5  # shorter than a pause that is forgiven
    feed(core, now, "tick", {second.peer: now}, [])
    assert first.silent_s(now) > first.lateness.silence_limit_s(now, PATIENCE_S)
    assert not core.stragglers.part_with_silent({first.peer})


def test_a_host_that_paused_after_it_was_told_something_has_paused_as_well() -> None:
    """Between two ticks it heard of one worker: what came of the other is read only at the tick."""
    run = Fleet(workers=2, slice_s=1.0)
    run.run_until(lambda: run.core.standing.version >= 5, limit_s=60)
    core = run.core
    first, second = core.membership.holders
    beat, late = beat_s(PATIENCE_S), run.clock.now + 5 * beat_s(PATIENCE_S)
    feed(core, late - 2.4 * beat, "tick", {second.peer: late - 2.4 * beat}, [])
    feed(core, late - 1.2 * beat, "message", second.peer, Heartbeat("w1", 0))
    feed(core, late, "tick", {second.peer: late}, [])
    assert first.silent_s(late) > first.lateness.silence_limit_s(late, PATIENCE_S)
    assert not core.stragglers.part_with_silent({first.peer})


def test_what_came_just_before_a_host_stopped_was_heard_then() -> None:
    """It is asked about at the first tick after the stop, by a clock that has stood still meanwhile."""
    run = Fleet(workers=2, slice_s=1.0)
    run.run_until(lambda: run.core.standing.version >= 5, limit_s=60)
    core, before = run.core, run.clock.now + 1
    (first, _), stop = core.membership.holders, 10 * PATIENCE_S
    feed(core, before, "tick", {}, [])
    feed(core, before + stop, "tick", {first.peer: before - 0.01}, [])
    assert core.clock == pytest.approx(before) and first.heard_at == pytest.approx(before - 0.01)
    feed(core, before + stop + 0.1, "tick", {first.peer: before + stop / 2}, [])
    assert first.heard_at == pytest.approx(before)


def test_one_who_outlived_a_silence_is_given_that_much_when_it_is_back() -> None:
    members = Membership()
    member = members.add(0.0, 1, "w", "cpu", plain=False, address="there")
    members.admit(member)
    for beat in range(100):
        member.hear(float(beat))
    assert member.lateness.silence_limit_s(99.0, 30.0) == 3.0
    members.remember_silence(member)
    members.remove(1)
    back, other = (members.add(103.0, n, name, "cpu", plain=False, address="there") for n, name in ((2, "w"), (3, "v")))
    for each in (back, other):
        members.admit(each)
        for beat in range(103, 150):
            each.hear(float(beat))
    assert back.lateness.silence_limit_s(149.0, 30.0) == 12.0
    assert other.lateness.silence_limit_s(149.0, 30.0) == 3.0


def test_a_link_that_is_late_at_times_gets_more_patience_and_a_new_one_all_of_it() -> None:
    seen, patience_s = Lateness(), 30.0
    assert seen.silence_limit_s(0.0, patience_s) == 15.0
    for beat in range(40):
        seen.note(float(beat), 1.0)
        assert seen.silence_limit_s(float(beat), patience_s) == (15.0 if beat < 15 else 3.0)
    seen.note(42.0, 3.0)
    assert seen.silence_limit_s(42.0, patience_s) == 9.0
    seen.note(50.0, 8.0)
    assert seen.silence_limit_s(50.0, patience_s) == 15.0  # never more than before
    assert seen.silence_limit_s(500.0, patience_s) == 15.0
    seen.note(500.0, 1.0)
    assert seen.silence_limit_s(850.0, patience_s) == 3.0  # and that is long ago


def test_a_silent_worker_that_wakes_joins_again() -> None:
    faults = FaultScript().silence("w1", at_step=2, seconds=PATIENCE_S + 2)
    run = Fleet(workers=2, faults=faults, slice_s=1.0).finish()
    assert faults.fired == ["silence w1"]
    assert [came.name for came in run.told(WorkerCame)].count("w1") == 2
    assert run.workers["w1"].weights == undisturbed()


def test_silence_is_told_while_it_lasts_and_names_nobody_else() -> None:
    faults = FaultScript().silence("w1", at_step=3, seconds=600, phase="backward")
    run = Fleet(workers=4, faults=faults, slice_s=1.0)
    run.run_until(lambda: bool(run.told(WorkerWent)), limit_s=60)
    assert faults.fired == ["silence w1"]
    stalls = run.told(Stalled)
    assert {stall.name for stall in stalls} == {"w1"}
    assert PATIENCE_S / 10 < stalls[0].seconds < PATIENCE_S / 4
    assert stalls[0].doing.startswith("silent while sending its gradient")
    assert stalls[0].then == "the others compute its part of step 3"


def test_the_slices_of_a_sleeper_are_computed_by_idle_workers_before_patience_is_over() -> None:
    faults = FaultScript().silence("w1", at_step=2, seconds=PATIENCE_S - 2)
    run = Fleet(workers=3, faults=faults)
    run.run_until(lambda: run.standing().version == 2)
    assert faults.fired == ["silence w1"]
    assert run.clock.now < 100 + PATIENCE_S - 2  # it still sleeps
    others = [number for name in ("w0", "w2") for step, number in run.workers[name].slices_computed if step == 2]
    assert sorted(others) == list(range(SLICES))
    assert run.told(Stalled)[0].then == "the others compute its part of step 2"
    run.finish()
    assert run.workers["w1"].weights == undisturbed()
    assert not [went for went in run.told(WorkerWent) if not went.polite]


def test_a_sleeper_that_wakes_takes_part_again() -> None:
    faults = FaultScript().silence("w1", at_step=2, seconds=PATIENCE_S - 3)
    run = Fleet(workers=2, faults=faults, slice_s=0.5).finish()
    assert faults.fired == ["silence w1"]
    assert max(step for step, _ in run.workers["w1"].slices_computed) == STEPS


def test_a_sleeper_whose_part_comes_back_to_it_computes_it() -> None:
    """It was given to another, who is gone by the time that the sleeper wakes."""
    faults = FaultScript().silence("w1", at_step=2, seconds=PATIENCE_S - 3)
    run = Fleet(workers=2, faults=faults)
    run.run_until(lambda: any(stall.then for stall in run.told(Stalled)))
    run.workers["w0"].kill()
    run.finish()
    assert faults.fired == ["silence w1"]
    assert run.workers["w1"].weights == undisturbed()


def test_a_worker_that_beats_and_computes_nothing_holds_nobody_up_for_ever() -> None:
    faults = FaultScript().stall("w1", at_step=2, seconds=1e6)
    run = Fleet(workers=3, faults=faults, description=KNOWN_LENGTH).finish(limit_s=100)
    assert faults.fired == ["stall w1"]
    stalls = run.told(Stalled)
    assert {stall.name for stall in stalls} == {"w1"}
    assert stalls[0].doing == "computing its gradient"
    assert stalls[0].then == "the others compute its part of step 2"
    assert PATIENCE_S < stalls[0].seconds < PATIENCE_S + 1
    assert not [went for went in run.told(WorkerWent) if not went.polite]


def test_a_worker_that_beats_and_evaluates_nothing_holds_nobody_up_for_ever() -> None:
    faults = FaultScript().stall("w1", at_step=2, seconds=1e6, phase="evaluating")
    run = Fleet(workers=3, faults=faults, evaluate_every=2, description=KNOWN_LENGTH).finish(limit_s=200)
    assert faults.fired == ["stall w1"]
    assert run.workers["w0"].validated[2] == pytest.approx(validation_of(0, VALIDATION_ROWS) / VALIDATION_ROWS)


def test_workers_that_are_all_slow_in_their_first_step_do_not_relieve_each_other() -> None:
    """A busy machine, on which everybody needs longer than patience, and more have come meanwhile."""
    run = Fleet(workers=1, slice_s=PATIENCE_S / 2)
    for name in ("w1", "w2"):
        run.add(name, at_s=1.0, slice_s=PATIENCE_S / 2)
    run.finish()
    assert not [stall for stall in run.told(Stalled) if stall.then]


def test_a_slow_worker_is_not_taken_for_one_that_hangs() -> None:
    """It needs longer than patience for each slice, but no longer than it always does."""
    run = Fleet(workers=1, at_least=2, slice_s=1.0, patience_s=4.0, epochs=6)
    slow = run.add("slow", slice_s=6.0)
    run.finish()
    relieved = [stall for stall in run.told(Stalled) if stall.then]
    assert len(relieved) == 1  # in its first step nothing was known of it
    assert len(slow.slices_computed) > 5


# A host that does not run for a while


@pytest.mark.parametrize("at_s", [0.05, 0.31, 0.44, 0.52, 0.7, 1.3, 2.05])
@pytest.mark.parametrize("seconds", [0.5, PATIENCE_S - 1, PATIENCE_S + 2, 10 * PATIENCE_S])
def test_a_pause_of_the_host_changes_no_bit_and_loses_nobody(at_s: float, seconds: float) -> None:
    run = Fleet(workers=3, save_every=2, evaluate_every=3)
    run.run_for(at_s)
    run.host.pause(seconds)
    run.finish()
    assert not [went for went in run.told(WorkerWent) if not went.polite]
    assert run.restores == 0


@pytest.mark.parametrize("at_s", [0.31, 0.44, 0.52, 0.7])
def test_a_pause_of_the_host_does_not_hide_who_is_really_gone(at_s: float) -> None:
    run = Fleet(workers=3)
    run.run_for(at_s)
    run.host.pause(3 * PATIENCE_S)
    run.workers["w1"].clock.stop(math.inf)
    run.finish()
    assert [went.name for went in run.told(WorkerWent) if not went.polite] in (["w1"], [])
    assert run.workers["w0"].weights == undisturbed()


def test_what_a_worker_sends_after_it_was_given_up_reaches_no_sum() -> None:
    """Its gradient is in the socket when it is given up, and its report with it."""
    faults = FaultScript().silence("w1", at_step=2, seconds=PATIENCE_S + 0.3)
    run = Fleet(workers=2, faults=faults, slice_s=2.0)
    run.finish()
    assert faults.fired == ["silence w1"]
    assert run.workers["w0"].weights == undisturbed()


def test_only_those_who_are_waited_for_are_told_as_stalled() -> None:
    """The gradients of faster workers are held back meanwhile, and that is not their fault."""
    faults = FaultScript().stall("w2", at_step=2, seconds=35)
    run = Fleet(workers=4, faults=faults).finish()
    assert faults.fired == ["stall w2"]
    assert {stall.name for stall in run.told(Stalled)} == {"w2"}


# Coming


@pytest.mark.parametrize("at_s", [0.05, 0.5, 1.1, 2.0, 2.9, 3.3])
def test_a_newcomer_starts_with_the_next_step_while_the_others_keep_training(at_s: float) -> None:
    run = Fleet(workers=1)
    newcomer = run.add("new", at_s=at_s)
    run.finish()
    (came,) = [came for came in run.told(WorkerCame) if came.name == "new"]
    assert newcomer.weights == undisturbed()
    first = min((step for step, _ in newcomer.slices_computed), default=STEPS + 1)
    assert first <= came.step + 2  # it arrives within a step, and is given work in the next
    assert run.clock.now < 100 + 5.5  # nobody waited for it


def test_a_sponsor_that_dies_is_replaced_by_another() -> None:
    faults = FaultScript()
    for step in range(1, STEPS):
        faults.kill("w0", at_step=step, phase="parcel")
    run = Fleet(workers=2, faults=faults)
    newcomer = run.add("new", at_s=1.0)
    run.finish()
    assert faults.fired == ["kill w0"]
    assert newcomer.weights == undisturbed()
    assert [came.name for came in run.told(WorkerCame)] == ["w0", "w1", "new"]


def test_a_state_of_an_earlier_step_than_was_asked_for_is_refused() -> None:
    """A newcomer would never catch up with it: the averages since are not kept."""
    run = Fleet(workers=2)
    run.run_until(lambda: run.standing().version >= 2)
    line = run.stranger()
    for message in (hello("new"), ready()):
        line.send(message)
    run.run_until(lambda: bool(run.core.transfers.under_way))
    ((number, transfer),) = run.core.transfers.under_way.items()
    assert transfer.sponsor is not None
    begin = StateBegin(number, transfer.step - 1, '[["state", 120]]')
    effects = run.core.at(run.clock.now).on_message(transfer.sponsor, begin)
    refusal = effects[0]
    assert isinstance(refusal, Send) and isinstance(refusal.message, Refusal) and refusal.peer == transfer.sponsor
    assert f"of step {transfer.step - 1}, and {transfer.step} was asked for" in refusal.message.sentence
    ((_, again),) = run.core.transfers.under_way.items()
    assert again.to == transfer.to and again.sponsor != transfer.sponsor


def test_a_newcomer_that_dies_while_catching_up_is_forgotten() -> None:
    faults = FaultScript().kill("new", at_step=0, phase="catching up")
    run = Fleet(workers=2, faults=faults)
    run.add("new", at_s=1.0)
    run.finish()
    assert faults.fired == ["kill new"]
    assert [came.name for came in run.told(WorkerCame)] == ["w0", "w1"]
    assert not run.core.transfers.under_way


def test_a_newcomer_with_the_last_holders_whole_state_goes_on_where_it_died() -> None:
    """The parcel was sent in full; whoever sent it is gone before it is unpacked."""
    run = Fleet(workers=1)
    newcomer = run.add("new", at_s=1.5)
    run.run_until(lambda: newcomer.line is not None)
    run.run_until(lambda: any(isinstance(m, StateBegin) for m in newcomer.line.received))
    newcomer.clock.stop(1.0)
    run.run_for(0.5)
    run.workers["w0"].kill()
    run.finish()
    assert run.restores == 0
    assert newcomer.weights == undisturbed()


def test_workers_that_build_other_weights_start_with_the_first_ones() -> None:
    run = Fleet(workers=2)
    other = run.add("other", weights=fresh_weights() * 2)
    run.finish()
    assert other.weights == undisturbed()


def test_a_run_does_not_begin_before_enough_workers_are_there() -> None:
    run = Fleet(workers=2, at_least=3)
    run.run_for(50)
    assert run.standing().version == 0 and run.core.now is None
    run.add("w2")
    run.finish()


def test_a_newcomer_that_goes_before_it_is_ready_delays_nobody() -> None:
    faults = FaultScript().kill("early", at_step=1, phase="joined")
    run = Fleet(faults=faults)
    run.add("early")
    run.add("first", at_s=0.5)
    run.finish()
    assert faults.fired == ["kill early"]
    assert run.clock.now < 100 + PATIENCE_S


# Leaving


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("phase", ["forward", "sent", "applied"])
def test_a_worker_that_leaves_politely_is_told_as_such(phase: str, workers: int) -> None:
    faults = FaultScript().leave("w0", at_step=2, phase=phase)
    run = Fleet(workers=workers, faults=faults).finish()
    assert faults.fired == ["leave w0"]
    (went,) = [went for went in run.told(WorkerWent) if went.name == "w0"]
    assert went.polite
    assert run.workers["w0"].member.left and run.workers["w0"].error is None


def test_the_last_holders_state_is_asked_for_before_it_goes() -> None:
    faults = FaultScript().leave("w0", at_step=3)
    run = Fleet(workers=1, faults=faults)
    run.run_until(lambda: run.workers["w0"].done)
    assert faults.fired == ["leave w0"]
    assert list(run.disk.states) == [3]
    run.add("next", at_s=30)
    run.finish()
    assert run.workers["next"].slices_computed[0][0] == 4


def test_the_last_holder_that_leaves_while_an_older_save_is_under_way_leaves_its_newest_state() -> None:
    faults = FaultScript().leave("w0", at_step=3)
    run = Fleet(workers=1, faults=faults, save_every=2, pack_s=0.7)
    run.run_until(lambda: run.workers["w0"].done)
    assert faults.fired == ["leave w0"]
    assert max(run.disk.states) == 3


def test_the_last_holder_that_leaves_while_its_gradient_is_on_its_way_leaves_what_it_has() -> None:
    """It waits for the average when it is asked to stop, and will not apply it."""
    faults = FaultScript().leave("w0", at_step=3, phase="sent")
    run = Fleet(workers=1, faults=faults, latency_s=0.3)
    run.run_until(lambda: run.workers["w0"].done)
    assert faults.fired == ["leave w0"]
    assert run.workers["w0"].state.step in run.disk.states
    run.add("next", at_s=1)
    run.finish()
    assert run.workers["next"].slices_computed[0] == (run.workers["w0"].state.step + 1, 0)


def test_the_last_holder_that_has_just_saved_leaves_at_once() -> None:
    faults = FaultScript().leave("w0", at_step=5)
    run = Fleet(workers=1, faults=faults, save_every=2)
    run.run_until(lambda: run.workers["w0"].done)
    assert sorted(run.disk.states) == [2, 4, 5]


# Everybody gone


def test_after_patience_without_anybody_the_run_goes_back_to_its_newest_checkpoint() -> None:
    faults = FaultScript().kill("w0", at_step=6)
    run = Fleet(workers=1, faults=faults, save_every=2)
    second = run.add("second", at_s=20)
    run.run_until(lambda: run.workers["w0"].dead)
    run.run_until(lambda: run.restores == 1)
    assert faults.fired == ["kill w0"]
    run.finish()
    assert second.slices_computed[0] == (5, 0)


def test_without_a_checkpoint_it_begins_anew() -> None:
    faults = FaultScript().kill("w0", at_step=4)
    run = Fleet(workers=1, faults=faults)
    second = run.add("second", at_s=4)
    run.finish()
    assert faults.fired == ["kill w0"]
    assert second.slices_computed[0] == (1, 0)
    assert run.restores == 1


def test_a_run_that_went_back_to_its_start_says_for_how_many_it_waits() -> None:
    faults = FaultScript().kill("w0", at_step=3).kill("w1", at_step=3)
    run = Fleet(workers=2, faults=faults)
    run.run_until(lambda: not run.is_anybody_alive)
    assert not run.told(Noticed)
    run.add("second")
    run.run_until(lambda: bool(run.told(Noticed)))
    run.run_for(2 * PATIENCE_S)
    (said,) = run.told(Noticed)
    assert run.told(WentBack) and "waits for 2 workers" in said.sentence and "1 more has to join" in said.sentence
    run.add("third")
    run.finish()
    assert len(run.told(Noticed)) == 1


def test_a_run_waits_patience_for_those_who_hold_its_weights() -> None:
    """They were cut off for a while, and come back before the run is restored."""
    run = Fleet(workers=2, save_every=2)
    run.run_until(lambda: run.standing().version == 3)
    for worker in run.workers.values():
        worker.clock.stop(PATIENCE_S + 5)
    run.add("fresh", at_s=PATIENCE_S + 2)
    run.finish()
    assert run.restores == 0
    assert run.workers["w0"].slices_computed[-1][0] == STEPS


def test_a_worker_with_weights_of_a_forgotten_run_is_told_so() -> None:
    """It held step 3 when all the others were lost at step 5, and nothing was saved."""
    run = Fleet(workers=2, at_least=1, slice_s=1.0)
    run.run_until(lambda: run.standing().version == 2)
    run.workers["w1"].clock.stop(60)
    run.run_until(lambda: run.standing().version == 5)
    run.workers["w0"].kill()
    run.run_until(lambda: run.workers["w1"].done, limit_s=100)
    assert run.workers["w1"].error is not None and "anew" in run.workers["w1"].error
    run.add("fresh")
    run.finish()


def test_a_newcomer_whose_sponsor_was_the_last_begins_anew_by_itself() -> None:
    """No checkpoint was kept, and it had half of the state."""
    faults = FaultScript()
    for step in range(1, STEPS):
        faults.kill("w0", at_step=step, phase="parcel")
    run = Fleet(workers=1, faults=faults)
    newcomer = run.add("new", at_s=1.0)
    run.finish()
    assert faults.fired == ["kill w0"]
    assert newcomer.slices_computed[0] == (1, 0)


def test_a_newcomer_whose_sponsor_was_the_last_gets_the_checkpoint() -> None:
    faults = FaultScript()
    for step in range(1, STEPS):
        faults.kill("w0", at_step=step, phase="parcel")
    run = Fleet(workers=1, faults=faults, save_every=1)
    run.add("new", at_s=1.5)
    run.finish()
    assert faults.fired == ["kill w0"]
    assert run.restores == 1


# A coordinator that dies


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("at_s", [0.905, 1.3, 2.2, 2.9])
def test_a_coordinator_started_again_from_its_journal_loses_nothing(at_s: float, workers: int, tmp_path: Path) -> None:
    run = Fleet(workers=workers, journal=tmp_path / "journal.sqlite", slice_s=0.1)
    run.run_for(at_s)
    assert run.standing().version >= 1
    run.crash_host()
    run.finish()
    assert run.restores == 0
    run.journal.close()


def test_a_coordinator_that_died_before_the_first_step_was_done_waits_for_nobody() -> None:
    run = Fleet(workers=2)
    run.run_for(0.1)
    run.crash_host()
    run.finish()
    assert run.clock.now < 100 + PATIENCE_S


def test_a_committed_step_that_nobody_heard_of_is_computed_again() -> None:
    run = Fleet(workers=2)
    run.run_until(lambda: run.standing().version == 3)
    assert {worker.state.step for worker in run.workers.values()} == {2}
    run.crash_host()
    run.finish()
    assert run.restores == 0
    for worker in run.workers.values():
        assert [number for step, number in worker.slices_computed if step == 3]


def half_heard(**options: Any) -> Fleet:
    """The host died when w0 had heard that step 3 is committed, and w1 had not."""
    run = Fleet(workers=2, **options)
    run.run_until(lambda: run.standing().version == 2)
    line = run.workers["w1"].line
    hear = line.on_down

    def hear_some(line: Line, item: Any) -> None:
        if not (isinstance(item, Average | Committed) and item.step == 3):
            hear(line, item)

    line.on_down = hear_some
    run.run_until(lambda: run.workers["w0"].state.step == 3)
    assert run.workers["w1"].state.step == 2
    run.crash_host()
    return run


def test_a_worker_one_ahead_of_the_step_that_is_computed_again_waits_for_the_others() -> None:
    run = half_heard()
    run.workers["w0"].clock.stop(0.95)
    run.run_until(lambda: run.core.now is not None and run.core.now.step == 3 and len(run.core.membership.ready) == 2)
    assert run.member("w0").applied == 3
    run.finish()
    assert run.restores == 0
    assert {number for step, number in run.workers["w1"].slices_computed if step == 3} == {0, 1, 2, 3, 4}


def test_a_worker_one_step_behind_catches_up_with_one_that_is_not() -> None:
    run = half_heard()
    run.workers["w1"].clock.stop(1.3)
    run.finish()
    assert run.restores == 0


def test_the_one_ahead_may_come_after_the_one_behind_is_lost() -> None:
    """What was being computed again is on record, so that the one who has applied it can go on."""
    run = half_heard()
    run.workers["w0"].clock.stop(5)
    run.run_until(lambda: run.core.now is not None and run.core.now.step == 3 and len(run.core.membership.ready) == 1)
    run.workers["w1"].kill()
    run.finish(limit_s=200)
    assert run.restores == 0


def test_the_one_ahead_goes_on_alone_if_the_one_behind_is_lost() -> None:
    """Nobody is left who could compute the step again, and nobody needs it."""
    run = half_heard()
    run.workers["w0"].clock.stop(0.95)
    run.run_until(lambda: run.core.now is not None and run.core.now.step == 3 and len(run.core.membership.ready) == 2)
    run.workers["w1"].kill()
    run.finish(limit_s=200)
    assert run.restores == 0


def test_a_worker_ahead_of_the_journal_is_given_the_runs_weights() -> None:
    """The journal was rewound: its weights are of a future that never was."""
    run = Fleet(workers=1, save_every=2)
    run.run_until(lambda: run.workers["w0"].state.step == 5)
    run.crash_host(back_after_s=2.0)
    run.journal.rewind(4)
    run.finish()
    assert run.restores == 1


# Who computes what


def test_work_follows_measured_speed() -> None:
    run = Fleet(at_least=2, epochs=6)
    run.add("fast", slice_s=0.1)
    run.add("slow", slice_s=0.3)
    run.finish()
    whole = [r for r in run.records if r.rows == BATCH][-4:]
    assert {row["name"]: row["rows"] for record in whole for row in record.workers} == {"fast": 12, "slow": 4}


def test_quotas_stay_while_a_change_is_not_worth_it() -> None:
    """A tenth slower: two slices of eight more or less would not pay."""
    run = Fleet(at_least=2, epochs=6)
    run.add("a", slice_s=0.100)
    run.add("b", slice_s=0.115)
    run.finish()
    whole = [record for record in run.records if record.rows == BATCH]
    assert {tuple(row["rows"] for row in record.workers) for record in whole} == {(8, 8)}


def test_speed_is_measured_over_what_was_computed_in_that_time() -> None:
    """w0 was given a lost worker's slices while it was still computing its own."""
    faults = FaultScript().kill("w1", at_step=2)
    run = Fleet(workers=2, faults=faults, slice_s=0.5)
    run.run_until(lambda: run.standing().version == 2)
    assert faults.fired == ["kill w1"]
    assert run.member("w0").speed == pytest.approx(2.0, rel=0.05)


def test_more_workers_than_slices_is_no_harm() -> None:
    Fleet(workers=SLICES + 3).finish()


# Bad payloads


@pytest.mark.parametrize("fault", ["poison", "poison_loss"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_bad_gradient_is_computed_again_slice_by_slice_by_another(fault: str, workers: int) -> None:
    faults = getattr(FaultScript(), fault)("w0", at_step=2, slice=1)
    run = Fleet(workers=workers, faults=faults).finish()
    assert faults.fired == [f"{fault} w0"]
    assert run.core.refused == {"bad payload": 1}
    (stall,) = run.told(Stalled)
    why = "is not finite" if fault == "poison" else "has a loss that is not finite"
    assert stall.name == "w0" and why in stall.doing and "computed again" in stall.doing
    if workers > 1:
        second = [step for step, _ in run.workers["w0"].slices_computed].count(2)
        assert second == SLICES // workers  # its own, and none of them a second time


def test_a_gradient_that_is_bad_twice_ends_the_run_with_a_sentence() -> None:
    faults = FaultScript().poison("w0", at_step=2, slice=1).poison("w1", at_step=2, slice=1)
    run = Fleet(workers=2, faults=faults)
    run.run_until(lambda: run.host.finish is not None)
    run.run_for(1)
    assert faults.fired == ["poison w0", "poison w1"]
    assert run.host.finish == Finish(
        "The gradient of slice 1 of step 2 is not finite, on w0 and again on w1. It is positions 18 to 19 of epoch 1's"
        " order. Look at those samples, or try a lower learning rate or step.clip; the weights are those of the step"
        " before.",
        failed=True,
    )
    assert {worker.error for worker in run.workers.values()} == {run.host.finish.reason}
    assert run.journal.steps() == [1]


def test_a_lone_worker_with_a_bad_gradient_is_named_twice() -> None:
    faults = FaultScript().poison("w0", at_step=3, slice=4).poison("w0", at_step=3, slice=4)
    run = Fleet(workers=1, faults=faults)
    run.run_until(lambda: run.host.finish is not None)
    assert faults.fired == ["poison w0", "poison w0"]
    assert "slice 4 of step 3 is not finite, twice on w0" in run.host.finish.reason


# Drift


def drifted(workers: int, **options: Any) -> Fleet:
    """w1 applies step 2 wrongly, and tells so after w0."""
    run = Fleet(workers=workers, faults=FaultScript().drift("w1", at_step=2), **options)
    run.run_until(lambda: "w1" in run.workers and run.workers["w1"].line is not None)
    run.workers["w1"].line.latency_s = 0.002
    return run


@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_that_drifted_is_given_the_weights_anew(workers: int) -> None:
    run = drifted(workers).finish()
    assert run.faults.fired == ["drift w1"]
    assert run.core.refused["drifted"] == 1
    assert run.workers["w1"].error is None and run.workers["w1"].weights == undisturbed()
    (told,) = run.told(Stalled)
    assert told.name == "w1" and told.doing.startswith("its weights after step 2 are not the others'")
    assert [epoch.same_weights for epoch in run.told(EpochDone)] == [False, True]
    assert "DRIFTED" in run.told(EpochDone)[0].sentence


def test_most_hashes_are_right_though_the_wrong_one_is_told_first() -> None:
    """When w1 tells another than w0, nobody can know which is right; with w2's it is two against one."""
    run = Fleet(faults=FaultScript().drift("w0", at_step=2), at_least=3)
    for number, latency_s in enumerate((0.001, 0.01, 0.02)):
        run.add(f"w{number}", latency_s=latency_s)
    run.finish(limit_s=300)
    assert run.faults.fired == ["drift w0"]
    assert all(worker.weights == undisturbed() for worker in run.workers.values())


def test_a_worker_that_drifted_before_an_evaluation_does_not_keep_its_range() -> None:
    run = drifted(2, evaluate_every=2).finish(limit_s=300)
    assert run.faults.fired == ["drift w1"]
    assert run.told(Validated)[0].loss == pytest.approx(validation_of(0, VALIDATION_ROWS) / VALIDATION_ROWS)


def test_a_worker_that_drifted_saves_nothing_and_sponsors_nobody() -> None:
    run = Fleet(faults=FaultScript().drift("wrong", at_step=2), at_least=2)
    run.add("wrong", save_every=2, latency_s=0.002)
    run.add("right", save_every=2)
    run.finish(limit_s=300)
    assert run.faults.fired == ["drift wrong"]
    assert run.disk.states
    for step, data in run.disk.states.items():
        assert State.from_bytes(data).weights.tobytes() == undisturbed(step)


def test_a_digest_of_a_step_that_is_not_committed_condemns_nobody() -> None:
    run = Fleet(workers=2)
    run.run_until(lambda: run.standing().version == 1)
    run.workers["w0"].send(Applied(4, "a digest of nothing", 0.1, 1.0, ""))
    run.finish()
    assert run.core.refused["drifted"] == 0


# Evaluating


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_evaluation_does_not_depend_on_who_computed_it(workers: int) -> None:
    run = Fleet(workers=workers, evaluate_every=2).finish()
    expected = {step: validation_of(0, VALIDATION_ROWS) / VALIDATION_ROWS for step in (2, 4, 6)}
    for worker in run.workers.values():
        assert worker.validated == expected
    assert {v.step: v.loss for v in run.told(Validated)} == expected


def test_the_ranges_of_a_lost_worker_are_given_to_the_others() -> None:
    faults = FaultScript().kill("w1", at_step=2, phase="evaluating")
    run = Fleet(workers=3, faults=faults, evaluate_every=2).finish()
    assert faults.fired == ["kill w1"]
    assert run.workers["w0"].validated == Fleet(workers=1, evaluate_every=2).finish().workers["w0"].validated
    assert [v.step for v in run.told(Validated)] == [2, 4, 6]


def test_a_worker_that_is_cut_off_while_it_evaluates_evaluates_anew() -> None:
    faults = FaultScript().cut("w1", at_step=2, phase="evaluating")
    run = Fleet(workers=2, faults=faults, evaluate_every=2).finish(limit_s=300)
    assert faults.fired == ["cut w1"]
    assert set(run.workers["w0"].validated) == {2, 4, 6}


def test_an_evaluation_that_nobody_is_left_to_finish_does_not_disturb_the_next() -> None:
    """Its only evaluator dies; the newcomer that goes on has not trained that step, and so does not evaluate it."""
    faults = FaultScript().kill("w0", at_step=4, phase="evaluating").kill("third", at_step=8, phase="evaluating")
    run = Fleet(workers=1, faults=faults, epochs=4, evaluate_every=4)
    run.add("second", at_s=1.8, evaluate_every=4)
    run.add("third", at_s=3.5, evaluate_every=4)
    run.finish(limit_s=300)
    assert faults.fired == ["kill w0", "kill third"]
    assert [v.step for v in run.told(Validated)] == [8, 12]


# Saving


def test_one_worker_saves_for_all() -> None:
    run = Fleet(workers=3, save_every=2).finish()
    assert sorted(run.disk.states) == [2, 4, 6]
    assert [saved.step for saved in run.told(CheckpointSaved)] == [2, 4, 6]
    assert State.from_bytes(run.disk.states[6]).weights.tobytes() == undisturbed()


def best_on_disk(run: Fleet) -> int:
    return State.from_bytes(run.disk.states[STEPS]).best


def test_a_step_that_is_called_the_best_after_it_was_kept_is_kept_once_more() -> None:
    run = Fleet(workers=2, description=KNOWN_LENGTH, keeps_best=True, evaluate_every=STEPS).finish()
    assert best_on_disk(run) == STEPS
    assert [saved.step for saved in run.told(CheckpointSaved)][-2:] == [STEPS, STEPS]


@pytest.mark.parametrize("phase", ["parcel", "save due"])
def test_if_the_one_who_saves_the_best_once_more_dies_another_who_calls_it_that_is_asked(phase: str) -> None:
    for victim in ("w0", "w1"):
        faults = FaultScript().kill(victim, at_step=STEPS, phase=phase).kill(victim, at_step=STEPS, phase=phase)
        run = Fleet(workers=3, faults=faults, description=KNOWN_LENGTH, keeps_best=True).finish(limit_s=300)
        assert best_on_disk(run) == STEPS


def test_a_state_that_does_not_say_that_it_is_the_best_is_asked_for_again_and_then_nobody_waits_for_it() -> None:
    """It was copied before, or is another's: the worker has been given that since."""
    core = Coordinator(patience_s=10, secret=SECRET)
    plain, best = StateBegin(SAVE, 0, '[["state", 1]]'), SaveDue(0, 2, is_best=1)
    for message in (hello(), ready(), SaveDue(0, 2), plain, StateChunk(SAVE, b"x")):
        core.at(100.0).on_message(1, message)
    core.at(100.0).on_saved(0, "a folder", "", 1)
    assert not core.saving.is_under_way
    assert Send(1, StateRequest(SAVE, 0)) in core.at(100.0).on_message(1, best)
    assert core.at(100.0).on_message(1, plain) == [Send(1, StateMore(SAVE, 0)), Send(1, StateRequest(SAVE, 0))]
    core.at(141.0).on_message(1, Heartbeat("1", 0))
    core.at(141.0).on_tick()
    assert Send(1, Saved(0, "a folder", "", is_best=1)) in core.at(142.0).on_message(1, plain)
    assert not core.saving.is_under_way


@pytest.mark.parametrize("phase", ["parcel", "save due"])
def test_if_the_one_who_saves_dies_another_is_asked(phase: str) -> None:
    """Also before it has begun: writing its state aside takes a while."""
    faults = FaultScript().kill("w0", at_step=4, phase=phase)
    run = Fleet(workers=3, faults=faults, save_every=4, slice_s=1.0)
    run.run_until(lambda: bool(faults.fired))
    run.run_until(lambda: bool(run.disk.states), limit_s=20)
    assert faults.fired == ["kill w0"]
    run.finish()


def test_at_the_end_another_saves_if_the_one_who_saves_dies() -> None:
    faults = FaultScript().kill("w0", at_step=STEPS, phase="save due")
    run = Fleet(workers=2, faults=faults, save_every=100).finish(limit_s=300)
    assert faults.fired == ["kill w0"]
    assert list(run.disk.states) == [STEPS]


def test_two_who_save_die_one_after_the_other() -> None:
    faults = FaultScript().kill("w0", at_step=4, phase="parcel")
    for step in (4, 5):
        faults.kill("w1", at_step=step, phase="parcel")
    run = Fleet(workers=3, faults=faults, save_every=4, slice_s=1.0)
    run.run_until(lambda: bool(run.disk.states), limit_s=60)
    assert faults.fired == ["kill w0", "kill w1"]
    run.finish()


def test_a_save_that_is_due_while_the_one_before_is_still_being_sent_is_not_lost() -> None:
    run = Fleet(workers=2, save_every=1, latency_s=0.3).finish(limit_s=300)
    assert max(run.disk.states) == STEPS


# A disk that is full


def test_a_lone_worker_that_stops_in_the_middle_of_a_state_is_asked_once_more() -> None:
    """A late word that the last one could not be written has reached it when the next was on its way."""
    run = Fleet(workers=1, save_every=2)
    run.run_until(lambda: run.core.saving.sender is not None)
    run.workers["w0"]._parcels = Parcels()
    run.finish()
    assert max(run.disk.states) == STEPS


def test_a_checkpoint_that_cannot_be_written_ends_nobody_and_the_next_one_is_tried() -> None:
    run = Fleet(workers=3, save_every=2)
    run.disk.is_full = True
    run.run_until(lambda: bool(run.disk.refused))
    run.disk.is_full = False
    run.finish()
    assert run.disk.refused == [2] and sorted(run.disk.states) == [4, 6]
    (told,) = run.told(CheckpointFailed)
    assert told.step == 2 and told.reason.endswith("step 2: No space left on device")
    assert run.core.saving.fault == ""


def test_the_last_checkpoint_is_tried_until_there_is_room() -> None:
    """All is computed, and nobody but the workers has the weights."""
    run = Fleet(workers=2, save_every=100)
    run.disk.is_full = True
    run.run_until(lambda: len(run.disk.refused) >= 3, limit_s=10 * PATIENCE_S)
    assert run.disk.refused == [STEPS] * 3 and run.host.finish is None
    assert all(not worker.done for worker in run.workers.values())
    assert run.core.saving.fault
    run.disk.is_full = False
    run.finish(limit_s=10 * PATIENCE_S)
    assert list(run.disk.states) == [STEPS] and run.core.saving.fault == ""


def test_the_last_holder_does_not_go_before_its_weights_are_kept() -> None:
    faults = FaultScript().leave("w0", at_step=3)
    run = Fleet(workers=1, faults=faults)
    run.disk.is_full = True
    run.run_until(lambda: len(run.told(CheckpointFailed)) >= 2, limit_s=10 * PATIENCE_S)
    assert not run.workers["w0"].done
    run.disk.is_full = False
    run.run_until(lambda: run.workers["w0"].done, limit_s=10 * PATIENCE_S)
    assert run.workers["w0"].member.left and max(run.disk.states) == 3
    assert State.from_bytes(run.disk.states[3]).weights.tobytes() == undisturbed(3)


def test_a_save_that_fails_half_way_is_not_in_the_way_of_the_next() -> None:
    """Of what its sender has not sent yet, nothing is waited for."""
    run = Fleet(workers=2, save_every=2)
    begin = run.disk.begin
    failed: list[int] = []

    def fail_at_once(step: int, header: str, on_saved: Any) -> None:
        if failed:
            begin(step, header, on_saved)
        else:
            failed.append(step)
            on_saved(step, "", "it is full", 0)

    run.disk.begin = fail_at_once  # type: ignore[method-assign]
    run.finish()
    assert failed == [2] and sorted(run.disk.states) == [4, 6]


# Stopping and ending


def test_a_stop_makes_the_step_under_way_the_last() -> None:
    run = Fleet(workers=2, save_every=100)
    run.run_until(lambda: run.standing().version == 2)
    run.host.act(run.core.at(run.clock.now).ending.request_stop())
    run.run_until(lambda: run.host.finish is not None)
    assert run.host.finish == Finish("interrupted")
    told = {(m.step, m.stop) for m in run.workers["w0"].line.received if isinstance(m, Committed)}
    assert told == {(1, 0), (2, 0), (3, 1)}
    assert list(run.disk.states) == [3]


@pytest.mark.parametrize(("finished", "reason"), [(1, "finished"), (0, "interrupted")])
def test_a_script_that_ends_the_run_ends_it_for_all_and_counts_as_done(finished: int, reason: str) -> None:
    """With 0 it is stopped, as by Ctrl-C on the host."""
    run = Fleet(workers=2, save_every=100)
    run.run_until(lambda: run.standing().version == 2)
    peer = run.member("w1").peer
    run.host.act(run.core.at(run.clock.now).on_message(peer, EndRun(finished)))
    assert not run.core.at(run.clock.now).on_message(peer, EndRun(1 - finished)), "the first word counts"
    run.run_until(lambda: run.host.finish is not None)
    assert run.host.finish == Finish(reason) and list(run.disk.states) == [3]
    assert [worker.member.finishes for worker in run.workers.values()] == [bool(finished)] * 2
    (told,) = run.told(Noticed)
    assert told.sentence.startswith(f"The script of w1 {'ends' if finished else 'stops'} the run for all")


def test_a_newcomer_ends_the_run_for_nobody() -> None:
    core, peer = in_phase(WorkerPhase.CATCHING_UP)
    assert core.at(1.0).on_message(peer, EndRun(1)) == []
    assert not core.stopping and not core.finished


def test_a_loop_that_was_left_ends_the_run_though_nobody_else_is_there() -> None:
    core, peer = in_phase(WorkerPhase.READY)
    core.at(1.0).on_message(peer, EndRun(1))
    for each in (1, 2):
        core.at(2.0).on_message(each, Leave(1, "finished"))
    assert core.finished == "finished"


def test_a_stop_while_the_run_waits_for_workers_ends_it() -> None:
    run = Fleet(workers=1, at_least=2)
    run.run_for(5)
    run.host.act(run.core.at(run.clock.now).ending.request_stop())
    run.run_until(lambda: run.host.finish is not None, limit_s=60)
    assert run.host.finish == Finish("interrupted")


def test_a_stop_with_nobody_there_ends_at_once() -> None:
    core = Coordinator(patience_s=1, secret="")
    assert core.at(1.0).ending.request_stop() == [Finish("interrupted")]


def test_a_stop_ends_the_run_though_the_last_holder_dies_before_the_step_is_done() -> None:
    faults = FaultScript().kill("w0", at_step=3, phase="sent").stall("w0", at_step=3, seconds=1)
    run = Fleet(workers=1, faults=faults)
    run.run_until(lambda: run.standing().version == 2)
    run.add("new")
    run.run_until(lambda: run.member("new") is not None)
    run.host.act(run.core.at(run.clock.now).ending.request_stop())
    run.workers["w0"].kill()
    run.run_until(lambda: run.host.finish is not None, limit_s=60)
    assert run.host.finish == Finish("interrupted")


def test_the_end_of_an_epoch_is_proved_in_a_sentence() -> None:
    run = Fleet(workers=2).finish()
    assert [epoch.sentence for epoch in run.told(EpochDone)] == [
        f"Epoch {n}: each of its 37 samples was used exactly once; all workers hold the same weights." for n in (1, 2)
    ]
    (last,) = [m for m in run.workers["w0"].line.received if isinstance(m, Committed) and m.step == 3]
    assert json.loads(last.workers)["epoch"]["sentence"] == run.told(EpochDone)[0].sentence


def test_rows_that_could_not_be_compared_are_proved_by_their_places_alone() -> None:
    run = Fleet(workers=2, description=described(data={})).finish()
    assert run.told(EpochDone)[0].sentence == (
        "Epoch 1: each of its 37 samples was used exactly once, counted by their places: what is in them could not be"
        " compared between workers; all workers hold the same weights."
    )


def test_a_coordinator_that_knew_less_of_the_run_learns_it_from_the_first_and_holds_others_to_it() -> None:
    core = Coordinator(patience_s=10, secret=SECRET, resumed=Resumed(description=described(data={}, training={})))
    effects_of(core, (1, hello()))
    assert Describe(described(), is_new=False) in effects_of(core, (1, ready()))
    assert core.description == described()
    effects_of(core, (2, hello()))
    told, *_ = effects_of(core, (2, ready(training={"optimizer.lr": 0.2})))
    assert isinstance(told, Send) and isinstance(told.message, Refusal)
    assert told.message.sentence.startswith("This run has optimizer.lr = 0.1, and you have 0.2.")


def test_a_step_tells_its_loss_by_samples() -> None:
    run = Fleet(workers=3).finish()
    first = run.records[0]
    exact = math.fsum(loss_of(0, start, end) for start, end, _ in first.ranges) / BATCH
    assert first.samples == BATCH and first.loss == pytest.approx(exact, rel=1e-12)


def test_a_worker_that_is_ready_after_the_end_does_not_begin_the_run_anew() -> None:
    """It was greeted before, and nobody holds the weights any more."""
    faults = FaultScript().stall("late", at_step=1, seconds=5.0, phase="joined")
    run = Fleet(workers=1, faults=faults)
    run.add("late", at_s=4.0)
    run.run_until(lambda: run.core.finished is not None)
    run.run_for(30)
    assert faults.fired == ["stall late"]
    assert run.restores == 0
    run.assert_right()


def test_a_gradient_found_bad_after_others_were_averaged_does_not_spoil_the_scale() -> None:
    """Parts that came before the bad one are averaged while its slices are computed again."""
    faults = FaultScript().poison("w0", at_step=2, slice=1)
    run = Fleet(at_least=2, faults=faults)
    run.add("w0", slice_s=0.05)
    run.add("w1", slice_s=0.1)
    run.finish()
    assert faults.fired == ["poison w0"]


def test_a_newcomer_that_was_given_all_before_its_sponsor_left_is_not_sent_it_again() -> None:
    """Else it would wait for weights that nobody sends."""
    faults = FaultScript().leave("w0", at_step=3)
    run = Fleet(workers=1, faults=faults)
    for number, latency_s in enumerate((0.005, 0.012)):
        run.add(f"new{number}", at_s=1.7, latency_s=latency_s)
    run.finish(limit_s=200)
    assert faults.fired == ["leave w0"]


def test_one_that_still_builds_its_model_at_the_end_is_told_and_not_waited_for() -> None:
    core, _ = in_phase(WorkerPhase.READY)
    for each in list(core.membership.members):
        core.at(2.0).on_closed(each, "gone")
    core.at(3.0).on_message(9, hello("late"))
    effects = core.at(4.0).ending.request_stop()
    told = [effect for effect in effects if isinstance(effect, Send | Close) and effect.peer == 9]
    assert isinstance(told[0], Send) and told[0].message == Shutdown() and isinstance(told[1], Close)
    assert not core.membership.members and Finish("interrupted") in effects


def test_the_run_has_ended_for_those_who_come_later() -> None:
    run = Fleet(workers=1).finish()
    late = run.add("late")
    run.run_for(5)
    assert late.error == "The run has ended: finished."


# Strangers, and messages that are out of place


def effects_of(core: Coordinator, *messages: tuple[int, Message], now: float = 100.0) -> list[Effect]:
    return [effect for peer, message in messages for effect in core.at(now).on_message(peer, message)]


def hello(name: str = "w", secret: str = SECRET, protocol: int = PROTOCOL) -> Hello:
    return Hello(protocol, secret, name, "cpu")


def ready(step: int = 0, holds: int = 0, **changes: Any) -> Ready:
    return Ready(described(**changes).to_json(), step, digest_of(fresh_weights()), holds)


def test_a_wrong_secret_gets_nothing_but_a_close() -> None:
    core = Coordinator(patience_s=10, secret=SECRET)
    for secret in ("", "the secre", "the secret ", "THE SECRET", "ü"):
        assert effects_of(core, (1, hello(secret=secret, protocol=77))) == [Close(1, "wrong secret")]
    assert core.refused == {"wrong secret": 5}
    assert not core.membership.members


@pytest.mark.parametrize("kind", [kind for kind in OURS if kind not in (Hello, LookOn)])
def test_whoever_has_not_said_hello_gets_nothing_but_a_close(kind: type[Message]) -> None:
    core = Coordinator(patience_s=10, secret=SECRET)
    assert effects_of(core, (1, example(kind))) == [Close(1, "unknown")]


def test_another_version_is_told_so() -> None:
    core = Coordinator(patience_s=10, secret=SECRET)
    told, closed = effects_of(core, (1, hello(protocol=PROTOCOL + 1)))
    assert told == Send(1, Refusal(1, f"This host speaks protocol {PROTOCOL}, and you speak {PROTOCOL + 1}."))
    assert isinstance(closed, Close)


def test_a_plain_peer_is_not_let_in_where_secrets_are() -> None:
    core = Coordinator(patience_s=10, secret=SECRET)
    assert effects_of(core, (1, JoinRequest("n", 1, "cuda"))) == [Close(1, "plain peer")]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "another"}, "Your parameter names, shapes or types are not those that this run trains."),
        ({"rows": 38}, "This run has rows = 37, and you have 38."),
        ({"batch": 8}, "This run has batch = 16, and you have 8."),
        ({"seed": 2}, "This run has seed = 1, and you have 2."),
        (
            {"policy": "async", "settings": settings_of(Async.published())},
            "This run's policy is sync, and yours is async.",
        ),
    ],
)
def test_another_model_is_refused_with_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    run = Fleet(workers=1)
    other = run.add("other", at_s=1.0, description=described(**changes))
    run.finish()
    assert other.error == f"{sentence} Build the same model, data and settings on every worker."
    assert run.core.refused == {"wrong model": 1}
    (went,) = [went for went in run.told(WorkerWent) if went.name == "other"]
    told = sentence_of(record_of(went))
    assert told is not None and told.text == f"other was turned away: {other.error[:-1]}. 1 worker now."


@pytest.mark.parametrize("phase", ["greeted", "catching up"])
def test_one_that_goes_before_it_takes_part_is_not_lost(phase: str) -> None:
    run = Fleet(workers=2)
    late = run.add("late", at_s=1.0, pack_s=5.0)
    wanted = {"greeted": WorkerPhase.GREETED, "catching up": WorkerPhase.CATCHING_UP}[phase]
    run.run_until(lambda: (member := run.member("late")) is not None and member.phase is wanted)
    late.kill()
    run.finish()
    (went,) = [went for went in run.told(WorkerWent) if went.name == "late"]
    told = sentence_of(record_of(went))
    assert told is not None and told.text == f"late went before it took part ({went.reason}); 2 workers now."


def test_a_description_that_is_none_is_refused_with_a_sentence() -> None:
    core = Coordinator(patience_s=10, secret=SECRET)
    effects_of(core, (1, hello()))
    told, closed, _ = effects_of(core, (1, Ready("{}", 0, "", 0)))
    assert isinstance(told, Send) and isinstance(told.message, Refusal)
    assert told.message.sentence.startswith("Ready.description is not one")
    assert isinstance(closed, Close)
    assert not core.membership.members and core.description is None


def example(kind: type[Message]) -> Message:
    """A harmless message of a kind."""
    none = np.zeros(0)
    values: dict[type[Message], tuple[Any, ...]] = {
        Hello: (PROTOCOL, SECRET, "w", "cpu"),
        Welcome: (0, 10, ""),
        Refusal: (1, "no"),
        Ready: (described().to_json(), 0, "", 0),
        Admitted: (0, 0, "{}"),
        Work: (1, 0, 0, 1, 1, none.astype("<u4")),
        SliceReport: (1, none.astype("<u4"), none, none, 0.0, b""),
        Committed: (1, 1, 1.0, 1.0, b"", 0, 0, "{}"),
        Applied: (0, "", 0.1, 1.0, ""),
        Leave: (0, ""),
        EvaluateNext: (0, 4, 2, 0, 0, 0.0, 0.0),
        Evaluated: (0, 0.0, 0.0),
        BaseFiles: ("",),
        BaseWanted: (0, 0),
        BasePiece: (0, 0, b""),
        Gather: (0, 0, 1, b""),
        Gathered: (0, 0, none.astype("<u4"), b"", ""),
        SaveDue: (0, 2),
        Saved: (0, "", ""),
        StateRequest: (0, 0),
        StateBegin: (9, 0, "[]"),
        StateChunk: (9, b""),
        StateMore: (0, 1),
        ShareMemory: (),
        PartAt: (1, 0, 0),
        AverageAt: (1, 0),
        SealKey: (b"",),
        CodedPart: (1, 0, 3, none.astype(np.uint8)),
        CodedAverage: (1, 0, 3, none.astype(np.uint8)),
        JoinRequest: ("n", 1, "cpu"),
        JoinAccepted: (0, 1),
        ShardAssignment: (1, 0, 1),
        Heartbeat: ("w", 1),
        Shutdown: (),
        LookOn: (PROTOCOL, SECRET),
        Watched: (0, b""),
        Wrote: (0, "a", "b"),
        Using: (0.5, 2, 1, 2, 0.0, 0, 0),
        EndRun: (1,),
    }
    return kind(*values[kind]) if kind in values else kind(1, 0, 1)


def in_phase(phase: WorkerPhase) -> tuple[Coordinator, int]:
    """A coordinator in the middle of its first step, and a peer that has come so far."""
    core = Coordinator(patience_s=10, secret=SECRET)
    effects_of(core, (1, hello("first")), (1, ready()), (2, hello("second")))
    if phase is WorkerPhase.READY:
        effects_of(core, (2, ready()))
    elif phase is WorkerPhase.CATCHING_UP:
        effects_of(core, (2, Ready(described().to_json(), 0, "another digest", 0)))
    assert core.membership.members[2].phase is phase
    return core, 2


@pytest.mark.parametrize("phase", WorkerPhase)
@pytest.mark.parametrize("kind", OURS)
def test_a_message_that_is_not_legal_in_its_phase_is_refused_with_a_sentence(
    kind: type[Message], phase: WorkerPhase
) -> None:
    core, peer = in_phase(phase)
    effects = effects_of(core, (peer, example(kind)))
    if kind in LEGAL[phase]:
        return
    assert core.refused["illegal"] == 1
    assert effects[:2] == [
        Send(peer, Refusal(1, f"{kind.__name__} is not expected from a worker that is {phase.name}.")),
        Close(peer, f"{kind.__name__} is not expected from a worker that is {phase.name}."),
    ]
    assert peer not in core.membership.members
    assert core.now is not None and core.now.step == 1


def report(step: int, slices: list[int], samples: float = 2.0, loss: float = 1.0) -> SliceReport:
    many = np.ones(len(slices))
    return SliceReport(step, np.array(slices, "<u4"), many * samples, many * loss, 0.0, b"")


@pytest.mark.parametrize("when", ["waiting", "computing", "sent"])
@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("stale report", lambda step: report(step - 1, [0])),
        ("stale report", lambda step: report(step + 1, [0])),
        ("stale report", lambda step: report(1 << 63, [])),
        ("foreign report", lambda step: report(step, [0, 5])),
        ("foreign report", lambda step: report(step, [1 << 31])),
        ("foreign report", lambda step: SliceReport(step, np.array([4], "<u4"), np.ones(2), np.ones(1), 0.0, b"")),
        ("foreign report", lambda step: SliceReport(step, np.zeros(0, "<u4"), np.ones(1), np.zeros(0), 0.0, b"")),
    ],
)
def test_reports_that_are_late_or_foreign_are_refused_counted_and_change_nothing(
    kind: str, wrong: Callable[[int], Message], when: str
) -> None:
    faults = FaultScript()
    if when == "computing":
        faults.stall("w1", at_step=2, seconds=0.01)
    elif when == "sent":
        faults.stall("w0", at_step=2, seconds=2.0).stall("w1", at_step=2, seconds=0.5, phase="sent")
    run = Fleet(workers=2, faults=faults)
    run.run_until(
        lambda: bool(faults.fired) and "w1" in faults.fired[-1] if when != "waiting" else run.standing().version == 2
    )
    run.workers["w1"].send(wrong(2 if when != "waiting" else 3))
    run.finish()
    assert run.core.refused == {kind: 1}
    assert run.workers["w1"].error is None


def test_a_report_sent_twice_counts_once() -> None:
    faults = FaultScript().stall("w1", at_step=2, seconds=0.3, phase="backward")
    run = Fleet(workers=2, faults=faults)
    run.run_until(lambda: bool(faults.fired))
    before = dict(run.core.now.reports)
    run.workers["w1"].send(report(2, [4, 5, 6, 7], samples=100.0, loss=7.0))
    run.run_for(0.1)
    assert run.core.now.reports == before and len(before) == SLICES
    run.finish()


def test_gradients_that_nobody_asked_for_go_nowhere() -> None:
    faults = FaultScript().stall("w1", at_step=2, seconds=0.3, phase="sent")
    run = Fleet(workers=2, faults=faults)
    run.run_until(lambda: bool(faults.fired))
    wrong = np.full(5, 1e30, np.float32)
    for step, part in ((2, 0), (2, 2), (1, 0), (7, 1)):
        run.workers["w1"].send(Payload(step, part, wrong[: PARTS[part]]))
    run.finish()
    assert run.core.refused.total() == 4


@pytest.mark.parametrize(
    "bad",
    [report(1, [0, 1, 2, 3], loss=1.7e308), report(1, [0, 1, 2, 3], samples=1.7e308), report(1, [0], samples=5e-324)],
    ids=["loss", "samples", "few samples"],
)
def test_reports_too_large_to_be_added_are_bad(bad: SliceReport) -> None:
    core, _ = in_phase(WorkerPhase.READY)
    for peer in (1, 2):
        core.membership.members[peer].nodes = [(0, 8)] if peer == 1 else []
    effects_of(core, (1, bad), (1, report(1, list(range(8)))))
    assert core.refused["bad payload"] == 1


def test_what_the_first_slice_made_of_buffers_is_told_to_all() -> None:
    """Only whoever has slice 0 is asked, and the first of them is believed: a slice may be computed again."""
    core, _ = in_phase(WorkerPhase.READY)
    members = core.membership.members
    members[1].nodes, members[2].nodes = [(0, 4)], [(4, 8)]

    def told(slices: list[int], buffers: bytes) -> SliceReport:
        return replace(report(1, slices), buffers=buffers)

    effects_of(core, (2, told([4, 5, 6, 7], b"not asked")), (1, told([0, 1, 2, 3], b"first")), (1, told([], b"later")))
    committed = [
        e.message for e in core.at(100.0).on_mean(1) if isinstance(e, Send) and isinstance(e.message, Committed)
    ]
    assert [bytes(message.buffers) for message in committed] == [b"first", b"first"]


def test_buffers_that_are_not_finite_are_no_fault_of_samples_or_learning_rate() -> None:
    core, _ = in_phase(WorkerPhase.READY)
    core.membership.members[1].nodes = [(0, 4)]
    core.at(100.0).rounds.on_bad(1, 1, (0, 4), BAD_BUFFERS)
    (again,) = (node for node in core.membership.members[2].nodes if node[0] == 0)
    (finish,) = (e for e in core.at(100.0).rounds.on_bad(2, 1, again, BAD_BUFFERS) if isinstance(e, Finish))
    assert finish.reason == (
        "The gradient of slice 0 of step 1 comes with a change of the model's buffers that is not finite, on first and"
        " again on second. It is positions 0 to 1 of epoch 1's order. Look at what the model's forward writes into its"
        " buffers, or register them with persistent=False; the weights are those of the step before."
    )


def test_an_evaluation_of_any_numbers_is_only_a_number() -> None:
    core, _ = in_phase(WorkerPhase.READY)
    asks = [EvaluateNext(0, 2, 1, 0, 0, 0.0, 0.0)] * 2
    effects_of(core, (1, asks[0]), (2, asks[1]))
    effects = effects_of(
        core, (1, EvaluateNext(0, 2, 1, 0, 1, math.inf, 1.0)), (2, EvaluateNext(0, 2, 1, 1, 2, -math.inf, 1.0))
    )
    (told,) = [effect.event for effect in effects if isinstance(effect, Emit)]
    assert math.isnan(told.loss)


@pytest.mark.parametrize(
    ("names", "loss", "words"),
    [
        ('["loss", "right"]', 2.0, "validation loss 2.0000, right 0.5000"),
        ('["right", "all"]', None, "validation right 2.0000, all 0.5000"),
        ("", 2.0, "validation loss 2.0000"),
    ],
)
def test_of_figures_by_name_only_the_loss_is_the_loss(names: str, loss: float | None, words: str) -> None:
    core, _ = in_phase(WorkerPhase.READY)
    found = EvaluateNext(0, 2, 2, 0, 2, 4.0, 2.0, names, np.array([1.0] if names else [], "<f8"))
    effects = effects_of(core, (1, EvaluateNext(0, 2, 2, 0, 0, 0.0, 0.0)), (1, found))
    (told,) = [effect.event for effect in effects if isinstance(effect, Emit)]
    assert (told.loss, told.in_words) == (loss, words)


def test_a_newcomer_that_says_twice_that_it_is_ready_is_let_in_once() -> None:
    core = Coordinator(patience_s=10, secret=SECRET, resumed=Resumed(standing=stood(4, 1, 16, 53), expected=1))
    core.description = described()
    effects_of(core, (1, hello()), (1, ready()), (1, ready()))
    core.on_heard(109.0, 1)
    assert core.at(110.5).on_tick() == [Restore()]
    sent = [effect for effect in core.at(110.5).restored(stood(4, 1, 16, 53)) if isinstance(effect, SendCheckpoint)]
    assert len(sent) == 1


def told_others(effects: list[Effect]) -> list[tuple[int, int]]:
    """Whom it was told, and how many others there are: of none, one that prints as if it were alone."""
    sent = [(e.peer, e.message) for e in effects if isinstance(e, Send)]
    return [(peer, json.loads(m.position).get("others", 0)) for peer, m in sent if isinstance(m, Admitted)]


def test_of_those_who_come_before_the_first_step_one_alone_is_told_of_no_others() -> None:
    core = Coordinator(patience_s=10, secret=SECRET, at_least=4)
    effects_of(core, *((peer, hello(f"w{peer}")) for peer in (1, 2, 3)))
    assert told_others(effects_of(core, *((peer, ready()) for peer in (2, 1, 3)))) == [(2, 0), (1, 1), (3, 2)]
    core.at(101.0).on_closed(2, "it was killed")
    assert told_others(effects_of(core, (4, hello("w4")), (4, ready()))) == [(4, 2)]


def test_of_those_who_are_given_a_checkpoint_one_alone_is_told_of_no_others() -> None:
    core = Coordinator(patience_s=10, secret=SECRET, resumed=Resumed(standing=stood(4, 1, 16, 53), expected=1))
    core.description = described()
    effects_of(core, (1, hello("w1")), (2, hello("w2")), (2, ready()), (1, ready()))
    for peer in (1, 2):
        core.on_heard(109.0, peer)
    assert core.at(110.5).on_tick() == [Restore()]
    assert told_others(core.at(110.5).restored(stood(4, 1, 16, 53))) == [(2, 0), (1, 1)]


def test_a_run_that_goes_back_says_from_where_and_that_it_waits_first() -> None:
    core = Coordinator(patience_s=10, secret=SECRET, resumed=Resumed(standing=stood(4, 1, 16, 53), expected=1))
    core.description = described()
    told = [e.event for e in effects_of(core, (1, hello()), (1, ready())) if isinstance(e, Emit)]
    assert "the weights of step 4" in told[0].name and "if nobody comes back within 10 s" in told[0].doing
    back = [e.event for e in core.at(111.0).restored(None) if isinstance(e, Emit)]
    assert back[0] == WentBack(from_step=4, step=0)
    core = Coordinator(patience_s=10, secret=SECRET, resumed=Resumed(standing=stood(4, 1, 16, 53), expected=1))
    core.description = described()
    assert not [e for e in core.at(111.0).restored(stood(4, 1, 16, 53)) if isinstance(e, Emit)]


def test_a_joiner_whose_run_would_be_shorter_or_longer_is_refused() -> None:
    core = Coordinator(patience_s=10, secret=SECRET)
    rows = described().rows
    effects_of(core, (1, hello()), (1, ready(rows_limit=6 * rows)))
    assert core.steps_total == described().steps_at(6, 0)
    for peer, epochs in ((2, 3), (3, 8)):
        refused = effects_of(core, (peer, hello()), (peer, ready(rows_limit=epochs * rows)))
        (said,) = [e.message for e in refused if isinstance(e, Send) and isinstance(e.message, Refusal)]
        assert said.sentence == f"This run ends after 6 epochs, and yours would after {epochs}. Ask for as many."
    effects_of(core, (4, hello()), (4, ready()))
    assert core.membership.members[4].is_ready and core.steps_total, "one that does not know takes nothing from it"


# Plain peers


def test_a_plain_peer_gets_a_range_and_its_mean_is_weighed_by_it() -> None:
    core = Coordinator(patience_s=10, secret=SECRET, plain_peers=True, at_least=2)
    came = effects_of(core, (1, JoinRequest("n", 1, "cuda")))
    assert Send(1, JoinAccepted(0, 2)) in came  # as many as are expected
    effects = effects_of(core, (2, hello()), (2, ready()))
    assert Send(1, ShardAssignment(1, 0, 8)) in effects
    assert Expect(1, 1, ((0, 4),), 8 * 0.25) in effects


def test_it_is_said_once_that_a_plain_peer_which_sends_parts_reports_no_loss() -> None:
    run = Fleet(workers=1, plain_peers=True, at_least=2)
    run.add_plain("plain")
    run.finish()
    (said,) = run.told(Noticed)
    assert "plain sends its gradient in parts" in said.sentence and "of the other workers' rows" in said.sentence


def test_a_plain_peer_that_is_turned_away_is_not_told_as_lost() -> None:
    run = Fleet(workers=0, plain_peers=True)
    run.add_plain("plain")
    run.run_until(lambda: run.member("plain") is not None)
    run.add("w0", description=described(policy="async", settings=settings_of(Async())))
    run.run_until(lambda: bool(run.told(WorkerWent)))
    (went,) = run.told(WorkerWent)
    assert went.name == "plain" and went.polite and not went.owed and "under sync alone" in went.reason


@pytest.mark.parametrize("at_least", [2, 3])
def test_only_of_one_that_had_a_part_it_is_said_that_others_compute_that_again(at_least: int) -> None:
    run = Fleet(workers=2, at_least=at_least, slice_s=0.5)
    run.run_until(lambda: len(run.core.membership.ready) == 2)
    run.run_for(0.1)
    run.workers["w1"].kill()
    run.run_until(lambda: bool(run.told(WorkerWent)))
    (went,) = run.told(WorkerWent)
    assert not went.polite and went.owed == (at_least == 2)


def test_a_plain_peers_bad_gradient_does_not_disturb_its_loss() -> None:
    """Its loss comes after its gradients, which were found to be bad meanwhile."""
    core = Coordinator(patience_s=10, secret=SECRET, plain_peers=True, at_least=2)
    effects_of(core, (1, JoinRequest("n", 1, "cuda")), (2, hello()), (2, ready()))
    assert core.at(100.0).rounds.on_bad(1, 1, (0, 4), "is not finite")
    assert core.at(100.0).rounds.on_plain_loss(1, 1, (0, 4), 2.5) == []


def plain_fleet(plain: int, ours: int = 1, **changes: Any) -> tuple[Coordinator, list[Effect]]:
    """Plain peers are 1, 2, ...; ours are 11, 12, ... The first step has begun."""
    core = Coordinator(patience_s=10, secret=SECRET, plain_peers=True, at_least=plain + ours)
    joins = [(1 + n, JoinRequest(f"plain {n}", 1, "cuda")) for n in range(plain)]
    effects = effects_of(core, *joins)
    for peer in range(11, 11 + ours):
        effects += effects_of(core, (peer, hello(f"ours {peer}")), (peer, ready(**changes)))
    return core, effects


def assigned(effects: list[Effect]) -> list[tuple[int, int, int, int]]:
    """(peer, step, first row, last + 1)"""
    sent = [e for e in effects if isinstance(e, Send) and isinstance(e.message, ShardAssignment)]
    return [(e.peer, e.message.step, e.message.shard_start, e.message.shard_end) for e in sent]


def deliver(core: Coordinator, now: float = 101.0) -> list[Effect]:
    """Everybody reports and sends what it owes of the step under way, and the mean is formed."""
    under = core.now
    assert under is not None
    for member in list(core.membership.ready):
        numbers = [number for node in member.nodes for number in range(*node)]
        if not member.plain and numbers:
            ones = np.ones(len(numbers))
            core.at(now).on_message(
                member.peer, SliceReport(under.step, np.array(numbers, "<u4"), ones, ones, 0.1, b"")
            )
        for node in list(member.nodes):
            if member.plain:
                core.at(now).rounds.on_plain_loss(member.peer, under.step, node, 2.0)
            core.at(now).rounds.on_payload(member.peer, under.step, node)
    return core.at(now).on_mean(under.step)


def test_every_plain_peer_gets_rows_in_every_step() -> None:
    """Of 17 rows in batches of 16 the second step has one row, which goes to a plain peer."""
    core, effects = plain_fleet(1, rows=17)
    assert assigned(effects) == [(1, 1, 0, 8)]
    assert assigned(deliver(core)) == [(1, 2, 16, 17)]


def test_with_fewer_rows_than_plain_peers_the_others_get_an_empty_assignment() -> None:
    core, _ = plain_fleet(3, rows=17)
    second = assigned(deliver(core))
    assert [peer for peer, *_ in second] == [1, 2, 3]
    assert sorted((start, end) for _, _, start, end in second) == [(16, 16), (16, 16), (16, 17)]
    assert core.membership.late(1e6, 10) and len(core.membership.late(1e6, 10)) == 2  # ours, and the one that owes


def test_no_step_beyond_the_end_of_the_run_is_handed_out() -> None:
    core, _ = plain_fleet(1, rows=32, rows_limit=32)
    assert assigned(deliver(core)) == [(1, 2, 16, 24)]
    last = deliver(core)
    assert not assigned(last) and not any(isinstance(e, Send) and isinstance(e.message, Work) for e in last)
    assert core.now is None and core.standing.rows_seen == 32


def test_a_run_whose_end_is_known_commits_no_step_too_many() -> None:
    run = Fleet(workers=3, description=KNOWN_LENGTH).finish()
    steps = [item.step for w in run.workers.values() for item in w.line.received if isinstance(item, Work)]
    assert max(steps) == STEPS == run.standing().version


def test_a_plain_peer_is_not_given_a_second_assignment_within_a_step() -> None:
    core, _ = plain_fleet(1, ours=2)
    gone = core.at(101.0).on_closed(11, "killed")
    assert not assigned(gone)  # its slices go to the other one of ours
    core, _ = plain_fleet(1, ours=1)
    gone = core.at(101.0).on_closed(11, "killed")
    assert not assigned(gone) and core.now is None
    back = effects_of(core, (12, hello()), (12, ready()), now=102.0)
    assert core.now is not None and core.now.step == 1
    assert not assigned(back)
    (ours,) = core.membership.holders
    assert {number for node in ours.nodes for number in range(*node)} == set(range(SLICES))


def test_a_plain_peers_silence_counts_only_while_it_owes_something() -> None:
    core, _ = plain_fleet(1)
    (plain,) = [m for m in core.membership.ready if m.plain]
    core.at(105.0).rounds.on_plain_loss(1, 1, (0, 4), 2.0)
    core.at(105.0).rounds.on_payload(1, 1, (0, 4))

    def closed(now: float) -> list[int]:
        core.on_heard(now, 11)
        return [effect.peer for effect in core.at(now).on_tick() if isinstance(effect, Close)]

    assert not any(closed(105.0 + seconds) for seconds in range(60))
    deliver(core, now=170.0)
    assert plain.nodes
    assert not any(closed(170.0 + seconds) for seconds in range(11))
    assert closed(180.5) == [1]


def test_a_plain_peer_that_arrives_last_is_counted_in_the_loss() -> None:
    core, _ = plain_fleet(1)
    records = [effect.step for effect in deliver(core) if isinstance(effect, Record)]
    assert [record.loss for record in records] == [pytest.approx((8 * 2.0 + 4 * 1.0) / (8 + 4))]


def test_a_plain_peer_cannot_go_back_with_the_run() -> None:
    core, _ = plain_fleet(1)
    deliver(core)
    effects_of(core, (12, hello()), (12, ready()))
    core.at(102.0).on_closed(11, "killed")
    effects = core.at(120.0).restored(None)
    assert Send(1, Shutdown()) in effects
    assert not any(member.plain for member in core.membership.members.values())


def test_a_plain_peer_may_come_back_before_the_first_step_is_done() -> None:
    core, _ = plain_fleet(1)
    core.at(101.0).on_closed(1, "killed")
    came = effects_of(core, (2, JoinRequest("again", 1, "cuda")), now=102.0)
    assert Send(2, JoinAccepted(2, 2)) in came
    assert assigned(came) == [(2, 1, 0, 0)]  # its rows are with ours already, and an average follows
    assert [peer for peer, *_ in assigned(deliver(core))] == [2]


def test_a_model_with_buffers_is_none_for_plain_peers() -> None:
    parts = (*described().parts, Part(None, BUFFERS, (2,)))
    core, effects = plain_fleet(1, parts=parts)
    assert Send(1, Shutdown()) in effects and not any(m.plain for m in core.membership.members.values())
    assert effects_of(core, (3, JoinRequest("n", 1, "cuda")))[0] == Send(3, Shutdown())


def test_a_plain_peer_that_leaves_at_the_end_is_not_told_as_lost() -> None:
    core, _ = plain_fleet(1, rows=16, rows_limit=16)
    deliver(core)
    effects_of(core, (11, Applied(1, "x", 0.1, 1.0, "", 0.0)), (11, Leave(1, "finished")))
    went = [e.event for e in core.at(103.0).on_closed(1, "it closed the connection") if isinstance(e, Emit)]
    assert [event.polite for event in went] == [True]


def test_a_plain_peer_may_not_come_once_the_run_is_on() -> None:
    core = Coordinator(patience_s=10, secret=SECRET, plain_peers=True, resumed=Resumed(standing=stood(3, 0, 20, 20)))
    assert effects_of(core, (1, JoinRequest("n", 1, "cuda")))[0] == Send(1, Shutdown())


# Whatever they send, and whenever they come and go


def rogue_messages() -> st.SearchStrategy[Message]:
    """Whatever a worker may send, but for what is its right: to end the run, or to report its own slices wrongly."""
    small = st.integers(0, STEPS + 2)
    any_float = st.floats(width=64)
    return st.one_of(
        st.sampled_from([kind for kind in OURS if kind not in (Leave, SliceReport)]).map(example),
        st.builds(Leave, st.just(0), st.just("")),
        st.builds(Applied, small, st.sampled_from(["", "x"]), any_float, any_float, st.just("")),
        st.builds(lambda step, slices: report(step, slices), small, st.lists(st.integers(8, 99), min_size=1)),
        st.builds(EvaluateNext, small, small, small, small, small, any_float, any_float),
        st.builds(Gather, small, small, small, st.binary(max_size=3)),
        st.builds(SaveDue, st.integers(0, 1 << 40), st.integers(0, 3)),
        st.builds(StateBegin, small, small, st.just('[["state", 1]]')),
        st.builds(StateChunk, small, st.binary(max_size=3)),
        st.builds(Ready, st.sampled_from(["", "[", described().to_json()]), small, st.just("x"), st.integers(0, 1)),
    )


SOME = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],  # to shrink takes minutes, and seldom helps here
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@SOME
@given(st.lists(st.tuples(st.floats(0.001, 0.4), rogue_messages()), max_size=12), st.integers(0, 2), st.booleans())
def test_whatever_a_worker_sends_in_whatever_phase_the_run_ends_with_the_right_weights(
    sent: list[tuple[float, Message]], phase: int, evaluates: bool
) -> None:
    """Its kind is its own: workers of one kind can condemn each other's weights, and of another they cannot."""
    run = Fleet(workers=2, evaluate_every=2 if evaluates else 0)
    line = run.stranger()
    if phase:
        line.send(Hello(PROTOCOL, SECRET, "rogue", "of its own kind"))
    if phase > 1:
        line.send(ready())
    for pause_s, message in sent:
        run.run_for(pause_s)
        line.send(message)
    line.close()
    run.finish()
    assert run.restores == 0


def test_a_checkpoint_that_is_older_than_the_one_on_the_disk_is_not_taken() -> None:
    """It was on its way when another began to lead; those who wait for the newer one would wait for ever."""
    run = Fleet(workers=2, save_every=2)
    run.run_until(lambda: run.core.saving.saved.step >= 2)
    run.workers["w1"].send(StateBegin(0, 1, '[["state", 1]]'))
    run.run_for(0.05)
    assert StateMore(0, 0) in run.workers["w1"].line.received
    assert run.core.saving.saved.step >= 2
    run.finish()
