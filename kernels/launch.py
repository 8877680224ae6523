"""The public kernels: arguments checked on the host, then one launch.

Arrays are NumPy, torch (CPU) or JAX, all of one kind, and so are the results. Shapes, meanings and
the formulas are those of `segattn.reference.attention`, which defines the behaviour; what a kernel
supports beyond that stands at the top of its file. Every rejected argument is a ValueError that
names it; nothing has been written then. Attention comes back in the dtype of q. NumPy and torch
caches are updated in place and returned as the same objects; JAX caches come back as new arrays.

Arguments that all attention functions share: `scale` of the scores, 1e-12 to 1e6, None is
1 / sqrt(head_dim); `sliding_window` W >= 1, a token sees itself and the W - 1 before it; `sinks`
[H] fp32; `k_scale` and `v_scale`, numbers or [KV], stored value times scale is the real one, needed
with fp8 caches; `k_pre_transposed`, the K cache is [num_blocks, KV, d, block_size]; `lnc`, 1 or 2;
`softmax`:

    exact     the maximum of every row, online
    bounded   one shift for many rows, verified; FloatingPointError where the check fails. Prefill
              in bf16 or fp32
    auto      bounded where it is faster (bf16, tables of 512 tokens or more), with the exact
              softmax where the check fails; exact elsewhere
"""

from typing import Any, SupportsIndex

import numpy as np

from ..reference.attention import queries_per_kv_head
from ..reference.paging import cdiv
from .arrays import array_kind, read_optional
from .backend import run
from .decode_plan import plan_decode
from .decode_shape import MOST_PLAN_BYTES, decode_shape
from .head_launches import launch_exact, launch_heads, of_heads
from .key_write_plan import key_write_arguments
from .launch_plan import ProgramShape, plan_launches
from .padded_prefill_nki import chunk_attention_kernel, padded_prefill_kernel
from .paged_decode_nki import paged_decode_kernel
from .paged_prior import TAIL_SEGMENT
from .segmented_attention_nki import segmented_attention_kernel
from .tile_schedule import PARTITIONS
from .validation import (
    FP8_DTYPES,
    Array,
    check_cache_scale,
    check_caches,
    check_choice,
    check_chunk,
    check_cores,
    check_count,
    check_dtypes,
    check_integers,
    check_padding_slots,
    check_scale,
    check_segment_size,
    check_shape,
    check_sinks,
    check_slots,
    check_softmax,
    check_window,
    check_writable_caches,
    check_written_rows,
    device_fp8,
    used_blocks,
)
from .window_plan import window_slots
from .write_kv_cache_nki import write_kv_cache_kernel

LONGEST_SEGMENT = 2048
"""Most tokens of a segment on chip: a longer kv_segment_size is read in segments of this size."""


