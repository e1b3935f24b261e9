"""What the simulation has found, each as the smallest run that shows it."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from potluck.agree.policy import Auto, Cadence
from potluck.errors import ConfigError, Diverged, PotluckError
from potluck.events import Decided, Stalled, WentBack
from potluck.fleet.coordinator import Coordinator
from potluck.fleet.coordinator_state import Resumed
from potluck.fleet.description import Description, settings_of
from potluck.fleet.effects import SaveAbort, SaveBegin, Send
from potluck.fleet.gathering import LONG
from potluck.fleet.membership import Lateness, Membership, WorkerPhase, beat_s
from potluck.wire.messages import (
    DIVERGED,
    SAVE,
    STEPPED,
    Admitted,
    Committed,
    EvaluateNext,
    Gather,
    Heartbeat,
    Ready,
    Refusal,
    SaveDue,
    StateBegin,
    StateChunk,
    StateMore,
    Work,
)
from tests.fleet.simulation import simulate
from tests.fleet.test_coordinator import effects_of, hello, ready
from tests.fleet.virtual import EPOCHS, PATIENCE_S, ROWS, SECRET, STEPS, FaultScript, Fleet, described
from tests.fleet.virtual.disk import stood
from tests.fleet.virtual.lone import LoneHolder
from tests.fleet.virtual.process import Receive
from tests.fleet.virtual.watch import Watch

pytestmark = pytest.mark.timeout(30)
KNOWN_LENGTH = described(rows_limit=EPOCHS * ROWS)
WINDOWED = described(policy="cadence", settings=settings_of(Cadence.published(anchor=1)), rows_limit=EPOCHS * ROWS)


def test_a_newcomer_goes_on_at_once_from_one_that_leaves_and_cannot_be_saved() -> None:
    """The host's disk is full, so that the last who has the weights stays; it computes nothing any more."""
    run = Fleet(workers=1, faults=FaultScript().leave("w0", at_step=2))
    run.disk.is_full = True
    run.add("newcomer", at_s=2.0)
    run.run_until(lambda: run.standing().version >= 4, limit_s=2 * PATIENCE_S)
    assert run.faults.fired == ["leave w0"] and run.workers["w0"].is_alive and not run.disk.states
    run.disk.is_full = False
    run.finish()


def test_a_worker_that_hangs_alone_in_its_window_is_relieved_by_those_who_come_later() -> None:
    faults = FaultScript().stall("w0", at_step=3, seconds=10_000)
    run = Fleet(workers=1, faults=faults, description=WINDOWED)
    run.add("newcomer", at_s=0.2, description=WINDOWED)
    run.finish(limit_s=20 * PATIENCE_S)
    assert faults.fired == ["stall w0"]
    assert any(event.name == "w0" and "the others compute" in event.then for event in run.told(Stalled))


@pytest.mark.parametrize("description", [KNOWN_LENGTH, WINDOWED], ids=["sync", "cadence"])
def test_one_that_hangs_since_an_earlier_step_is_not_given_what_another_lost(description: Description) -> None:
    faults = FaultScript().stall("w1", at_step=2, seconds=10_000).kill("w2", at_step=3)
    run = Fleet(workers=3, faults=faults, description=description)
    run.finish(limit_s=20 * PATIENCE_S)
    assert faults.fired == ["stall w1", "kill w2"]
    assert len([event for event in run.told(Stalled) if event.name == "w1" and event.then]) == 1


def test_one_that_was_relieved_gets_work_after_the_run_went_back_to_before_that_step() -> None:
    """It is the only one left: of those who gave it up, two held different weights, and are gone."""
    faults = FaultScript().stall("w1", at_step=3, seconds=2.5 * PATIENCE_S).drift("w0", at_step=3)
    run = Fleet(workers=3, faults=faults, description=KNOWN_LENGTH, save_every=2)
    run.run_until(lambda: bool(run.told(WentBack)))
    assert run.member("w1").phase is WorkerPhase.CATCHING_UP and any(event.then for event in run.told(Stalled))
    run.workers["w0"].kill()
    run.workers["w2"].kill()
    run.finish(limit_s=20 * PATIENCE_S)


