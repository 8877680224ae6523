"""Windows that reach further back than what is computed token by token: segments in between."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import segmented_attention
from segattn.kernels.device.prefill.window_segments import TILES_PER_FETCH, window_tiles
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Options,
    assert_close,
    block_sizes,
    gqa,
    options,
    padded_rows,
    paged_tokens,
    seeds,
)


def compare(
    rng: np.random.Generator, heads: tuple[int, int], rows: int, n: int, prior: int, d: int,
    block_size: int, holes: float, dtype: npt.DTypeLike, options: Options, **arguments: Any,
) -> None:  # fmt: skip
    """A call gives what the reference gives."""
    cache_dtype = options.cache_dtype(dtype)
    paged = paged_tokens(
        rng, [prior], heads[1], d, block_size, cache_dtype, holes=holes,
        unseen=options.unseen(prior),
    )  # fmt: skip
    q = padded_rows(rng, heads[0], rows, n, d, dtype)
    k, v = (padded_rows(rng, heads[1], rows, n, d, dtype) for _ in range(2))
    k_cache = options.stored_keys(paged.k_cache)
    call = (q, k, v, k_cache, paged.v_cache, paged.tables[0], prior, n)
    shared = {**options.arguments(rng, heads[0]), **options.scales(rng, heads[1], dtype)}
    out = segmented_attention(*call, **{**shared, **arguments})
    assert_close(out[:, :n], reference.segmented_attention(*call, **shared)[:, :n])


@given(
    seed=seeds,
    heads=gqa,
    tiles=st.integers(1, 3),
    data=st.data(),
    prior=st.integers(0, 1300) | st.sampled_from([512, 1024]),
    window=st.integers(300, 1500),
    segment=st.sampled_from([128, 384, 512, 1024]),
    d=st.sampled_from([64, 32, 256]),
    block_size=block_sizes,
    options=options,
    holes=st.sampled_from([0.0, 0.3]),
    softmax=st.sampled_from(["bounded", "exact"]),
)
def test_equals_the_reference_in_both_kinds_of_segments(
    seed: int, heads: tuple[int, int], tiles: int, data: st.DataObject, prior: int, window: int,
    segment: int, d: int, block_size: int, options: Options, holes: float, softmax: str,
) -> None:  # fmt: skip
    options.window = window
    dtype = data.draw(st.sampled_from([ml_dtypes.bfloat16, np.float32]))
    n = data.draw(st.integers(0, tiles * 128))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("segattn.kernels.device.prefill.window_segments.LEAST_TILES", 1)
        compare(
            np.random.default_rng(seed), heads, tiles * 128, n, prior, d, block_size, holes, dtype,
            options, kv_segment_size=segment, softmax=softmax,
        )  # fmt: skip


@pytest.mark.parametrize("k_pre_transposed", [False, True])
@pytest.mark.parametrize("softmax", ["auto", "exact"])
def test_a_window_above_4096_begins_in_the_middle_of_a_block(
    softmax: str, k_pre_transposed: bool
) -> None:
    window, prior = 4300, 5001
    assert window_tiles(window, 128, 64, 2, 16) == (-34, -32, 2)
    options = Options(window, True, None, False, 1, k_pre_transposed, True, 0.2)
    compare(
        np.random.default_rng(3), (2, 1), 128, 100, prior, 64, 32, 0.1, ml_dtypes.bfloat16, options,
        softmax=softmax,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "d", "window", "rows", "softmax"),
    [
        (np.float32, 64, 2500, 128, "exact"),
        (np.float32, 64, 2500, 512, "bounded"),
        (ml_dtypes.bfloat16, 256, 2200, 128, "exact"),
        (ml_dtypes.bfloat16, 256, 2200, 512, "bounded"),
    ],
)
@pytest.mark.parametrize("k_pre_transposed", [False, True])
def test_three_segments_take_turns_in_two_sets_of_tiles(
    dtype: npt.DTypeLike, d: int, window: int, rows: int, softmax: str, k_pre_transposed: bool
) -> None:
    first, end, tiles = window_tiles(window, rows, d, np.dtype(dtype).itemsize, 16)
    assert end - first == 3 * tiles
    assert tiles > TILES_PER_FETCH
    # Raw scores with a deviation of 3.2, which "bounded" has to accept.
    options = Options(window, False, None, False, 1, k_pre_transposed, True, 3.2 / np.sqrt(d))
    compare(
        np.random.default_rng(5), (1, 1), rows, rows, window + 100, d, 128, 0.0, dtype, options,
        softmax=softmax,
    )  # fmt: skip


def test_a_window_wider_than_the_table_and_the_chunk_is_none() -> None:
    options = Options(10**6, False, None, False, 1, False, False, None)
    compare(np.random.default_rng(4), (1, 1), 128, 90, 600, 64, 16, 0.0, np.float32, options)
