"""Seconds of random runs on the virtual clock, others each day; see simulation.py."""

import time
from collections import Counter

import pytest

from tests.fleet.seeds import POLICIES, hurried, seeds
from tests.fleet.simulation import HANG_S, again, simulate

pytestmark = pytest.mark.timeout(300)
SECONDS, MOST = 3.0, 4000


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_happens_all_that_must_hold_does_after_each_event_and_at_the_end(policy: str) -> None:
    told, deadline = Counter[str](), time.monotonic() + SECONDS
    for seed in seeds(MOST):
        try:
            with hurried(HANG_S):
                simulate(seed, policy, told)
        except Exception as error:
            raise AssertionError(f"The run of a seed goes wrong. Again: {again(seed, policy)}") from error
        if time.monotonic() > deadline:
            break
    assert told["events"] and told.total() > told["events"], told