def test_who_waits_for_the_end_to_be_kept_is_not_named_as_stalled() -> None:
    run = Fleet(workers=2, description=KNOWN_LENGTH, save_every=STEPS)
    run.disk.late_s = 3 * PATIENCE_S
    run.finish()
    assert not run.told(Stalled)


def test_a_run_is_over_whose_last_worker_is_killed_when_its_end_is_on_the_disk() -> None:
    """It does not hear that the end is kept, so that nobody has finished; nobody need come to do so."""
    run = Fleet(workers=1, description=WINDOWED)
    run.disk.late_s = PATIENCE_S / 2
    run.run_until(lambda: run.core.is_complete and run.disk.newest == run.standing().version)
    assert not run.is_done
    run.workers["w0"].kill()
    run.finish(limit_s=2 * PATIENCE_S)
    assert run.is_done and not run.workers["w0"].has_finished


def test_a_stopped_worker_misses_nothing_of_what_befalls_it_meanwhile() -> None:
    """A fault of the simulation: that its connection was lost was forgotten when it was asked to leave."""
    run = Fleet(workers=2)
    run.run_until(lambda: run.standing().version >= 2 and isinstance(run.workers["w0"].waits, Receive))
    worker, line = run.workers["w0"], run.workers["w0"].line
    worker.clock.stop(1.0)
    worker.lose_connection()
    run.run_for(0.1)
    worker.ask_to_leave()
    run.run_for(PATIENCE_S)
    assert worker.line is not line and worker.done and worker.error is None
    run.finish()


def state_begun(step: int = 2) -> tuple[Fleet, int]:
    """A host to whose disk a state of 120 bytes is on its way, and its sender."""
    run = Fleet(workers=1)
    run.run_until(lambda: run.standing().version >= step and run.member("w0").applied >= step)
    peer, now = run.member("w0").peer, run.clock.now
    run.core.at(now).on_message(peer, SaveDue(step, 1))
    begun = run.core.at(now).on_message(peer, StateBegin(SAVE, step, '[["state", 120]]'))
    assert any(isinstance(effect, SaveBegin) for effect in begun)
    return run, peer


@pytest.mark.parametrize(("chunks", "is_cancelled"), [(1, True), (2, False)])
def test_a_state_that_cannot_be_kept_is_cancelled_only_while_it_is_coming(chunks: int, is_cancelled: bool) -> None:
    """A sender that has sent all of it would take that for its next one."""
    run, peer = state_begun()
    for _ in range(chunks):
        run.core.at(run.clock.now).on_message(peer, StateChunk(SAVE, bytes(60)))
    failed = run.core.at(run.clock.now).on_saved(2, "", "No space left on device")
    told = [effect.message for effect in failed if isinstance(effect, Send)]
    assert (StateMore(SAVE, 0) in told) == is_cancelled


@pytest.mark.parametrize(("chunks", "is_aborted"), [(1, True), (2, False)])
def test_a_state_of_which_all_has_come_is_kept_though_its_sender_is_gone(chunks: int, is_aborted: bool) -> None:
    """Else the next one begins, the first is told to be on the disk, and nobody waits for the rest of the next."""
    run, peer = state_begun()
    for _ in range(chunks):
        run.core.at(run.clock.now).on_message(peer, StateChunk(SAVE, bytes(60)))
    assert (SaveAbort() in run.core.at(run.clock.now).on_closed(peer, "it closed the connection")) == is_aborted
    assert run.core.saving.is_writing != is_aborted


def test_a_sender_that_begins_another_state_ends_the_one_before() -> None:
    run, peer = state_begun()
    run.core.at(run.clock.now).on_message(peer, StateChunk(SAVE, bytes(60)))
    again = run.core.at(run.clock.now).on_message(peer, StateBegin(SAVE, 2, '[["state", 120]]'))
    assert type(again[0]) is SaveBegin  # in place of what has come of the last


