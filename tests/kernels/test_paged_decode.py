"""paged_decode against the float64 reference."""

from unittest import mock

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import DecodePlan, paged_decode
from segattn.kernels.plan import decode_shape
from segattn.reference import attention as reference
from segattn.reference import nki
from segattn.reference.nki.cost.constants import BASE
from segattn.reference.nki.cost.result import evaluate
from segattn.reference.nki.trace import Trace
from segattn.tests.kernels.cases import (
    Array,
    Options,
    assert_close,
    block_sizes,
    dtypes,
    garbage,
    gqa,
    head_dims,
    normal,
    options,
    paged_tokens,
    relative_error,
    seeds,
)


@given(
    seed=seeds,
    heads=gqa | st.sampled_from([(16, 16), (32, 4)]),
    lengths=st.lists(st.integers(0, 700) | st.just(0), min_size=1, max_size=4),
    num_queries=st.sampled_from([1, 1, 2, 3, 5]),
    all_queries=st.booleans(),
    data=st.data(),
    d=head_dims,
    block_size=block_sizes,
    options=options,
    holes=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=dtypes,
    small_batches=st.booleans(),
)
def test_equals_the_reference(
    seed: int,
    heads: tuple[int, int],
    lengths: list[int],
    num_queries: int,
    all_queries: bool,
    data: st.DataObject,
    d: int,
    block_size: int,
    options: Options,
    holes: float,
    dtype: npt.DTypeLike,
    small_batches: bool,
) -> None:
    """Small batches: several are needed where a usual one takes all of such lengths."""
    rng = np.random.default_rng(seed)
    cache_dtype = options.cache_dtype(dtype)
    paged = paged_tokens(rng, lengths, heads[1], d, block_size, cache_dtype, holes=holes)
    real = [num_queries] * len(lengths)
    if not all_queries:
        real = [data.draw(st.integers(0, num_queries)) for _ in lengths]
    q = garbage(rng, (len(lengths), heads[0], num_queries, d), dtype)
    for request, length in enumerate(lengths):
        if length:
            q[request, :, : real[request]] = normal(rng, (heads[0], real[request], d), dtype)
    context_lens = np.array(lengths, np.int32)
    k_cache = options.stored_keys(paged.k_cache)
    call = (q, k_cache, paged.v_cache, paged.tables, context_lens)
    arguments = {
        "query_lens": None if all_queries else np.array(real, np.int32),
        **options.arguments(rng, heads[0]),
        **options.scales(rng, heads[1], dtype),
    }
    expected = reference.paged_decode(*call, **arguments)
    most = 1 if small_batches else decode_shape.MOST_TILES
    with mock.patch.object(decode_shape, "MOST_TILES", most), nki.strict(field="error"):
        out = paged_decode(*call, **arguments)
    assert out.dtype == q.dtype
    assert_close(out, expected)
    for request, length in enumerate(lengths):
        padding = out[request, :, real[request] if length else 0 :]
        np.testing.assert_array_equal(padding.astype(float), 0.0)


def test_a_long_context_of_several_groups_is_exact() -> None:
    """34 tiles of 128 runs of 16 tokens of one request, on one core and on two."""
    rng = np.random.default_rng(5)
    length = 16 * 128 * 33 + 7
    paged = paged_tokens(rng, [length], 1, 32, 128, np.float32)
    q = normal(rng, (1, 3, 1, 32), np.float32)
    call = (q, paged.k_cache, paged.v_cache, paged.tables, np.array([length], np.int32))
    expected = reference.paged_decode(*call)
    for lnc in (1, 2):
        assert_close(paged_decode(*call, lnc=lnc), expected)


