"""Workers with GPUs: alike whoever is there, and mixed with CPUs in one run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck.agree.policy import Cadence
from potluck.replica.precision import StepConfig
from potluck.sharding.strategy import FullShard, ShardGradOp, ShardingStrategy
from tests.fleet.faults import PHASES
from tests.fleet.fleet import BATCH, EPOCHS, ROWS, STEPS, Fleet, assert_same
from tests.fleet.judges import assert_close, judge, plain
from tests.fleet.kinds import SHORT
from tests.quick import first_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(180),
]


def test_gpu_workers_compute_the_same_bits_however_many_there_are(tmp_path: Path) -> None:
    found = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        fleet = Fleet(folder, at_least=count)
        for number in range(count):
            fleet.add(f"gpu{number}", gpu=True)
        found.append(fleet.finish(150))
    assert_same(*found)


@pytest.mark.parametrize("strategy", first_of([FullShard(), ShardGradOp()]), ids=["FullShard", "ShardGradOp"])
def test_gpu_workers_of_two_ranks_and_of_one_hold_the_same_bits(strategy: ShardingStrategy, tmp_path: Path) -> None:
    """Clipped, so that the norm is the same to the bit too. Both ranks share a GPU, and talk over Gloo."""
    options: dict[str, Any] = {"bare": True, "gpu": True, "step": StepConfig(clip=0.3)}
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add_node("two", strategy=strategy, **options)
    fleet.add("one", **options)
    assert_close(fleet.finish(150), plain(clip=0.3))
    assert fleet.server.core.refused.total() == 0


def test_cpu_and_gpu_workers_mix_in_one_run(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("cpu")
    fleet.add("gpu", gpu=True)
    finish = fleet.server.wait(150)
    assert finish is not None and not finish.failed, fleet.describe()
    for worker in fleet.workers:
        worker.process.join(20)
    a, b = (worker.weights for worker in fleet.workers)
    assert {row["name"] for r in fleet.records for row in r.workers if row["rows"]} == {"cpu", "gpu"}
    assert len(fleet.records) == STEPS
    assert fleet.server.core.refused["drifted"] == 0
    # Their optimizers round differently; the averages that they apply are the same.
    for name in a:
        torch.testing.assert_close(a[name].cpu(), b[name].cpu(), rtol=1e-3, atol=1e-4, equal_nan=True)


class Attends(nn.Module):
    """A small causal transformer: fused attention, layer norms, an embedding whose gradient adds up repeated words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.encoder(self.embed(x), mask=mask, is_causal=True))


def attend(fleet: Any) -> nn.Module:
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(3)
    model = Attends()
    words = torch.randint(0, 50, (ROWS, 65), generator=torch.Generator().manual_seed(5))
    data = (words[:, :-1], words[:, 1:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH, seed=1)
    for _ in fleet.epochs(EPOCHS):
        for x, y in loader:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            fleet.backward(loss, samples=len(x))
            fleet.step()
    return model


@pytest.mark.parametrize("precision", first_of(["fp32", "bf16"]))
def test_attention_with_deterministic_algorithms_has_the_same_bits_after_a_kill(precision: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"job": attend, "gpu": True, "step": StepConfig(precision=precision)}
    options["group"] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # without it torch refuses cuBLAS as not deterministic
    found = []
    for name, fault in (("calm", None), ("killed", PHASES["half"])):
        folder = tmp_path / name
        folder.mkdir()
        fleet = Fleet(folder, at_least=2 if fault else 1)
        if fault:
            fleet.add("victim", fault, **options)
        fleet.add("survivor", **options)
        found.append(fleet.finish(150))
    assert_same(*found)
    assert (tmp_path / "killed" / "fired-half").exists()


def test_a_killed_gpu_worker_changes_no_bit(tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "a", tmp_path / "b"
    for folder in (undisturbed, disturbed):
        folder.mkdir()
    calm = Fleet(undisturbed)
    calm.add("alone", gpu=True)
    expected = calm.finish(150)
    fleet = Fleet(disturbed, at_least=2)
    fleet.add("victim", PHASES["half"], gpu=True)
    fleet.add("survivor", gpu=True)
    assert_same(fleet.finish(150), expected)
    assert (disturbed / "fired-half").exists()


def test_a_node_of_two_ranks_on_a_gpu_beside_a_node_on_the_cpu(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add_node("gpu", policy=Cadence.published(**SHORT), bare=True, gpu=True, save_every=2)
    fleet.add_node("cpu", policy=Cadence.published(**SHORT), bare=True)
    weights = fleet.finish(150)  # the same bits on both: they subtract the same means from the same start
    for name, expected in judge(fleet).items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("where", first_of(["gpu", "node"]))
def test_gpu_workers_begin_as_sync_and_average_their_moments(where: str, tmp_path: Path) -> None:
    policy = Cadence.published(**SHORT, together=0.3, moments=True)
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("one", policy=policy, bare=True, gpu=True)
    if where == "gpu":
        fleet.add("two", policy=policy, bare=True, gpu=True)
    else:
        fleet.add_node("two", policy=policy, bare=True, gpu=True)
    weights = fleet.finish(150)
    for name, expected in judge(fleet, moments=True).items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-3, atol=1e-4)
    assert fleet.server.core.refused.total() == 0
