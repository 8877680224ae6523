"""A pre-transposed K cache: what it saves, and what it refuses."""

from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.kernels import padded_prefill, paged_decode, segmented_attention, write_kv_cache
from segattn.kernels.plan.window_plan import window_columns
from segattn.reference.nki.cost.constants import BASE
from segattn.reference.nki.cost.result import evaluate
from segattn.reference.nki.trace import Trace
from segattn.tests.kernels.cases import padded_rows, paged_tokens

BF16 = ml_dtypes.bfloat16


def transposes(function: Any, *arguments: Any, **options: Any) -> int:
    """PE transposes that a call executes."""
    with Trace() as trace:
        function(*arguments, **options)
    return Counter(each.opcode for each in trace.launches[0].records)["nc_transpose"]


def test_reading_it_transposes_no_key_of_the_prior() -> None:
    rng = np.random.default_rng(0)
    prior, d, block_size = 1024, 64, 64
    paged = paged_tokens(rng, [prior], 1, d, block_size, BF16)
    q, k, v = (padded_rows(rng, heads, 128, 128, d, BF16) for heads in (2, 1, 1))
    columns = np.ascontiguousarray(paged.k_cache.swapaxes(2, 3))

    def count(k_cache: Any, prior: int, k_pre_transposed: bool) -> int:
        return transposes(
            segmented_attention, q, k, v, k_cache, paged.v_cache, paged.tables[0], prior, 128,
            softmax="bounded", k_pre_transposed=k_pre_transposed,
        )  # fmt: skip

    own = count(columns, 0, True)
    assert count(columns, prior, True) == own
    # In rows, one for each of the 16 tiles of 128 keys of a trip of the loop over the prior.
    assert count(paged.k_cache, prior, False) == own + 16


def test_the_model_lets_it_cost_decode_time() -> None:
    """Runs of 64 tokens of a block of 128 are pieces of 128 bytes, 128 descriptors each."""
    rng = np.random.default_rng(0)
    paged = paged_tokens(rng, [8192], 1, 128, 128, BF16)
    columns = np.ascontiguousarray(paged.k_cache.swapaxes(2, 3))
    query = rng.standard_normal((1, 8, 1, 128)).astype(BF16)
    us = []
    for k_cache, k_pre_transposed in ((paged.k_cache, False), (columns, True)):
        with Trace() as trace:
            paged_decode(
                query, k_cache, paged.v_cache, paged.tables, np.array([8192], np.int32),
                k_pre_transposed=k_pre_transposed,
            )  # fmt: skip
        us.append(evaluate(trace.launches[0], BASE).modelled_us)
    assert 9.5 * us[0] <= us[1] <= 9.6 * us[0]


@pytest.mark.parametrize(("block_size", "most"), [(128, 0.74), (16, 1.83)])
def test_a_window_loads_whole_blocks_of_columns(block_size: int, most: float) -> None:
    """Modelled against keys in rows; a token's column by itself would take eight times as long."""
    rng = np.random.default_rng(0)
    prior, window = 4200, 2000
    paged = paged_tokens(rng, [prior], 1, 128, block_size, BF16, unseen=prior - window + 1)
    q, k, v = (padded_rows(rng, heads, 256, 256, 128, BF16) for heads in (1, 1, 1))
    columns = np.ascontiguousarray(paged.k_cache.swapaxes(2, 3))
    us = []
    for k_cache, k_pre_transposed in ((paged.k_cache, False), (columns, True)):
        with Trace() as trace:
            segmented_attention(
                q, k, v, k_cache, paged.v_cache, paged.tables[0], prior, 256,
                sliding_window=window, k_pre_transposed=k_pre_transposed,
            )  # fmt: skip
        us.append(evaluate(trace.launches[0], BASE).modelled_us)
    assert (most - 0.02) * us[0] <= us[1] <= most * us[0]


def test_blocks_of_a_window_are_named_from_its_first_token_on() -> None:
    """Tokens 5 .. 12 of blocks 6, 2 and one that is absent; token 5 is hidden."""
    slots = np.array([[-1, 26, 27, 8, 9, 10, 11, -1]], np.int32)
    blocks, seen = window_columns(slots, 13, 4)
    assert blocks.tolist() == [[6, 2, -1]]
    assert seen.tolist() == [[0, 1, 1, 1, 1, 1, 1, 0]]
    assert window_columns(None, 13, 4) == ()


def test_blocks_of_columns_are_stored_in_whole_rows() -> None:
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, 256, 64)).astype(BF16) for _ in range(2))
    k_cache, v_cache = np.zeros((9, 2, 64, 32), BF16), np.zeros((9, 2, 32, 64), BF16)
    with Trace() as trace:
        write_kv_cache(k, v, k_cache, v_cache, np.arange(16, 272, dtype=np.int32),
                       k_pre_transposed=True)  # fmt: skip
    stores = [
        each.writes[0] for each in trace.launches[0].records
        if each.opcode == "dma_copy" and each.writes[0].buffer == "hbm"
    ]  # fmt: skip
    # A block of a head is one descriptor, those that are filled in part included: one DMA for whole
    # blocks of keys, one for the others, one for runs of values; single values have 128 bytes.
    assert sorted(each.run_bytes for each in stores) == [64 * 2] + 3 * [64 * 32 * 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_pre_transposed": 2}, "k_pre_transposed=2: must be one of False, True"),
        (
            {"k_cache": np.zeros((4, 1, 32, 64), np.float32)},
            r"k_cache: shape \(4, 1, 32, 64\) must",
        ),
        (
            {"v_cache": np.zeros((4, 1, 64, 32), np.float32)},
            r"v_cache: shape \(4, 1, 64, 32\) must",
        ),
        ({"k_cache": np.zeros((4, 1, 64, 8), np.float32)}, r"v_cache: shape \(4, 1, 32, 64\)"),
    ],
)
def test_caches_of_another_layout_are_refused(changes: dict[str, Any], message: str) -> None:
    rows = np.zeros((1, 128, 64), np.float32)
    arguments: dict[str, Any] = {
        "q": rows, "k": rows, "v": rows, "k_cache": np.zeros((4, 1, 64, 32), np.float32),
        "v_cache": np.zeros((4, 1, 32, 64), np.float32),
        "slot_mapping": np.full(128, -1, np.int32), "num_tokens": 0, "k_pre_transposed": True,
    }  # fmt: skip
    padded_prefill(**arguments)
    with pytest.raises(ValueError, match=message):
        padded_prefill(**{**arguments, **changes})
