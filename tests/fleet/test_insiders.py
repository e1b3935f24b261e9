"""What an invited worker may do, and what it may not: docs/security.md names each of these tests."""

import contextlib
import itertools
import json
import os
import queue
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck.errors import TheirProtocolError
from potluck.events import Event, Stalled, WorkerWent
from potluck.fleet.client import Client
from potluck.fleet.coordinator import Coordinator
from potluck.fleet.coordinator_state import Resumed
from potluck.fleet.description import Description
from potluck.fleet.effects import Close, Effect, Finish, Restore, SaveBegin, Send
from potluck.fleet.invite import INVITE, Invite
from potluck.fleet.journal import Journal
from potluck.fleet.rejoin_limiter import FREE, FREE_OF_ADDRESS, FREE_OF_NETWORK, MOST_KNOWN, RejoinLimiter
from potluck.fleet.server import Server
from potluck.fleet.transfers import CHUNKS_AHEAD
from potluck.save import checkpoint_folder
from potluck.save.checkpoint_receiver import CheckpointReceiver
from potluck.wire.codec import decode, encode
from potluck.wire.frames import FrameReader
from potluck.wire.messages import (
    PROTOCOL,
    SAVE,
    TOO_SOON,
    Admitted,
    Applied,
    Evaluated,
    EvaluateNext,
    EvaluateRange,
    Heartbeat,
    Hello,
    Leave,
    Message,
    Ready,
    Refusal,
    SaveDue,
    SliceReport,
    StateBegin,
    StateChunk,
    StateMore,
    Welcome,
)
from tests.fleet.fleet import Fleet as RealFleet
from tests.fleet.fleet import assert_same, wait_until
from tests.fleet.judges import plain_run
from tests.fleet.virtual import (
    EPOCHS,
    PATIENCE_S,
    ROWS,
    SECRET,
    STEPS,
    FaultScript,
    Fleet,
    Worker,
    described,
    digest_of,
    fresh_weights,
    undisturbed,
)
from tests.fleet.virtual.disk import stood

pytestmark = pytest.mark.timeout(60)
LIMITED = described(rows_limit=EPOCHS * ROWS)


def hello(name: str = "insider", kind: str = "cpu") -> Hello:
    return Hello(PROTOCOL, SECRET, name, kind)


def ready(**changes: object) -> Ready:
    return Ready(described(**changes).to_json(), 0, digest_of(fresh_weights()), 0)


# Other weights than the run's


RIGHT, FORGED = "a" * 32, "f" * 32


def restarted(*, kept: bool = False) -> Coordinator:
    """A host that was started again: its journal has the digests of the last two steps."""
    standing, previous = stood(4, 1, 16, ROWS + 16), stood(3, 1, 8, ROWS + 8)
    agreed = {4: {"torch": RIGHT}, 3: {"torch": "b" * 32}}
    known = Resumed(standing=standing, previous=previous, description=described(), next_id=5, expected=3, agreed=agreed)
    core = Coordinator(patience_s=PATIENCE_S, secret=SECRET, resumed=known)
    if kept:
        core.saving.found(stood(4, 1, 16, ROWS + 16), "a folder")
    return core


def comes_back(core: Coordinator, peer: int, digest: str, kind: str, now: float = 100.0) -> list[int]:
    """The peers that are let in with the weights that they have."""
    core.at(now).on_message(peer, hello(f"w{peer}", kind))
    effects = core.at(now).on_message(peer, Ready(described().to_json(), 4, digest, 1))
    return admitted(effects)


def admitted(effects: list[Effect]) -> list[int]:
    sends = [effect for effect in effects if isinstance(effect, Send)]
    return [send.peer for send in sends if isinstance(send.message, Admitted) and not send.message.wait]


def test_after_a_restart_of_the_host_those_with_the_weights_of_its_journal_go_first() -> None:
    for kind in ("of its own; alien", "cpu; torch"):
        core = restarted()
        assert comes_back(core, 1, FORGED, kind) == []
        assert comes_back(core, 2, RIGHT, "cpu; torch") == [2] and comes_back(core, 3, RIGHT, "cpu; torch") == [3]
        assert [transfer.to for transfer in core.transfers.under_way.values()] == [1]


