"""Rows of a paged KV cache: how tokens are stored, and read again."""

from typing import Any

import numpy as np
import numpy.typing as npt

from .paging import PAD_SLOT_ID, UNUSED_BLOCK

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

FP8_MAX = 240.0
"""Largest magnitude of trn2's float8_e4m3; float8_e4m3fn has the same bits up to here."""
E5M2_MAX = 57344.0
"""Largest finite float8_e5m2."""
INT8_MAX = 127.0
"""Largest magnitude that is stored in an int8 cache."""
LARGEST_STORED = {"float8_e5m2": E5M2_MAX, "int8": INT8_MAX}
"""Where it is not FP8_MAX, for caches of one byte."""


def write_kv_cache(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    *,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    k_pre_transposed: bool = False,
) -> tuple[Array, Array]:
    """Store row t of k and v in slot slot_mapping[t] of the caches, in place; return the caches.

    Stored value = value / scale, for caches of one byte held within +-240 (e5m2:
    57344, int8: 127), rounded to the cache's dtype.
    """
    block_size = v_cache.shape[2]
    k_rows = by_row(k_cache, k_pre_transposed)
    for rows, cache, scale in ((k, k_rows, k_scale), (v, v_cache, v_scale)):
        divisor = per_kv_head(scale, cache.shape[1])[:, None]
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot == PAD_SLOT_ID:
                continue
            block, offset = divmod(slot, block_size)
            stored = rows[:, token].astype(np.float64) / divisor
            if cache.dtype.itemsize == 1:
                most = LARGEST_STORED.get(cache.dtype.name, FP8_MAX)
                stored = np.clip(stored, -most, most)
            if cache.dtype == np.int8:
                stored = np.rint(stored)
            cache[block, :, offset] = stored.astype(cache.dtype)
    return k_cache, v_cache


def by_row(k_cache: Array, k_pre_transposed: bool) -> Array:
    """A view of the K cache as [num_blocks, KV, block_size, d]."""
    return k_cache.swapaxes(2, 3) if k_pre_transposed else k_cache


def cached_rows(
    kv_head: int,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    num_tokens: int,
    k_scale: float | Array | None,
    v_scale: float | Array | None,
) -> tuple[npt.NDArray[np.int64], Float64, Float64]:
    """Positions, keys and values of the cached tokens 0..num_tokens-1 that are not absent."""
    num_kv_heads, block_size, _ = k_cache.shape[1:]
    positions, keys, values = [], [], []
    for position in range(num_tokens):
        block = int(block_table[position // block_size])
        if block == UNUSED_BLOCK:
            continue
        positions.append(position)
        keys.append(k_cache[block, kv_head, position % block_size].astype(np.float64))
        values.append(v_cache[block, kv_head, position % block_size].astype(np.float64))
    return (
        np.array(positions, np.int64),
        np.array(keys).reshape(len(positions), k_cache.shape[3])
        * per_kv_head(k_scale, num_kv_heads)[kv_head],
        np.array(values).reshape(len(positions), v_cache.shape[3])
        * per_kv_head(v_scale, num_kv_heads)[kv_head],
    )


def per_kv_head(scale: float | Array | None, num_kv_heads: int) -> Float64:
    """The scale of each KV head; no scale is 1."""
    return np.broadcast_to(np.asarray(1.0 if scale is None else scale, np.float64), (num_kv_heads,))
