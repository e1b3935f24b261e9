"""Faults put back into the coordinator and the worker, on purpose: the simulation finds each of them."""

from collections import Counter
from typing import Any

import pytest

from potluck.fleet.coordinator import Coordinator
from potluck.fleet.coordinator_state import CoordinatorState
from potluck.fleet.ending import Ending
from potluck.fleet.evaluation import Evaluations
from potluck.fleet.exchange import PeerConnection
from potluck.fleet.journal import Journal
from potluck.fleet.member import Member
from potluck.fleet.membership import WorkerRecord
from potluck.fleet.planning import StepUnderWay
from potluck.fleet.saving import Saving
from potluck.fleet.step_dispatcher import StepDispatcher
from potluck.fleet.stragglers import Stragglers
from potluck.fleet.transfers import Transfers
from potluck.fleet.weights import Weights
from tests.fleet.seeds import POLICIES, hurried
from tests.fleet.simulation import simulate
from tests.fleet.virtual.toy import ROWS
from tests.fleet.virtual.worker import Worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MOST, MOST_SLOW = 100, 400
"""Seeds. Each is lived under every policy; a few seconds find all that is not slow."""
HANG_S = 10


def nothing(*given: Any, **named: Any) -> list[Any]:
    return []


Patch = tuple[Any, str, Any]
MUTANTS: dict[str, list[Patch]] = {
    # The two of old.
    "a host counts its own pause as its workers' silence": [(CoordinatorState, "pass_time", lambda core, now: now)],
    "a worker that is given the end in mid-epoch waits for work": [
        (Worker, "_has_rows", lambda worker: not worker.stopping and worker.state.row < ROWS)
    ],
    # Who owes what.
    "a host that finds all done waits for those who have ended": [(Ending, "_end_without_them", nothing)],
    "those who wait for weights are forgotten": [(Weights, "_take_waiting", nothing)],
    "nobody is relieved": [(Stragglers, "relieve", nothing)],
    "one that hangs is given work again": [(WorkerRecord, "is_relieved", False)],
    "who leaves keeps its slices": [(StepDispatcher, "take_away", nothing)],
    "what a lost worker owed is nobody's": [(StepDispatcher, "on_gone", nothing)],
    "an evaluation waits for one who is gone": [(Evaluations, "give_back", nothing)],
    "a newcomer waits for weights from one who is gone": [(Transfers, "on_gone", nothing)],
    "a member does not ask again for what was lost": [(Member, "_ask_again", nothing)],
    # What is in the sums, and on record.
    "a step is committed without one report": [
        (StepUnderWay, "is_reported", property(lambda step: len(step.reports) >= step.slices - 1))
    ],
    "a row is counted twice": [
        (StepUnderWay, "rows", property(lambda step: step.bounds[-1][1] - step.bounds[0][0] - (step.step == 3)))
    ],
    "what is of no use any more reaches the sums": [
        (PeerConnection, "discard", nothing),
        (Coordinator, "has_reported", lambda core, peer, node: True),
    ],
    "the step before a restart is not on record": [(Journal, "record", nothing)],
    "a host that is started again does not know its checkpoint": [(Saving, "found", nothing)],
    # Who has which weights.
    "the last window is computed again, whoever has it": [(Weights, "_may_have_the_last", lambda weights: False)],
}
SLOW = {
    "a host that is started again does not know its checkpoint",
    "the last window is computed again, whoever has it",
    "a newcomer waits for weights from one who is gone",
    "an evaluation waits for one who is gone",
    "what is of no use any more reaches the sums",
}


def find(most: int) -> tuple[int, str] | None:
    """The first seed, and the policy, under which a run goes wrong."""
    for seed in range(most):
        for policy in POLICIES:
            try:
                with hurried(HANG_S):
                    simulate(seed, policy, Counter())
            except Exception:
                return seed, policy
    return None


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] if what in SLOW else []) for what in MUTANTS]
)
def test_a_fault_that_is_put_back_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, instead in MUTANTS[what]:
        monkeypatch.setattr(owner, name, instead)
    most = MOST_SLOW if what in SLOW else MOST
    assert find(most) is not None, f"{most} seeds under each policy do not show that {what}"