def test_a_worker_with_the_weights_of_the_journal_keeps_them_though_one_of_an_unknown_kind_is_in() -> None:
    core = restarted()
    core.digests.agreed[4]["alien"] = FORGED  # as it told when it had computed the step
    assert comes_back(core, 1, FORGED, "of its own; alien") == [1]
    assert comes_back(core, 2, RIGHT, "cpu; torch") == [2] and comes_back(core, 3, "c" * 32, "cpu; torch") == []


def test_weights_that_nobody_can_check_are_taken_only_if_nobody_else_comes_and_no_checkpoint_has_them() -> None:
    later = 100 + 2 * PATIENCE_S
    for kind, kept in itertools.product(("of its own; alien", "cpu; torch"), (False, True)):
        core, is_taken = restarted(kept=kept), kind.endswith("alien") and not kept
        assert comes_back(core, 1, FORGED, kind) == []
        core.at(later).on_message(1, Heartbeat("w1", 0))
        effects = core.at(later).on_tick()
        assert admitted(effects) == [1] * is_taken and (Restore() in effects) != is_taken
        if is_taken:
            assert comes_back(core, 2, RIGHT, "cpu; torch", now=later) == [2]


# Ending the run


@pytest.mark.parametrize("description", [LIMITED, described()], ids=["length known", "length unknown"])
@pytest.mark.parametrize("quitter", ["w0", "w1"])
def test_a_script_that_ends_early_leaves_and_ends_the_run_for_nobody_else(quitter: str, description: object) -> None:
    faults = FaultScript().quit(quitter, at_step=2)
    run = Fleet(workers=3, faults=faults, description=description).finish()
    assert faults.fired == [f"quit {quitter}"]
    assert run.standing().version == STEPS and run.host.finish == Finish("finished")
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
    assert run.host.finish == Finish("finished") and run.standing().version == 4
    assert run.workers["w1"].weights == undisturbed(4)


def test_a_run_that_one_called_finished_is_finished_if_the_others_die_at_that_step() -> None:
    """Else the host would wait for weights that were on no disk, though all was done."""
    faults = FaultScript().quit("w0", at_step=4).kill("w1", at_step=4, phase="applied")
    run = Fleet(workers=2, faults=faults)
    run.run_until(lambda: run.host.finish is not None, limit_s=60)
    assert sorted(faults.fired) == ["kill w1", "quit w0"] and run.host.finish == Finish("finished")


def test_a_worker_that_does_not_hold_the_weights_cannot_end_the_run() -> None:
    run = Fleet(workers=2)
    run.run_until(lambda: run.standing().version == 2)
    for opening in ([hello("greeted")], [hello("catching up"), ready()]):
        line = run.stranger()
        for message in (*opening, Leave(1, "finished")):
            line.send(message)
    run.finish()


def test_a_worker_that_calls_the_run_finished_at_its_end_costs_nobody_the_last_checkpoint() -> None:
    """It says so the moment that the last step is on record; the others have not evaluated or saved yet."""
    run = Fleet(workers=2, description=LIMITED, save_every=100, evaluate_every=STEPS)
    run.add("insider", description=LIMITED, at_s=0.5)
    run.run_until(lambda: run.standing().version == STEPS - 1 and run.member("insider").is_ready)
    run.run_until(lambda: run.workers["insider"].state.step == STEPS)
    run.finish()
    assert list(run.disk.states) == [STEPS]
    assert set(run.workers["w0"].validated) == {STEPS}


@pytest.mark.parametrize("finished", [0, 1])
def test_a_worker_that_leaves_and_stays_is_closed_after_patience(finished: int) -> None:
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
    near = run.add("near", description=described(rows_limit=EPOCHS * ROWS - 1), at_s=0.5)
    far = run.add("far", description=described(rows_limit=1), at_s=0.6)
    run.finish()
    assert run.core.rows_limit == EPOCHS * ROWS
    assert near.error is None  # a run that is resumed in the middle of a window may count so
    assert far.error is not None and far.error.startswith("This run ends after 2 epochs, and yours would after")


# Filling memory and disk


def insider(run: Fleet, name: str = "insider", **options: Any) -> Worker:
    """One that trains like any other; what else it sends is the test's."""
    worker = run.add(name, **options)
    run.run_until(lambda: run.member(name) is not None and run.member(name).is_ready)
    return worker


def refused(worker: Worker) -> str:
    """The sentence that it was refused with."""
    (sentence,) = {m.sentence for m in worker.line.received if isinstance(m, Refusal)} or {""}
    return sentence


