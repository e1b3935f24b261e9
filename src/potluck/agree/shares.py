"""Whole numbers in proportion to weights: rows among workers, parameters among ranks. Pure, and exact at every size.

Floats would be wrong from 2^53 on, and each of them is a fraction of whole numbers; so those are counted with.
"""

import math
from collections.abc import Sequence


def share_out(total: int, weights: Sequence[float]) -> list[int]:
    """Parts of `total` in proportion to the weights: each within 1 of its exact part, ties to the first.

    Their sum is `total`, and a weight of zero gets nothing. Weights that are all zero count as equal.
    """
    ratios = [weight.as_integer_ratio() for weight in weights]
    one = math.lcm(*(denominator for _, denominator in ratios))
    whole = [numerator * (one // denominator) for numerator, denominator in ratios]
    if not any(whole):
        whole = [1] * len(whole)
    exact = [divmod(total * part, sum(whole)) for part in whole]
    parts = [part for part, _ in exact]
    by_rest = sorted(range(len(parts)), key=lambda rank: (-exact[rank][1], rank))
    for rank in by_rest[: total - sum(parts)]:
        parts[rank] += 1
    return parts


def without_singles(parts: Sequence[int]) -> list[int]:
    """The same total in parts none of which is 1, if the total is not: from the largest, or else by fewer parts."""
    found = list(parts)
    while sum(found) > 1 and 1 in found:
        single, largest = found.index(1), found.index(max(found))
        if found[largest] > 2:
            found[largest] -= 1
            found[single] += 1
        else:  # all others are 1 or 2
            partner = found.index(1, single + 1) if found.count(1) > 1 else largest
            found[partner] += 1
            found[single] -= 1
    return found
