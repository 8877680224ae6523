"""Bucket lists that waste the least padding for a given number of compiled graphs.

A step of n tokens (or n requests) in bucket b computes `rows(b)` rows. Given how often each size
occurs, dynamic programming over the sorted sizes finds the list of at most k buckets with the
fewest rows in all. An optimal bucket is as small as the largest size in it allows, so only sizes
that occur are candidates, rounded up as far as the rows stay the same, and the largest allowed one.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..reference.paging import smallest_bucket

Rows = Callable[[int], int]
"""Rows that the compiled shape of a bucket has."""


@dataclass(frozen=True)
class BucketPlan:
    """A bucket list and what a workload costs in it."""

    buckets: tuple[int, ...]
    num_rows: int
    """Rows computed, padding included."""
    num_real: int
    """Real tokens or requests among them."""

    @property
    def waste(self) -> float:
        """Share of the rows that is padding; 0 for no work."""
        return 1 - self.num_real / self.num_rows if self.num_rows else 0.0


def evaluate(buckets: Sequence[int], sizes: Mapping[int, int], rows: Rows) -> BucketPlan:
    """Cost of `sizes` (size -> how often) in `buckets`. ValueError when a size fits none."""
    num_rows = sum(count * rows(smallest_bucket(size, buckets)) for size, count in sizes.items())
    return BucketPlan(tuple(buckets), num_rows, sum(size * n for size, n in sizes.items()))


def plan_buckets(
    sizes: Mapping[int, int], largest: int, num_buckets: int, rows: Rows
) -> BucketPlan:
    """The best list of at most `num_buckets` buckets that ends in `largest`.

    Of two lists with equal cost the shorter one. ValueError for `num_buckets` < 1 and for a size
    beyond `largest` or below 1.
    """
    if num_buckets < 1:
        raise ValueError(f"num_buckets={num_buckets}: must be at least 1")
    wrong = [size for size in sizes if not 1 <= size <= largest]
    if wrong:
        raise ValueError(f"size={wrong[0]}: must be within 1..{largest}")
    occurring: Counter[int] = Counter({largest: 0})
    for size, count in sizes.items():
        occurring[min(rows(size), largest)] += count
    ends = sorted(occurring)
    counts = [0, *accumulate(occurring[end] for end in ends)]
    # best[j]: fewest rows of the first j ends with the buckets so far, and those buckets.
    best: list[tuple[int, tuple[int, ...]]] = [
        (counts[j] * rows(ends[j - 1]), (ends[j - 1],)) if j else (0, ())
        for j in range(len(ends) + 1)
    ]
    for _ in range(num_buckets - 1):
        best = [best[0]] + [
            min(
                [best[j]]
                + [
                    (best[i][0] + (counts[j] - counts[i]) * rows(end), (*best[i][1], end))
                    for i in range(1, j)
                ],
                key=lambda option: (option[0], len(option[1])),
            )
            for j, end in enumerate(ends, 1)
        ]
    return evaluate(best[-1][1], sizes, rows)