def test_evaluations_of_one_worker_are_at_most_one_and_do_not_disturb_the_others() -> None:
    run = Fleet(workers=2, evaluate_every=2)
    liar = insider(run, evaluate_every=0)
    run.run_until(lambda: run.standing().version >= 2)
    for number in range(60):
        rows = 1_000 + number
        liar.send(EvaluateNext(number % 3, rows, 1 + number % 7, 0, 0, 0.0, 0.0))
    run.run_for(0.01)
    assert len(run.core.evaluations.open) <= 3
    run.finish()
    assert not run.core.evaluations.open and len(run.core.evaluations.done) <= 4
    assert run.workers["w0"].validated == Fleet(workers=1, evaluate_every=2).finish().workers["w0"].validated


@pytest.mark.parametrize("names", [("odd", "w0", "w1"), ("w0", "w1", "odd")], ids=["in first", "in last"])
def test_one_that_tells_of_other_figures_is_left_out_of_the_evaluation_and_ends_nobody(names: tuple[str, ...]) -> None:
    """It is the first to tell, too."""
    run, odd = Fleet(at_least=3), {"names": '["loss", "x"]', "slice_s": 0.05}
    for name in names:
        run.add(name, evaluate_every=2, **(odd if name == "odd" else {}))
    run.finish()
    assert not [went for went in run.told(WorkerWent) if not went.polite] and not run.core.refused
    right = Fleet(workers=1, evaluate_every=2).finish().workers["w0"].validated
    assert run.workers["w0"].validated == run.workers["w1"].validated == right
    assert not run.workers["odd"].validated and run.workers["odd"].has_finished
    told = [event for event in run.told(Stalled) if "other figures" in event.doing]
    assert {event.name for event in told} == {"odd"} and "loss, two" in told[0].doing


def test_whose_figures_count_is_decided_by_most_and_then_by_who_was_in_first() -> None:
    core = Coordinator(patience_s=PATIENCE_S, secret=SECRET)
    for peer in (1, 2):
        for message in (hello(f"w{peer}"), ready()):
            core.at(100.0).on_message(peer, message)
        core.at(100.0).on_message(peer, EvaluateNext(0, 2, 1, 0, 0, 0.0, 0.0))
    core.at(100.0).on_message(2, EvaluateNext(0, 2, 1, 1, 2, 9.0, 1.0, '["x", "y"]', np.ones(1)))
    effects = core.at(100.0).on_message(1, EvaluateNext(0, 2, 1, 0, 1, 1.0, 1.0))
    sent = [(effect.peer, effect.message) for effect in effects if isinstance(effect, Send)]
    assert sent == [(2, Evaluated(0, 0.0, 0.0, '["loss"]')), (1, EvaluateRange(0, 1, 2))]
    effects = core.at(100.0).on_message(1, EvaluateNext(0, 2, 1, 1, 2, 3.0, 1.0))
    assert [effect.message for effect in effects if isinstance(effect, Send)] == [Evaluated(0, 4.0, 2.0)]
    assert len(core.membership.ready) == 2 and not core.evaluations.open


def test_one_that_tells_of_other_figures_than_before_in_one_evaluation_is_refused_itself() -> None:
    core = Coordinator(patience_s=PATIENCE_S, secret=SECRET)
    for message in (hello(), ready(), EvaluateNext(0, 3, 1, 0, 0, 0.0, 0.0), EvaluateNext(0, 3, 1, 0, 1, 1.0, 1.0)):
        core.at(100.0).on_message(1, message)
    effects = core.at(100.0).on_message(1, EvaluateNext(0, 3, 1, 1, 2, 1.0, 1.0, '["loss", "x"]', np.ones(1)))
    (refusal,) = [effect.message for effect in effects if isinstance(effect, Send)]
    assert isinstance(refusal, Refusal) and "other figures than you told before" in refusal.sentence


@pytest.mark.parametrize(
    "ask",
    [
        EvaluateNext(1 << 40, 10, 3, 0, 0, 0.0, 0.0),
        EvaluateNext(0, 1 << 48, 1, 0, 0, 0.0, 0.0),
        EvaluateNext(0, 0, 0, 0, 0, 0.0, 0.0),
    ],
    ids=["a step to come", "too many ranges", "no rows"],
)
def test_an_evaluation_that_no_honest_worker_asks_for_is_refused(ask: EvaluateNext) -> None:
    run = Fleet(workers=2)
    liar = insider(run)
    liar.send(ask)
    run.run_for(0.05)
    assert refused(liar).startswith("EvaluateNext") and not run.core.evaluations.open


