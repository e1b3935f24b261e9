"""In which form gradients travel, from what agreeing costs: tried where it may help, and kept where it does."""

from potluck.agree.wire_choice import PASSED_OVER, WATCHED, WireChoice

ROUND = PASSED_OVER + WATCHED


def told(choice: WireChoice, agree_s: float, step_s: float, steps: int = ROUND) -> list[str]:
    return [sentence for _ in range(steps) if (sentence := choice.report(agree_s, step_s)) is not None]


def test_agreeing_that_costs_little_stays_as_it_is() -> None:
    choice = WireChoice()
    assert told(choice, 0.002, 0.1, 5 * ROUND) == [] and choice.wire == "fp32"
    told(choice, 0.05, 0.1)  # and is watched all the time
    assert choice.wire == "int4"


def test_agreeing_that_bytes_make_long_is_coded_and_stays_so() -> None:
    choice = WireChoice()
    assert told(choice, 0.2, 0.5) == [
        "Agreeing takes 40% of each step (200 of 500 ms): from now on gradients travel as int4, in an eighth of the"
        " bytes."
    ]
    assert choice.wire == "int4" and told(choice, 0.03, 0.33, 5 * ROUND) == []
    assert choice.wire == "int4" and choice.is_settled


def test_agreeing_that_is_long_for_other_reasons_is_not() -> None:
    choice = WireChoice()
    told(choice, 0.02, 0.1)
    assert told(choice, 0.019, 0.1, 5 * ROUND) == [
        "Fewer bytes have not made agreeing shorter (19 ms, and 20 before): gradients travel as fp32 again."
    ]
    assert choice.wire == "fp32" and choice.is_settled and told(choice, 0.09, 0.1, 5 * ROUND) == []


def test_a_few_odd_steps_decide_nothing() -> None:
    choice = WireChoice()
    for number in range(5 * ROUND):
        choice.report(0.5 if number % ROUND < PASSED_OVER + 3 else 0.0, 1.0)
    assert choice.wire == "fp32"


def test_a_run_continues_with_what_it_had_chosen() -> None:
    choice = WireChoice()
    choice.resume("int4")
    assert choice.wire == "int4" and told(choice, 0.5, 1.0, 5 * ROUND) == []
    choice.resume("fp32")
    assert choice.wire == "fp32" and told(choice, 0.5, 1.0)
