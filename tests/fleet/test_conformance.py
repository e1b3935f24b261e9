"""Whatever happens to a run of whatever kind, it comes to what plain PyTorch computes; see kinds.py and faults.py.

A line of a list is a kind and a fault. The first of each list are run by `make test`, and all of them by `make chaos`,
with others each day that are drawn: POTLUCK_SEED=... repeats one.
"""

import random
import signal
from pathlib import Path

import pytest
import torch

import potluck
from potluck.events import CheckpointSaved, Decided, WorkerCame, WorkerWent
from tests.fleet import soak
from tests.fleet.faults import COORDINATOR, PHASES, RANK_PHASES, SHARED_PHASES, STOPS, WINDOW_PHASES
from tests.fleet.fleet import (
    BATCH,
    STEPS,
    Fleet,
    assert_same,
    build,
    check_journal_in,
    start_coordinator,
    step_of,
    wait_until,
)
from tests.fleet.judges import kinds, rows_of
from tests.fleet.kinds import KINDS
from tests.fleet.seeds import seeds
from tests.quick import first_of

pytestmark = pytest.mark.timeout(90)
DEATHS = PHASES | SHARED_PHASES | WINDOW_PHASES
EARLY = ("connected", "joined")
LATER = [phase for phase in PHASES if phase not in EARLY]


def is_ready(fleet: Fleet, name: str) -> bool:
    return any(member.name == name for member in fleet.server.core.membership.ready)


def gone(fleet: Fleet, *, is_polite: bool) -> list[str]:
    return [event.name for event in fleet.events if isinstance(event, WorkerWent) and event.polite is is_polite]


def fired(folder: Path) -> list[str]:
    return [path.name.removeprefix("fired-") for path in folder.glob("fired-*")]


# Killed


@pytest.mark.parametrize(
    ("name", "point", "count"),
    first_of(
        [
            ("sync", "half", 2),
            ("sync near", "backward", 2),
            ("int4", "half", 2),
            ("cadence of 2", "window", 2),
            ("async int8", "half", 3),
            ("all together", "sending-2", 3),
            *(("sync", phase, 2) for phase in PHASES if phase != "half"),
            ("sync near", "shown", 2),
            ("sync near and far", "sent", 2),
            ("sync near", "seen", 2),
            ("int8", "backward", 2),
            ("bf16", "sent", 2),
            ("int4", "average", 2),
            ("cadence of 2", "sending-2", 3),
            ("cadence judged", "sending-2", 3),
            ("async int8", "sent", 3),
            ("auto", "sending-2", 2),
        ],
        6,
    ),
)
def test_a_worker_killed_at_any_point_loses_nothing(name: str, point: str, count: int, tmp_path: Path) -> None:
    kind, is_early = KINDS[name], point in EARLY
    fleet = Fleet(tmp_path, at_least=1 if is_early else count)
    (victim,) = kind.join(fleet, "victim", DEATHS[point], save_every=3)
    if point == "saving":  # the first in is the one who saves
        wait_until(lambda: is_ready(fleet, "victim"))
    for number in range(1, count):
        kind.join(fleet, f"survivor{number}", save_every=3, slow_s=0.02)
    weights = fleet.finish()
    assert fired(tmp_path) == [point] and victim.process.exitcode == -signal.SIGKILL
    kind.check(weights, fleet)
    assert gone(fleet, is_polite=False) == ["victim"] or is_early
    if point in WINDOW_PHASES and not kinds(fleet)[2]:
        second = fleet.records[1]
        assert second.step == 2 and len(second.ranges) == count
        assert len({worker for _, _, worker in second.ranges}) == count - 1  # one of them did two parts
        assert count == 2 or any(isinstance(e, Decided) and "victim went" in e.reason for e in fleet.events)