MANY = json.dumps([*map(str, range(65))])


@pytest.mark.parametrize(
    "told",
    [
        ("", [1.0]),
        ('["a"]', [1.0]),
        ('["a", "a"]', [1.0]),
        ("[1, 2]", [1.0]),
        ("{", []),
        (json.dumps([*map(str, range(65))]), [1.0] * 64),
    ],
)
def test_figures_that_no_honest_worker_tells_of_are_refused(told: tuple[str, list[float]]) -> None:
    run = Fleet(workers=1)
    liar = insider(run)
    names, sums = told
    liar.send(EvaluateNext(0, 4, 4, 0, 0, 0.0, 0.0))
    liar.send(EvaluateNext(0, 4, 4, 0, 4, 1.0, 4.0, names, np.array(sums, "<f8")))
    run.finish()
    assert refused(liar).startswith("EvaluateNext tells of other figures") and not run.core.evaluations.open


def test_two_sets_that_are_looked_at_at_one_step_have_each_its_own_loss() -> None:
    """The second was answered with the first one's loss."""
    core, answers = Coordinator(patience_s=10, secret=SECRET), []
    for message in (hello(), ready()):
        core.at(100.0).on_message(1, message)
    for rows, loss in ((10, 5.0), (20, 8.0)):
        core.at(100.0).on_message(1, EvaluateNext(0, rows, rows, 0, 0, 0.0, 0.0))
        told = core.at(100.0).on_message(1, EvaluateNext(0, rows, rows, 0, rows, loss, 1.0))
        answers += [effect.message.loss_sum for effect in told if isinstance(effect, Send)]
    assert answers == [5.0, 8.0]


def test_a_range_that_is_never_done_is_given_to_those_who_wait() -> None:
    faults = FaultScript().stall("w1", at_step=2, seconds=1000 * PATIENCE_S, phase="evaluating")
    run = Fleet(workers=3, faults=faults, evaluate_every=2)
    run.run_until(lambda: 2 in run.workers["w0"].validated and 2 in run.workers["w2"].validated, 5 * PATIENCE_S)
    assert faults.fired == ["stall w1"]


def test_hashes_of_old_steps_do_not_pile_up() -> None:
    run = Fleet(workers=2, epochs=4)
    liar = insider(run, kind="of its own")
    run.run_until(lambda: run.standing().version >= 8)
    for step in range(8):
        liar.send(Applied(step, "x", 0.1, 1.0, ""))
    run.run_for(0.01)
    assert len(run.core.digests.told) <= 4
    run.finish()


@pytest.mark.parametrize(
    "message",
    [
        Applied(0, "x" * 300, 0.1, 1.0, ""),
        Applied(0, "x", 0.1, 1.0, "x" * 5000),
        Leave(0, "x" * 5000),
        StateBegin(SAVE, 0, "[" * 70_000),
        SliceReport(1, np.zeros(0, "<u4"), np.zeros(0), np.zeros(0), 0.1, bytes(1 << 20)),
        SliceReport(1, np.zeros(70_000, "<u4"), np.zeros(70_000), np.zeros(70_000), 0.1, b""),
        *(SliceReport(1, np.zeros(0, "<u4"), np.zeros(0), np.zeros(0), s, b"") for s in (-1.0, 1e300, np.inf, np.nan)),
        *(
            SliceReport(1, np.zeros(0, "<u4"), np.zeros(0), np.zeros(0), 0.1, b"", figures=figures)
            for figures in ("[1]", '{"a": "b"}', "{" * 50, " " * 100_000)
        ),
    ],
    ids=[
        *("hash", "fault", "reason", "header", "used", "slices", "before", "aeons", "for ever", "no time"),
        *("figures in a list", "a word", "no JSON", "a long text"),
    ],
)
def test_texts_and_figures_that_no_honest_worker_sends_are_refused_by_name(message: Message) -> None:
    run = Fleet(workers=2)
    liar = insider(run)
    liar.send(message)
    run.run_for(0.05)
    assert refused(liar).startswith(type(message).__name__) and run.core.refused["implausible"] == 1
    run.finish()


