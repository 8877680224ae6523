"""The bounded softmax: accurate where its check passes, replaced where it fails."""

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segattn.kernels import backend, padded_prefill, segmented_attention
from segattn.reference import attention as reference
from segattn.reference.nki import activations
from segattn.tests.kernels.cases import (
    Array,
    Options,
    assert_close,
    block_sizes,
    garbage,
    gqa,
    head_dims,
    options,
    padded_rows,
    paged_tokens,
    seeds,
)

BF16 = ml_dtypes.bfloat16


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> list[Array]:
    """Flags [cores, H] of every launch of an attention kernel."""
    seen: list[Array] = []
    run = backend.run

    def recording(*args: Any) -> Any:
        result = run(*args)
        seen.append(result[-1])
        return result

    monkeypatch.setattr("segattn.kernels.backend.run", recording)
    return seen


def rounded_softmax(call: tuple[Any, ...], window: int | None) -> Array:
    """Exact-maximum softmax with bf16 probabilities and a bf16 result, all else in float64."""
    q, k, v, k_cache, v_cache, table, prior, n = call
    heads, _, d = q.shape
    group = heads // k.shape[0]
    block_size = k_cache.shape[2]
    positions = np.array([p for p in range(prior) if table[p // block_size] >= 0], int)
    blocks, offsets = table[positions // block_size], positions % block_size
    out = np.zeros((heads, n, d))
    for head in range(heads):
        kv = head // group
        keys = np.concatenate([k_cache[blocks, kv, offsets], k[kv, :n]]).astype(float)
        values = np.concatenate([v_cache[blocks, kv, offsets], v[kv, :n]]).astype(float)
        scores = q[head, :n].astype(float) @ keys.T / np.sqrt(d)
        behind = prior + np.arange(n)[:, None] - np.concatenate([positions, prior + np.arange(n)])
        scores[(behind < 0) | (behind >= (window or behind.max() + 1))] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True)).astype(BF16).astype(float)
        out[head] = weights @ values / weights.sum(1, keepdims=True)
    return out.astype(BF16)


@given(
    seed=seeds,
    heads=gqa,
    tiles=st.integers(1, 6),
    data=st.data(),
    prior=st.integers(0, 1300) | st.sampled_from([512, 768, 769, 1024]),
    segment=st.sampled_from([128, 384, 512, 640, 1024]),
    d=head_dims,
    block_size=block_sizes,
    options=options,
    holes=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from([BF16, np.float32]),
)
def test_equals_the_reference_without_raising_the_flag(
    seed: int,
    heads: tuple[int, int],
    tiles: int,
    data: st.DataObject,
    prior: int,
    segment: int,
    d: int,
    block_size: int,
    options: Options,
    holes: float,
    dtype: Any,
) -> None:
    rng = np.random.default_rng(seed)
    rows = tiles * 128
    n = data.draw(st.integers(0, rows))
    cache_dtype = options.cache_dtype(dtype)
    paged = paged_tokens(rng, [prior], heads[1], d, block_size, cache_dtype, holes=holes)
    k_cache = options.stored_keys(paged.k_cache)
    q = padded_rows(rng, heads[0], rows, n, d, dtype)
    k, v = (padded_rows(rng, heads[1], rows, n, d, dtype) for _ in range(2))
    call = (q, k, v, k_cache, paged.v_cache, paged.tables[0], prior, n)
    arguments = {**options.arguments(rng, heads[0]), **options.scales(rng, heads[1], dtype)}
    expected = reference.segmented_attention(*call, **arguments)
    out = segmented_attention(*call, kv_segment_size=segment, softmax="bounded", **arguments)
    assert_close(out[:, :n], expected[:, :n])
    np.testing.assert_array_equal(out[:, n:].astype(float), 0.0)


@pytest.mark.parametrize("softmax", ["auto", "bounded"])
@pytest.mark.parametrize(
    ("rows", "n", "prior", "window", "d"),
    [
        (128, 1, 0, None, 128),
        (128, 3, 0, None, 64),
        (128, 128, 0, None, 128),
        (128, 5, 300, None, 64),
        (128, 2, 700, None, 128),
        (256, 256, 0, None, 64),
        (256, 256, 0, None, 256),
        (384, 300, 100, 64, 128),
        (512, 512, 0, None, 128),
        (128, 128, 900, 500, 128),
    ],
)
def test_error_is_within_1_15_of_an_exact_maximum_with_bf16_weights(
    rows: int, n: int, prior: int, window: int | None, d: int, softmax: str
) -> None:
    """Draws are pooled to some 256 rows of heads: the quotient for single rows is noise."""
    rng = np.random.default_rng(n + d)
    own = rounded = 0.0
    for _ in range(max(1, 256 // (4 * n))):
        paged = paged_tokens(rng, [prior], 1, d, 16, BF16)
        q = padded_rows(rng, 4, rows, n, d, BF16)
        k, v = (padded_rows(rng, 1, rows, n, d, BF16) for _ in range(2))
        call = (q, k, v, paged.k_cache, paged.v_cache, paged.tables[0], prior, n)
        expected = reference.segmented_attention(*call, sliding_window=window)[:, :n]
        out = segmented_attention(*call, sliding_window=window, softmax=softmax)[:, :n]
        own += float(np.square(out.astype(float) - expected).sum())
        rounded += float(np.square(rounded_softmax(call, window).astype(float) - expected).sum())
    assert own <= 1.15**2 * rounded


@settings(max_examples=10)
@given(
    seed=seeds,
    heads=gqa,
    tiles=st.integers(1, 5),
    data=st.data(),
    dtype=st.sampled_from([BF16, np.float32]),
    lnc=st.sampled_from([1, 2]),
)
def test_prefill_equals_the_reference_without_raising_the_flag(
    seed: int, heads: tuple[int, int], tiles: int, data: st.DataObject, dtype: Any, lnc: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = tiles * 128
    n = data.draw(st.integers(0, rows))
    q = padded_rows(rng, heads[0], rows, n, 64, dtype)
    k, v = (padded_rows(rng, heads[1], rows, n, 64, dtype) for _ in range(2))
    shape = (tiles * 8, heads[1], 16, 64)
    caches = garbage(rng, shape, dtype), garbage(rng, shape, dtype)
    slots = np.full(rows, -1, np.int32)
    slots[:n] = rng.permutation(rows)[:n]
    wanted = caches[0].copy(), caches[1].copy()
    expected, _, _ = reference.padded_prefill(q, k, v, *wanted, slots, n)
    out, *_ = padded_prefill(q, k, v, *caches, slots, n, softmax="bounded", lnc=lnc)
    assert_close(out, expected)
    assert [c.tobytes() for c in caches] == [c.tobytes() for c in wanted]


@pytest.mark.parametrize(
    ("heads", "tiles", "n", "prior", "holes", "lnc"),
    [(1, 12, 1500, 2300, 0.3, 1), (1, 12, 1100, 0, 0.0, 1), (3, 16, 2048, 600, 0.0, 2)],
)
def test_long_chunks_whose_last_blocks_come_after_the_prior(
    heads: int, tiles: int, n: int, prior: int, holes: float, lnc: int
) -> None:
    rng = np.random.default_rng(tiles)
    paged = paged_tokens(rng, [prior], 1, 64, 32, BF16, holes=holes)
    q = padded_rows(rng, heads, tiles * 128, n, 64, BF16)
    k, v = (padded_rows(rng, 1, tiles * 128, n, 64, BF16) for _ in range(2))
    sinks = np.linspace(-3, 3, heads, dtype=np.float32)
    call = (q, k, v, paged.k_cache, paged.v_cache, paged.tables[0], prior, n)
    expected = reference.segmented_attention(*call, sinks=sinks)
    out = segmented_attention(*call, sinks=sinks, softmax="bounded", kv_segment_size=1024, lnc=lnc)
    assert_close(out, expected)


def hostile(name: str, q: Array, k: Array, v: Array, k_cache: Array, v_cache: Array) -> None:
    """Change a call in place so that it defeats a bound."""
    query = q[0, 5].astype(float)
    aligned = query / np.linalg.norm(query)
    orthogonal = np.roll(aligned, 1)
    orthogonal -= (orthogonal @ aligned) * aligned
    if name == "norms x8":
        q *= q.dtype.type(8)
        k *= k.dtype.type(8)
        k_cache *= k_cache.dtype.type(8)
    elif name == "aligned outlier in the prior":
        k_cache[3, 0, 2] = (aligned * 400).astype(k.dtype)
    elif name == "orthogonal outlier in the prior":
        k_cache[3, 0, 2] = (orthogonal * 400).astype(k.dtype)
    elif name == "aligned outlier in the chunk":
        k[0, 2] = (aligned * 400).astype(k.dtype)
    elif name == "orthogonal outlier in the chunk":
        k[0, 2] = (orthogonal * 4000).astype(k.dtype)
    elif name == "sums at the edge of the range":
        k[0, 2] = (aligned * 89).astype(k.dtype)
    elif name == "late outlier in the chunk":
        k[0, 120] = (aligned * 4000).astype(k.dtype)
    elif name == "constant scores":
        k[:], k_cache[:] = k[:, :1], k[0, 0]
    elif name == "scores of -1e30":
        q[:], k[:], k_cache[:] = 0, 0, 0
        q[..., 0], k[..., 0], k_cache[..., 0] = -1e30, 8, 8
    elif name == "very negative scores":
        q[:], k[:], k_cache[:] = abs(q), -abs(k), -abs(k_cache)
        q *= q.dtype.type(6)
    elif name == "values of 1e30":
        v *= v.dtype.type(1e30)
        v_cache *= v_cache.dtype.type(1e30)


FLAGGED = {
    "norms x8": True,
    "aligned outlier in the prior": True,
    "orthogonal outlier in the prior": None,
    "aligned outlier in the chunk": None,
    "orthogonal outlier in the chunk": True,
    "sums at the edge of the range": True,
    "late outlier in the chunk": True,
    "constant scores": False,
    "scores of -1e30": True,
    "very negative scores": None,
    "values of 1e30": None,
    "nothing": False,
}
"""Whether the check must fail; None: either is right."""


def flushing_exp(x: Array, out: Array | None = None) -> Array:
    """An exp whose subnormal results are zero, as the hardware's may be."""
    y = np.exp(x, out=out)
    y[np.abs(y) < np.finfo(np.float32).tiny] = 0
    return y


@pytest.fixture
def flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's exp flushes denormals to zero."""
    monkeypatch.setitem(activations.ACTIVATIONS, "exp", activations.Activation("exp", flushing_exp))
    # The plans of instructions that ran before hold the other exp.
    monkeypatch.setattr(sys.modules["segattn.reference.nki.isa.activation"], "_plans", {})


@pytest.mark.parametrize("name", FLAGGED)
@pytest.mark.parametrize("flushes", [False, True])
def test_hostile_inputs_are_right_or_fall_back(
    name: str, flushes: bool, flags: list[Array], request: pytest.FixtureRequest
) -> None:
    if flushes:
        request.getfixturevalue("flushing")
    rng = np.random.default_rng(1)
    prior, n = 300, 125
    paged = paged_tokens(rng, [prior], 1, 128, 16, BF16)
    table = np.full(32, -1, np.int32)
    table[:19] = np.arange(19)
    k_cache, v_cache = (
        np.asarray(rng.standard_normal(c.shape), BF16) for c in (paged.k_cache, paged.v_cache)
    )
    q = padded_rows(rng, 2, 128, n, 128, BF16)
    k, v = (padded_rows(rng, 1, 128, n, 128, BF16) for _ in range(2))
    hostile(name, q[:, :n], k[:, :n], v[:, :n], k_cache, v_cache)
    call = (q, k, v, k_cache, v_cache, table, prior, n)
    out = segmented_attention(*call)
    expected = reference.segmented_attention(*call)
    assert_close(out, expected)
    row_errors = np.linalg.norm(out[:, :n].astype(float) - expected[:, :n], axis=2)
    row_norms = np.linalg.norm(expected[:, :n], axis=2)
    assert (row_errors <= 0.02 * row_norms).all()
    if FLAGGED[name] is not None:
        assert bool(flags[-1].any()) == FLAGGED[name]
    if flags[-1].any():
        with pytest.raises(FloatingPointError, match=r"softmax='bounded': row sums .* head\(s\)"):
            segmented_attention(*call, softmax="bounded")


@pytest.mark.parametrize("name", FLAGGED)
@pytest.mark.parametrize(
    ("heads", "d", "window", "fp8", "lnc", "softmax"),
    [
        (2, 64, 200, False, 1, "auto"),
        (1, 128, 130, False, 2, "auto"),
        (2, 256, None, False, 1, "auto"),
        (1, 256, 77, False, 2, "exact"),
        (2, 64, 250, True, 1, "auto"),
    ],
)
def test_hostile_inputs_are_right_in_every_other_program(
    name: str,
    heads: int,
    d: int,
    window: int | None,
    fp8: bool,
    lnc: int,
    softmax: str,
    flushing: None,
) -> None:
    """An exp that flushes denormals; outliers in the middle of a block that the window cuts."""
    rng = np.random.default_rng(2)
    prior, n = 307, 125
    q = padded_rows(rng, heads, 128, n, d, BF16)
    k, v = (padded_rows(rng, 1, 128, n, d, BF16) for _ in range(2))
    k_cache, v_cache = rng.standard_normal((2, 21, 1, 16, d)).astype(BF16)
    # The block where hostile() puts its outlier holds positions 208 to 223.
    table = np.full(40, -1, np.int32)
    table[:20] = np.concatenate([np.arange(4, 17), [3], np.arange(14, 20)])
    table[5] = -1
    hostile(name, q[:, :n], k[:, :n], v[:, :n], k_cache, v_cache)
    options: dict[str, Any] = {"sliding_window": window}
    if fp8:
        options |= {"k_scale": 4.0, "v_scale": 3.0}
        k_cache, v_cache = (
            np.clip(c.astype(np.float32) / 4, -240, 240).astype(ml_dtypes.float8_e4m3fn)
            for c in (k_cache, v_cache)
        )
    k_cache[20], v_cache[20] = np.nan, np.nan  # in no table
    call = (q, k, v, k_cache, v_cache, table, prior, n)
    out = segmented_attention(*call, softmax=softmax, lnc=lnc, **options)
    expected = reference.segmented_attention(*call, **options)
    assert_close(out, expected)
    row_errors = np.linalg.norm(out[:, :n].astype(float) - expected[:, :n], axis=2)
    assert (row_errors <= 0.02 * np.linalg.norm(expected[:, :n], axis=2)).all()


def test_a_failed_bounded_prefill_has_written_nothing() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (padded_rows(rng, 1, 128, 128, 64, BF16) for _ in range(3))
    hostile("scores of -1e30", q, k, v, k, v)
    caches = garbage(rng, (9, 1, 16, 64), BF16), garbage(rng, (9, 1, 16, 64), BF16)
    before = [cache.tobytes() for cache in caches]
    with pytest.raises(FloatingPointError, match="softmax='bounded'"):
        padded_prefill(q, k, v, *caches, np.arange(128, dtype=np.int32), 128, softmax="bounded")
    assert [cache.tobytes() for cache in caches] == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": np.float16}, r"\(not float16\)"),
        ({"rows": 8192, "dtype": np.float32}, r"at most 2097152 bytes .*S=8192, head_dim=128"),
    ],
)
def test_bounded_is_refused_where_it_does_not_exist(change: dict[str, Any], message: str) -> None:
    q = np.zeros((1, change.get("rows", 128), 128), change.get("dtype", BF16))
    cache = np.zeros((2, 1, 16, 128), q.dtype)
    with pytest.raises(ValueError, match=message):
        segmented_attention(q, q, q, cache, cache, np.zeros(1, np.int32), 5, 5, softmax="bounded")


def test_a_row_sum_that_makes_its_factor_denormal_raises_the_flag() -> None:
    """Cached scores 60 above the chunk's, v_scale 1e-6: a row sum of 1e35, a factor of 1e-41."""
    rng = np.random.default_rng(0)
    q, k, v = 0.1 * rng.standard_normal((3, 1, 128, 64)).astype(np.float32)
    k_cache, v_cache = 0.1 * rng.standard_normal((2, 16, 1, 16, 64)).astype(np.float32)
    q[..., 0], k[..., 0], k_cache[..., 0] = 8, 0, 60
    arguments = (q, k, 1e-6 * v, k_cache, v_cache, np.arange(16, dtype=np.int32), 256, 128)
    with pytest.raises(FloatingPointError):
        segmented_attention(*arguments, v_scale=1e-6, softmax="bounded")
