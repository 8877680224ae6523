"""Slot, block and bucket arithmetic against values worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.reference.paging import (
    attention_rows,
    check_buckets,
    default_buckets,
    num_blocks_for,
    slot_of,
    smallest_bucket,
)


def test_slot_is_block_times_size_plus_offset() -> None:
    assert slot_of(0, [7], 16) == 112
    assert slot_of(37, [3, 9, 5], 16) == 5 * 16 + 5


def test_slot_outside_the_table_is_refused() -> None:
    with pytest.raises(IndexError, match=r"position=16 .* 1 blocks of 16 hold 0\.\.15"):
        slot_of(16, [4], 16)
    with pytest.raises(IndexError, match="position=-1"):
        slot_of(-1, [4], 16)
    with pytest.raises(ValueError, match="logical block 1"):
        slot_of(17, [4, -1], 16)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (100, 7)])
def test_block_count_rounds_up(tokens: int, blocks: int) -> None:
    assert num_blocks_for(tokens, 16) == blocks


@pytest.mark.parametrize(("bucket", "rows"), [(1, 128), (128, 128), (129, 256), (6000, 6016)])
def test_a_bucket_is_served_by_rows_rounded_up_to_128(bucket: int, rows: int) -> None:
    assert attention_rows(bucket) == rows


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(64, [64]), (128, [128]), (129, [128, 129]), (6000, [128, 256, 512, 1024, 2048, 4096, 6000])],
)
def test_default_buckets_end_in_the_largest_size(largest: int, expected: list[int]) -> None:
    assert default_buckets(largest) == expected


@given(st.lists(st.integers(1, 500), min_size=1, unique=True).map(sorted), st.data())
def test_smallest_bucket_is_the_first_that_holds_the_size(
    buckets: list[int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(0, buckets[-1]))
    chosen = smallest_bucket(size, buckets)
    assert chosen >= size
    assert all(bucket < size for bucket in buckets if bucket < chosen)


def test_a_size_beyond_every_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match=r"size=9 fits no bucket of \[4, 8\]"):
        smallest_bucket(9, [4, 8])


@pytest.mark.parametrize("bad", [[], [0, 8], [4, 4, 8], [8, 4], [4, 7]])
def test_bucket_lists_must_ascend_and_end_in_the_limit(bad: list[int]) -> None:
    with pytest.raises(ValueError, match=r"num_seqs_buckets=.*end in 8"):
        check_buckets("num_seqs_buckets", bad, 8)
    assert check_buckets("num_seqs_buckets", (2, 8), 8) == [2, 8]