def padded_prefill(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    num_tokens: SupportsIndex,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_pre_transposed: bool = False,
    softmax: str = "auto",
    lnc: int = 1,
) -> tuple[Any, Any, Any]:
    """Causal attention of a chunk without prior, and its cache write.

    q [H, S, d]; k, v [KV, S, d]; caches [num_blocks, KV, block_size, d]; slot_mapping [S] int32;
    0 <= num_tokens <= S. Returns (out [H, S, d], k_cache, v_cache).
    """
    kind = array_kind(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    q_, k_, v_, slots = map(kind.read, (q, k, v, slot_mapping))
    k_rows, v_rows = kind.open_cache(k_cache), kind.open_cache(v_cache)
    lnc = check_cores(lnc)
    check_chunk(q_, k_, v_)
    check_caches(k_rows, v_rows, k_.shape[0], q_.shape[2], k_pre_transposed)
    check_dtypes(q_.dtype, {"k": k_, "v": v_}, {"k_cache": k_rows, "v_cache": v_rows})
    check_writable_caches(k_rows, v_rows)
    check_integers("slot_mapping", slots, (q_.shape[1],))
    check_slots(slots, v_rows)
    check_written_rows(k_)
    count = check_count("num_tokens", num_tokens, q_.shape[1])
    check_padding_slots(slots, count)
    window = check_window(sliding_window)
    mode = check_softmax(softmax, q_, q_.shape[1])
    factor = check_scale(scale, q_.shape[2])
    logits = check_sinks(read_optional(kind, sinks), q_.shape[0])
    scales = (
        check_cache_scale("k_scale", read_optional(kind, k_scale), k_rows),
        check_cache_scale("v_scale", read_optional(kind, v_scale), v_rows),
    )
    caches = device_fp8(k_rows), device_fp8(v_rows)
    key_writes = key_write_arguments(slots, v_rows.shape[2], k_pre_transposed)
    shape = ProgramShape(
        q_.shape[1], q_.shape[2], q_.dtype.itemsize, lnc, mode, window, None, v_rows.shape[2],
        k_pre_transposed,
    )  # fmt: skip
    plan = plan_launches(shape, q_.shape[0], k_.shape[0])

    def launch(q_heads: slice, kv_heads: slice, softmax: str) -> tuple[Array, Array]:
        found: tuple[Array, Array] = run(
            chunk_attention_kernel, lnc, q_[q_heads], k_[kv_heads], v_[kv_heads], _number(count),
            factor, window, of_heads(logits, q_heads), softmax,
        )  # fmt: skip
        return found

    if plan.heads == q_.shape[0]:
        before = [cache.copy() for cache in (k_rows, v_rows)] if mode == "bounded" else []
        out, _, _, flags = run(
            padded_prefill_kernel, lnc, q_, k_, v_, *caches, slots, _number(count), factor, window,
            logits, *scales, plan.softmax, *key_writes,
        )  # fmt: skip
        if mode == "bounded" and flags.any():
            k_rows[...], v_rows[...] = before
        if plan.exact_heads is not None and flags.any():
            every = slice(0, q_.shape[0])
            out = launch_exact(plan.exact_heads, every, q_.shape[0], k_.shape[0], launch)
        _check_bound(mode, flags)
    else:
        out, flags = launch_heads(plan, q_.shape[0], k_.shape[0], launch)
        _check_bound(mode, flags)
        run(write_kv_cache_kernel, 1, k_, v_, *caches, slots, *scales, *key_writes)
    return kind.give(out), kind.close_cache(k_cache, k_rows), kind.close_cache(v_cache, v_rows)


def segmented_attention(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    prior_tokens: SupportsIndex,
    num_tokens: SupportsIndex,
    *,
    kv_segment_size: SupportsIndex = 2048,
    scale: float | None = None,
    sliding_window: int | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_pre_transposed: bool = False,
    softmax: str = "auto",
    lnc: int = 1,
) -> Any:
    """Causal attention of a chunk over `prior_tokens` cached tokens and itself.

    q [H, S, d]; k, v [KV, S, d]; caches [num_blocks, KV, block_size, d]; block_table [max_blocks]
    int32, of which the first ceil(prior_tokens / block_size) entries are looked at. The prior is
    read in segments of kv_segment_size tokens, a multiple of 128 and of block_size; more than 2048
    are read in pieces of 2048. Returns out [H, S, d].
    """
    kind = array_kind(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, block_table=block_table)
    q_, k_, v_, k_rows, v_rows, table = map(kind.read, (q, k, v, k_cache, v_cache, block_table))
    lnc = check_cores(lnc)
    check_chunk(q_, k_, v_)
    check_caches(k_rows, v_rows, k_.shape[0], q_.shape[2], k_pre_transposed)
    check_dtypes(q_.dtype, {"k": k_, "v": v_}, {"k_cache": k_rows, "v_cache": v_rows})
    block_size = v_rows.shape[2]
    segment = check_segment_size(kv_segment_size, block_size)
    check_integers("block_table", table, (table.size,))
    segment = _covering_segment(segment, table.size * block_size)
    prior = check_count("prior_tokens", prior_tokens, table.size * block_size)
    count = check_count("num_tokens", num_tokens, q_.shape[1])
    tables = used_blocks(
        "block_table",
        table[None],
        np.array([prior]),
        v_rows,
        segment // block_size,
        3 * max(segment, TAIL_SEGMENT) // block_size,
    )
    window = check_window(sliding_window)
    most_tokens = table.size * block_size + q_.shape[1]
    if window is not None and window >= most_tokens:
        window = None
    mode = check_softmax(softmax, q_, most_tokens)
    factor = check_scale(scale, q_.shape[2])
    logits = check_sinks(read_optional(kind, sinks), q_.shape[0])
    k_factors = check_cache_scale("k_scale", read_optional(kind, k_scale), k_rows)
    v_factors = check_cache_scale("v_scale", read_optional(kind, v_scale), v_rows)
    program = (q_.shape[1], q_.shape[2], q_.dtype.itemsize)
    slots = window_slots(tables[0], prior, window, block_size, *program)
    shape = ProgramShape(*program, lnc, mode, window, segment, block_size, k_pre_transposed)
    plan = plan_launches(shape, q_.shape[0], k_.shape[0])

    def launch(q_heads: slice, kv_heads: slice, softmax: str) -> tuple[Array, Array]:
        some_heads = kv_heads.stop - kv_heads.start < k_.shape[0]
        found: tuple[Array, Array] = run(
            segmented_attention_kernel, lnc, q_[q_heads], k_[kv_heads], v_[kv_heads],
            device_fp8(k_rows), device_fp8(v_rows), tables, _number(prior), _number(count), segment,
            factor, window, of_heads(logits, q_heads), of_heads(k_factors, kv_heads),
            of_heads(v_factors, kv_heads), softmax, k_pre_transposed, slots,
            _number(kv_heads.start) if some_heads else None,
        )  # fmt: skip
        return found

    out, flags = launch_heads(plan, q_.shape[0], k_.shape[0], launch)
    _check_bound(mode, flags)
    return kind.give(out)


def paged_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    query_lens: Any = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    k_pre_transposed: bool = False,
    softmax: str = "auto",
    lnc: int = 1,
) -> Any:
    """Attention of the last tokens of B requests over their cached tokens, their own included.

    q [B, H, T, d], T >= 1, at most 128 rows of H / KV * T; caches [num_blocks, KV, block_size, d];
    block_tables [B, max_blocks] and context_lens [B] int32; query_lens [B] int32 within 0..T, None
    is T. Query t of request b is real when t < query_lens[b], at position
    context_lens[b] - query_lens[b] + t; other rows are zero. Returns out [B, H, T, d].
    """
    kind = array_kind(
        q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, context_lens=context_lens
    )
    q_, k_rows, v_rows, tables, lengths = map(
        kind.read, (q, k_cache, v_cache, block_tables, context_lens)
    )
    lnc = check_cores(lnc)
    check_choice("softmax", softmax, ("auto", "exact"))
    check_shape("q", q_, (None, None, None, None), "B, H, T, d")
    num_requests, num_q_heads, num_queries, head_dim = q_.shape
    check_caches(k_rows, v_rows, None, head_dim, k_pre_transposed)
    check_dtypes(q_.dtype, {}, {"k_cache": k_rows, "v_cache": v_rows})
    group = queries_per_kv_head(num_q_heads, k_rows.shape[1])
    if group * num_queries > PARTITIONS:
        raise ValueError(
            f"q: {group} query heads per KV head times T={num_queries} must be at most {PARTITIONS}"
        )
    check_integers("block_tables", tables, (num_requests, None))
    check_integers("context_lens", lengths, (num_requests,))
    queries = read_optional(kind, query_lens)
    if queries is None:
        queries = np.full(num_requests, num_queries, np.int32)
    check_integers("query_lens", queries, (num_requests,))
    block_size = v_rows.shape[2]
    for i in range(num_requests):
        check_count(f"context_lens[{i}]", lengths[i], tables.shape[1] * block_size)
        check_count(f"query_lens[{i}]", queries[i], num_queries)
    num_kv_heads = k_rows.shape[1]
    tables = used_blocks("block_tables", tables, lengths, v_rows, 1)
    window = check_window(sliding_window)
    shape = decode_shape(
        num_requests, num_kv_heads, group * num_queries, num_queries, head_dim, q_.dtype.itemsize,
        tables.shape[1] * block_size, window is not None, lnc, k_pre_transposed,
        k_rows.dtype in FP8_DTYPES,
    )  # fmt: skip
    if shape.plan_bytes(num_queries, lnc) > MOST_PLAN_BYTES:
        raise ValueError(
            f"block_tables: shape {tables.shape} with T={num_queries} needs a plan of "
            f"{shape.plan_bytes(num_queries, lnc)} bytes, must be at most {MOST_PLAN_BYTES}: give "
            "shorter tables or fewer requests"
        )
    plan = plan_decode(
        shape, tables, lengths, queries, num_queries, window, block_size, num_kv_heads, lnc,
        head_dim if k_pre_transposed else None,
    )  # fmt: skip
    out = run(
        paged_decode_kernel, lnc, q_, device_fp8(k_rows), device_fp8(v_rows), *plan.arrays(),
        shape.heads, shape.tokens, check_scale(scale, head_dim),
        check_sinks(read_optional(kind, sinks), num_q_heads),
        check_cache_scale("k_scale", read_optional(kind, k_scale), k_rows),
        check_cache_scale("v_scale", read_optional(kind, v_scale), v_rows), *plan.key_arrays(),
    )  # fmt: skip
    return kind.give(out)


