"""What became of a case: right, refused with a sentence, or wrong in one of several ways."""

import time
import traceback
from dataclasses import dataclass

from tests.differential.cases import Case
from tests.differential.compare import compare, is_chaotic
from tests.differential.judge import judge
from tests.differential.outcomes import Failed, Refused
from tests.differential.runner import run_case


@dataclass(frozen=True, slots=True)
class Verdict:
    case: Case
    kind: str
    """right, refused, or a fault; or what nobody can judge: diverged, chaotic.

    Faults: WRONG, CRASH, HANG, LATE (refused after the first step), JUDGE (of the judge's own).
    """
    detail: str = ""
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        return self.kind not in ("right", "refused", "diverged", "chaotic")


def verdict_of(case: Case) -> Verdict:
    started = time.monotonic()
    kind, detail = _decide(case)
    return Verdict(case, kind, detail, time.monotonic() - started)


def _decide(case: Case) -> tuple[str, str]:
    try:
        told, found = run_case(case)
    except Refused as refusal:
        return "refused", str(refusal)
    except Failed as failure:
        return failure.kind, str(failure)
    except Exception:
        return "CRASH", f"when its checkpoint was read: {traceback.format_exc()}"
    try:
        expected = judge(case, told)
        if expected.has_diverged and not expected.complaints:
            return "diverged", ""
        complaints = compare(case, expected, told, found)
        if complaints and not expected.complaints and is_chaotic(case, expected, judge(case, told, is_shaken=True)):
            return "chaotic", ""
    except Exception:
        return "JUDGE", traceback.format_exc()
    return ("WRONG", "; ".join(complaints[:4])) if complaints else ("right", "")
