"""Each row of the padding contract, with values worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.runner.padding import Row, decode_inputs, prefill_inputs

BLOCK_SIZE = 4
BLOCK_IDS = [7, 2, 9]  # slots 28..31, 8..11, 36..39


def test_prefill_input_ids_are_the_tokens_then_the_pad_token_id() -> None:
    inputs = prefill_inputs(Row([5, 6, 8], 0, [7]), bucket=128, width=4, block_size=BLOCK_SIZE)
    assert inputs.input_ids.tolist() == [5, 6, 8] + [0] * 125


def test_prefill_positions_start_at_the_prior_and_repeat_the_last_real_one() -> None:
    inputs = prefill_inputs(Row([5, 6, 8], 5, BLOCK_IDS), bucket=128, width=4, block_size=4)
    assert inputs.positions.tolist() == [5, 6, 7] + [7] * 125
    assert (inputs.prior_tokens, inputs.num_tokens) == (5, 3)


def test_prefill_slots_follow_the_block_table_and_padding_is_written_nowhere() -> None:
    inputs = prefill_inputs(Row([5, 6, 8, 1], 6, BLOCK_IDS), bucket=128, width=4, block_size=4)
    assert inputs.slot_mapping.tolist() == [10, 11, 36, 37] + [-1] * 124


def test_prefill_block_table_is_the_physical_ids_then_unused_entries() -> None:
    inputs = prefill_inputs(Row([5], 8, BLOCK_IDS), bucket=128, width=5, block_size=BLOCK_SIZE)
    assert inputs.block_table.tolist() == [7, 2, 9, -1, -1]


@pytest.mark.parametrize(("bucket", "rows"), [(1, 128), (100, 128), (128, 128), (130, 256)])
def test_prefill_tensors_have_the_buckets_rows_rounded_up_to_128(bucket: int, rows: int) -> None:
    inputs = prefill_inputs(Row([3], 0, [7]), bucket=bucket, width=4, block_size=BLOCK_SIZE)
    assert {len(inputs.input_ids), len(inputs.positions), len(inputs.slot_mapping)} == {rows}
    assert inputs.bucket == bucket


def test_prefill_without_tokens_is_padding_only() -> None:
    inputs = prefill_inputs(Row([], 0, []), bucket=128, width=2, block_size=BLOCK_SIZE)
    assert inputs.input_ids.tolist() == [0] * 128
    assert inputs.positions.tolist() == [0] * 128
    assert inputs.slot_mapping.tolist() == [-1] * 128
    assert inputs.block_table.tolist() == [-1, -1]


ROWS = [Row([11], 5, [7, 2, 9]), Row([12], 0, [5])]


def test_decode_input_ids_and_positions_are_padded_with_zero() -> None:
    inputs = decode_inputs(ROWS, bucket=4, num_queries=1, width=3, block_size=BLOCK_SIZE)
    assert inputs.input_ids.tolist() == [11, 12, 0, 0]
    assert inputs.positions.tolist() == [5, 0, 0, 0]
    assert (inputs.bucket, inputs.query_lens.tolist()) == (4, [1, 1, 0, 0])


def test_decode_slots_are_those_of_the_new_tokens_and_padding_is_written_nowhere() -> None:
    inputs = decode_inputs(ROWS, bucket=4, num_queries=1, width=3, block_size=BLOCK_SIZE)
    assert inputs.slot_mapping.tolist() == [9, 20, -1, -1]


def test_decode_context_lens_count_the_new_token_and_are_zero_for_padding() -> None:
    inputs = decode_inputs(ROWS, bucket=4, num_queries=1, width=3, block_size=BLOCK_SIZE)
    assert inputs.context_lens.tolist() == [6, 1, 0, 0]


def test_decode_block_tables_hold_the_contexts_blocks_and_rows_of_minus_one() -> None:
    inputs = decode_inputs(ROWS, bucket=4, num_queries=1, width=3, block_size=BLOCK_SIZE)
    assert inputs.block_tables.tolist() == [[7, 2, -1], [5, -1, -1], [-1] * 3, [-1] * 3]


def test_more_tokens_than_the_bucket_are_refused_although_the_rows_would_hold_them() -> None:
    with pytest.raises(ValueError, match=r"num_tokens=3 exceeds bucket=2"):
        prefill_inputs(Row([1, 2, 3], 0, [7]), bucket=2, width=4, block_size=BLOCK_SIZE)


def test_more_requests_than_the_bucket_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_seqs=2 exceeds bucket=1"):
        decode_inputs(ROWS, bucket=1, num_queries=1, width=3, block_size=BLOCK_SIZE)


def test_a_context_wider_than_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="2 values do not fit a padded size of 1"):
        decode_inputs(ROWS, bucket=4, num_queries=1, width=1, block_size=BLOCK_SIZE)


def test_a_position_without_block_is_refused() -> None:
    with pytest.raises(IndexError, match="position=4 is outside the block table"):
        prefill_inputs(Row([1], 4, [7]), bucket=128, width=4, block_size=BLOCK_SIZE)


@given(
    num_tokens=st.integers(0, 40),
    prior_tokens=st.integers(0, 40),
    block_size=st.sampled_from([4, 16]),
)
def test_every_prefill_array_is_int32_and_real_slots_are_distinct(
    num_tokens: int, prior_tokens: int, block_size: int
) -> None:
    inputs = prefill_inputs(
        Row([1] * num_tokens, prior_tokens, list(range(30, 50))),
        bucket=40,
        width=20,
        block_size=block_size,
    )
    arrays = [inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.block_table]
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}
    real = inputs.slot_mapping[inputs.slot_mapping >= 0]
    assert len(set(real.tolist())) == num_tokens
    # Position p lies in logical block p // block_size, which maps to block 30 + p // block_size.
    positions = np.arange(prior_tokens, prior_tokens + num_tokens)
    assert real.tolist() == (30 * block_size + positions).tolist()
