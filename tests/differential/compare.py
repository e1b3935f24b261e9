"""Whether a run gave what its judge says: within rounding, which differs by the type of its numbers."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.differential.cases import Case
from tests.differential.judge import Expected, precision_of
from tests.differential.models import build


class Tolerance(NamedTuple):
    weights: float
    """Of each number, beside 1."""
    change: float
    """Of the change of a tensor since the start."""
    loss: float
    """What is told of a step is rounded to float32, whatever the model's type."""
    norm: float


TOLERANCES = {
    "float64": Tolerance(1e-9, 1e-7, 1e-6, 1e-6),
    "float32": Tolerance(1e-5, 0.02, 1e-4, 1e-3),
    "bf16": Tolerance(2e-3, 0.3, 0.03, 0.3),
}
LARGEST = {"float64": torch.finfo(torch.float64).max, "float32": torch.finfo(torch.float32).max}
"""Beyond it a run has infinity where the judge, in float64, still has a number."""


def is_chaotic(case: Case, expected: Expected, shaken: Expected) -> bool:
    """Whether the judge, begun from weights that are off by no more than rounding is, ends elsewhere itself; or comes
    to numbers that the run's type has no room for."""
    limit = _tolerance(case)
    got, want = shaken.evaluated, expected.evaluated
    return bool(
        any(_overflows(case, step) for steps in expected.steps for step in steps)
        or _compare_tensors(expected.tensors, shaken.tensors, expected.start, limit)
        or (got is not None and want is not None and got != want and not abs(got - want) <= limit.loss * abs(want))
        or any(
            _compare_steps(steps, others, limit, is_sync=leg.policy.startswith("Sync"))
            for leg, steps, others in zip(case.legs, expected.steps, shaken.steps, strict=True)
        )
    )


def compare_calm_steps(case: Case, expected: Expected, shaken: Expected, told: list[list[dict[str, Any]]]) -> list[str]:
    """Of a chaotic run, what is wrong with the steps before that: those of which the shaken judge says the same, by
    far."""
    limit = _tolerance(case)
    strict = Tolerance(*(each / 100 for each in limit))
    for number, leg in enumerate(case.legs):
        is_sync = leg.policy.startswith("Sync")
        calm = 0
        pairs = list(zip(expected.steps[number], shaken.steps[number], strict=False))
        while calm < len(pairs) and not _overflows(case, pairs[calm][0]):
            if _compare_steps([pairs[calm][0]], [pairs[calm][1]], strict, is_sync=is_sync):
                break
            calm += 1
        events = [event for event in told[number][0]["events"] if is_sync or event[2]][:calm]
        if not case.host and (wrong := _compare_steps(expected.steps[number][:calm], events, limit, is_sync=is_sync)):
            return [f"leg {number}: {each}" for each in wrong]
        if calm < len(pairs):
            break
    return []


def _overflows(case: Case, step: list[float]) -> bool:
    """A loss is summed over samples."""
    loss, norm, samples = step
    return max(abs(loss) * samples, abs(norm)) > LARGEST["float64" if precision_of(case) == "float64" else "float32"]


def may_lack(case: Case, expected: Expected) -> set[str]:
    """What a checkpoint leaves out: parameters that were frozen from the start, if they take more bytes than those that
    are trained, and as far as nobody has changed them."""
    model = build(case.model, getattr(torch, case.dtype), case.seed)
    every = dict(model.named_parameters(remove_duplicate=False))
    frozen = {name: parameter for name, parameter in every.items() if not parameter.requires_grad}
    size = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    if case.host or size <= trained:
        return set()
    return {
        name
        for name, was in frozen.items()
        if torch.equal(expected.tensors[name], was.to(expected.tensors[name].dtype))
    }


def _tolerance(case: Case) -> Tolerance:
    return TOLERANCES[precision_of(case)]


