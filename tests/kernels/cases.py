"""Random inputs for the kernels, with NaN and infinity wherever nothing may be read."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

Array = npt.NDArray[Any]

TOLERANCE = {
    np.dtype(np.float32): 1e-5,
    np.dtype(np.float16): 2e-3,
    np.dtype(ml_dtypes.bfloat16): 1.2e-2,
}
"""Relative L2 error against float64 that rounding of weights, results and, with scores of some 50,
of the scores themselves explains."""

dtypes = st.sampled_from([np.float32, ml_dtypes.bfloat16, np.float16])
head_dims = st.sampled_from([64, 128, 32, 80, 96, 256, 40, 72, 136, 192])
block_sizes = st.sampled_from([16, 32, 64, 128, 1, 2, 4, 8])
missing_rows = st.sampled_from([0, 0, 1, 77, 127])
"""Rows that a chunk has less than whole tiles of 128."""
seeds = st.integers(0, 2**32 - 1)
gqa = st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (9, 3), (4, 2)])
"""(query heads, KV heads), ratios that are no powers of two included."""


@dataclass
class Options:
    """Optional arguments of an attention function."""

    window: int | None
    with_sinks: bool
    fp8: type | None
    per_head_scales: bool
    lnc: int
    k_pre_transposed: bool
    with_scales: bool  # also for a cache that is not fp8, which needs none
    scale: float | None
    softcap: float = 0.0

    def unseen(self, prior: int) -> int:
        """Tokens of a prior that the window hides from every token after it."""
        return 0 if self.window is None else max(0, prior - self.window + 1)

    def stored_keys(self, k_cache: Array) -> Array:
        """A K cache [num_blocks, KV, block_size, d] in the layout of these options."""
        return np.ascontiguousarray(k_cache.swapaxes(2, 3)) if self.k_pre_transposed else k_cache

    def cache_dtype(self, dtype: npt.DTypeLike) -> npt.DTypeLike:
        """The caches' dtype; fp8 goes with 16-bit queries only."""
        return self.fp8 if self.fp8 is not None and np.dtype(dtype).itemsize == 2 else dtype

    def scales(self, rng: np.random.Generator, num_kv_heads: int, dtype: npt.DTypeLike) -> Any:
        """k_scale, v_scale and k_pre_transposed for these caches."""
        layout = {"k_pre_transposed": self.k_pre_transposed}
        if self.cache_dtype(dtype) is dtype:
            # Powers of two: what is written is divided by them exactly. Below 1: larger keys at
            # `scale` leave the range in which the bounded softmax is accurate.
            exact = {"k_scale": np.exp2(-rng.integers(1, 4, num_kv_heads)), "v_scale": 4.0}
            numbers = {name: np.asarray(value, np.float32) for name, value in exact.items()}
            return {**numbers, **layout} if self.with_scales else layout
        if self.per_head_scales:
            pair = rng.uniform(0.02, 0.5, (2, num_kv_heads)).astype(np.float32)
            return {"k_scale": pair[0], "v_scale": pair[1], **layout}
        return {"k_scale": 0.25, "v_scale": 0.1, **layout}

    def arguments(self, rng: np.random.Generator, num_q_heads: int) -> dict[str, Any]:
        """Keyword arguments, reference and kernel alike."""
        sinks = rng.uniform(-6, 6, num_q_heads).astype(np.float32) if self.with_sinks else None
        return {
            "sliding_window": self.window, "sinks": sinks, "lnc": self.lnc, "scale": self.scale,
            "softcap": self.softcap,
        }  # fmt: skip


options = st.builds(
    Options,
    window=st.none() | st.integers(1, 400) | st.sampled_from([128, 129, 4096]),
    with_sinks=st.booleans(),
    fp8=st.sampled_from(
        [None, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2, np.int8]
    ),
    per_head_scales=st.booleans(),
    lnc=st.sampled_from([1, 2]),
    k_pre_transposed=st.booleans(),
    with_scales=st.booleans(),
    scale=st.sampled_from([None, 0.05, 0.2]),
    softcap=st.sampled_from([0.0, 0.0, 2.5, 30.0]),
)


