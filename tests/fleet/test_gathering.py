"""Values of one's own under a host: whose are gathered, whatever happens to workers meanwhile."""

import pytest

from potluck.events import Stalled
from potluck.fleet.coordinator import Coordinator
from potluck.fleet.effects import Effect, Send
from potluck.fleet.gathering import MOST_BYTES, MOST_DONE, MOST_TOTAL_BYTES
from potluck.fleet.member import MemberPhase
from potluck.wire.messages import Applied, Gather, Gathered, Refusal, StateBegin, StateChunk
from tests.fleet.test_coordinator import KNOWN_LENGTH, effects_of, hello, ready
from tests.fleet.test_insiders import insider, refused
from tests.fleet.virtual import PATIENCE_S, SECRET, STEPS, FaultScript, Fleet
from tests.fleet.virtual.lone import LoneHolder
from tests.fleet.virtual.process import Life

pytestmark = pytest.mark.timeout(60)


def test_every_worker_has_the_same_values_of_each_step() -> None:
    run = Fleet(workers=3, gather_every=1).finish()
    for worker in run.workers.values():
        assert worker.gathered == {n: [f"w{i} {n}" for i in range(3)] for n in range(1, STEPS + 1)}


@pytest.mark.parametrize("phase", ["gathering", "applied"])
def test_a_worker_that_is_killed_is_not_waited_for(phase: str) -> None:
    run = Fleet(workers=3, gather_every=2, faults=FaultScript().kill("w1", at_step=4, phase=phase)).finish()
    both = [run.workers[name].gathered for name in ("w0", "w2")]
    assert both[0] == both[1] and both[0][STEPS // 2 * 2] == [f"w0 {STEPS // 2 * 2}", f"w2 {STEPS // 2 * 2}"]


def test_a_worker_that_is_cut_off_meanwhile_asks_again() -> None:
    run = Fleet(workers=2, gather_every=2, faults=FaultScript().cut("w1", at_step=4, phase="gathering")).finish(
        limit_s=300
    )
    assert [sorted(w.gathered[6]) for w in run.workers.values()] == [["w0 6", "w1 6"]] * 2
    assert all("w0 4" in w.gathered[4] for w in run.workers.values())


def test_a_newcomer_is_not_waited_for_and_then_takes_part() -> None:
    run = Fleet(workers=1, gather_every=1)
    run.add("late", at_s=1.0, gather_every=1)
    run.finish()
    late = run.workers["late"].gathered
    assert late and all(late[step] == found for step, found in run.workers["w0"].gathered.items() if step in late)
    assert len(late[STEPS]) == 2


def test_workers_that_waited_when_the_host_was_killed_wait_for_each_other_again() -> None:
    run = Fleet(workers=3, gather_every=3, faults=FaultScript().stall("w2", at_step=3, phase="applied", seconds=1.0))
    run.run_until(lambda: (found := run.core.gatherings.open.get((3, 0))) is not None and len(found.given) == 2)
    run.crash_host(back_after_s=0.2)
    run.finish(limit_s=300)
    assert {tuple(sorted(worker.gathered[3])) for worker in run.workers.values()} == {("w0 3", "w1 3", "w2 3")}


def test_a_worker_that_never_calls_is_named_and_the_others_continue() -> None:
    run = Fleet(workers=2, gather_every=4)
    run.add("silent", gather_every=0)
    run.finish(limit_s=60 * PATIENCE_S)
    said = [e for e in run.events if isinstance(e, Stalled) and "fleet.mean()" in e.doing]
    assert {e.name for e in said} == {"silent"} and "continue without its value" in said[-1].then
    assert run.workers["w0"].gathered[4] == ["w0 4", "w1 4"]


# A run that ends early


@pytest.mark.parametrize("fault", ["none", "kill", "late", "other"])
def test_a_run_that_all_find_over_ends_there(fault: str) -> None:
    """No other step is taken, also by one that has not found it over: it was given the weights right there."""
    faults = FaultScript()
    if fault == "kill":
        faults.kill("w1", at_step=5, phase="applied")
    run = Fleet(workers=3, faults=faults, description=KNOWN_LENGTH, ends_at=5, save_every=5)
    if fault == "late":
        run.add("late", at_s=1.0, ends_at=5, save_every=5)
    if fault == "other":
        run.add("other")
    run.run_until(lambda: run.host.finish is not None, limit_s=20 * PATIENCE_S)
    assert run.host.finish is not None and run.host.finish.reason == "finished"
    assert run.standing().version == 5 and run.core.saving.saved.step == 5
    assert all(worker.state.step == 5 for worker in run.workers.values())


# Insiders


@pytest.mark.parametrize(
    "ask", [Gather(1 << 40, 0, 1, b""), Gather(0, 0, 1, bytes(MOST_BYTES + 1))], ids=["step", "bytes"]
)
def test_what_no_honest_worker_gives_is_refused(ask: Gather) -> None:
    run = Fleet(workers=2)
    liar = insider(run)
    liar.send(ask)
    run.finish()
    assert refused(liar).startswith("Gather") and not run.core.gatherings.open


@pytest.mark.parametrize("is_heard", [True, False])
@pytest.mark.parametrize(("name", "address"), [("w1", "10.0.0.1"), ("w1", "10.0.0.9"), ("w9", "10.0.0.1")])
def test_a_value_is_replaced_only_by_its_own_worker(name: str, address: str, is_heard: bool) -> None:
    """By one that came back, and whose first connection is not known to be gone."""
    core = Coordinator(patience_s=PATIENCE_S, secret=SECRET)
    core.at(100.0).on_message(2, hello("w2"), "10.0.0.2")
    for peer, who, where, now in ((1, "w1", "10.0.0.1", 100.0), (9, name, address, 101.0)):
        core.at(now).on_message(peer, hello(who), where)
        core.at(now).on_message(peer, ready())
    core.at(102.0).on_message(2, ready())
    first_id = core.membership.members[1].worker_id
    core.at(100.0).on_message(1, Gather(0, 0, first_id, b"first"))
    if is_heard:
        core.on_heard(103.0, 1)
    core.at(104.0).on_message(9, Gather(0, 0, first_id, b"second"))
    (answer, *_) = [e.message for e in core.at(104.0).on_message(2, Gather(0, 0, 0, b"third")) if isinstance(e, Send)]
    assert isinstance(answer, Gathered)
    is_one = name == "w1" and (address == "10.0.0.1" or not is_heard)
    assert bytes(answer.data) == (b"thirdsecond" if is_one else b"thirdfirstsecond")


def test_a_worker_counts_once_whose_first_id_is_of_a_host_before_this_one_and_another_workers_now() -> None:
    core = Coordinator(patience_s=PATIENCE_S, secret=SECRET)
    for peer, who in ((1, "w1"), (2, "w2"), (9, "w1")):
        core.at(100.0).on_message(peer, hello(who), "10.0.0.1")
        core.at(100.0).on_message(peer, ready())
    claimed = core.membership.members[2].worker_id
    core.at(101.0).on_message(1, Gather(0, 0, claimed, b"first"))
    core.at(102.0).on_message(9, Gather(0, 0, claimed, b"again"))
    (answer, *_) = [e.message for e in core.at(103.0).on_message(2, Gather(0, 0, 7, b"other")) if isinstance(e, Send)]
    assert isinstance(answer, Gathered) and bytes(answer.data) == b"againother"


def test_the_worker_that_came_first_of_all_is_known_when_it_comes_back() -> None:
    holder = LoneHolder()
    holder.go(holder.member.join())
    holder.worker_id = 7
    holder.reconnect()
    holder.member.phase = MemberPhase.IN
    holder.go(holder.member.gather(b""))
    assert holder.member.worker_id == 7 and holder.sent[-1] == Gather(0, 0, 0, b"")


def test_a_worker_that_names_another_first_id_each_time_does_not_prolong_the_wait() -> None:
    core = Coordinator(patience_s=PATIENCE_S, secret=SECRET)
    effects_of(core, *((peer, message) for peer in (1, 2, 3) for message in (hello(f"w{peer}"), ready())))
    for now, peer, first_id in ((100.0, 1, 0), (101.0, 2, 1), (150.0, 1, 77)):
        core.at(now).on_message(peer, Gather(0, 0, first_id, b""))
    assert core.gatherings.open[0, 0].last_at == 101.0


def test_what_is_kept_is_bounded() -> None:
    """One worker's other calls take the place of its first, and all together are refused where they are too much."""
    core = Coordinator(patience_s=10, secret=SECRET)
    peers = range(1, 9)
    for peer in peers:
        effects_of(core, (peer, hello(f"w{peer}")), (peer, ready()))
    for call in range(100):
        core.at(100.0).on_message(1, Gather(0, call, 1, bytes(1000)))
    assert [len(found.given) for found in core.gatherings.open.values()] == [1]
    assert len(core.gatherings.done) <= MOST_DONE
    told: list[Effect] = []
    for peer in peers[1:]:
        told += core.at(100.0).on_message(peer, Gather(0, 100, peer, bytes(MOST_BYTES)))
    answers = [e.message for e in told if isinstance(e, Send)]
    assert not any(isinstance(answer, Refusal) for answer in answers)
    faults = [answer.fault for answer in answers if isinstance(answer, Gathered)]
    assert f"{MOST_TOTAL_BYTES:,}" in faults[-1] and not core.gatherings.open.get((0, 100))


class Reloading(LoneHolder):
    def receive_state(self, step: int, header: str) -> None:
        self.step = step

    def take_chunk(self, data: bytes) -> Life:
        yield from ()

    def load_state(self) -> tuple[int, int]:
        return self.step, self.step

    def applied_message(self, step: int, digest: str, norm: float, fault: str) -> Applied:
        return Applied(step, digest, 0.1, norm, fault)


def test_a_worker_whose_run_went_back_counts_anew_what_it_gathers_at_a_step() -> None:
    """It was in the second gathering of a step while the others were in their first, and later values were mixed."""
    holder = Reloading()
    member = holder.member
    member.version, member.phase = 5, MemberPhase.IN
    holder.go(member.gather(b"before"))
    member.phase = MemberPhase.CATCHING_UP
    holder.go(member.hear(StateBegin(1, 4, '[["weights", 1]]')))
    holder.go(member.hear(StateChunk(1, b"x")))
    member.version = 5
    holder.go(member.gather(b"after"))
    assert [(said.step, said.call) for said in holder.sent if isinstance(said, Gather)] == [(5, 0), (5, 0)]