def test_a_plain_peer_is_not_sent_the_average_of_a_step_again_that_it_has_applied() -> None:
    """The only one who held the weights comes back with those of the step before, and the last is computed again."""
    run = Fleet(workers=1, plain_peers=True, faults=FaultScript().cut("w0", at_step=2, phase="committed"))
    run.add_plain("plain")
    run.finish()
    (plain,) = run.plain
    assert run.faults.fired == ["cut w0"] and plain.state.step == STEPS
    assert np.allclose(plain.state.weights, run.workers["w0"].state.weights, rtol=1e-4)


def test_a_newcomer_goes_on_from_one_that_leaves_though_a_plain_peer_has_the_rest_of_the_step() -> None:
    """The step would be nobody's: who leaves takes no other, and a plain peer gives its weights to none."""
    run = Fleet(workers=1, plain_peers=True, faults=FaultScript().leave("w0", at_step=2, phase="sent"))
    run.disk.is_full = True  # so that it stays
    run.add_plain("plain", batch_s=PATIENCE_S / 2)
    run.run_until(lambda: run.standing().version == 1)
    run.add("newcomer")
    run.run_until(lambda: run.standing().version >= 4, limit_s=3 * PATIENCE_S)
    assert run.faults.fired == ["leave w0"] and run.workers["w0"].is_alive
    run.disk.is_full = False
    run.finish()


def test_a_plain_peer_that_owes_nothing_is_not_late_while_nobody_holds_the_weights() -> None:
    """The step that it had a part of is abandoned, and it cannot be given the weights anew."""
    run = Fleet(workers=1, plain_peers=True)
    run.add_plain("plain")
    run.run_until(lambda: run.standing().version == 2 and bool(run.member("plain").nodes))
    run.workers["w0"].clock.stop(3 * PATIENCE_S)
    run.workers["w0"].lose_connection()
    run.finish()
    assert run.plain[0].state.step == STEPS and not run.told(Stalled)


def test_a_step_is_not_computed_again_by_one_that_has_applied_it() -> None:
    """It was sent the step while it caught up. The one who computed it then came back with the one before."""
    run = Fleet(workers=1, slice_s=0.05, faults=FaultScript().cut("w0", at_step=3, phase="sent"))
    run.run_until(lambda: run.standing().version == 1)
    newcomer = run.add("newcomer")
    run.run_until(lambda: bool(run.core.transfers.under_way))
    assert newcomer.line is not None
    newcomer.line.latency_s = 0.2
    run.run_until(lambda: run.core.ahead is not None)
    run.workers["w0"].clock.stop(10 * PATIENCE_S)
    run.run_until(lambda: run.member("newcomer").applied == 3)
    assert run.standing().version == 2  # what w0 owes of the third is soon given to others
    run.finish(limit_s=2 * PATIENCE_S)


@pytest.mark.parametrize(("slices", "busy_s"), [(0, 1.0), (1, math.inf), (1, 0.0), (1, math.nan)])
def test_no_speed_is_learned_from_nothing(slices: int, busy_s: float) -> None:
    member = Membership().add(0.0, 1, "w0", "cpu", plain=False)
    member.measure(slices, busy_s)
    assert member.speed is None


@pytest.mark.parametrize(("seconds", "times"), [(1.0, 1), (1.2 * PATIENCE_S, 2)])
def test_a_window_is_not_computed_again_that_a_newcomer_is_about_to_have(seconds: float, times: int) -> None:
    """It has been sent a whole state, and the average since; who held the weights lost its connection, and comes back
    with those of the window before. A newcomer that takes longer than patience comes again: its own are of no use."""
    described = replace(WINDOWED, rows_limit=20 * ROWS)
    faults = FaultScript().cut("w0", at_step=5, phase="sent")
    faults.stall("newcomer", at_step=0, phase="catching up", seconds=seconds)
    run = Fleet(workers=1, faults=faults, description=described, epochs=20)
    recorded = list[int]()
    run.on_record = lambda record: recorded.append(record.step)
    run.add("newcomer", at_s=0.45, description=described)
    run.finish()
    assert faults.fired == ["stall newcomer", "cut w0"] and recorded.count(5) == times
    assert not run.core.refused["drifted"] and run.workers["newcomer"].has_finished


