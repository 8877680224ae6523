"""Checks of the shapes of a kernel call: what the kernels have, and what the chip holds.

Every failure is a ValueError that names the argument, its value and what is allowed.
"""

from typing import SupportsIndex

import numpy as np

from ..reference.attention import queries_per_kv_head
from .sizes import PARTITIONS, padded_features
from .validation import Array, check_choice, check_integer, check_shape

HEAD_DIMS = range(32, 257, 8)
DECODE_KEY_DIMS, DECODE_VALUE_DIMS = range(32, 577, 8), range(32, 513, 8)
"""Those of paged_decode: MLA has keys of 576 features and values of 512."""
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_COLUMN_BLOCKS = 2**24
"""Pre-transposed blocks are found by numbers that fp32 must hold."""
CHUNK_BYTES = 4 << 20
"""Most bytes of a head's keys in a chunk, which stay in SBUF: S = 8192 with 128 fp32 features. More
than 128 features take the room of 256."""
MOST_ROWS = 8192
"""Longest chunk: the program of one head has below 20,000 instructions then."""
MOST_WRITTEN_ROWS = 350_000
"""Most tokens times (KV heads + 4) of write_kv_cache: rows of the chunk are exact in fp32, and the
program has below 60,000 instructions where pre-transposed keys follow each other in blocks."""
WIDEST_TOKEN = 16384
"""Most elements of a token's K in all heads: with scales SBUF holds 128 tokens in three forms."""


def check_caches(
    k_cache: Array,
    v_cache: Array,
    num_kv_heads: int | None,
    head_dim: int,
    k_pre_transposed: bool = False,
    value_dim: int | None = None,
    key_dims: range = HEAD_DIMS,
) -> None:
    """The caches have one supported shape [num_blocks, KV, block_size, head_dim].

    A pre-transposed K cache is [num_blocks, KV, head_dim, block_size]. value_dim: that of the V
    cache, where it may differ.
    """
    check_choice("k_pre_transposed", k_pre_transposed, (False, True))
    rows, columns = (3, 2) if k_pre_transposed else (2, 3)
    expected: list[int | None] = [None, num_kv_heads, None, None]
    expected[columns] = head_dim
    check_shape("k_cache", k_cache, tuple(expected))
    num_blocks, heads, block_size = k_cache.shape[0], k_cache.shape[1], k_cache.shape[rows]
    check_shape("v_cache", v_cache, (num_blocks, heads, block_size, value_dim or head_dim))
    layout = "[num_blocks, KV, d, block_size]" if rows == 3 else "[num_blocks, KV, block_size, d]"
    check_choice(f"block_size (k_cache.shape[{rows}] of {layout})", block_size, BLOCK_SIZES)
    check_head_dim("head_dim", head_dim, key_dims)
    if k_pre_transposed and num_blocks * heads >= MOST_COLUMN_BLOCKS:
        raise ValueError(
            f"k_cache: {num_blocks} pre-transposed blocks of {heads} KV heads must be below "
            f"{MOST_COLUMN_BLOCKS} together"
        )


def check_head_dim(name: str, head_dim: int, sizes: range = HEAD_DIMS) -> None:
    """A head size that the kernels have."""
    if head_dim not in sizes:
        raise ValueError(
            f"{name}={head_dim}: must be a multiple of {sizes.step} within {sizes[0]}..{sizes[-1]}"
        )


def check_apart(k_cache: Array, v_cache: Array, **read: Array) -> None:
    """Caches that are written overlap nothing that is read."""
    for name, array in read.items():
        if any(np.shares_memory(array, cache) for cache in (k_cache, v_cache)):
            raise ValueError(f"{name}: shares memory with a cache, must be an array of its own")


def check_chunk(q: Array, k: Array, v: Array) -> None:
    """Q [H, S, d] and k, v [KV, S, d] belong together, and the chunk fits SBUF."""
    check_shape("q", q, (None, None, None))
    check_shape("k", k, (None, q.shape[1], q.shape[2]))
    check_value_rows(v, k)
    queries_per_kv_head(q.shape[0], k.shape[0])
    check_queries(q, v.shape[2])


def check_value_rows(v: Array, k: Array) -> None:
    """V [KV, T, dv] belongs to k [KV, T, d]."""
    check_shape("v", v, (*k.shape[:2], None))
    check_value_dim("v", v.shape[2], k.shape[2])


def check_value_dim(name: str, value_dim: int, key_dim: int) -> None:
    """Values take no more parts of 128 features than keys."""
    if value_dim == key_dim:
        return
    check_head_dim(f"{name}: head size", value_dim)
    most = -(-key_dim // PARTITIONS) * PARTITIONS
    if value_dim > most:
        raise ValueError(
            f"{name}: head size {value_dim} must be at most {most} for keys of {key_dim}"
        )


def check_queries(q: Array, value_dim: int) -> None:
    """Q [H, S, d]: a head's rows, with values of `value_dim` features, fit SBUF."""
    check_shape("q", q, (None, None, None))
    features = max(padded_features(q.shape[2]), value_dim)
    most = min(MOST_ROWS, CHUNK_BYTES // (features * q.dtype.itemsize))
    most -= most % PARTITIONS
    if q.shape[1] > most:
        raise ValueError(f"q: S={q.shape[1]} must be at most {most}")


def check_cross(k: Array | None, v: Array | None, causal: bool, softmax: str) -> None:
    """Attention without keys of its own: both are absent, and no row stands among the keys."""
    if k is not None or v is not None:
        name = "k" if k is None else "v"
        raise ValueError(f"{name}=None: must be an array, or both k and v None")
    if causal:
        raise ValueError("k=None: cross attention needs causal=False")
    check_choice("softmax without k and v", softmax, ("auto", "exact"))


def check_written_rows(name: str, k: Array) -> None:
    """The rows [KV, T, d] of one cache write fit a program and SBUF."""
    num_kv_heads, num_tokens, head_dim = k.shape
    if num_kv_heads * head_dim > WIDEST_TOKEN:
        raise ValueError(
            f"{name}: {num_kv_heads} KV heads of head_dim={head_dim} must have at most "
            f"{WIDEST_TOKEN} elements together"
        )
    most = MOST_WRITTEN_ROWS // (num_kv_heads + 4)
    if num_tokens > most:
        raise ValueError(
            f"{name}: T={num_tokens} must be at most {most} for {num_kv_heads} KV heads: store "
            "longer chunks in several calls"
        )


def check_segment_size(kv_segment_size: SupportsIndex, block_size: int) -> int:
    """A segment is whole tiles of 128 tokens and whole blocks."""
    size = check_integer("kv_segment_size", kv_segment_size)
    if size < 1 or size % PARTITIONS or size % block_size:
        raise ValueError(
            f"kv_segment_size={size}: must be a positive multiple of {PARTITIONS} and of "
            f"block_size={block_size}"
        )
    return size
