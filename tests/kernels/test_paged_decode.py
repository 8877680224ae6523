"""paged_decode against the float64 reference."""

from unittest import mock

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import decode_plan, decode_shape, paged_decode
from segattn.reference import attention as reference
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
    scale=st.sampled_from([None, 0.1, 1.0]),
    group_bytes=st.sampled_from([decode_shape.GROUP_BYTES, 512]),
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
    scale: float | None,
    group_bytes: int,
) -> None:
    """Small groups need several trips, where the usual ones take all of such lengths in one."""
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
    call = (q, paged.k_cache, paged.v_cache, paged.tables, context_lens)
    arguments = {
        "query_lens": None if all_queries else np.array(real, np.int32),
        "scale": scale,
        **options.arguments(rng, heads[0]),
        **options.scales(rng, heads[1], dtype),
    }
    expected = reference.paged_decode(*call, **arguments)
    with mock.patch.multiple(decode_shape, GROUP_BYTES=group_bytes, STAGED_BYTES=4 * group_bytes):
        out = paged_decode(*call, **arguments)
    assert out.dtype == q.dtype
    assert_close(out, expected)
    for request, length in enumerate(lengths):
        padding = out[request, :, real[request] if length else 0 :]
        np.testing.assert_array_equal(padding.astype(float), 0.0)


def test_a_long_context_of_several_trips_is_exact() -> None:
    """129 slots of one request: two trips and one slot of a third, on one core and on two."""
    rng = np.random.default_rng(5)
    length = 16 * 128 * 33 + 7
    paged = paged_tokens(rng, [length], 1, 32, 128, np.float32)
    q = normal(rng, (1, 3, 1, 32), np.float32)
    call = (q, paged.k_cache, paged.v_cache, paged.tables, np.array([length], np.int32))
    expected = reference.paged_decode(*call)
    for lnc in (1, 2):
        assert_close(paged_decode(*call, lnc=lnc), expected)


def _one_request(
    rng: np.random.Generator, keys: Array, values: Array, q: Array, block_size: int = 16
) -> Array:
    """Decode of one request whose cache holds keys and values [n, d], blocks in reverse order."""
    num_blocks = -(-len(keys) // block_size)
    caches = []
    for rows in (keys, values):
        cache = garbage(rng, (num_blocks + 1, 1, block_size, rows.shape[1]), rows.dtype)
        flat = cache[1:][::-1].reshape(-1, rows.shape[1])
        flat[: len(rows)] = rows
        cache[1:] = flat.reshape(num_blocks, 1, block_size, -1)[::-1]
        caches.append(cache)
    table = np.arange(num_blocks, 0, -1, np.int32)[None]
    call = (q, caches[0], caches[1], table, np.array([len(keys)], np.int32))
    out = paged_decode(*call)
    expected = reference.paged_decode(*call)
    rounded = paged_decode(*[np.asarray(a, np.float32) if a.ndim == 4 else a for a in call])
    assert relative_error(rounded, expected) <= 1e-5
    # bf16 weights cost at most this against float64, whatever the scores.
    assert relative_error(out, expected) <= 1.2e-2
    return out


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
        keys[:] = -1e14 * np.sign(q[0, 2, 0].astype(np.float32)).astype(q.dtype)
        q = (q * 1e14).astype(q.dtype)
    else:
        values = (values * 1e30).astype(values.dtype)
    _one_request(rng, keys, values, q)


def test_work_follows_the_lengths_and_two_cores_share_it_evenly() -> None:
    """Trips with work, of a table that could hold 131072 tokens per request."""
    block_size, requests = 128, 4
    width = 131072 // block_size
    for cores in (1, 2):
        shape = decode_shape.decode_shape(requests, 2, 4, 1, 128, 2, 131072, False, cores)
        tables = np.arange(requests * width, dtype=np.int32).reshape(requests, width)
        lengths = np.array([131072, 5, 0, 40000], np.int32)
        ones = np.ones(requests, np.int32)
        plan = decode_plan.plan_decode(shape, tables, lengths, ones, 1, None, block_size, 2, cores)
        per_slot = shape.tokens * 128
        used = sum(-(-int(n) // per_slot) for n in lengths) * 2
        per_trip = shape.slots * shape.groups
        expected = -(-(-(-used // cores)) // per_trip)
        assert plan.num_trips[:, 0].tolist() == [expected] * cores
        gathered = (plan.gather_rows[..., : shape.slots] >= 0).reshape(cores, -1).sum(1)
        assert gathered.sum() == sum(int(n) // shape.tokens for n in lengths) * 2
        assert gathered.max() - gathered.min() <= 128


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
