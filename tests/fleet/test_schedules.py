"""Some hundred random schedules of kills, joins, pauses and host restarts, others each day; see schedules.py."""

import pytest

from tests.fleet.schedules import HANG_S, POLICIES, hurried, live, seeds

pytestmark = pytest.mark.timeout(300)
COUNTS = {"sync": 80, "cadence": 120, "async": 40}


@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_joins_leaves_and_dies_whenever_the_weights_and_the_ledger_are_right(policy: str) -> None:
    for seed in seeds(COUNTS[policy]):
        try:
            with hurried(HANG_S):
                live(seed, policy)
        except Exception as error:
            again = f"POTLUCK_SEED={seed} pytest tests/fleet/test_schedules.py -k {policy}"
            raise AssertionError(f"Schedule {seed} under {policy} ends wrong. Again: {again}") from error
