"""The switches change how a step is computed, and not what it computes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import StepConfig
from potluck.errors import ConfigError
from potluck.train.model import GPT, ModelConfig, next_token_loss
from tests.parity.test_sync import STILL
from tests.ranks import run_ranks

TINY = ModelConfig(dim=16, layers=2, heads=2, context=8)


def train(config: StepConfig, steps: int = 3) -> dict[str, Any]:
    with potluck.init(STILL, step=config) as fleet:
        torch.manual_seed(0)
        model = GPT(TINY).to(fleet.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rows = torch.randint(0, 256, (4 * steps, TINY.context + 1), generator=torch.Generator().manual_seed(1))
        _, _, loader = fleet.prepare(model, optimizer, rows, batch_size=4)
        saved: list[int] = []
        for batch in loader:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
                loss, tokens = next_token_loss(model, batch)
            fleet.backward(loss, samples=tokens)
            fleet.step()
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        with torch.no_grad():
            logits = model(rows[:1, :-1])
        return {"weights": weights, "saved": sum(saved), "names": list(model.state_dict()), "logits": logits}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return run_ranks(2, train, StepConfig())[0]  # type: ignore[no-any-return]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_checkpointed_activations_give_the_same_weights_and_keep_less(plain: dict[str, Any]) -> None:
    found = run_ranks(2, train, StepConfig(checkpoint_activations=True))[0]
    assert torch.equal(found["weights"], plain["weights"])
    assert found["names"] == plain["names"]
    assert found["saved"] < 0.6 * plain["saved"]


def test_bf16_computes_in_bf16_and_keeps_its_weights_in_fp32(plain: dict[str, Any]) -> None:
    found = run_ranks(2, train, StepConfig(precision="bf16"))[0]
    # A loop of one's own computes its loss of float32 numbers, which have been computed in bf16.
    assert found["logits"].dtype == torch.float32
    assert torch.equal(found["logits"], found["logits"].bfloat16().float())
    assert not torch.equal(plain["logits"], plain["logits"].bfloat16().float())
    assert found["weights"].dtype == torch.float32
    # bf16 keeps 8 bits of a number; after three steps of 1e-3 the weights are apart by a part of those steps.
    assert 0 < relative(found["weights"], plain["weights"]) < 0.02


@pytest.mark.slow
def test_compiled_blocks_give_the_same_weights(plain: dict[str, Any]) -> None:
    found = run_ranks(2, train, StepConfig(compile=True), timeout_s=110)[0]
    # The compiler fuses and so rounds otherwise: equal within float error, not to the bit.
    assert relative(found["weights"], plain["weights"]) < 1e-4
    assert found["names"] == plain["names"]


def test_all_switches_at_once_train() -> None:
    config = StepConfig(precision="bf16", compile=True, checkpoint_activations=True, clip=1.0)
    found = run_ranks(2, train, config, 1, timeout_s=110)
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    assert torch.isfinite(found[0]["weights"]).all()


def test_compile_really_compiles() -> None:
    model = GPT(TINY)
    potluck.Engine(step=StepConfig(compile=True)).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(block._compiled_call_impl is not None for block in model.blocks)


def test_a_model_without_repeated_blocks_cannot_checkpoint_them() -> None:
    model = nn.Linear(2, 2)
    engine = potluck.Engine(step=StepConfig(checkpoint_activations=True))
    with pytest.raises(ConfigError, match="found no repeated blocks"):
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_compile_without_a_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    model = nn.Linear(2, 2)
    engine = potluck.Engine(step=StepConfig(compile=True))
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler"):
        engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


# Steps that are not finite


def train_with_bad_rows(bad_rows: list[int], limit: int = 3) -> dict[str, Any]:
    from potluck.errors import Diverged

    with potluck.init(STILL, step=StepConfig(nonfinite_limit=limit)) as fleet:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        x = torch.randn(24, 2)
        order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
        x[order[bad_rows]] = float("nan")
        _, _, loader = fleet.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), x, batch_size=4)
        events: list[str] = []
        fleet.events.listeners.append(lambda event: events.append(getattr(event, "reason", type(event).__name__)))
        said = ""
        try:
            for batch in loader:
                fleet.backward(F.mse_loss(model(batch), torch.zeros(len(batch), 1)), samples=len(batch))
                fleet.step()
        except Diverged as error:
            said = str(error)
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        return {"weights": weights, "events": events, "skipped": fleet.skipped, "said": said}


def test_a_step_that_is_not_finite_is_skipped_by_all_together() -> None:
    found = run_ranks(2, train_with_bad_rows, [6])  # the second step, on worker 1
    for result in found:
        assert result["skipped"] == 1
        assert result["events"][1] == "the loss of worker 1 is not finite"
        assert result["events"].count("StepDone") == 5
        assert torch.isfinite(result["weights"]).all()
        assert torch.equal(result["weights"], found[0]["weights"])


def test_after_a_limit_in_a_row_the_run_stops_with_a_sentence() -> None:
    for result in run_ranks(2, train_with_bad_rows, [4, 8, 12], 3):
        assert "Stopped after 3 skipped steps in a row, at step 4: the loss of worker 0 is not finite" in result["said"]
        assert torch.isfinite(result["weights"]).all()


def test_skipped_steps_that_are_not_in_a_row_do_not_stop_it() -> None:
    for result in run_ranks(2, train_with_bad_rows, [0, 8, 16], 2):
        assert result["said"] == "" and result["skipped"] == 3


def explode() -> dict[str, Any]:
    """A finite loss with an infinite gradient."""
    with potluck.init(STILL) as fleet:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.tensor([[0.0 if fleet.rank else 1.0]])
        fleet.backward(torch.sqrt(model(x)).mean(), samples=1)
        event = fleet.step()
        return {"weight": model.weight.item(), "reason": getattr(event, "reason", "")}


def test_an_infinite_gradient_is_skipped_though_the_loss_is_finite() -> None:
    for result in run_ranks(2, explode):
        assert result == {"weight": 1.0, "reason": "the gradient's norm (nan) is not finite"}
