import os
from collections import defaultdict

import pytest
import torch
from hypothesis import HealthCheck, settings

REAL = ("tests.ranks", "tests.bare", "tests.fleet.fleet", "tests.fleet.faults")
"""Where tests have helpers from that start processes."""

os.environ.setdefault("POTLUCK_PAGE", "off")  # tests that look at the page say so

# A busy machine is not a failure: Hypothesis would take 200 ms for one example, or 2 s to draw a few, for one.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


@pytest.fixture(autouse=True)
def one_thread_and_a_seed() -> None:
    """Sums over several threads may be ordered otherwise; with one thread, equal means bit-identical."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that starts processes, `make test` runs the first; the others are slow."""
    alike: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        module = getattr(item, "module", None)
        starts = any(getattr(value, "__module__", None) in REAL for value in vars(module).values()) if module else False
        if starts and item.get_closest_marker("slow") is None:
            alike[item.nodeid.split("[")[0]].append(item)
    for cases in alike.values():
        for item in cases[1:]:
            item.add_marker(pytest.mark.slow)
