"""Every strategy in a process group of one rank, as torchrun starts it, against plain PyTorch on the same device.

On a GPU that group is NCCL's: all of NCCL that one GPU can run. On a CPU it is Gloo's. Between several GPUs NCCL was
never run; tests/unit/test_devices.py has what is chosen there.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import potluck
from potluck import Async, Cadence, FullShard, HybridShard, NoShard, ShardGradOp, StepConfig, Sync
from potluck.devices import choose_device
from potluck.link.link import RENDEZVOUS, connect
from potluck.save.export import write_plain
from potluck.train.model import GPT, ModelConfig, next_token_loss
from tests.gathered import home
from tests.quick import first_of
from tests.ranks import run_ranks

STEPS, BATCH = 6, 8
TINY = ModelConfig(dim=64, layers=3, heads=4, context=32)
STRATEGIES: dict[str, Any] = {
    "none": NoShard(),
    "zero2": ShardGradOp(),
    "zero1": ShardGradOp(keep_gradients=True),
    "zero2 by weight": ShardGradOp(weights=(1.0,)),
    "full": FullShard(),
    "full by weight": FullShard(weights=(1.0,)),
    "full by memory": FullShard(weights="memory"),
    "hybrid": HybridShard(intra_node_size=1),
}


@contextmanager
def as_torchrun_starts_it() -> Iterator[None]:
    """Our own launcher makes no group for one rank; torchrun does."""
    del os.environ[RENDEZVOUS]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    yield


def rows() -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (STEPS * BATCH, TINY.context + 1), generator=draw)


def make() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(TINY)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def plain() -> Tensor:
    model, _ = make()
    model.to(home())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    order = torch.randperm(STEPS * BATCH, generator=torch.Generator().manual_seed(0))
    for batch in rows()[order].split(BATCH):
        next_token_loss(model, batch.to(home()))[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().reshape(-1).cpu() for parameter in model.parameters()])


def ours(strategy: Any, folder: str, policy: Any = Sync()) -> dict[str, Any]:
    with as_torchrun_starts_it(), potluck.init(policy, strategy, step=StepConfig(clip=1.0)) as fleet:
        model, optimizer = make()
        model, optimizer, loader = fleet.prepare(model, optimizer, rows(), batch_size=BATCH, micro_batch_size=3)

        def train() -> None:
            for batch in loader:
                loss, tokens = next_token_loss(model, batch)
                fleet.backward(loss, samples=tokens)
                fleet.step()

        train()
        weights = saved(fleet, folder, "first")
        train()
        assert fleet.load(Path(folder) / "first")
        again = saved(fleet, folder, "again")
        return {"weights": weights, "loaded": again, "device": str(fleet.device), "backend": _backend()}


def saved(fleet: Any, folder: str, name: str) -> Tensor:
    """What a checkpoint holds: split parameters have no memory between steps."""
    fleet.save(Path(folder) / name, keep_last=1)
    fleet.wait_for_saves()
    (checkpoint,) = (Path(folder) / name).glob("step-*")
    write_plain(checkpoint, out := Path(folder) / f"{name}.safetensors")
    stored = load_file(out)
    return torch.cat([stored[key].reshape(-1) for key, _ in make()[0].named_parameters()])


def _backend() -> str:
    group = dist.group.WORLD
    assert group is not None
    return str(group._get_backend(home()).name())


@pytest.mark.parametrize("name", first_of(STRATEGIES))
def test_a_group_of_one_computes_what_plain_pytorch_does(name: str, tmp_path: Path) -> None:
    found = run_ranks(1, ours, STRATEGIES[name], str(tmp_path), timeout_s=110)[0]
    assert (found["device"], found["backend"]) == (("cuda:0", "nccl") if torch.cuda.is_available() else ("cpu", "gloo"))
    expected = plain()
    # AdamW turns the last bit of a small gradient into a larger one; six steps of 1e-3 leave this much.
    assert (found["weights"] - expected).norm() / expected.norm() < 1e-4
    assert torch.equal(found["loaded"], found["weights"])


def each_operation() -> bool:
    with as_torchrun_starts_it():
        link = connect(choose_device(), patience_s=30)
    for each in (link, link.part([[0]])):
        there = torch.arange(5.0, device=home())
        each.start_sum(there).wait()
        each.broadcast(there)
        assert there.tolist() == [0, 1, 2, 3, 4]
        assert each.gather_rows([1.5, 2.5]) == [[1.5, 2.5]]
        assert each.gather_bytes(b"bytes") == [b"bytes"]
    backend = _backend()
    link.close()
    return backend == ("nccl" if torch.cuda.is_available() else "gloo")


def test_each_operation_of_a_link_works_in_a_group_of_one() -> None:
    assert run_ranks(1, each_operation) == [True]


@pytest.mark.parametrize("policy", first_of([Cadence.published(anchor=2), Async.published(anchor=4)]), ids=repr)
def test_a_policy_that_averages_replicas_has_nothing_to_average_in_a_group_of_one(policy: Any, tmp_path: Path) -> None:
    found = run_ranks(1, ours, NoShard(), str(tmp_path), policy, timeout_s=110)[0]
    expected = plain()
    assert (found["weights"] - expected).norm() / expected.norm() < 1e-4
    assert torch.equal(found["loaded"], found["weights"])
