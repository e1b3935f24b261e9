"""What became of a case: right, refused with a sentence, or wrong in one of several ways."""

import time
import traceback
from dataclasses import dataclass, replace

import torch

from tests.differential.cases import Case
from tests.differential.compare import compare, compare_calm_steps, compare_steps, is_chaotic
from tests.differential.data import plain_batches
from tests.differential.hosted import told_of
from tests.differential.judge import judge
from tests.differential.models import make_data
from tests.differential.outcomes import Failed, Refused
from tests.differential.plain import fails_alike
from tests.differential.refusals import is_allowed
from tests.differential.runner import Told, run_case

SHAKEN = 6
"""How often a judge that found something wrong looks whether it would end elsewhere itself: once may be luck."""


@dataclass(frozen=True, slots=True)
class Verdict:
    case: Case
    kind: str
    """right, refused, or a fault; or what nobody can judge: diverged, chaotic, torch (plain PyTorch fails alike).

    Faults: WRONG, CRASH, HANG, LATE (refused after the first step), UNASKED (refused with a sentence that no word of
    the case asks for), JUDGE (of the judge's own).
    """
    detail: str = ""
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        return self.kind not in ("right", "refused", "diverged", "chaotic", "torch")


def verdict_of(case: Case) -> Verdict:
    started = time.monotonic()
    kind, detail = _decide(case)
    return Verdict(case, kind, detail, time.monotonic() - started)


def _decide(case: Case) -> tuple[str, str]:
    try:
        told, found = run_case(case)
    except Refused as refusal:
        if not is_allowed(str(refusal), case):
            return "UNASKED", str(refusal)
        wrong = _wrong_before(case, refusal.told) if refusal.told is not None else ""
        return ("WRONG", f"before a refusal: {wrong}") if wrong else ("refused", str(refusal))
    except Failed as failure:
        if failure.kind == "LATE" and case.host and ": Diverged: " in str(failure) and _diverges(case):
            return "diverged", ""
        if failure.kind == "CRASH" and fails_alike(case, str(failure)):
            return "torch", str(failure).strip().splitlines()[-1]
        return failure.kind, str(failure)
    except Exception:
        return "CRASH", f"when its checkpoint was read: {traceback.format_exc()}"
    try:
        expected = judge(case, told)
        complaints = compare(case, expected, told, found)
        for shake in range(SHAKEN if complaints and not expected.complaints else 0):
            shaken = judge(case, told, is_shaken=True, shake=shake)
            if is_chaotic(case, expected, shaken) and not compare_calm_steps(case, expected, shaken, told):
                return "diverged" if expected.has_diverged else "chaotic", ""
    except Exception:
        return "JUDGE", traceback.format_exc()
    return ("WRONG", "; ".join(complaints[:4])) if complaints else ("right", "")


def _diverges(case: Case) -> bool:
    """Whether plain PyTorch runs away from the same rows: a host then ends the run, and says so."""
    batches = plain_batches(case, make_data(case.model, case.rows, case.seed, torch.float64, case.samples, case.faults))
    return judge(case, told_of(batches, [])).has_diverged


def _wrong_before(case: Case, told: list[list[Told]]) -> str:
    """What was wrong with the steps that were done when a loop was refused something."""
    begun = replace(case, legs=case.legs[: len(told)])
    expected = judge(begun, told, is_whole=False)
    return "; ".join(expected.complaints or compare_steps(begun, expected, told))
