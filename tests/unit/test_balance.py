"""Parts of a batch follow measured speed, and noise does not move them."""

import pytest

from potluck.agree.shares import STEPS, Balance


def settle(balance: Balance, rows: list[int], seconds_per_row: list[float], fixed_s: float = 0.0) -> list[int]:
    """The parts after many steps at these speeds."""
    for _ in range(10 * STEPS):
        busy = [fixed_s + part * each for part, each in zip(rows, seconds_per_row, strict=True)]
        if (changed := balance.report(rows, busy)) is not None:
            rows = changed[0]
    return rows


@pytest.mark.parametrize("fixed_s", [0.0, 0.05])
def test_all_finish_together(fixed_s: float) -> None:
    rows = settle(Balance(64, 3), [22, 21, 21], [0.01, 0.01, 0.03], fixed_s)
    assert sum(rows) == 64
    took = [fixed_s + part * each for part, each in zip(rows, [0.01, 0.01, 0.03], strict=True)]
    assert max(took) < 1.2 * min(took)


def test_a_device_that_changes_its_speed_is_followed() -> None:
    balance = Balance(40, 2)
    rows = settle(balance, [20, 20], [0.01, 0.01])
    assert rows == [20, 20]
    rows = settle(balance, rows, [0.03, 0.01])
    assert rows == [10, 30]
    assert settle(balance, rows, [0.01, 0.01]) == [20, 20]


def test_the_reason_is_a_sentence_with_the_numbers() -> None:
    balance = Balance(8, 2)
    told = [balance.report([4, 4], [0.4, 0.1]) for _ in range(STEPS)]
    assert told[:-1] == [None] * (STEPS - 1) and told[-1] is not None
    assert told[-1] == (
        [2, 6],
        "Worker 0 takes 4 times as long for a row as worker 1, so each step's 8 rows are shared 2, 6: about 200 ms a"
        " step instead of 400.",
    )


def test_noise_and_short_steps_move_nothing() -> None:
    balance = Balance(8, 2)
    for step in range(50):
        assert balance.report([4, 4], [0.1 + 0.02 * (step % 2), 0.1]) is None
        assert balance.report([2, 1], [0.5, 0.1]) is None


def test_nobody_is_left_without_a_row() -> None:
    assert min(settle(Balance(4, 3), [2, 1, 1], [0.001, 0.001, 5.0])) == 1
