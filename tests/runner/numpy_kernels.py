"""The kernels' host functions in a few lines of NumPy, for tests that serve thousands of steps."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def write_kv_cache(k: Array, v: Array, k_cache: Array, v_cache: Array, slots: Array) -> None:
    """Store rows [KV, S, d] at their slots; -1 is written nowhere."""
    real = np.flatnonzero(slots >= 0)
    blocks, rows = np.divmod(slots[real], k_cache.shape[2])
    k_cache[blocks, :, rows] = k[:, real].swapaxes(0, 1)
    v_cache[blocks, :, rows] = v[:, real].swapaxes(0, 1)


def _attend(q: Array, k_cache: Array, v_cache: Array, table: Array, first: int) -> Array:
    """Causal attention of q [H, T, d], at positions `first` and on, over the cached tokens."""
    end = first + q.shape[1]
    block_size = k_cache.shape[2]
    blocks = table[: -(-end // block_size)]
    group = len(q) // k_cache.shape[1]
    keys, values = (
        cache[blocks]
        .swapaxes(0, 1)
        .reshape(cache.shape[1], -1, q.shape[2])[:, :end]
        .repeat(group, 0)
        for cache in (k_cache, v_cache)
    )
    scores = q @ keys.swapaxes(1, 2) / np.float32(q.shape[2] ** 0.5)
    scores = np.where(np.arange(end) <= np.arange(first, end)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out: Array = (weights / weights.sum(-1, keepdims=True) @ values).astype(q.dtype)
    return out


def padded_prefill(
    q: Array, k: Array, v: Array, k_cache: Array, v_cache: Array, slots: Array, num_tokens: int
) -> tuple[Array, Array, Array]:
    """A first chunk."""
    table = slots[: num_tokens : k_cache.shape[2]] // k_cache.shape[2]
    out = segmented_attention(
        q, *_written(k, v, k_cache, v_cache, slots), k_cache, v_cache, table, 0, num_tokens
    )
    return out, k_cache, v_cache


def _written(
    k: Array, v: Array, k_cache: Array, v_cache: Array, slots: Array
) -> tuple[Array, Array]:
    write_kv_cache(k, v, k_cache, v_cache, slots)
    return k, v


def segmented_attention(
    q: Array, k: Array, v: Array, k_cache: Array, v_cache: Array, table: Array,
    prior_tokens: int, num_tokens: int, **_: int,
) -> Array:  # fmt: skip
    """A later chunk, which is in the cache already."""
    out = np.zeros_like(q)
    out[:, :num_tokens] = _attend(q[:, :num_tokens], k_cache, v_cache, table, prior_tokens)
    return out


def paged_decode(
    q: Array, k_cache: Array, v_cache: Array, tables: Array, context_lens: Array, *,
    query_lens: Array,
) -> Array:  # fmt: skip
    """The last tokens of each request."""
    out = np.zeros_like(q)
    for index, (end, count) in enumerate(zip(context_lens, query_lens, strict=True)):
        if count:
            rows = q[index, :, :count]
            out[index, :, :count] = _attend(rows, k_cache, v_cache, tables[index], end - count)
    return out


NAMES = ("padded_prefill", "paged_decode", "segmented_attention", "write_kv_cache")
