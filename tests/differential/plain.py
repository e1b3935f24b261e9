"""Whether plain PyTorch can do what a case asks for at all: what it cannot is neither right nor a fault.

Such are a layer that this processor has no kernel for in fp16, and a second derivative that torch does not have.
"""

import traceback

import torch

from tests.differential.cases import Case, Leg
from tests.differential.habits import Loop
from tests.differential.models import build, loss_of, make_data
from tests.differential.optimizers import make_optimizer

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def fails_alike(case: Case, told: str) -> bool:
    """Whether one process in plain PyTorch ends with the error that a rank told."""
    return any(error and error in told for error in (_error(case, leg) for leg in case.legs))


def _error(case: Case, leg: Leg) -> str:
    try:
        _step(case, leg)
    except Exception as error:
        return traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    return ""


def _step(case: Case, leg: Leg) -> None:
    """One step of all rows, and an evaluation."""
    dtype = getattr(torch, case.dtype)
    model = build(case.model, dtype, case.seed)
    optimizer = make_optimizer(model, case.optimizer)
    Loop(case.habits, model, optimizer).before_prepare()
    if "compile=True" in leg.switches:
        for block in model.blocks:
            block.compile()
    data = make_data(case.model, case.rows, case.seed, dtype, case.samples, case.faults)
    narrow = next((kind for name, kind in TYPES.items() if f"'{name}'" in leg.switches), None)
    with torch.autocast("cpu", narrow, enabled=narrow is not None):
        loss, _ = loss_of(model, data, case.scale, case.habits)
    loss.backward()
    optimizer.step()
    with torch.no_grad(), torch.autocast("cpu", narrow, enabled=narrow is not None):
        loss_of(model.eval(), data, case.scale, case.habits)