def test_a_worker_whose_window_is_over_other_rows_than_the_runs_gets_its_weights_anew() -> None:
    """The run went back while it was away, and the next window of that number is told by nobody yet: the host does not
    know its digest."""
    holder = LoneHolder(rows_seen=3 * ROWS)
    member, description = holder.member, holder.description.to_json()
    member.version = 5
    holder.go(member.join())
    assert holder.sent == [Ready(description, 5, "a digest", 1)]
    holder.go(member.hear(Admitted(5, 0, stood(5, 2, 16, 2 * ROWS + 16).to_wire())))
    assert holder.connects == 1 and not member.is_settled
    assert holder.sent[1:] == [Ready(description, 5, "", 1)]


@pytest.mark.parametrize(("code", "kind"), [(2, ConfigError), (DIVERGED, Diverged)])
def test_one_that_comes_as_the_run_ends_for_losses_that_are_no_numbers_hears_so(
    code: int, kind: type[PotluckError]
) -> None:
    holder = LoneHolder()
    holder.go(holder.member.join())
    with pytest.raises(PotluckError) as caught:
        holder.go(holder.member.hear(Refusal(code, "Why.")))
    assert type(caught.value) is kind and str(caught.value) == "Why."


@pytest.mark.parametrize(("rows_seen", "is_kept"), [(2 * ROWS, True), (2 * ROWS + 16, False)])
def test_a_checkpoint_of_a_lost_step_is_not_that_of_the_one_that_has_its_number_now(
    rows_seen: int, is_kept: bool
) -> None:
    core = Coordinator(patience_s=1.0, secret="", resumed=Resumed(standing=stood(5, 2, 0, 2 * ROWS)))
    core.saving.found(stood(5, *divmod(rows_seen, ROWS), rows_seen), "a folder")
    assert core.saving.is_last_kept == is_kept


def test_all_step_together_only_where_no_window_was_begun_under_an_earlier_host() -> None:
    """The run goes back to its beginning and begins with a window, of which the host dies; who computed in it has fresh
    weights still, and an optimizer of its own."""
    auto = described(policy="auto", settings=settings_of(Auto(anchor=1, together=0.0)), rows_limit=EPOCHS * ROWS)
    faults = FaultScript().kill("w0", at_step=1, phase="applied")
    run = Fleet(workers=1, faults=faults, description=auto)
    run.run_until(lambda: run.member("w0") is None and bool(faults.fired))
    worker = run.add("w1", description=auto)
    run.run_until(lambda: bool(worker.slices_computed))
    assert faults.fired == ["kill w0"] and run.told(WentBack) and worker.state.step == 0 and worker.state.momentum.any()
    run.crash_host()
    decided = len(run.told(Decided))
    run.add("w2", description=auto)
    run.finish()
    assert run.told(Decided)[decided].anchor and not run.core.refused["drifted"]


def one_evaluates(faults: FaultScript | None = None) -> Fleet:
    """After step 3, by itself: the other computes its part of step 4, after which both give a value."""
    run = Fleet(at_least=2, faults=faults)
    run.add("w0", evaluate_every=3, gather_every=4)
    run.add("w1", gather_every=4)
    run.run_until(lambda: run.member("w0") is not None and bool(run.member("w0").evaluating))
    return run