def test_a_model_that_the_host_has_no_memory_for_is_refused_before_anything_is_allocated() -> None:
    parts = [{"block": block, "component": None, "sizes": [1 << 29]} for block in range(4000)]
    table = json.loads(described().to_json())
    core = Coordinator(patience_s=10, secret=SECRET)
    core.weights.most_floats = 1 << 34
    core.at(100.0).on_message(1, hello())
    told, closed, _ = core.at(100.0).on_message(1, Ready(json.dumps(table | {"parts": parts[:2000]}), 0, "", 0))
    assert isinstance(told, Send) and "has memory for the mean of 17,179,869,184" in told.message.sentence
    assert isinstance(closed, Close) and core.description is None
    with pytest.raises(TheirProtocolError, match="all parts together"):
        Description.from_json(json.dumps(table | {"parts": parts}))


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        (StateBegin(SAVE, 1, json.dumps([["state", 1 << 40]])), "has at most"),
        (StateBegin(SAVE, 1 << 40, json.dumps([["state", 1]])), "its last step is"),
        (StateBegin(SAVE, 1, "[[1, -5]]"), "no plain file"),
        (StateBegin(SAVE, 1, "[" * 5000), "not a list of files"),
    ],
    ids=["too large", "of a step to come", "negative", "nested"],
)
def test_a_checkpoint_that_cannot_be_this_runs_is_refused_before_a_byte_is_written(begin: StateBegin, why: str) -> None:
    run = Fleet(workers=2, save_every=4)
    liar = insider(run, save_every=0)
    run.run_until(lambda: run.standing().version == 1)
    liar.send(SaveDue(1, 2))
    liar.send(begin)
    run.run_for(0.01)
    assert why in refused(liar)
    run.finish()
    assert max(run.disk.states) == STEPS


def test_a_checkpoint_that_nobody_wants_is_not_taken() -> None:
    run = Fleet(workers=2)
    liar = insider(run)
    liar.send(StateBegin(SAVE, 0, json.dumps([["state", 1]])))
    run.run_for(0.01)
    assert StateMore(SAVE, 0) in liar.line.received and not run.disk.states
    run.finish()


def test_chunks_that_nobody_allowed_do_not_pile_up() -> None:
    run = Fleet(workers=2)
    liar = insider(run)
    run.run_until(lambda: run.standing().version >= 1)
    held: list[object] = []
    # A disk that is slower than the sender.
    run.core.transfers.on_taken = lambda peer, transfer: held.append(peer) or []
    liar.send(SaveDue(1, 2))
    liar.send(StateBegin(SAVE, 1, json.dumps([["state", 100]])))
    for _ in range(50):
        liar.send(StateChunk(SAVE, b"x"))
    run.run_for(0.01)
    assert len(held) == 2 * CHUNKS_AHEAD and "before StateMore allowed it" in refused(liar)


@pytest.mark.parametrize("keep_last", [0, 1])
def test_no_worker_can_have_the_hosts_checkpoints_removed(keep_last: int) -> None:
    """What is to be kept is the most that a worker wanted; the last one is kept for everybody."""
    core = Coordinator(patience_s=10, secret=SECRET)
    for message in (hello(), ready(), SaveDue(0, 3), SaveDue(0, keep_last)):
        core.at(100.0).on_message(1, message)
    (begun,) = [
        effect
        for effect in core.at(100.0).on_message(1, StateBegin(SAVE, 0, json.dumps([["state", 1]])))
        if isinstance(effect, SaveBegin)
    ]
    assert begun.keep_last == 3


def test_whoever_says_twice_that_it_is_ready_is_not_made_to_wait_for_its_own_weights() -> None:
    """Nobody holds the weights when it says so first; the second time it brings them, and is the first who is in."""
    core = Coordinator(patience_s=10, secret=SECRET, resumed=Resumed(standing=stood(4, 1, 16, 53), expected=1))
    core.description = described()
    text = described().to_json()
    for message in (hello(), Ready(text, 0, "", 0), Ready(text, 4, "x", 1)):
        core.at(100.0).on_message(1, message)
    assert [member.peer for member in core.membership.holders] == [1] and not core.weights.waiting


# Saves, and states for newcomers, that never come


def test_a_leader_that_never_sends_the_checkpoint_is_passed_over() -> None:
    faults = FaultScript().stall("insider", at_step=STEPS, seconds=1000 * PATIENCE_S, phase="applied")
    run = Fleet(at_least=3, faults=faults)
    run.add("insider", save_every=0)
    run.run_until(lambda: run.member("insider") is not None)
    for name in ("w0", "w1"):
        run.add(name, save_every=100)
    run.run_until(lambda: list(run.disk.states) == [STEPS], limit_s=10 * PATIENCE_S)
    assert faults.fired == ["stall insider"]


