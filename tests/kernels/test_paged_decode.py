"""paged_decode against the float64 reference."""

from itertools import groupby, pairwise
from unittest import mock

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import paged_decode
from segattn.kernels.plan import decode_plan, decode_shape, decode_spans
from segattn.reference import attention as reference
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
    small_groups=st.booleans(),
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
    small_groups: bool,
) -> None:
    """Small groups: several are needed where a usual one takes all of such lengths."""
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
    most = 1 if small_groups else decode_shape.GROUP_SLOTS
    most_shared = 1 if small_groups else decode_shape.SHARED_SLOTS
    with mock.patch.multiple(decode_shape, GROUP_SLOTS=most, SHARED_SLOTS=most_shared):
        out = paged_decode(*call, **arguments)
    assert out.dtype == q.dtype
    assert_close(out, expected)
    for request, length in enumerate(lengths):
        padding = out[request, :, real[request] if length else 0 :]
        np.testing.assert_array_equal(padding.astype(float), 0.0)


def test_a_long_context_of_several_groups_is_exact() -> None:
    """34 slots of one request, in groups of eight, on one core and on two."""
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


def test_work_follows_the_lengths_and_two_cores_share_it_evenly() -> None:
    """Groups with work, of a table that could hold 131072 tokens per request.

    Per KV head 8192 runs of 16 tokens, none, and 2500: 128 slots, one for the two chains without
    runs, 40 for the others: 169, or 85 and 84, four of a group.
    """
    block_size, requests = 128, 4
    width = 131072 // block_size
    for cores in (1, 2):
        shape = decode_shape.decode_shape(requests, 2, 4, 1, 128, 2, 131072, False, cores)
        tables = np.arange(requests * width, dtype=np.int32).reshape(requests, width)
        lengths = np.array([131072, 5, 0, 40000], np.int32)
        ones = np.ones(requests, np.int32)
        plan = decode_plan.plan_decode(shape, tables, lengths, ones, 1, None, block_size, 2, cores)
        assert (shape.tokens, shape.slots, shape.slot_spans) == (16, 4, 2)
        assert plan.num_groups.ravel().tolist() == {1: [43], 2: [22, 22]}[cores]
        gathered = (plan.gather_rows[..., : shape.slots] >= 0).reshape(cores, -1).sum(1)
        assert gathered.sum() == sum(int(n) // shape.tokens for n in lengths) * 2
        assert gathered.max() <= 1.03 * gathered.sum() / cores


@pytest.mark.parametrize(
    ("requests", "context", "table", "groups"),
    [
        # 131 runs of 16 tokens: 16 x 131 / 128 is 16.4 slots, four of a group.
        (16, 2100, 4096, 5),
        # 32 runs: four requests share a slot.
        (64, 512, 512, 4),
        (1, 100, 131072, 1),
    ],
)
def test_requests_share_slots(requests: int, context: int, table: int, groups: int) -> None:
    shape = decode_shape.decode_shape(requests, 1, 8, 1, 128, 2, table, False, 1)
    tables = np.arange(requests * table // 32, dtype=np.int32).reshape(requests, -1)
    lengths, ones = np.full(requests, context), np.ones(requests, np.int32)
    plan = decode_plan.plan_decode(shape, tables, lengths, ones, 1, None, 32, 1, 1)
    assert plan.num_groups.ravel().tolist() == [groups]


@given(
    lengths=st.lists(st.integers(0, 500), max_size=12),
    slot_spans=st.integers(1, 4),
    num_cores=st.sampled_from([1, 2]),
)
def test_spans_hold_every_run_once_and_in_order(
    lengths: list[int], slot_spans: int, num_cores: int
) -> None:
    pieces = [decode_spans.Runs(chain, 0, length) for chain, length in enumerate(lengths)]
    cores, shared = decode_spans.pack_cores(pieces, slot_spans, num_cores)
    assert len(cores) == num_cores
    runs: dict[int, list[int]] = {chain: [] for chain in range(len(lengths))}
    most = decode_spans.most_slots(len(lengths), max(lengths, default=0), slot_spans)
    for spans in cores:
        order = [span.runs.chain for span in spans]
        assert len(set(order)) == sum(a != b for a, b in pairwise([-1, *order]))
        assert shared not in order or order[-1] == shared
        for slot, own in groupby(spans, lambda span: span.slot):
            of_slot = list(own)
            assert [span.number for span in of_slot] == list(range(len(of_slot)))
            assert len(of_slot) <= slot_spans
            assert [span.place for span in of_slot] == [
                sum(span.runs.length for span in of_slot[:i]) for i in range(len(of_slot))
            ]
            assert sum(span.runs.length for span in of_slot) <= 128
            assert slot < -(-most // num_cores) + num_cores - 1
        for _, _, _, (chain, first, length) in spans:
            runs[chain] += range(first, first + length)
    assert [runs[chain] for chain in range(len(lengths))] == [list(range(n)) for n in lengths]
    assert all(any(s.runs.chain == c for own in cores for s in own) for c in range(len(lengths)))


def test_a_short_context_in_a_long_table_costs_a_group() -> None:
    """Modelled: at most 0.4 of what a context of 16 slots costs with the same program."""
    rng = np.random.default_rng(0)
    paged = paged_tokens(rng, [32768], 1, 128, 128, ml_dtypes.bfloat16)
    q = normal(rng, (1, 8, 1, 128), ml_dtypes.bfloat16)
    us = []
    for length in (100, 32768):
        with Trace() as trace:
            lengths = np.array([length], np.int32)
            paged_decode(q, paged.k_cache, paged.v_cache, paged.tables, lengths)
        us.append(evaluate(trace.launches[0], BASE).modelled_us)
    assert us[0] <= 0.4 * us[1]


def test_no_row_of_the_cache_is_gathered_that_no_query_sees() -> None:
    """The rows of a plan against the definition, token by token."""
    rng = np.random.default_rng(11)
    block_size, num_queries, window = 16, 3, 40
    lengths, real = np.array([77, 200, 3, 0]), np.array([3, 1, 2, 3])
    shape = decode_shape.decode_shape(4, 2, 6, num_queries, 64, 2, 208, True, 1)
    tables = rng.permutation(52).astype(np.int32).reshape(4, 13)
    plan = decode_plan.plan_decode(
        shape, tables, lengths, real, num_queries, window, block_size, 2, 1
    )
    runs = plan.gather_rows[..., : shape.slots]
    edges = plan.gather_rows[..., shape.slots :]
    tokens = [r * shape.tokens + j for r in runs[runs >= 0].tolist() for j in range(shape.tokens)]
    tokens += edges[edges >= 0].tolist()
    per_chain = 2 // (2 // shape.heads)
    expected = []
    for table, length, queries in zip(tables, lengths, real, strict=True):
        for position in range(max(0, length - queries - window + 1), length):
            block, row = divmod(position, block_size)
            for head in range(0, 2, per_chain):
                expected.append((int(table[block]) * 2 + head) * block_size + row)
    assert sorted(tokens) == sorted(expected)


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