@pytest.mark.parametrize(
    ("name", "point"),
    first_of(
        [
            ("cadence of 2 nodes", "means"),
            ("cadence of 2 nodes", "window"),
            ("cadence of 2 nodes", "parts"),
            ("sync of 2 1 3", "forward"),
            ("sync of 2 1 3", "part"),
        ]
    ),
)
def test_a_rank_killed_ends_its_worker_alone_which_joins_again(name: str, point: str, tmp_path: Path) -> None:
    kind, (rank, fault) = KINDS[name], RANK_PHASES[point]
    fleet = Fleet(tmp_path, at_least=2)
    ranks = kind.join(fleet, "victim", fault, rank=rank, may_lose=True, slow_s=0.3)
    kind.join(fleet, "survivor", slow_s=0.3, hold_at=6)
    for each in ranks:
        each.process.join(30)
    assert fired(tmp_path) == [point] and ranks[rank].process.exitcode == -signal.SIGKILL
    lost = (tmp_path / f"{ranks[1 - rank].name}.lost").read_text()
    assert ranks[1 - rank].process.exitcode == 1 and ("WorkerLost" in lost or "gloo" in lost), lost
    kind.join(fleet, "again", slow_s=0.3)
    fleet.let_in("again")
    kind.check(fleet.finish(), fleet)
    assert gone(fleet, is_polite=False) == ["victim"]
    assert any(isinstance(e, WorkerCame) and e.name == "again" and e.step > 0 for e in fleet.events)
    assert (tmp_path / "again.pt").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("phase", LATER)
@pytest.mark.parametrize("other", ["forward", "half", "average"])
def test_two_of_four_killed_in_any_two_phases(phase: str, other: str, tmp_path: Path) -> None:
    fleet, kind = Fleet(tmp_path, at_least=4), KINDS["sync"]
    kind.join(fleet, "victim", PHASES[phase], save_every=3)
    wait_until(lambda: is_ready(fleet, "victim"))
    kind.join(fleet, "second victim", PHASES[other], save_every=3)
    kind.join(fleet, "a", save_every=3)
    kind.join(fleet, "b", save_every=3)
    kind.check(fleet.finish(), fleet)
    assert fired(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "phase"),
    [*(("sync", phase) for phase in LATER), ("cadence judged", "sending-2"), ("async", "half"), ("turns", "half")],
)
def test_one_joins_while_another_dies_in_any_phase(name: str, phase: str, tmp_path: Path) -> None:
    fleet, kind = Fleet(tmp_path, at_least=2), KINDS[name]
    kind.join(fleet, "victim", DEATHS[phase], save_every=3, slow_s=0.05)
    wait_until(lambda: is_ready(fleet, "victim"))
    kind.join(fleet, "survivor", slow_s=0.05, save_every=3)
    fleet.wait_for_step(2)
    kind.join(fleet, "newcomer", slow_s=0.05, save_every=3)
    kind.check(fleet.finish(), fleet)


# Stopped


@pytest.mark.parametrize(
    ("name", "phase"),
    first_of(
        [
            ("sync", "half"),
            *(("sync", phase) for phase in LATER if phase != "half"),
            ("int4", "half"),
            ("cadence of 2", "window"),
            ("cadence judged", "sending-2"),
        ]
    ),
)
def test_a_worker_stopped_beyond_patience_is_given_up_and_comes_back(name: str, phase: str, tmp_path: Path) -> None:
    fleet, kind = Fleet(tmp_path, at_least=2, patience_s=1.5), KINDS[name]
    (sleeper,) = kind.join(fleet, "sleeper", STOPS[phase], save_every=3)
    wait_until(lambda: is_ready(fleet, "sleeper"))
    kind.join(fleet, "survivor", save_every=3, slow_s=0.2, hold_at=6)
    wait_until(lambda: fired(tmp_path) == [phase])
    wait_until(
        lambda: any(isinstance(e, WorkerWent) and "silent for" in e.reason for e in fleet.events), 20, fleet.describe
    )
    sleeper.send(signal.SIGCONT)
    fleet.let_in("sleeper")
    kind.check(fleet.finish(), fleet)
    assert sum(isinstance(event, WorkerCame) and event.name == "sleeper" for event in fleet.events) == 2


# Coming and going


