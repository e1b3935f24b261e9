from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st

from potluck.agree.shares import share_out
from potluck.fleet.ledger import Ledger, prove
from potluck.fleet.tree import slice_rows


def test_shares_follow_the_published_sizes() -> None:
    """From tests/vectors/elche.json, `sizes`."""
    assert share_out(100, [1.0]) == [100]
    assert share_out(100, [1, 1, 1]) == [34, 33, 33]
    assert share_out(10, [1] * 7) == [2, 2, 2, 1, 1, 1, 1]
    assert share_out(3, [1] * 4) == [1, 1, 1, 0]
    assert share_out(900, [3, 2, 1]) == [450, 300, 150]
    assert share_out(101, [0.7, 0.3]) == [71, 30]
    assert share_out(100, [0, 0]) == [50, 50]


weights = st.lists(st.floats(0, 1e300) | st.integers(0, 1 << 70), min_size=1, max_size=9).filter(any)


@given(st.integers(0, 10_000) | st.integers(0, 1 << 80), weights)
@example((1 << 53) + 3, [1.0])
@example(1000, [0.0, 5e-324])
def test_shares_are_complete_and_each_within_one_of_its_exact_part(total: int, weights: list[float]) -> None:
    parts = share_out(total, weights)
    assert sum(parts) == total
    exact = [total * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    assert all(abs(part - share) < 1 for part, share in zip(parts, exact, strict=True))
    assert all(part == 0 for part, weight in zip(parts, weights, strict=True) if weight == 0)


@given(st.integers(0, 1 << 80), st.integers(1, 9))
def test_equal_shares_are_those_of_whole_division_with_the_longer_ones_first(total: int, world: int) -> None:
    short, longer = divmod(total, world)
    assert share_out(total, [1.0] * world) == [short + (rank < longer) for rank in range(world)]


@given(st.integers(0, 1 << 62), st.integers(0, 1 << 62), st.integers(1, 99))
def test_the_slices_of_a_step_are_even_and_complete_at_every_size(row: int, rows: int, slices: int) -> None:
    found = slice_rows(row, rows, slices)
    assert [start for start, _ in found] == [row, *(end for _, end in found[:-1])] and found[-1][1] == row + rows
    sizes = [end - start for start, end in found]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


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