def test_those_who_gather_values_continue_without_one_that_hangs_while_it_evaluates() -> None:
    """Nobody else looks, so that nobody waits for its range, which stays its own."""
    faults = FaultScript().stall("w0", at_step=3, phase="evaluating", seconds=10_000)
    run = one_evaluates(faults)
    run.run_until(lambda: bool(run.workers["w1"].gathered), limit_s=2 * LONG * PATIENCE_S)
    assert faults.fired == ["stall w0"] and run.workers["w1"].gathered[4] == ["w1 4"]
    run.workers["w0"].kill()
    run.finish()


def test_a_value_that_is_given_anew_does_not_prolong_the_wait_for_one_that_hangs() -> None:
    faults = FaultScript().stall("w0", at_step=4, phase="applied", seconds=10_000)
    run = Fleet(workers=3, faults=faults, gather_every=4)
    run.run_until(lambda: sum(member.gathering is not None for member in run.core.membership.holders) == 2)
    waits_since = run.clock.now
    run.run_for((LONG - 1) * PATIENCE_S)
    run.workers["w1"].lose_connection()
    run.run_until(lambda: bool(run.workers["w2"].gathered))
    assert run.clock.now < waits_since + LONG * PATIENCE_S + 1
    assert faults.fired == ["stall w0"] and sorted(run.workers["w2"].gathered[4]) == ["w1 4", "w2 4"]


def test_those_who_gather_values_continue_without_one_that_evaluates_an_earlier_step() -> None:
    """It is far away, and each range takes it long."""
    run = one_evaluates()
    run.workers["w0"].slice_s = 2 * PATIENCE_S
    run.run_until(lambda: bool(run.workers["w1"].gathered), limit_s=2 * LONG * PATIENCE_S - 1)
    assert run.member("w0").evaluating and run.workers["w1"].gathered[4] == ["w1 4"]
    run.workers["w0"].kill()
    run.finish()


