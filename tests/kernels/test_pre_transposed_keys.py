"""A pre-transposed K cache: what it saves, and what it refuses."""

from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.kernels import padded_prefill, segmented_attention, write_kv_cache
from segattn.reference.nki.trace import Trace
from segattn.tests.kernels.cases import padded_rows, paged_tokens

BF16 = ml_dtypes.bfloat16


def transposes(function: Any, *arguments: Any, **options: Any) -> int:
    """PE transposes that a call executes."""
    with Trace() as trace:
        function(*arguments, **options)
    return Counter(each.opcode for each in trace.launches[0].records)["nc_transpose"]


@pytest.mark.parametrize("softmax", ["bounded", "exact"])
def test_reading_it_transposes_no_key_of_the_prior(softmax: str) -> None:
    rng = np.random.default_rng(0)
    prior, d, block_size = 1024, 64, 64
    paged = paged_tokens(rng, [prior], 1, d, block_size, BF16)
    q, k, v = (padded_rows(rng, heads, 128, 128, d, BF16) for heads in (2, 1, 1))
    columns = np.ascontiguousarray(paged.k_cache.swapaxes(2, 3))

    def count(k_cache: Any, k_pre_transposed: bool) -> int:
        return transposes(
            segmented_attention, q, k, v, k_cache, paged.v_cache, paged.tables[0], prior, 128,
            softmax=softmax, k_pre_transposed=k_pre_transposed,
        )  # fmt: skip

    # One transpose per tile of 128 cached keys.
    saved = count(paged.k_cache, False) - count(columns, True)
    assert saved >= prior // 128


def test_whole_blocks_are_written_in_rows_and_only_the_rest_by_element() -> None:
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, 256, 64)).astype(BF16) for _ in range(2))
    k_cache, v_cache = np.zeros((9, 2, 64, 32), BF16), np.zeros((9, 2, 32, 64), BF16)

    def smallest_stores(first_slot: int) -> list[int]:
        slots = np.arange(first_slot, first_slot + 256, dtype=np.int32)
        with Trace() as trace:
            write_kv_cache(k, v, k_cache, v_cache, slots, k_pre_transposed=True)
        stores = [each for each in trace.launches[0].records if each.opcode == "dma_copy"]
        return sorted(each.writes[0].run_bytes for each in stores if each.writes[0].buffer == "hbm")

    assert min(smallest_stores(32)) == 32 * BF16(0).itemsize
    # 16 tokens of the first block and 16 of the last one are stored one element at a time.
    assert smallest_stores(16)[:2] == [BF16(0).itemsize, 32 * BF16(0).itemsize]


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
