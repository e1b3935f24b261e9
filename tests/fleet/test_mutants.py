"""Faults put back into the coordinator and the worker, on purpose: the simulation finds each of them."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from potluck.fleet.coordinator import Coordinator
from potluck.fleet.ending import Ending
from potluck.fleet.evaluation import Evaluations
from potluck.fleet.exchange import PeerConnection
from potluck.fleet.journal import Journal
from potluck.fleet.mean import Mean
from potluck.fleet.member import Member
from potluck.fleet.membership import Membership
from potluck.fleet.planning import StepUnderWay
from potluck.fleet.rounds import Rounds
from potluck.fleet.run_state import RunState
from potluck.fleet.saving import Saving
from potluck.fleet.stragglers import Stragglers
from potluck.fleet.transfers import Transfers
from potluck.fleet.weights import Weights
from tests.fleet.seeds import POLICIES, hurried
from tests.fleet.simulation import simulate
from tests.fleet.virtual.toy import ROWS
from tests.fleet.virtual.worker import Worker

pytestmark = pytest.mark.timeout(600)


class Mutant(NamedTuple):
    owner: Any
    name: str
    instead: Any
    policies: tuple[str, ...] = POLICIES
    most: int = 200
    """Seeds."""


def nothing(*given: Any, **named: Any) -> list[Any]:
    return []


def with_effects_but(kind: str, real: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def call(*given: Any, **named: Any) -> list[Any]:
        return [effect for effect in real(*given, **named) if type(effect).__name__ != kind]

    return call


MUTANTS = {
    # The two of old.
    "a host counts its own pause as its workers' silence": Mutant(Membership, "forgive", nothing),
    "a worker that is given the end in mid-epoch waits for work": Mutant(
        Worker, "_has_rows", lambda worker: not worker.stopping and worker.state.row < ROWS
    ),
    # Others about the host's restart.
    "a host that finds all done waits for those who have ended": Mutant(Ending, "_end_without_them", nothing),
    "a restarted host does not know what is on its disk": Mutant(Coordinator, "found", nothing, ("cadence", "async")),
    "a window is computed again though somebody has it": Mutant(
        Weights, "_may_have_the_last", lambda admission: False, ("cadence", "async")
    ),
    "those who wait for weights are forgotten": Mutant(Weights, "_take_waiting", lambda admission: iter(())),
    # Who owes what.
    "nobody is relieved": Mutant(Stragglers, "relieve", nothing),
    "who leaves keeps its slices": Mutant(Rounds, "take_away", nothing),
    "what nobody could take is never handed out": Mutant(Rounds, "give_orphans", nothing),
    "what a lost worker owed is nobody's": Mutant(Rounds, "on_gone", nothing),
    "an evaluation waits for one who is gone": Mutant(Evaluations, "give_back", nothing),
    "a save waits for one who is gone": Mutant(Saving, "pass_over", nothing),
    "a newcomer waits for weights from one who is gone": Mutant(Transfers, "on_gone", nothing),
    # What is in the sums.
    "a step is committed without one report": Mutant(
        StepUnderWay, "is_reported", property(lambda step: len(step.reports) >= step.slices - 1)
    ),
    "a part of a payload is added twice": Mutant(Mean, "_accept", lambda mean, slot, part, number: True),
    "a row is counted twice": Mutant(
        StepUnderWay, "rows", property(lambda step: step.bounds[-1][1] - step.bounds[0][0] - (step.step == 3))
    ),
    "what a lost worker still sends reaches the sums": Mutant(PeerConnection, "revoke", nothing),
    "what is of no use any more reaches the sums": Mutant(PeerConnection, "discard", nothing),
    "a gradient counts before its report": Mutant(Coordinator, "has_reported", lambda core, peer, node: True),
    # What is kept.
    "the step before a restart is not on record": Mutant(Journal, "record", nothing),
    "a step that was on record is skipped": Mutant(RunState, "skip_ahead", nothing),
    # The worker's side.
    "a member does not ask again for what was lost": Mutant(Member, "_ask_again", nothing),
}


def find(mutant: Mutant, first: int = 0) -> tuple[int, str, float] | None:
    """The seed and the policy that finds it, and after how many seconds."""
    started = time.process_time()
    for seed in range(first, first + mutant.most):
        for policy in mutant.policies:
            try:
                with hurried(5):
                    simulate(seed, policy, Counter())
            except Exception:
                return seed, policy, time.process_time() - started
    return None


@pytest.mark.parametrize("what", MUTANTS)
def test_a_fault_that_is_put_back_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[what]
    monkeypatch.setattr(mutant.owner, mutant.name, mutant.instead)
    assert find(mutant) is not None, f"{mutant.most} seeds under each of {mutant.policies} do not show that {what}"
