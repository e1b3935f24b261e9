"""What a trainer of one's own is made of: the public names of the handle, on one worker and on two."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import potluck
from potluck.errors import Interrupted
from tests.parity.test_own_loops import BATCH, make
from tests.ranks import run_ranks


def train(end_after: int, clip: float | None) -> dict[str, Any]:
    with potluck.init() as fleet:
        model, optimizer, data = make()
        assert not fleet.is_prepared and not fleet.is_split
        model, optimizer, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH)
        said: dict[str, Any] = {
            "named": fleet.broadcast(f"from {fleet.rank}"),
            "other": fleet.broadcast(fleet.rank, src=fleet.world - 1),
        }
        fleet.barrier()
        fleet.clip = clip
        fleet.loop.end_after(end_after, rows_of_epoch=loader.rows, batch_size=BATCH)
        grads: list[torch.Tensor] = []
        optimizer.register_step_pre_hook(lambda *told: grads.append(next(model.parameters()).grad.clone()))
        before: list[int] = []
        fleet.before_step.append(lambda: before.append(fleet.step_number))
        passed: list[int] = []

        def after() -> None:
            if fleet.has_passed(2):
                passed.append(fleet.step_number)
            if fleet.step_number == end_after:
                fleet.end()

        fleet.after_agreement.append(after)
        for _ in fleet.passes(3, lambda: None):
            for x, y in loader:
                fleet.backward(F.mse_loss(model(x), y), samples=len(x))
                fleet.step()
        assert fleet.is_prepared and fleet.stopping and not fleet.is_under_way
        return said | {
            "steps": fleet.step_number,
            "before": len(before),
            "passed": passed,
            "grads": grads,
            "limit": fleet.loop.rows_limit,
            "position": (fleet.position.epoch, fleet.position.row),
            "words": str(fleet.interrupted("Saved nowhere.")),
        }


def test_a_trainer_of_ones_own_ends_where_it_says_and_sees_the_gradient_of_all() -> None:
    (one,) = run_ranks(1, train, 5, None)
    two = run_ranks(2, train, 5, None)
    for each in (one, *two):
        assert each["named"] == "from 0" and each["steps"] == each["before"] == 5 and each["passed"] == [2, 4]
        assert each["position"] == one["position"] and each["limit"] == one["limit"]
        assert each["words"].startswith("Stopped after step 5. Saved nowhere.")
        for mine, alone in zip(each["grads"], one["grads"], strict=True):
            assert torch.allclose(mine, alone, atol=1e-6), "a hook sees the mean over all workers"
    assert [each["other"] for each in two] == [1, 1]


def test_a_norm_that_is_set_later_is_kept_to() -> None:
    (free,) = run_ranks(1, train, 2, None)
    (clipped,) = run_ranks(1, train, 2, 1e-3)
    assert clipped["grads"][0].norm() < 2e-3 < free["grads"][0].norm()


def test_an_error_that_says_where_the_run_stands_ends_the_process_as_ctrl_c_does() -> None:
    fleet = potluck.init()
    with pytest.raises(Interrupted, match=r"Stopped after step 0\."):
        raise fleet.interrupted()
