import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_and_a_seed() -> None:
    """Sums over several threads may be ordered otherwise; with one thread, equal means bit-identical."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
