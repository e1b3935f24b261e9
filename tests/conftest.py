import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

for _number, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:  # as where a shell has started the tests in the background
        signal.signal(_number, _default)


os.environ.setdefault("POTLUCK_PAGE", "off")  # tests that look at the page say so

# A busy machine is not a failure: Hypothesis would take 200 ms for one example, or 2 s to draw a few, for one.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


@pytest.fixture(autouse=True)
def one_thread_and_a_seed() -> None:
    """Sums over several threads may be ordered otherwise; with one thread, equal means bit-identical."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