@pytest.mark.parametrize(
    ("name", "step"),
    first_of(
        [
            ("sync", 1),
            ("async", 2),
            ("sync with a scheduler", 4),  # else its weights would differ after the next step, and be sent for ever
            ("sync", 0),
            ("sync", 5),
            ("sync", STEPS - 2),
            ("sync of 1 2", 2),
            ("sync of 2 1", 2),
            ("turns", 7),
            ("cadence judged", 2),
            ("cadence int4", 2),
            ("async nodes", 2),
        ],
        3,
    ),
)
def test_a_worker_that_joins_in_mid_run_gets_its_state_and_takes_part(name: str, step: int, tmp_path: Path) -> None:
    fleet, kind = Fleet(tmp_path), KINDS[name]
    kind.join(fleet, "first", slow_s=0.25, hold_at=step + 1)  # there is time to be sent its state, and to compute
    fleet.wait_for_step(step)
    wait_until(lambda: is_ready(fleet, "first"))  # also where nobody is at any step yet
    kind.join(fleet, "newcomer")
    fleet.let_in("newcomer")
    kind.check(fleet.finish(), fleet)
    came = [(event.name, event.step >= step) for event in fleet.events if isinstance(event, WorkerCame)]
    if step < STEPS - 2:
        assert came == [("first", step == 0), ("newcomer", True)]  # it was let in once
        assert any(rows_of(fleet, "newcomer"))
    if kind.has_windows:
        assert any(isinstance(e, Decided) and e.reason.startswith("newcomer came, and the work") for e in fleet.events)


@pytest.mark.parametrize(
    "name", first_of(["sync", "cadence", "sync split", "cadence nodes", "cadence judged", "async", "turns", "int4"], 2)
)
def test_a_polite_leaver_costs_nothing_and_a_checkpoint_is_a_plain_runs_too(name: str, tmp_path: Path) -> None:
    fleet, kind = Fleet(tmp_path, at_least=2), KINDS[name]
    ranks = kind.join(fleet, "leaver", slow_s=0.05, save_every=2)
    kind.join(fleet, "stayer", slow_s=0.05, save_every=2)
    fleet.wait_for_step(2)
    ranks[-1].send(signal.SIGUSR1)  # any of its ranks may wish so
    weights = fleet.finish()
    kind.check(weights, fleet)
    assert gone(fleet, is_polite=True).count("leaver") == 1 and "leaver" not in gone(fleet, is_polite=False)
    assert fleet.server.core.refused.total() == 0
    # Named and told by batches of the run; the host counts agreements.
    saved = [event for event in fleet.events if isinstance(event, CheckpointSaved)]
    assert all(Path(event.folder).name.startswith(f"step-{event.step:08d}") for event in saved)
    assert saved[-1].step == kind.steps
    if kind.has_odd_layers:
        check_checkpoint(tmp_path / "checkpoints", weights)