def test_a_checkpoint_that_was_begun_and_never_sent_is_taken_from_another() -> None:
    run = Fleet(workers=2, save_every=2)
    liar = insider(run, save_every=0)
    run.run_until(lambda: run.standing().version == 2)
    liar.send(SaveDue(2, 2))
    liar.send(StateBegin(SAVE, 2, json.dumps([["state", 100]])))
    run.run_until(lambda: run.core.saving.sender is not None)
    assert run.core.saving.sender == liar.line.peer
    run.finish(limit_s=40 * PATIENCE_S)
    assert max(run.disk.states) == STEPS


def test_a_leader_whose_checkpoint_was_turned_away_is_asked_for_it_again() -> None:
    """Another's was on its way then, and turned out to be none: all waited for one that nobody sent any more."""
    run = Fleet(workers=2, save_every=4)
    run.disk.is_checkpoint = lambda data: len(data) > 1
    liar = insider(run, save_every=0)
    run.run_until(lambda: run.standing().version == 2)
    liar.send(SaveDue(2, 2))
    liar.send(StateBegin(SAVE, 2, json.dumps([["state", 1]])))
    run.run_until(lambda: any(StateMore(SAVE, 0) in run.workers[name].line.received for name in ("w0", "w1")))
    assert run.core.saving.sender == liar.line.peer and not run.disk.states
    liar.send(StateChunk(SAVE, b"x"))
    run.run_until(lambda: bool(run.disk.states), limit_s=PATIENCE_S)
    run.finish()


def test_what_is_no_checkpoint_costs_its_sender_the_run_and_nobody_else_anything() -> None:
    run = Fleet(workers=2, save_every=2)
    run.disk.is_checkpoint = lambda data: len(data) > 1
    liar = insider(run, save_every=0)
    run.run_until(lambda: run.standing().version == 2)
    liar.send(SaveDue(2, 2))
    liar.send(StateBegin(SAVE, 2, json.dumps([["state", 1]])))
    liar.send(StateChunk(SAVE, b"x"))
    run.run_until(lambda: run.core.refused["bad checkpoint"] == 1, limit_s=5)
    run.finish()
    assert "no checkpoint" in refused(liar)
    assert {2, STEPS} <= set(run.disk.states)


def test_a_newcomer_whose_weights_never_come_gets_them_from_another() -> None:
    run = Fleet(at_least=2, epochs=200)
    run.add("insider", pack_s=1e9, slice_s=0.5)
    run.run_until(lambda: run.member("insider") is not None)
    run.add("w0")
    run.run_until(lambda: run.standing().version >= 1)
    run.add("new")
    run.run_until(lambda: run.member("new") is not None and run.member("new").is_ready, limit_s=8 * PATIENCE_S)


# Joining in a loop


def test_a_worker_that_joins_in_a_loop_is_held_off_longer_each_time_and_the_others_are_not() -> None:
    run = Fleet(workers=2, epochs=200, slice_s=0.5)
    joins: list[float] = []

    def start(number: int = 0) -> None:
        """As its supervisor would: at once, and in a process with another number."""
        worker = run.add(f"looper-{number}")

        def look() -> None:
            if run.member(worker.name) is not None and not worker.dead:
                joins.append(run.clock.now)
                worker.kill()
                run.clock.after(0.01, lambda: start(number + 1))
            else:
                run.clock.after(0.01, look)

        look()

    start()
    run.run_for(60)
    pauses = [after - before for before, after in itertools.pairwise(joins)]
    assert pauses[:2] == pytest.approx([0, 0], abs=0.2) and len(joins) < 15
    assert pauses[-1] == pytest.approx(PATIENCE_S, abs=0.2)
    assert all(after > 0.9 * before for before, after in itertools.pairwise(pauses[3:]))
    (told, *_) = [event for event in run.told(Stalled) if "held off" in event.doing]
    assert told.name.startswith("looper-") and "come and gone 4 times" in told.doing
    before = run.clock.now
    late = insider(run, "somebody else")
    assert run.clock.now - before < 2 and not late.held_off


