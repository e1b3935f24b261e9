"""Runs of groups end with the bits of tests/vectors/bits.json; on another kind of machine, with their losses.

An intended change of numbers writes the file anew: `python -m tests.parity.bits --write`, and says why.
"""

import math

import pytest

from tests.parity.bits import CASES, TOLERANCE, Case, found_in, kind_of_this_machine, read

KEPT = read()
BITS: dict[str, str] = KEPT["bits"].get(kind_of_this_machine(), {})


def _param(case: Case) -> object:
    compared = "bits" if case.name in BITS else f"losses to {TOLERANCE[case.digits]:g}"
    marks = [pytest.mark.slow] * case.is_slow
    return pytest.param(case, id=f"{case.name}: {compared}", marks=marks)


@pytest.mark.parametrize("case", [_param(case) for case in CASES])
def test_a_run_ends_as_it_did(case: Case) -> None:
    found, losses = found_in(case), KEPT["losses"][case.name]
    if case.name in BITS:
        assert (found.losses, found.digest) == (losses, BITS[case.name])
    else:
        known = [math.nan if loss is None else loss for loss in losses]
        mine = [math.nan if loss is None else loss for loss in found.losses]
        assert mine == pytest.approx(known, rel=TOLERANCE[case.digits], abs=0, nan_ok=True)


def test_the_file_has_each_case_and_no_other() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) and set(KEPT["losses"]) == set(names)
    assert all(set(of) <= set(names) for of in KEPT["bits"].values())
