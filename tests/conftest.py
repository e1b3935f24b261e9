import gc
import os
import signal
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings

for _number, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:  # as where a shell has started the tests in the background
        signal.signal(_number, _default)

gc.disable()  # until all tests are collected: it would look at all that is loaded again and again, for seconds

# Many processes load the same modules, and each would compile them again, for half a second.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

os.environ.setdefault("POTLUCK_PAGE", "off")  # tests that look at the page say so

# A busy machine is not a failure: Hypothesis would take 200 ms for one example, or 2 s to draw a few, for one.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


def pytest_collection_finish() -> None:
    gc.freeze()  # what is loaded stays
    gc.enable()


@pytest.fixture(autouse=True)
def one_thread_and_a_seed() -> None:
    """Sums over several threads may be ordered otherwise; with one thread, equal means bit-identical."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