def test_a_worker_that_is_held_off_is_told_why_and_comes_in_when_it_is_time() -> None:
    run = Fleet(workers=1, epochs=200)
    for _ in range(4):
        run.add("flapping")
        run.run_until(lambda: run.member("flapping") is not None)
        run.workers["flapping"].kill()
        run.run_until(lambda: run.member("flapping") is None)
    back = insider(run, "flapping")
    assert back.held_off and run.clock.now - back.held_off[0] < 2
    run.run_for(2 * PATIENCE_S)  # it stays, and is trusted again
    back.lose_connection()
    run.run_until(lambda: run.member("flapping") is None)
    before, back.held_off = run.clock.now, []
    run.run_until(lambda: run.member("flapping") is not None)
    assert run.clock.now - before < 1 and not back.held_off


def test_one_that_changes_its_name_each_time_is_held_off_by_its_address() -> None:
    returns = RejoinLimiter(10.0)
    for number in range(FREE_OF_ADDRESS + 1):
        assert returns.wait_s(number, "10.0.0.1", f"name {number}") == 0
        returns.went(number + 0.5, "10.0.0.1", f"name {number}", number)
    assert returns.wait_s(number + 0.5, "10.0.0.1", "another") > 0
    assert returns.wait_s(number + 0.5, "10.0.0.2", "another") == 0


def test_one_that_changes_its_address_each_time_is_held_off_by_its_network() -> None:
    for many, free, same, other in (
        ("2001:db8::{:x}", FREE_OF_ADDRESS, "2001:db8::ffff:1", "2001:db8:0:1::1"),
        ("fe80::{:x}%eth0", FREE_OF_ADDRESS, "fe80::ffff", "fe80:0:0:1::1"),
        ("2001:db8:0:{:x}::1", FREE_OF_NETWORK, "2001:db8:0:ffff::1", "2001:db8:1::1"),
        ("203.0.113.{}", FREE_OF_NETWORK, "203.0.113.9", "203.0.114.9"),
        ("::ffff:203.0.113.{}", FREE_OF_NETWORK, "203.0.113.9", "::ffff:203.0.114.9"),
    ):
        returns = RejoinLimiter(1000.0)
        for number in range(free + 1):
            assert returns.wait_s(number, same, "another") == 0
            returns.went(number + 0.5, many.format(number % 255), f"name {number}", number)
        assert returns.wait_s(number + 0.5, same, "another") > 0, many
        assert returns.wait_s(number + 0.5, other, "another") == 0, many


def test_whoever_joined_is_remembered_in_bounded_memory() -> None:
    returns = RejoinLimiter(10.0)
    for number in range(3 * MOST_KNOWN):
        returns.went(number, f"10.0.0.{number}", "w", number)
    assert len(returns._known) <= MOST_KNOWN


# The host's receiver


def keep(folder: Path, manifest: dict[str, Any], step: int = 7) -> tuple[str, str, bool]:
    """What the receiver says of a checkpoint of no files but its manifest, whose checksum is right."""
    body = {"format": 1, "files": {}, "step": step, "epoch": 0, "row": 4, "rows_seen": 4, "rows_in_epoch": 8} | manifest
    data = json.dumps({"body": body, "sha256": checkpoint_folder.body_sha256(body)}).encode()
    said: queue.Queue[tuple[str, str, bool]] = queue.Queue()
    receiver = CheckpointReceiver(folder, lambda path, reason: None)
    header = json.dumps([["manifest.json", len(data)]])
    receiver.begin(step, header, 2, lambda s, place, error, size, theirs: said.put((place, error, theirs)))
    receiver.feed(data, lambda: None)
    return said.get(timeout=10)


@pytest.mark.parametrize(
    "manifest",
    [
        {"step": "seven"},
        {"epoch": None},
        {"row": -1},
        {"rows_seen": 1e300},
        {"step": 1 << 70},
        {"version": []},
        {"step": 8},
    ],
    ids=str,
)
def test_no_manifest_ends_the_hosts_keeper(tmp_path: Path, manifest: dict[str, Any]) -> None:
    folder, error, is_theirs = keep(tmp_path, manifest)
    assert not folder and "The host cannot keep the checkpoint of step 7" in error and is_theirs
    assert [path.name for path in tmp_path.iterdir()] == []
    folder, error, _ = keep(tmp_path, {})
    assert not error and Path(folder).exists()


