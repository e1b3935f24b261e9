"""Refreshes of the copies that ranks keep of their neighbours' parts."""

from pathlib import Path

import pytest
import torch
from torch import nn

import potluck
from potluck.errors import ConfigError
from potluck.save import buddies
from potluck.save.memory import MEMORY, NEIGHBOUR, OWN, STANDING, numbered, rank_folder
from tests.ranks import run_ranks


def train(folder: str | None, strategy: potluck.ShardingStrategy, steps: int) -> int:
    """In blocks so small that each part has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buddies, "BLOCK_BYTES", 256)
        patch.setenv(MEMORY, folder or "")
        with potluck.init(potluck.Sync(balance=False), strategy) as fleet:
            torch.manual_seed(0)
            model: nn.Module = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 1))
            model.register_buffer("seen", torch.arange(3))
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer, loader = fleet.prepare(model, optimizer, torch.randn(6 * steps, 4), batch_size=6)
            for batch in loader:
                fleet.backward(model(batch).square().mean(), samples=len(batch))
                fleet.step()
            return fleet.step_number


STRATEGIES = [
    potluck.FullShard(buddy=True, buddy_every=2),
    potluck.ShardGradOp(buddy=True, buddy_every=2, weights=(5.0, 0.0, 1.0)),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.kind)
def test_each_rank_has_its_part_and_a_copy_of_its_neighbours(
    tmp_path: Path, strategy: potluck.ShardingStrategy
) -> None:
    assert run_ranks(3, train, str(tmp_path), strategy, 5) == [5, 5, 5]
    for rank in range(3):
        own = numbered(rank_folder(tmp_path, rank) / OWN, 3)  # before the first step, after 2, after 4
        copy = numbered(rank_folder(tmp_path, (rank + 1) % 3) / NEIGHBOUR, 3)
        assert '"step": 4' in (own / STANDING).read_text()
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (own / name).read_bytes() == (copy / name).read_bytes()
        held = sorted(path.name for path in rank_folder(tmp_path, rank).iterdir())
        assert held == [".aside-neighbour", ".aside-own", copy.name, own.name]
    assert sum(file.stat().st_size for file in tmp_path.rglob("own-*/model.safetensors")) > 4 * 256


def refused(strategy: potluck.ShardingStrategy) -> str:
    with pytest.raises(ConfigError) as caught:
        train(None, strategy, 1)
    return str(caught.value)


def test_without_our_launcher_a_sentence_says_what_to_do() -> None:
    for said in run_ranks(2, refused, STRATEGIES[0]):
        assert said.startswith("strategy.buddy keeps copies in /dev/shm") and "Start the run with `potluck run`" in said


def test_alone_there_is_no_buddy_to_keep() -> None:
    assert run_ranks(1, train, None, STRATEGIES[0], 3) == [3]


def test_replicas_that_step_by_themselves_keep_none() -> None:
    with pytest.raises(ConfigError, match="use the Sync policy"):
        fleet = potluck.Engine(policy=potluck.Cadence.published(), strategy=STRATEGIES[0])
        model = nn.Linear(2, 2)
        fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
