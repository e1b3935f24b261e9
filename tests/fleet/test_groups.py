"""Random runs of groups on the virtual clock, others each day; and faults put back on purpose, which they find."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from potluck.agree.policy import Cadence, Sync
from potluck.agree.records import Report
from potluck.agree.windows import RowPool
from potluck.engine.group_plans import SyncPlans, WindowPlans
from potluck.engine.group_table import GroupTable
from potluck.engine.table import RoundPlan
from potluck.errors import WorkerLost
from potluck.fleet.ledger import Ledger
from potluck.link.link import Done
from potluck.replica.buckets import GradBuckets
from potluck.sums.window_delta import WindowDelta
from tests.fleet.seeds import hurried, seeds
from tests.fleet.simulation import GROUP, HANG_S, again
from tests.fleet.virtual.group import Faults, Group, Pace, Rank
from tests.fleet.virtual.group_case import Case, Life, draw_pace
from tests.fleet.virtual.group_link import LOST
from tests.fleet.virtual.group_run import check_again, live, run_case, simulate_group

pytestmark = pytest.mark.timeout(300)
SEEDS = 20
MOST = 100
"""Seeds in which a fault that is put back must be found."""
PACE = Pace(delays="any", row_s=(0.01,) * 4, latency_s=0.01)


def test_whatever_happens_to_a_group_all_that_must_hold_does() -> None:
    told = Counter[str]()
    for seed in seeds(SEEDS):
        try:
            with hurried(HANG_S):
                simulate_group(seed, told)
        except Exception as error:
            raise AssertionError(f"The run of a seed goes wrong. Again: {again(seed, GROUP)}") from error
    assert told["events"] and (told["kill"] + told["stop"] or len(seeds(SEEDS)) == 1), told


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(Life(world=1, policy=Cadence(anchor=1, together=1.0)), id="one worker"),
        pytest.param(Life(world=2, policy=Cadence(anchor=1, together=0.0)), id="a policy without such steps"),
    ],
)
def test_a_checkpoint_between_two_turns_is_resumed_by_workers_that_would_never_step_together(after: Life) -> None:
    """Found by the simulation: the batch was finished by a replica by itself, whose mean nobody had begun."""
    first = Life(world=2, policy=Cadence(anchor=1, together=1.0), kills=((0, 90),))
    lived = run_case(Case(lives=(first, after), model="gan", calls={"save": 3, "wait_for_saves": 3}))
    assert [position.turn for position in lived.record.resumed] == [1]


def test_the_same_seed_is_the_same_run_and_numbers_of_sync_depend_neither_on_delays_nor_on_what_befalls_it() -> None:
    life = Life(world=3, policy=Sync(balance=False))
    stopped, killed = replace(life, stops=((1, 60),)), replace(life, kills=((2, 90),))
    case = Case(lives=(stopped, killed, life), model="drop", micro=2, calls={"save": 2, "wait_for_saves": 2})
    lived = live(case, draw_pace(case))
    assert lived.fired == ["stop 1", "kill 2"] and case.undisturbed is not None
    check_again(case, lived)
    check_again(case.undisturbed, live(case.undisturbed, draw_pace(case)))


# The virtual group itself


def run_group(script: Any, world: int = 2, **faults: Any) -> list[Rank]:
    return Group(world, "a seed", PACE, Faults(**faults), script).run()


def test_ranks_at_different_calls_fail_at_once_and_both_are_named() -> None:
    def script(rank: Rank) -> None:
        if rank.number == 0:
            with rank.link.within("fleet.save()", 3):
                rank.link.gather_bytes(b"")
        rank.link.gather_rows([1.0])

    with pytest.raises(AssertionError, match=r"worker \d is at .* and worker \d at .*") as found:
        run_group(script)
    assert "fleet.save() after step 3" in str(found.value) and "fleet.step()" in str(found.value)


def test_a_rank_that_waits_for_one_that_has_ended_is_a_deadlock() -> None:
    with pytest.raises(AssertionError, match=r"deadlock: worker 0 waits at .*; worker 1 has ended"):
        run_group(lambda rank: rank.link.gather_rows([1.0]) if rank.number == 0 else None)


def test_who_waits_for_a_killed_rank_hears_that_it_is_lost() -> None:
    ranks = run_group(lambda rank: [rank.link.gather_rows([1.0]) for _ in range(9)], world=3, kills={1: 7})
    assert [type(rank.error) for rank in ranks] == [WorkerLost, type(None), WorkerLost]
    assert str(ranks[0].error).startswith(LOST) and ranks[1].is_dead


def test_each_rank_draws_random_numbers_as_in_a_process_of_its_own() -> None:
    def draws(rank: Rank) -> list[list[float]]:
        found = []
        for _ in range(5):
            rank.pause(rank.draw.random())
            found.append(torch.rand(3).tolist())
        return found

    before = torch.get_rng_state()
    together = [rank.result for rank in run_group(draws, world=2)]
    alone = run_group(draws, world=1)[0].result
    assert together[0] == alone != together[1]
    assert torch.equal(before, torch.get_rng_state())


# Faults that are put back

AGREE, AGREE_ON_WINDOW = GroupTable._agree_on_step, GroupTable._agree_on_window
LEARN, RECORD, END = SyncPlans.learn, Ledger.record, WindowDelta.end


def stop_alone(table: GroupTable, plan: RoundPlan) -> Any:
    outcome = yield from AGREE(table, plan)
    return replace(outcome, stops=table._run.wants_stop)


def learn_own_time(plans: SyncPlans, plan: RoundPlan, reports: list[Report]) -> None:
    own = plans._run.link.rank
    reports[own] = reports[own]._replace(busy_s=reports[own].busy_s / 3)
    LEARN(plans, plan, reports)


def record_twice(ledger: Ledger, start: int, end: int) -> None:
    RECORD(ledger, start, end)
    if start == 0:
        RECORD(ledger, start, end)


def report_rows_alone(table: GroupTable, plan: RoundPlan) -> Any:
    """Ask a rank without rows for nothing."""
    link = table._run.link
    silent = mock.patch.object(link, "start_gather", lambda row: Done([list(row)] * link.world))
    with nullcontext() if plan.has_rows else silent:
        return (yield from AGREE_ON_WINDOW(table, plan))


def read_too_early(buckets: GradBuckets) -> float:
    buckets.start_rest()
    return 0.0


def weigh_alike(delta: WindowDelta, weight: float) -> None:
    END(delta, 1 / max(1, delta._mean._link.world))  # type: ignore[attr-defined]


Patch = tuple[Any, str, Any]
MUTANTS: dict[str, Patch] = {
    "one that wants to stop stops alone": (GroupTable, "_agree_on_step", stop_alone),
    "each rank believes its own clock": (SyncPlans, "learn", learn_own_time),
    "a row is recorded twice": (Ledger, "record", record_twice),
    "a rank that has no rows gathers no reports": (GroupTable, "_agree_on_window", report_rows_alone),
    "gradients are used before their sum is here": (GradBuckets, "finish", read_too_early),
    "all replicas weigh alike": (WindowDelta, "end", weigh_alike),
    "what a window did not reach is nobody's": (RowPool, "give_back", lambda pool, ranges: None),
    "a checkpoint forgets which rows are left": (WindowPlans, "left", lambda plans: []),
}


QUICK = (
    "a row is recorded twice",
    "gradients are used before their sum is here",
)


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[] if what in QUICK else [pytest.mark.slow]) for what in MUTANTS]
)
def test_a_fault_that_is_put_back_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[what])
    for seed in range(MOST):
        try:
            with hurried(HANG_S):
                simulate_group(seed, Counter())
        except Exception:
            return
    raise AssertionError(f"{MOST} seeds do not show that {what}")