def test_a_checkpoint_on_the_disk_whose_manifest_makes_no_sense_is_passed_over(tmp_path: Path) -> None:
    keep(tmp_path, {})
    worse = tmp_path / "step-00000009"
    worse.mkdir()
    body = {"format": 1, "files": {}, "step": "nine"}
    (worse / "manifest.json").write_text(json.dumps({"body": body, "sha256": checkpoint_folder.body_sha256(body)}))
    passed: list[str] = []
    found = CheckpointReceiver(tmp_path, lambda path, reason: passed.append(path.name)).newest()
    assert found is not None and found[1].step == 7 and passed == ["step-00000009"]


# Behind real sockets


def serve(patience_s: float = 0.3, secret: str = SECRET, **options: Any) -> Server:
    coordinator = Coordinator(patience_s=patience_s, secret=secret)
    journal, saver = Journal(Path(":memory:")), CheckpointReceiver(Path(), lambda path, reason: None)
    server = Server(coordinator, host="127.0.0.1", port=0, tls=None, journal=journal, saver=saver, **options)
    server.start()
    return server


def test_a_worker_that_beats_and_does_not_read_is_closed_and_keeps_nobody_waiting() -> None:
    events: list[Event] = []
    server = serve(on_event=events.append)
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as deaf:
            deaf.sendall(encode(hello()) + encode(ready()))
            wait_until(lambda: bool(server.connections))
            (peer,) = server.connections
            server._send_now(peer, StateChunk(9, bytes(64 << 20)))

            def has_gone() -> bool:
                with contextlib.suppress(OSError):
                    deaf.sendall(encode(Heartbeat("deaf", 0)))
                return not server.connections

            wait_until(has_gone, 20)
        (went,) = [event for event in events if isinstance(event, WorkerWent)]
        assert "has not read" in went.reason
    finally:
        server.stop()


def test_an_event_that_cannot_be_shown_does_not_end_the_run() -> None:
    def show(event: Event) -> None:
        raise UnicodeEncodeError("ascii", "é", 0, 1, "a terminal that knows no such letter")

    server = serve(on_event=show)
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as guest:
            guest.sendall(encode(hello("é")) + encode(ready()))
            wait_until(lambda: bool(server.connections))
            assert server.wait(0.2) is None and [m.name for m in server.core.membership.ready] == ["é"]
    finally:
        server.stop()


def test_a_client_that_joined_in_a_loop_waits_as_it_is_told_and_then_comes_in() -> None:
    server = serve(patience_s=5.0, secret="secret")
    try:
        said: list[Message] = []
        while not said or isinstance(said[-1], Welcome):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as guest:
                guest.sendall(encode(Hello(PROTOCOL, "secret", f"looper-{len(said)}", "cpu")))
                said += [decode(payload) for payload in FrameReader(4096).feed(guest.recv(4096))]
            wait_until(lambda: not server.core.membership.members)
        assert len(said) == FREE + 2 and isinstance(said[-1], Refusal)
        assert said[-1].code == TOO_SOON and "Come again in 1 s" in said[-1].sentence
        client = Client(Invite("127.0.0.1", server.port, "secret", None), name="looper", kind="cpu", say=said.append)
        client.connect()
        assert client.welcome is not None and "Come again" in said[-1]
        client.close()
    finally:
        server.stop()


SCRIPT = """
import sys, torch, potluck
from potluck.sums import slices
from tests.fleet.fleet import train
slices.SMALL_BYTES = 1024  # as the other worker
torch.set_num_threads(1)
def on_step(fleet):
    if fleet.step_number == 3:
        if sys.argv[1] == "crash":
            raise ValueError("a fault of the script's own")
        sys.exit(0)
train(potluck.init("sync"), on_step=on_step)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_script_that_exits_or_crashes_under_plain_python_ends_the_run_for_nobody_else(tmp_path: Path) -> None:
    fleet = RealFleet(tmp_path, at_least=3)
    place = {INVITE: fleet.invite.line(), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    scripts = {
        how: subprocess.Popen(
            [sys.executable, "-c", SCRIPT, how], env=os.environ | place | {"POTLUCK_NAME": how}, stderr=subprocess.PIPE
        )
        for how in ("exit", "crash")
    }
    fleet.add("steady", shared=True, slow_s=0.01)
    assert_same(fleet.finish(timeout_s=150), plain_run())
    said = {how: script.communicate(timeout=20)[1].decode() for how, script in scripts.items()}
    assert scripts["exit"].returncode == 0, said
    assert scripts["crash"].returncode == 1 and "a fault of the script's own" in said["crash"]
    polite = {event.name: event.polite for event in fleet.events if isinstance(event, WorkerWent)}
    assert polite["exit"] and not polite["crash"]
