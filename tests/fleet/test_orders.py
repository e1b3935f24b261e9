"""What a person orders on the page, in a fleet on a virtual clock: it is carried out, told, and changes no bit."""

from typing import Any

import pytest

from potluck.agree.policy import Cadence
from potluck.events import CheckpointSaved, Ordered, StepDone, WorkerWent
from potluck.fleet.bounds import MOST_WATCHERS
from potluck.fleet.coordinator import WRITTEN_EVERY_S, Coordinator
from potluck.fleet.description import settings_of
from potluck.fleet.effects import Close, Effect, Emit, Send, ShowTo
from potluck.wire.messages import PROTOCOL, LookOn, Refusal, Using, Welcome, Wrote
from tests.fleet.virtual import EPOCHS, PATIENCE_S, ROWS, Fleet, described, undisturbed

SECRET = "the secret"


def order(run: Fleet, action: str, worker: int | None = None) -> str:
    """Returns what was told of it."""
    run.host.act(run.core.at(run.host.clock.now).orders.carry_out(action, worker))
    return str(run.told(Ordered)[-1].sentence)


@pytest.mark.parametrize("at_s", [0.05, 0.31, 0.44, 0.7, 1.3])
def test_a_pause_of_any_length_loses_nobody_and_changes_no_bit(at_s: float) -> None:
    run = Fleet(workers=3, save_every=2, evaluate_every=3)
    run.run_for(at_s)
    order(run, "pause")
    run.run_for(PATIENCE_S)
    stood = run.core.standing.version
    run.run_for(10 * PATIENCE_S)
    assert run.core.standing.version == stood and len(run.core.membership.members) == 3
    order(run, "resume")
    run.finish()
    assert not [went for went in run.told(WorkerWent) if not went.polite]
    assert run.workers["w0"].weights == undisturbed()
    assert [told.action for told in run.told(Ordered) if told.done] == ["pause", "resume"]


@pytest.mark.parametrize("at_s", [0.31, 0.44, 0.7])
def test_windows_pause_too_and_what_workers_have_in_hand_is_taken(at_s: float) -> None:
    policy = Cadence.published(anchor=1, max_anchor=1)
    windowed = described(policy=policy.kind, settings=settings_of(policy), batch=4, rows_limit=EPOCHS * ROWS)
    run = Fleet(workers=2, description=windowed)
    run.run_for(at_s)
    order(run, "pause")
    run.run_for(PATIENCE_S)
    stood = run.core.standing.version
    run.run_for(3 * PATIENCE_S)
    assert run.core.standing.version == stood and run.core.now is None
    order(run, "resume")
    run.finish()
    assert run.restores == 0 and run.core.refused.total() == 0


def test_save_now_is_a_checkpoint_of_the_last_step_also_while_the_run_is_paused() -> None:
    run = Fleet(workers=2)
    assert order(run, "save") == "There is nothing to save yet."
    run.run_until(lambda: run.core.standing.version >= 2)
    order(run, "pause")
    run.run_for(PATIENCE_S)
    step = run.core.standing.version
    assert order(run, "save") == f"A person asked for a checkpoint after step {step}."
    run.run_until(lambda: bool(run.told(CheckpointSaved)))
    assert run.told(CheckpointSaved)[-1].step == step and step in run.disk.states
    assert order(run, "save") == f"Step {step} is saved already."
    order(run, "resume")
    run.finish()
    assert run.workers["w0"].weights == undisturbed()


@pytest.mark.parametrize("at_s", [0.31, 0.44, 0.7, 1.3])
def test_a_worker_that_is_let_go_leaves_politely_and_knows_that_the_run_continues(at_s: float) -> None:
    run = Fleet(workers=3)
    run.run_until(lambda: run.core.standing.version >= 1)
    run.run_for(at_s)
    (member,) = [m for m in run.core.membership.members.values() if m.name == "w1"]
    assert order(run, "let_go", member.worker_id) == "w1 was let go by a person."
    run.finish()
    (went,) = [went for went in run.told(WorkerWent) if went.name == "w1"]
    assert went.polite
    assert run.workers["w1"].member.left and run.workers["w1"].error is None
    assert run.workers["w0"].weights == undisturbed()