def write_kv_cache(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    k_pre_transposed: bool = False,
) -> tuple[Any, Any]:
    """Store row t of k and v [KV, T, d] in slot slot_mapping[t]; -1 is not written.

    caches [num_blocks, KV, block_size, d]; slot_mapping [T] int32. T is at least 1,
    T * (KV + 4) at most 350,000, KV * d at most 16,384. Returns the caches.
    """
    kind = array_kind(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    k_, v_, slots = map(kind.read, (k, v, slot_mapping))
    k_rows, v_rows = kind.open_cache(k_cache), kind.open_cache(v_cache)
    check_shape("k", k_, (None, None, None), "KV, T, d")
    check_shape("v", v_, k_.shape)
    check_written_rows(k_)
    check_caches(k_rows, v_rows, k_.shape[0], k_.shape[2], k_pre_transposed)
    check_dtypes(k_.dtype, {"v": v_}, {"k_cache": k_rows, "v_cache": v_rows})
    check_writable_caches(k_rows, v_rows)
    check_integers("slot_mapping", slots, (k_.shape[1],))
    check_slots(slots, v_rows)
    run(
        write_kv_cache_kernel, 1, k_, v_, device_fp8(k_rows), device_fp8(v_rows), slots,
        check_cache_scale("k_scale", read_optional(kind, k_scale), k_rows),
        check_cache_scale("v_scale", read_optional(kind, v_scale), v_rows),
        *key_write_arguments(slots, v_rows.shape[2], k_pre_transposed),
    )  # fmt: skip
    return kind.close_cache(k_cache, k_rows), kind.close_cache(v_cache, v_rows)


def _check_bound(softmax: str, flags: Array) -> None:
    """softmax="bounded" has no fallback: FloatingPointError where its check failed."""
    if softmax == "bounded" and flags.any():
        heads = np.flatnonzero(flags.any(0)).tolist()
        raise FloatingPointError(
            f"softmax='bounded': row sums of the queries from head(s) {heads} on left the "
            "accurate range; softmax='auto' falls back to the exact softmax"
        )


def _covering_segment(segment: int, table_tokens: int) -> int:
    """`segment`, or less when SBUF or the block table holds less: whole tiles of 128 tokens."""
    return min(segment, LONGEST_SEGMENT, max(1, cdiv(table_tokens, PARTITIONS)) * PARTITIONS)


def _number(value: int) -> Array:
    """A runtime value as the kernels take it: [1, 1] int32."""
    return np.array([[value]], np.int32)