def garbage(rng: np.random.Generator, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """NaN, infinities and a large number that every dtype holds; int8: its largest ones."""
    if np.dtype(dtype) == np.int8:
        return rng.choice(np.array([-128, 127], np.int8), shape)
    return rng.choice([np.nan, np.inf, -np.inf, 6e4], shape).astype(np.float32).astype(dtype)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Standard normal numbers, rounded to dtype."""
    return rng.standard_normal(shape).astype(dtype)


@dataclass
class PagedTokens:
    """Tokens in a paged cache whose other rows are garbage."""

    k_cache: Array  # [num_blocks, KV, block_size, d]
    v_cache: Array
    tables: Array  # [B, max_blocks] int32


def paged_tokens(
    rng: np.random.Generator,
    lengths: list[int],
    num_kv_heads: int,
    d: int,
    block_size: int,
    dtype: npt.DTypeLike,
    *,
    holes: float = 0.0,
    spare_blocks: int = 2,
    unseen: int = 0,
) -> PagedTokens:
    """B requests of the given lengths in shuffled blocks; a share `holes` of table entries is -1.

    Table entries after a request's last block name blocks full of garbage. The first `unseen`
    tokens of each request are garbage as well.
    """
    needed = [-(-n // block_size) for n in lengths]
    width = max(*needed, 1) + spare_blocks if len(needed) > 1 else max(needed[0], 1) + spare_blocks
    num_blocks = sum(needed) + spare_blocks + 1
    shape = (num_blocks, num_kv_heads, block_size, d)
    k_cache, v_cache = garbage(rng, shape, dtype), garbage(rng, shape, dtype)
    free = rng.permutation(num_blocks).tolist()
    tables = np.full((len(lengths), width), free[-1], np.int32)
    for request, length in enumerate(lengths):
        for index in range(needed[request]):
            block = free.pop()
            rows = min(block_size, length - index * block_size)
            if rng.random() < holes:
                tables[request, index] = -1
                continue
            tables[request, index] = block
            first = min(max(unseen - index * block_size, 0), rows)
            for cache in (k_cache, v_cache):
                cache[block, :, first:rows] = normal(rng, (num_kv_heads, rows - first, d), dtype)
        tables[request, needed[request] :] = free[0]
    return PagedTokens(k_cache, v_cache, tables)


def padded_rows(
    rng: np.random.Generator, heads: int, rows: int, real: int, d: int, dtype: npt.DTypeLike
) -> Array:
    """[heads, rows, d]: normal numbers, garbage from row `real` on."""
    array = garbage(rng, (heads, rows, d), dtype)
    array[:, :real] = normal(rng, (heads, real, d), dtype)
    return array


def relative_error(actual: Array, expected: Array) -> float:
    """L2 error of `actual` relative to the L2 norm of `expected`; NaN counts as infinite."""
    difference = actual.astype(np.float64) - expected
    if not np.isfinite(difference).all():
        return float("inf")
    return float(np.linalg.norm(difference)) / max(float(np.linalg.norm(expected)), 1e-30)


def assert_close(actual: Array, expected: Array) -> None:
    """`actual` is `expected` (float64) up to the rounding of its dtype."""
    error = relative_error(actual, expected)
    assert error <= TOLERANCE[actual.dtype], f"relative L2 error {error:.2e}"


def assert_same_rows(cache: Array, expected: Array) -> None:
    """Bit for bit the same cache; in fp8 a value may round to the neighbour at a tie.

    The kernel multiplies by the fp32 reciprocal of the scale where the reference divides.
    """
    if cache.dtype.itemsize > 1:
        assert cache.tobytes() == expected.tobytes()
        return
    steps = np.abs(cache.view(np.int8).astype(int) - expected.view(np.int8))
    assert steps.max() <= 1
    assert (steps > 0).mean() < 0.01