def check_checkpoint(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    engine = potluck.init("sync")
    model, optimizer, data = build()
    engine.prepare(model, optimizer, data, batch_size=BATCH, seed=1)
    assert engine.load(folder) and engine.step_number == STEPS
    assert_same(dict(model.state_dict()), weights)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert len(steps) == 1 and steps.pop() > 1
    assert len(optimizer.state) == len(list(model.parameters())) - 2  # but those that nobody uses


@pytest.mark.parametrize("name", first_of(["sync", "async", "cadence nodes", "auto", "turns", "int4"]))
def test_the_last_to_leave_leaves_its_weights_behind(name: str, tmp_path: Path) -> None:
    fleet, kind = Fleet(tmp_path), KINDS[name]
    ranks = kind.join(fleet, "first", slow_s=0.05)
    fleet.wait_for_step(4)
    ranks[0].send(signal.SIGUSR1)
    wait_until(lambda: not fleet.server.core.membership.members)
    kind.join(fleet, "second")
    kind.check(fleet.finish(), fleet)


@pytest.mark.parametrize(
    "name",
    first_of(["sync", "cadence", "cadence nodes", "cadence judged", "async int8", "auto", "turns", "sync split"]),
)
def test_a_run_that_everybody_died_in_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    fleet, kind = Fleet(tmp_path, patience_s=1.0), KINDS[name]
    ranks = kind.join(fleet, "first", slow_s=0.1, save_every=2, may_lose=True, hold_at=8)
    fleet.wait_for_step(3)
    wait_until(lambda: any((tmp_path / "checkpoints").glob("step-*")))
    ranks[0].kill()
    wait_until(lambda: not fleet.server.core.membership.members)
    kind.join(fleet, "second")
    kind.check(fleet.finish(), fleet)


# The host


@pytest.mark.parametrize(
    ("name", "point"),
    first_of(
        [
            ("sync", "before"),
            ("cadence", "after-3"),
            # All have sent their slices, which nobody has applied; to the next host these are a window.
            ("auto", "after-2"),
            ("sync", "after"),
            ("sync", "told"),
            ("sync", "averages"),
            ("cadence nodes", "after-3"),
            ("async", "after-2"),
            ("int8", 1),
            ("turns", 7),  # in the middle of a batch's turns
        ],
        3,
    ),
)
def test_a_host_that_is_killed_loses_and_repeats_nothing(name: str, point: str | int, tmp_path: Path) -> None:
    """By a fault, or from outside once that step was seen."""
    kind, outside = KINDS[name], isinstance(point, int)
    host, invite = start_coordinator(tmp_path, fault=None if outside else COORDINATOR[point], at_least=2)
    slow_s = 0.05 if outside else 0.02
    found = [kind.start(invite, tmp_path, worker, number, slow_s=slow_s) for number, worker in enumerate("ab")]
    if outside:
        wait_until(lambda: step_of(tmp_path) >= point)
        host.kill()
    host.join(60)
    assert host.exitcode == -signal.SIGKILL and (outside or fired(tmp_path))
    host, _ = start_coordinator(tmp_path, port=invite.port, returning=2)
    for worker in (rank for ranks in found for rank in ranks):
        worker.wait()
    for first, *_ in found:
        kind.check(first.weights)
        assert_same(first.weights, found[0][0].weights)
    host.join(20)
    assert not (tmp_path / "coordinator.error").exists(), (tmp_path / "coordinator.error").read_text()
    check_journal_in(tmp_path, None if kind.has_windows else kind.steps)


# Drawn


@pytest.mark.slow
@pytest.mark.timeout(soak.LONGEST_S)
@pytest.mark.parametrize("policy", ["sync", "cadence"])
@pytest.mark.parametrize("number", range(4))
def test_a_random_schedule_of_real_processes(policy: str, number: int) -> None:
    """As many more as one likes: make soak."""
    soak.live(seeds(4)[0] + number, policy)


@pytest.mark.slow
@pytest.mark.timeout(2 * soak.LONGEST_S)
@pytest.mark.parametrize("seed", range(3))
def test_a_minute_of_random_ends(seed: int) -> None:
    soak.live(seed, "sync", is_long=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", seeds(12))
def test_whatever_is_drawn_of_kinds_and_faults_at_once(seed: int, tmp_path: Path) -> None:
    """One stays, and holds until the newcomer is in. Each of the others is killed at some point, leaves or works."""
    draw = random.Random(seed)
    name = draw.choice(list(KINDS))
    kind, count = KINDS[name], draw.randint(2, 4)
    faults = list(WINDOW_PHASES.values() if kind.has_windows else (PHASES[phase] for phase in LATER))
    options = {"save_every": draw.choice([None, 2, 3]), "slow_s": draw.choice([0.02, 0.1]), "may_lose": True}
    fleet = Fleet(tmp_path, at_least=count, patience_s=5.0)
    kind.join(fleet, "stays", hold_at=draw.randint(2, 8), **options)
    ends = [draw.choice(["killed", "leaves", "works"]) for _ in range(count - 1)]
    print(f"POTLUCK_SEED={seed} is {name}, of {count}, of whom {ends}, with {options}")
    others = [
        kind.join(fleet, f"{end}{number}", draw.choice(faults) if end == "killed" else None, **options)
        for number, end in enumerate(ends)
    ]
    fleet.wait_for_step(draw.randint(1, 2))
    for end, ranks in zip(ends, others, strict=True):
        if end == "leaves":
            draw.choice(ranks).send(signal.SIGUSR1)
    kind.join(fleet, "newcomer", **options)
    fleet.let_in("newcomer")
    kind.check(fleet.finish(), fleet)
    went = gone(fleet, is_polite=False)
    assert all(each.startswith("killed") for each in went) and len(went) == len(set(went)), went