@pytest.mark.parametrize(("ranges", "is_waited_for"), [(8, True), (1, False)])
def test_those_who_gather_values_wait_for_one_that_evaluates_at_that_step(ranges: int, is_waited_for: bool) -> None:
    """However long all of it takes: what it finds may be in its value. One that hangs finds nothing."""
    core, now = Coordinator(patience_s=PATIENCE_S, secret=SECRET), 100.0
    effects_of(core, *((peer, message) for peer in (1, 2) for message in (hello(f"w{peer}"), ready())))
    core.at(now).on_message(2, Gather(0, 0, 2, b""))
    for tick in range(64):
        if tick % 8 == 0 and tick < 8 * ranges:
            start, end = max(0, tick // 8 - 1), tick // 8
            core.at(now).on_message(1, EvaluateNext(0, 20, 1, start, end, 1.0, 1.0, "", np.zeros(0)))
        now += PATIENCE_S / 8
        effects_of(core, (1, Heartbeat("w1", 0)), (2, Heartbeat("w2", 0)), now=now)
        core.at(now).on_tick()
    assert bool(core.gatherings.open) == is_waited_for


@pytest.mark.parametrize("plain_peers", [True, False])
def test_a_step_of_before_the_run_went_back_is_not_the_one_that_has_its_number_now(plain_peers: bool) -> None:
    """Where plain peers may have been in it, it has other bits; and nobody has told the new one's digest yet."""
    run = Fleet(workers=1, plain_peers=plain_peers, slice_s=0.001, latency_s=0.5)
    run.run_until(lambda: run.standing().version == 1 and run.member("w0").applied == 0)
    line = run.stranger()
    for message in (hello("away"), replace(ready(step=1, holds=1), digest="of another life")):
        line.send(message)
    run.run_for(0.1)
    (admitted,) = [message for message in line.received if isinstance(message, Admitted)]
    assert run.member("w0").applied == 0 and bool(admitted.wait) == plain_peers


@pytest.mark.parametrize("does_host_crash", [False, True])
def test_weights_of_before_the_run_began_anew_are_not_those_of_a_checkpoint_with_their_number(
    does_host_crash: bool,
) -> None:
    """What was agreed on is forgotten as the run resumes from it, and nobody has told its digest yet."""
    run = Fleet(workers=1, description=WINDOWED, save_every=2)
    run.run_until(lambda: run.core.saving.is_last_kept)
    run.workers["w0"].kill()
    newcomer = run.add("w1", description=WINDOWED, latency_s=0.5)
    run.run_until(lambda: run.restores == 1)
    if does_host_crash:
        run.crash_host(back_after_s=0.1)
        run.run_for(0.2)
    step, line = run.standing().version, run.stranger()
    stale = replace(ready(step=step, holds=1), digest="of another life", description=WINDOWED.to_json())
    for message in (hello("away"), stale):
        line.send(message)
    run.run_for(0.1)
    (admitted,) = [message for message in line.received if isinstance(message, Admitted)]
    assert step == 2 and admitted.wait and newcomer.state.step == 0
    line.close()
    run.finish()


def test_a_window_does_not_end_before_rows_of_which_a_lost_worker_has_sent_something() -> None:
    """It has told all of its part, and died while it sent that; who was given it leaves in its middle, as the last."""
    described = replace(WINDOWED, settings=settings_of(Cadence.published(anchor=3)), batch=6)
    faults = FaultScript().kill("w1", at_step=1, phase="half")
    run = Fleet(workers=2, faults=faults, description=described)
    Watch(run)
    last = run.workers["w0"]
    run.run_until(lambda: run.member("w1") is None and last.doing is not None and 2 in last.doing.nodes)
    last.ask_to_leave()
    run.run_until(lambda: last.done)
    assert faults.fired == ["kill w1"] and not run.records  # newcomers compute all of it again
    run.add("w2", description=described)
    run.add("w3", description=described)
    run.finish()


def test_a_newcomer_continues_that_was_given_the_weights_before_a_step_that_was_being_computed_again() -> None:
    """By the last who held them, as it left: the step counts as it is on record, and nobody sends its average."""
    faults = FaultScript().cut("w0", at_step=2, phase="sent")
    run = Fleet(workers=1, faults=faults)
    run.run_until(lambda: bool(faults.fired))
    newcomer = run.add("newcomer")
    run.run_until(lambda: bool(run.core.weights.waiting))
    assert newcomer.line is not None
    newcomer.line.latency_s = 1.0
    run.workers["w0"].ask_to_leave()
    run.finish(limit_s=20 * PATIENCE_S)
    assert newcomer.state.step == STEPS


def test_one_that_has_applied_a_step_continues_where_all_leave_who_would_compute_it_again() -> None:
    """It comes back while the last of them waits for its weights to be kept."""
    faults = FaultScript().cut("w0", at_step=2, phase="sent")
    run = Fleet(workers=2, faults=faults)
    run.disk.late_s = PATIENCE_S / 2
    run.run_until(lambda: bool(faults.fired))
    behind, ahead = run.workers.values()
    behind.clock.stop(0.5)
    run.run_until(lambda: ahead.state.step == 2)
    ahead.clock.stop(3.0)
    ahead.lose_connection()
    run.run_until(lambda: run.core.ahead is not None)
    behind.ask_to_leave()
    run.finish(limit_s=20 * PATIENCE_S)
    assert ahead.has_finished


def test_one_that_has_applied_a_step_does_not_wait_for_ever_for_one_that_hangs_as_it_computes_it_again() -> None:
    faults = FaultScript().cut("w0", at_step=2, phase="sent").stall("w0", at_step=2, phase="joined", seconds=0.5)
    run = Fleet(workers=2, faults=faults)
    run.run_until(lambda: len(faults.fired) == 2)
    behind, ahead = run.workers.values()
    run.run_until(lambda: ahead.state.step == 2)
    ahead.clock.stop(3.0)
    ahead.lose_connection()
    faults.stall("w0", at_step=2, seconds=10_000)
    run.run_until(lambda: run.core.ahead is not None)
    run.run_until(lambda: run.standing().version == STEPS, limit_s=20 * PATIENCE_S)
    assert faults.fired == ["cut w0", "stall w0", "stall w0"] and ahead.is_alive and behind.state.step == 1


AVERAGED = settings_of(Auto(anchor=1, together=0.0, moments=True))
AUTO = described(policy="auto", settings=AVERAGED, rows_limit=EPOCHS * ROWS)


def come_back(run: Fleet, *, has_stepped: bool) -> Admitted:
    """One with the run's weights, whose optimizer may have stepped in a window that was never agreed on."""
    line, (told, *_) = run.stranger(), run.core.digests.told[run.standing().version].values()
    held = ready(step=run.standing().version, holds=STEPPED if has_stepped else 1)
    for message in (hello("away"), replace(held, digest=told.digest, description=AUTO.to_json())):
        line.send(message)
    run.run_for(0.05)
    (admitted,) = [message for message in line.received if isinstance(message, Admitted)]
    return admitted


@pytest.mark.parametrize("has_stepped", [False, True])
def test_one_whose_optimizer_has_stepped_by_itself_is_not_in_a_step_that_all_take_together(has_stepped: bool) -> None:
    """The run went back while it was away, and came to the same weights. The average would make others of its own."""
    run = Fleet(workers=1, description=AUTO)
    run.run_until(lambda: run.standing().version == 1 and run.member("w0").applied == 1)
    assert run.core.rounds.is_together
    assert bool(come_back(run, has_stepped=has_stepped).wait) == has_stepped


@pytest.mark.parametrize("has_stepped", [False, True])
def test_who_comes_back_first_with_an_optimizer_that_has_stepped_begins_with_a_window(has_stepped: bool) -> None:
    run = Fleet(workers=1, description=AUTO)
    run.run_until(lambda: run.standing().version == 1 and run.member("w0").applied == 1)
    run.workers["w0"].kill()
    run.run_until(lambda: run.member("w0") is None)
    assert not come_back(run, has_stepped=has_stepped).wait
    assert bool(run.told(Decided)[-1].anchor) == has_stepped


def test_a_worker_tells_that_it_was_in_a_window_until_one_is_agreed_on() -> None:
    holder = LoneHolder(rows_seen=16)
    member = holder.member
    member.version = 1
    holder.go(member.join())

    def holds() -> int:
        holder.reconnect()
        said = holder.sent[-1]
        assert isinstance(said, Ready)
        return said.holds

    def take_work() -> None:
        nodes, sizes = np.array([0, 2], "<u4"), np.array([8, 0], "<u4")
        holder.go(member.hear(Work(2, 0, 16, 8, 2, nodes, sizes, 4)))
        holder.go(member.await_step())

    take_work()
    assert holds() == 1
    take_work()
    assert member.begin() is not None
    assert holds() == STEPPED
    member.agree(Committed(2, 8, 8.0, 0.0, b"", 0, 0, "{}", b""))
    assert holds() == 1


def test_a_window_is_not_computed_again_that_the_disk_is_writing() -> None:
    """All of it has come. Who had it is gone, and the first to come back has the window before: with other bits, the
    window would have the first one's checkpoint."""
    faults = FaultScript().cut("w0", at_step=2, phase="sent")
    run = Fleet(workers=2, faults=faults, description=WINDOWED, save_every=2)
    recorded = list[int]()
    run.on_record = lambda record: recorded.append(record.step)
    run.disk.late_s = 2 * PATIENCE_S
    run.run_until(lambda: bool(faults.fired))
    behind, ahead = run.workers.values()
    behind.clock.stop(3.0)
    run.run_until(lambda: run.core.saving.is_last_coming)
    ahead.kill()
    run.run_until(lambda: run.member("w0") is not None)
    assert behind.state.step == 1 and ahead.state.step == 2
    run.finish()
    assert recorded.count(2) == 1


def test_a_run_does_not_go_back_while_the_disk_writes_a_checkpoint() -> None:
    """It would come to the checkpoint's step again, with other bits, and take that checkpoint for its own."""
    run = Fleet(workers=1, description=WINDOWED, save_every=1)
    run.disk.late_s = 4 * PATIENCE_S
    run.run_until(lambda: run.core.saving.is_writing and run.standing().version == 2)
    run.workers["w0"].kill()
    run.add("w1", save_every=1, description=WINDOWED)
    run.run_until(lambda: run.restores == 1 or not run.core.saving.is_writing)
    assert run.restores == 0
    run.finish()
    assert run.restores == 1


def test_a_value_that_comes_as_the_host_wakes_is_not_waited_with_for_longer_than_another() -> None:
    """The pause was before it, so the others are waited for as long as ever."""
    simulate(9900002452, "sync", Counter())


def test_one_that_has_nothing_to_say_is_not_parted_from_before_its_next_heartbeat() -> None:
    """With little patience a tenth of it is less than what lies between two heartbeats."""
    simulate(2611185828, "auto", Counter())
    for patience_s in (0.5, 1.0, 2.0, 4.0, 30.0):
        link = Lateness()
        for beat in range(200):
            link.note(beat * 0.01 * patience_s, 0.001)
        assert beat_s(patience_s) < link.silence_limit_s(2 * patience_s, patience_s) <= patience_s / 2


def test_those_who_gather_values_wait_once_for_one_that_hangs_and_not_at_each_step() -> None:
    """One that was late itself gets what the others got, and does not wait for one that is later still."""
    simulate(2611187387, "auto", Counter())
    faults = FaultScript().stall("w1", at_step=2, seconds=40 * PATIENCE_S, phase="applied")
    run = Fleet(workers=2, faults=faults, gather_every=1)
    run.run_until(lambda: bool(faults.fired))
    began = run.clock.now
    run.run_until(lambda: run.standing().version >= 6)
    assert run.clock.now - began < 2 * LONG * PATIENCE_S
    named = [e for e in run.told(Stalled) if "fleet.mean()" in e.doing and "after" not in e.then]
    assert [e.name for e in named] == ["w1"]
    run.finish()


def test_the_last_worker_that_waits_for_an_earlier_checkpoint_is_asked_for_what_it_has() -> None:
    """The host took it for the one that sends the last checkpoint by itself, since it spoke for all then."""
    simulate(9960004434, "async", Counter())


@pytest.mark.parametrize(
    ("seed", "policy"),
    [
        pytest.param(7000006, "sync", id="each step waits for one that saves"),
        pytest.param(7000906, "sync", id="each step waits for a plain peer that is far away"),
        pytest.param(7003004, "sync", id="the last step is in a checkpoint alone, because the journal lost it"),
        pytest.param(7006530, "sync", id="a worker is heard only while the host sleeps"),
        pytest.param(7007029, "sync", id="two hang and nobody else is left, so that both are given work"),
        pytest.param(7008540, "sync", id="a step is begun anew without the plain peer that was in its first means"),
        pytest.param(8101685, "sync", id="a step that the journal lost is computed again without its plain peer"),
        pytest.param(9300005611, "cadence", id="one that came again is measured by a slow one, in rows"),
        pytest.param(9300001377, "async", id="those who gather values wait for one that hangs, and then for another"),
        pytest.param(
            9300004334, "auto", id="a checkpoint is of a step that the journal lost, and has another under its number"
        ),
        pytest.param(
            9300008793, "sync", id="weights of before the run went back are the same, and their momentum is not"
        ),
        pytest.param(9930002671, "auto", id="a second gradient of a step is none, of another worker's slice"),
        pytest.param(2611171126, "async", id="the last worker is so far away that it evaluates for half a minute"),
    ],
)
def test_the_simulation_asks_for_no_more_than_must_hold(seed: int, policy: str) -> None:
    """Faults of what it looks at; the runs are right. So long, each, that no smaller one shows it."""
    simulate(seed, policy, Counter())
