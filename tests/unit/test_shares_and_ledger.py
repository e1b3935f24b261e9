from hypothesis import given
from hypothesis import strategies as st

from potluck.agree.policy import share_out
from potluck.fleet.ledger import Ledger, prove


def test_shares_follow_the_published_sizes() -> None:
    """From shared/vectors/elche.json, `sizes`."""
    assert share_out(100, [1.0]) == [100]
    assert share_out(100, [1, 1, 1]) == [34, 33, 33]
    assert share_out(10, [1] * 7) == [2, 2, 2, 1, 1, 1, 1]
    assert share_out(3, [1] * 4) == [1, 1, 1, 0]
    assert share_out(900, [3, 2, 1]) == [450, 300, 150]
    assert share_out(101, [0.7, 0.3]) == [71, 30]
    assert share_out(100, [0, 0]) == [50, 50]


@given(st.integers(0, 10_000), st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
def test_shares_are_complete_and_each_within_one_of_its_exact_part(total: int, weights: list[float]) -> None:
    parts = share_out(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) < 1 + 1e-6


ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda r: (r[0], r[0] + r[1])), max_size=12)


@given(ranges, st.integers(0, 30))
def test_a_proof_counts_what_counting_one_by_one_counts(found: list[tuple[int, int]], total: int) -> None:
    times = [sum(start <= position < end for start, end in found) for position in range(50)]
    proof = prove(found, total)
    assert proof.used == sum(n > 0 for n in times[:total])
    assert proof.repeated == sum(n > 1 for n in times[:total])
    assert proof.holds == (times[:total] == [1] * total and not any(times[total:]))


def test_the_proof_is_a_sentence_that_says_what_is_wrong() -> None:
    assert str(prove([(0, 4), (4, 10)], 10)) == "each of its 10 samples was used exactly once"
    assert str(prove([(0, 4), (3, 9)], 10)) == "of its 10 samples, 1 not used, 1 used more than once"
    assert str(prove([(0, 12)], 10)) == "of its 10 samples, 2 outside the epoch"


def test_neighbouring_ranges_are_kept_as_one() -> None:
    ledger = Ledger()
    for start, end in [(0, 2), (2, 5), (8, 9), (9, 9)]:
        ledger.record(start, end)
    assert ledger.ranges == [(0, 5), (8, 9)]