def compare(case: Case, expected: Expected, told: list[list[dict[str, Any]]], found: dict[str, Tensor]) -> list[str]:
    """What is wrong, in sentences; nothing if all is right."""
    if expected.complaints:
        return expected.complaints
    limit = _tolerance(case)
    complaints = compare_steps(case, expected, told)
    for number, ranks in enumerate(told):
        drifted = [proof for rank in ranks for proof in rank["proofs"] if not proof[2]]
        complaints += [f"leg {number}: the weights had drifted apart at the end of an epoch"] if drifted else []
    missing = may_lack(case, expected) - set(found)
    tensors = {name: tensor for name, tensor in expected.tensors.items() if name not in missing}
    complaints += _compare_tensors(tensors, found, expected.start, limit)
    averages = {f"the average of {name}": tensor for name, tensor in expected.average.items()}
    means = {f"the average of {name}": tensor for name, tensor in told[-1][0]["average"].items()}
    start = {f"the average of {name}": expected.start[name] for name in expected.average}
    complaints += _compare_tensors(averages, means, start, limit)
    got, want = told[-1][0]["evaluated"], expected.evaluated
    if want is not None and not (
        got == want or abs(got - want) <= limit.loss * abs(want) or (math.isnan(got) and math.isnan(want))
    ):
        complaints.append(f"evaluate() gave {got!r}, and the judge {want!r}")
    return complaints


def compare_steps(case: Case, expected: Expected, told: list[list[dict[str, Any]]]) -> list[str]:
    """What is wrong with what was told of each step."""
    complaints = []
    for number, (leg, ranks) in enumerate(zip(case.legs, told, strict=True)):
        is_sync = leg.policy.startswith("Sync")
        events = [event for event in ranks[0]["events"] if is_sync or event[2]]
        steps = [step for step in expected.steps[number] if is_sync or step[2]]
        if case.host:  # the worker that stays may have come when others had begun
            steps = steps[len(steps) - len(events) :]
        wrong = _compare_steps(steps, events, _tolerance(case), is_sync=is_sync)
        complaints += [f"leg {number}: {each}" for each in wrong]
    return complaints


def _compare_steps(
    steps: list[list[float]], events: list[list[float]], limit: Tolerance, *, is_sync: bool
) -> list[str]:
    if len(steps) != len(events):
        return [f"{len(events)} steps were told, and there were {len(steps)}"]
    for number, (step, event) in enumerate(zip(steps, events, strict=True), start=1):
        for name, want, got, near in zip(
            ("loss", "norm", "samples"), step, event, (limit.loss, limit.norm, 1e-9), strict=True
        ):
            if name == "norm" and not is_sync:
                continue
            if math.isnan(want) != math.isnan(got):
                return [f"step {number} has the {name} {got}, and the judge {want}: only one of them was skipped"]
            if not math.isnan(want) and abs(want - got) > near * abs(want) + 1e-12:
                return [f"step {number} has the {name} {got!r}, and the judge {want!r}"]
    return []


def _compare_tensors(
    expected: dict[str, Tensor], found: dict[str, Tensor], start: dict[str, Tensor], limit: Tolerance
) -> list[str]:
    complaints = []
    for name, want in expected.items():
        got = found.get(name)
        if got is None:
            complaints.append(f"{name} is not in the checkpoint")
        elif got.shape != want.shape:
            complaints.append(f"{name} has the shape {tuple(got.shape)}, not {tuple(want.shape)}")
        elif not want.is_floating_point() and not want.is_complex():
            if not torch.equal(got, want.to(got.dtype)) or got.dtype != want.dtype:
                complaints.append(f"{name} is {got.tolist()}, not {want.tolist()}")
        elif told := _compare_numbers(_wide(got), _wide(want), _wide(start[name]), limit):
            complaints.append(f"{name} {told}")
    return complaints


def _wide(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


def _compare_numbers(got: Tensor, want: Tensor, start: Tensor, limit: Tolerance) -> str:
    odd, wanted = int((~got.isfinite()).sum()), int((~want.isfinite()).sum())
    if not torch.equal(got.isfinite(), want.isfinite()):
        return f"has {odd} numbers that are not finite, and the judge {wanted}"
    is_finite = want.isfinite()
    if not torch.equal(got[~is_finite].nan_to_num(), want[~is_finite].nan_to_num()):
        return "is not finite in another way"
    off, change = (got - want)[is_finite].abs(), (want - start)[is_finite].norm()
    near = limit.weights * (1 + want[is_finite].abs()) + limit.change * change / math.sqrt(max(1, off.numel()))
    if not (off > near).any():
        return ""
    return f"is off by {float(off.max()):.3g}, where it changed by {float(change):.3g} (norm)"
