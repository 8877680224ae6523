"""Arithmetic of the paged KV cache and of buckets: the one place for each of these facts.

A cache holds `num_blocks` blocks of `block_size` rows. A *slot* numbers one row of the whole
cache. Everything here is integer arithmetic on Python ints, free of NumPy, so that scheduler,
runner, kernels' host side and reference share it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

PAD_SLOT_ID = -1
"""Slot of a padding token: nothing is written."""

NULL_BLOCK_ID = 0
"""Block that the scheduler never hands out, as in vLLM; an ordinary block to a kernel."""

UNUSED_BLOCK = -1
"""Entry of a block table that maps nothing: these keys are absent."""

PAD_TOKEN_ID = 0
"""Token id of padding."""

ROW_TILE = 128
"""Rows that the partitions of SBUF hold at once; compiled token counts are multiples of it."""

MIN_DEFAULT_BUCKET = 128
"""Smallest bucket of a default bucket list (unless the list's end is smaller)."""


def cdiv(numerator: int, denominator: int) -> int:
    """Quotient rounded up. `numerator >= 0`, `denominator > 0`."""
    return -(-numerator // denominator)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return cdiv(num_tokens, block_size)


def slot_of(position: int, block_table: Sequence[int], block_size: int) -> int:
    """Slot of the token at `position` of a request whose logical blocks map through `block_table`.

    Raises IndexError when the table does not reach the position, ValueError when it maps nothing
    there.
    """
    index, offset = divmod(position, block_size)
    if position < 0 or index >= len(block_table):
        raise IndexError(
            f"position={position} is outside the block table: "
            f"{len(block_table)} blocks of {block_size} hold 0..{len(block_table) * block_size - 1}"
        )
    block = block_table[index]
    if block == UNUSED_BLOCK:
        raise ValueError(f"position={position} lies in logical block {index}, which is unused (-1)")
    return block * block_size + offset


def attention_rows(bucket: int) -> int:
    """Rows of the compiled tensors that serve a bucket: the next multiple of 128."""
    return cdiv(bucket, ROW_TILE) * ROW_TILE


def smallest_bucket(size: int, buckets: Sequence[int]) -> int:
    """Smallest bucket that holds `size`; `buckets` ascends. ValueError when none does."""
    index = bisect_left(buckets, size)
    if index == len(buckets):
        raise ValueError(f"size={size} fits no bucket of {list(buckets)}")
    return buckets[index]


def default_buckets(largest: int, smallest: int = MIN_DEFAULT_BUCKET) -> list[int]:
    """Powers of two from `smallest` that lie below `largest`, then `largest` itself."""
    buckets = []
    bucket = smallest
    while bucket < largest:
        buckets.append(bucket)
        bucket *= 2
    return [*buckets, largest]


def check_buckets(name: str, buckets: Sequence[int], last: int) -> list[int]:
    """Return `buckets` as a list if it ascends strictly from at least 1 and ends in `last`.

    Raises ValueError that names the argument, the value and what is allowed.
    """
    if not isinstance(buckets, Sequence) or not all(isinstance(one, int) for one in buckets):
        raise ValueError(f"{name}={buckets!r}: must be a list of integers")
    values = list(buckets)
    ascending = all(a < b for a, b in pairwise(values))
    if not values or values[0] < 1 or not ascending or values[-1] != last:
        raise ValueError(
            f"{name}={values}: must ascend strictly, start at 1 or more and end in {last}"
        )
    return values