def _assert_one_request(
    rng: np.random.Generator, keys: Array, values: Array, q: Array, block_size: int = 16
) -> None:
    """Decode of a request with keys and values [n, d], in bf16 and in fp32 against float64."""
    num_blocks = -(-len(keys) // block_size)
    table = np.arange(num_blocks, dtype=np.int32)[::-1]
    caches = []
    for rows in (keys, values):
        tokens = garbage(rng, (num_blocks * block_size, rows.shape[1]), rows.dtype)
        tokens[: len(rows)] = rows
        caches.append(tokens.reshape(num_blocks, 1, block_size, -1)[table])
    length = np.array([len(keys)], np.int32)
    k_cache, v_cache = caches
    expected = reference.paged_decode(q, k_cache, v_cache, table[None], length)
    out = paged_decode(q, k_cache, v_cache, table[None], length)
    assert relative_error(out, expected) <= 1.2e-2
    q, k_cache, v_cache = (array.astype(np.float32) for array in (q, k_cache, v_cache))
    out = paged_decode(q, k_cache, v_cache, table[None], length)
    assert relative_error(out, expected) <= 1e-5


@pytest.mark.parametrize(
    "change",
    ["norms", "early outlier", "late outlier", "constant", "very negative", "large values"],
)
def test_no_scores_and_no_values_are_silently_wrong(change: str) -> None:
    rng = np.random.default_rng(7)
    keys, values = normal(rng, (2, 2600, 64), ml_dtypes.bfloat16)
    q = normal(rng, (1, 4, 1, 64), ml_dtypes.bfloat16)
    if change == "norms":
        keys, q = keys * 8, q * 8
    elif change == "early outlier":
        keys[3] = q[0, 0, 0] * 20
    elif change == "late outlier":
        keys[2590] = q[0, 1, 0] * 60
    elif change == "constant":
        keys[:] = keys[0]
    elif change == "very negative":
        # Every score is -1e30, without rounding.
        keys[:], q[:] = 0, 0
        keys[:, 0], q[..., 0] = -1e15, 1e15
    else:
        values = (values * 1e30).astype(values.dtype)
    _assert_one_request(rng, keys, values, q)


def test_a_plan_of_a_step_serves_all_layers() -> None:
    rng = np.random.default_rng(2)
    lengths = [300, 77, 0]
    first, second = (paged_tokens(rng, lengths, 2, 64, 32, np.float32) for _ in range(2))
    q = normal(rng, (3, 4, 2, 64), np.float32)
    real = np.array([2, 1, 2], np.int32)
    step = first.tables, np.array(lengths, np.int32)
    plan = DecodePlan.build(
        q, first.k_cache, first.v_cache, *step, query_lens=real, sliding_window=90, lnc=2
    )
    for layer in (first, second):
        keys, values = layer.k_cache[: len(first.k_cache)], layer.v_cache[: len(first.k_cache)]
        keys, values = (np.nan_to_num(x, nan=1.0, posinf=1.0, neginf=1.0) for x in (keys, values))
        expected = reference.paged_decode(
            q, keys, values, *step, query_lens=real, sliding_window=90
        )
        assert_close(paged_decode(q, keys, values, plan=plan), expected)
    with pytest.raises(ValueError, match="context_lens"):
        paged_decode(q, keys, values, context_lens=step[1], plan=plan)
    with pytest.raises(ValueError, match="lnc"):
        paged_decode(q, keys, values, plan=plan, lnc=2)
    with pytest.raises(ValueError, match="plan"):
        paged_decode(q[:2], keys, values, plan=plan)


def test_a_short_context_in_a_long_table_costs_a_batch() -> None:
    """Modelled: half of a context that needs both batches of the same program, and what begins it.

    9 tiles of 128 runs of 32 tokens, since the table is two blocks longer than the context, are two
    batches of 5.
    """
    rng = np.random.default_rng(0)
    paged = paged_tokens(rng, [32768], 1, 128, 128, ml_dtypes.bfloat16)
    q = normal(rng, (1, 8, 1, 128), ml_dtypes.bfloat16)
    us, trips = [], []
    for length in (100, 32768):
        with Trace() as trace:
            lengths = np.array([length], np.int32)
            paged_decode(q, paged.k_cache, paged.v_cache, paged.tables, lengths)
        us.append(evaluate(trace.launches[0], BASE).modelled_us)
        opcodes = [each.opcode for each in trace.launches[0].records]
        trips.append(opcodes.count("loop iteration"))
    assert trips == [1, 2]
    assert us[0] <= 0.53 * us[1]


@pytest.mark.parametrize(("largest", "k_scale"), [(3e38, None), (1e32, 1e-6)])
def test_a_sink_at_the_end_of_fp32_leaves_the_other_heads_alone(
    largest: float, k_scale: float | None
) -> None:
    rng = np.random.default_rng(0)
    q = normal(rng, (1, 2, 1, 32), np.float32)
    paged = paged_tokens(rng, [5], 1, 32, 16, np.float32)
    sinks = np.array([largest, 0], np.float32)
    arguments = (q, paged.k_cache, paged.v_cache, paged.tables, np.array([5], np.int32))
    out = paged_decode(*arguments, sinks=sinks, k_scale=k_scale)
    assert (out[0, 0] == 0).all()
    assert_close(out, reference.paged_decode(*arguments, sinks=sinks, k_scale=k_scale))


@pytest.mark.parametrize("window", [2**31, 2**70])
def test_a_window_beyond_every_cache_is_no_window(window: int) -> None:
    rng = np.random.default_rng(0)
    q = normal(rng, (1, 2, 2, 32), np.float32)
    paged = paged_tokens(rng, [40], 1, 32, 16, np.float32)
    arguments = (q, paged.k_cache, paged.v_cache, paged.tables, np.array([40], np.int32))
    out = paged_decode(*arguments, sliding_window=window)
    assert_close(out, reference.paged_decode(*arguments))


@pytest.mark.parametrize("k_pre_transposed", [False, True])
def test_a_block_that_a_table_names_twice_counts_twice(k_pre_transposed: bool) -> None:
    rng = np.random.default_rng(0)
    q = normal(rng, (1, 2, 1, 32), np.float32)
    k_cache, v_cache = normal(rng, (2, 3, 1, 16, 32), np.float32)
    keys = np.ascontiguousarray(k_cache.swapaxes(2, 3)) if k_pre_transposed else k_cache
    table, lengths = np.array([[2, 2, 2, 0, 1]], np.int32), np.array([75], np.int32)
    out = paged_decode(q, keys, v_cache, table, lengths, k_pre_transposed=k_pre_transposed)
    assert_close(out, reference.paged_decode(q, k_cache, v_cache, table, lengths))
