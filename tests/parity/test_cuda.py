"""On a GPU: one rank, and two ranks that share it over Gloo, against plain PyTorch on the same GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import potluck
from potluck import CheckpointConfig, FitConfig, StepConfig
from potluck.errors import Interrupted
from potluck.train.model import GPT, ModelConfig, next_token_loss
from tests.parity import test_cadence, test_stages
from tests.quick import first_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TINY = ModelConfig(dim=64, layers=3, heads=4, context=32)


def rows(count: int) -> Tensor:
    return torch.randint(0, 256, (count, TINY.context + 1), generator=torch.Generator().manual_seed(1))


def make() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(TINY).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1).cpu() for parameter in model.parameters()])


def plain(steps: int) -> Tensor:
    model, optimizer = make()
    order = torch.randperm(8 * steps, generator=torch.Generator().manual_seed(0))
    for batch in rows(8 * steps)[order].split(8):
        next_token_loss(model, batch.cuda())[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def ours(steps: int, config: StepConfig, shares: tuple[float, ...] = ()) -> dict[str, Any]:
    with potluck.init(potluck.Sync(shares=shares), step=config) as fleet:
        model, optimizer = make()
        _, _, loader = fleet.prepare(model, optimizer, rows(8 * steps), batch_size=8)
        busy = []
        for batch in loader:
            loss, tokens = next_token_loss(model, batch)
            fleet.backward(loss, samples=tokens)
            busy.append([worker.busy_s for worker in fleet.step().workers])  # type: ignore[union-attr]
        return {"weights": flat(model), "device": str(fleet.device), "busy": busy}


@pytest.mark.parametrize(("world", "shares"), first_of([(1, ()), (2, ()), (2, (3.0, 1.0))]))
def test_the_weights_are_those_of_one_process(world: int, shares: tuple[float, ...]) -> None:
    found = run_ranks(world, ours, 6, StepConfig(clip=1.0), shares, timeout_s=110)
    expected = plain(6)
    assert all(result["device"] == "cuda:0" for result in found)
    assert all(torch.equal(result["weights"], found[0]["weights"]) for result in found)
    # AdamW turns the last bit of a small gradient into a larger one; six steps of 1e-3 leave this much.
    assert (found[0]["weights"] - expected).norm() / expected.norm() < 1e-4


def test_every_switch_at_once() -> None:
    config = StepConfig(clip=1.0, precision="bf16", compile=True, checkpoint_activations=True)
    found = run_ranks(2, ours, 3, config, timeout_s=110)
    expected = plain(3)
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    assert (found[0]["weights"] - expected).norm() / expected.norm() < 0.02


def fit(folder: str, stop_at: int, resume: bool) -> Tensor:
    with potluck.init(potluck.Sync(balance=False)) as fleet:
        model, optimizer = make()
        if stop_at:
            fleet.after_step.append(lambda: fleet.request_stop() if fleet.step_number == stop_at else None)
        config = FitConfig(checkpoint=CheckpointConfig(every=3), progress=False)
        trainer = potluck.Trainer(
            model, optimizer, rows(80), loss=next_token_loss, batch_size=8, folder=folder, engine=fleet, config=config
        )
        try:
            trainer.fit(resume=resume)
        except Interrupted:
            assert stop_at
        return flat(model)


def test_a_resumed_run_ends_with_bit_identical_weights(tmp_path: Path) -> None:
    whole = run_ranks(2, fit, str(tmp_path / "whole"), 0, False, timeout_s=110)
    run_ranks(2, fit, str(tmp_path / "part"), 4, False, timeout_s=110)
    resumed = run_ranks(2, fit, str(tmp_path / "part"), 0, True, timeout_s=110)
    assert torch.equal(resumed[0], whole[0])


@pytest.mark.parametrize("policy", first_of(["cadence", "async"]))
def test_replicas_that_step_by_themselves_are_those_of_one_process(policy: str) -> None:
    told = run_ranks(2, test_cadence.ours, test_cadence.POLICIES[policy], "adamw", 12, 2, timeout_s=110)
    assert torch.equal(told[0]["weights"], told[1]["weights"])
    assert told[0]["epochs"] == [[test_cadence.ROWS, test_cadence.ROWS, True]] * 2
    expected = test_cadence.judge(test_cadence.POLICIES[policy], "adamw", told)
    assert (told[0]["weights"] - expected).norm() / expected.norm() < 1e-3


def test_a_model_that_is_on_the_gpu_already_is_cut_there() -> None:
    found = run_ranks(2, test_stages.train, test_stages.PIPELINE, {"device": "cuda"}, timeout_s=110)
    test_stages.assert_same(found, test_stages.one_process())
