"""The price of windows and of steps together, and which way is taken."""

import pytest

from potluck.agree.costs import CLEAR, LEARNING, WindowCosts


def told(batch_s: float, step_s: float = 0.0, agree_s: float = 0.0) -> WindowCosts:
    costs = WindowCosts()
    if step_s:
        costs.report_step(batch_s, step_s)
    if agree_s:
        costs.report_window(batch_s, agree_s)
    return costs


@pytest.mark.parametrize("agree_s", [0.01, 0.1, 1.0, 10.0])
def test_no_other_length_is_cheaper(agree_s: float) -> None:
    costs = told(0.1, agree_s=agree_s)
    best = costs.best(10_000)
    assert costs.price(best) <= min(map(costs.price, range(1, 10_000))) * 1.005
    assert costs.best(3) == min(3, best)


def test_a_link_that_costs_little_is_used_in_every_step_and_one_that_costs_much_is_not() -> None:
    cheap, dear = told(1.0, 0.03), told(1.0, 2.0)
    assert not cheap.decide(200) and cheap.anchor == 0
    assert cheap.why_together(200) == (
        "Agreeing in every step adds 3 % to the time of computing; averaging only every 4 batches would add 7 % until"
        " the loss is as low"
    )
    assert dear.decide(200) and dear.anchor == dear.best(200) > 1
    assert dear.why_apart(dear.anchor).startswith(
        f"Agreeing in every step would add 200 % to the time of computing; averaging only every {dear.anchor} batches"
    )


def test_it_comes_back_when_the_link_is_fast_again_and_noise_moves_nothing() -> None:
    costs = told(1.0, 2.0)
    assert costs.decide(200)
    changes = 0
    for _ in range(100):
        costs.report_window(1.0, 0.03)
        costs.step_s = 0.01
        changes += costs.decide(200)
    assert changes == 1 and costs.anchor == 0
    edge = told(1.0, 0.12)
    edge.agree_s = 0.36
    found = set()
    for turn in range(100):
        edge.report_step(1.0, 0.12 * (1.1 if turn % 2 else 0.9))
        edge.decide(200)
        found.add(edge.anchor > 0)
    assert len(found) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_clocks_that_lie_change_nothing(bad: float) -> None:
    costs = told(1.0, 0.5, 1.0)
    before = costs.price(5)
    costs.report_step(bad, bad)
    costs.report_window(bad, bad)
    assert costs.price(5) == before
    assert not WindowCosts().decide(200) and 0 < CLEAR < 1 and LEARNING > 0
