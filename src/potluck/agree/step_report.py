"""StepDecision: what all workers decide from the reports of a step. Pure.

Every worker gets the same reports and so reaches the same decision: to apply the step or to skip it.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.agree.records import Report


@dataclass(frozen=True, slots=True)
class StepDecision:
    samples: float
    loss: float
    """The mean over the samples of all workers."""
    norm: float
    """The norm of that mean's gradient, before clipping."""
    scale: float
    """Factor that turns the summed gradient into the one to apply."""
    fault: str | None
    """Why the step is skipped, as part of a sentence; none: it is applied."""


def fault_of(reports: Sequence[Report]) -> str | None:
    """Why the gradient of these workers is of no use, as far as their losses say so."""
    culprits = [str(rank) for rank, report in enumerate(reports) if not math.isfinite(report.loss_sum)]
    return f"the loss of worker {' and '.join(culprits)} is not finite" if culprits else None


def decide_sum(
    samples: float, loss: float, norm_of_sum: float, per: float, clip: float | None, fault: str | None = None
) -> StepDecision:
    """Each gradient of the sum was multiplied by its number of samples, and divided by `per`."""
    if not samples:
        return StepDecision(0.0, math.nan, math.nan, math.nan, "the step has no samples")
    scale = per / samples
    return decide_mean(samples, loss, norm_of_sum * scale, scale, clip, fault)


def decide_mean(
    samples: float, loss: float, norm: float, scale: float, clip: float | None, fault: str | None = None
) -> StepDecision:
    """`norm` is the mean gradient's; `scale` turns what there is into that mean."""
    if fault is None and not math.isfinite(norm):
        fault = f"the gradient's norm ({norm}) is not finite"
    if fault is None and clip is not None:
        scale *= min(1.0, _clipping(norm, clip))
    return StepDecision(samples, loss, norm, scale, fault)


def _clipping(norm: float, clip: float) -> float:
    """The factor of torch.nn.utils.clip_grad_norm_, to the bit: it computes in the type of the norm.

    A norm that float32 can hold is one of float32: of float64 one in half a billion is. Results of float64 that are
    rounded to float32 after each operation are those of float32.
    """
    rounded = _as_float32 if _as_float32(norm) == norm else float
    return rounded(rounded(1 / rounded(norm + rounded(1e-6))) * rounded(clip))


def _as_float32(number: float) -> float:
    return ctypes.c_float(number).value


def norm_of_stages(norms: Sequence[float], elsewhere: Sequence[float]) -> float:
    """Compute the norm of the whole gradient from each stage's, without what it has too and another stage counts
    (`elsewhere`).

    Not finite if any of them is not. Python's max(0.0, nan) is 0.0, which would pass for a good gradient.
    """
    whole, twice = math.hypot(*norms), math.hypot(*elsewhere)
    if not whole or not math.isfinite(whole + twice):
        return whole + twice
    return whole * math.sqrt(max(0.0, 1 - (twice / whole) ** 2))