def test_the_last_worker_that_is_let_go_leaves_its_weights_behind() -> None:
    run = Fleet(workers=1)
    run.run_until(lambda: run.core.standing.version >= 3)
    order(run, "let_go", run.member("w0").worker_id)
    run.run_until(lambda: run.workers["w0"].done)
    assert run.disk.states and run.workers["w0"].member.left
    run.add("next", at_s=30)
    run.finish()
    assert run.workers["next"].weights == undisturbed()


def test_orders_that_mean_nothing_are_told_so_and_do_nothing() -> None:
    run = Fleet(workers=2)
    run.run_until(lambda: run.core.standing.version >= 1)
    assert order(run, "resume") == "The run is not paused."
    assert order(run, "let_go", 77) == "That worker is not here any more."
    assert order(run, "pause").startswith("Paused by a person")
    assert order(run, "pause") == "The run is paused already."
    assert [told.done for told in run.told(Ordered)] == [False, False, True, False]
    order(run, "resume")
    run.finish()


# Those who only watch


def effects_of(core: Coordinator, peer: int, message: Any, now: float = 0.0) -> list[Effect]:
    return core.at(now).on_message(peer, message)


def test_one_who_watches_is_no_member_and_has_no_id() -> None:
    core = Coordinator(patience_s=10, secret=SECRET)
    assert effects_of(core, 1, LookOn(PROTOCOL, SECRET)) == [Send(1, Welcome(0, 10_000, "")), ShowTo(1)]
    assert not core.membership.members and core.membership.next_id == 0
    assert core.at(1.0).on_closed(1, "it closed the connection") == []


def test_who_has_not_the_secret_sees_nothing_and_hears_nothing() -> None:
    core = Coordinator(patience_s=10, secret=SECRET)
    assert effects_of(core, 1, LookOn(77, "another")) == [Close(1, "wrong secret")]
    told, closed = effects_of(core, 2, LookOn(PROTOCOL + 1, SECRET))
    assert isinstance(told, Send) and isinstance(told.message, Refusal) and isinstance(closed, Close)


def test_so_many_may_watch_and_when_one_goes_another_may() -> None:
    core = Coordinator(patience_s=10, secret=SECRET)
    for peer in range(MOST_WATCHERS):
        assert ShowTo(peer) in effects_of(core, peer, LookOn(PROTOCOL, SECRET))
    told, _ = effects_of(core, 99, LookOn(PROTOCOL, SECRET))
    assert told == Send(99, Refusal(1, "16 watch this host, the most at once. Come again later."))
    core.at(1.0).on_closed(3, "it closed the connection")
    assert ShowTo(100) in effects_of(core, 100, LookOn(PROTOCOL, SECRET))


def test_what_the_model_writes_is_cleaned_and_told_now_and_then() -> None:
    run = Fleet(workers=1)
    run.run_until(lambda: run.core.standing.version >= 1)
    peer = run.member("w0").peer

    def told(now: float) -> list[Any]:
        return [
            e.event for e in run.core.at(now).on_message(peer, Wrote(10**9, "a", "b\x1b[2J\nc")) if isinstance(e, Emit)
        ]

    now = run.host.clock.now
    (sampled,) = told(now)
    assert (sampled.text, sampled.step) == ("b?[2J\nc", run.core.steps_done)
    assert told(now + 0.9 * WRITTEN_EVERY_S) == [] and len(told(now + 1.1 * WRITTEN_EVERY_S)) == 1
    assert StepDone not in map(type, run.events)


def test_what_a_worker_uses_is_kept_for_people_and_nonsense_is_not() -> None:
    run = Fleet(workers=1)
    run.run_until(lambda: run.core.standing.version >= 1)
    member, now = run.member("w0"), run.host.clock.now
    assert run.core.at(now).on_message(member.peer, Using(1.5, 2, 3, 4, 0.5, 6, 7)) == []
    told = {"cores": 1.5, "of_cores": 2, "memory_bytes": 3, "of_memory_bytes": 4}
    assert member.uses == told | {"gpu": 0.5, "gpu_bytes": 6, "of_gpu_bytes": 7}
    for odd in (float("nan"), -1.0, float("inf")):
        assert run.core.at(now).on_message(member.peer, Using(odd, 2, 3, 4, 0.5, 6, 7)) == []
        assert run.core.at(now).on_message(member.peer, Using(1.0, 2, 3, 4, odd, 6, 7)) == []
    assert member.uses["cores"] == 1.5
    run.finish()
    assert run.workers["w0"].weights == undisturbed()
