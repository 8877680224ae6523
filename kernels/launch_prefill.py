"""The host functions of prefill: arguments checked, then one launch or some heads at a time."""

from typing import Any, SupportsIndex

import numpy as np

from ..reference.paging import cdiv
from . import backend
from .addresses import check_padding_slots, check_slots, used_blocks
from .arrays import array_kind, read_optional
from .device.padded_prefill_nki import chunk_attention_kernel, padded_prefill_kernel
from .device.prefill.paged_prior import TAIL_SEGMENT
from .device.segmented_attention_nki import segmented_attention_kernel
from .device.write_kv_cache_nki import write_kv_cache_kernel
from .head_launches import launch_exact, launch_heads, of_heads
from .launch_plan import ProgramShape, plan_launches
from .plan.key_writes import key_write_arguments
from .plan.window_plan import window_columns, window_slots
from .sizes import PARTITIONS
from .validation import (
    Array,
    check_cache_scale,
    check_caches,
    check_chunk,
    check_cores,
    check_count,
    check_dtypes,
    check_integers,
    check_scale,
    check_segment_size,
    check_sinks,
    check_softmax,
    check_window,
    check_writable_caches,
    check_written_rows,
    device_fp8,
)

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
    check_writable_caches(k_rows, v_rows, q=q_, k=k_, v=v_)
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
        found: tuple[Array, Array] = backend.run(
            chunk_attention_kernel, lnc, q_[q_heads], k_[kv_heads], v_[kv_heads], _number(count),
            factor, window, of_heads(logits, q_heads), softmax,
        )  # fmt: skip
        return found

    if plan.heads == q_.shape[0]:
        before = [cache.copy() for cache in (k_rows, v_rows)] if mode == "bounded" else []
        out, _, _, flags = backend.run(
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
        backend.run(write_kv_cache_kernel, 1, k_, v_, *caches, slots, *scales, *key_writes)
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
    columns = window_columns(slots, prior, block_size) if k_pre_transposed else ()
    is_cast = k_rows.dtype != q_.dtype
    shape = ProgramShape(
        *program, lnc, mode, window, segment, block_size, k_pre_transposed, is_cast
    )
    plan = plan_launches(shape, q_.shape[0], k_.shape[0])

    def launch(q_heads: slice, kv_heads: slice, softmax: str) -> tuple[Array, Array]:
        some_heads = kv_heads.stop - kv_heads.start < k_.shape[0]
        found: tuple[Array, Array] = backend.run(
            segmented_attention_kernel, lnc, q_[q_heads], k_[kv_heads], v_[kv_heads],
            device_fp8(k_rows), device_fp8(v_rows), tables, _number(prior), _number(count), segment,
            factor, window, of_heads(logits, q_heads), of_heads(k_factors, kv_heads),
            of_heads(v_factors, kv_heads), softmax, k_pre_transposed, slots,
            _number(kv_heads.start) if some_heads else None, *columns,
        )  # fmt: skip
        return found

    out, flags = launch_heads(plan, q_.shape[0], k_.shape[0], launch)
    _check_bound(mode, flags)
    return kind.give(out)


def _check_bound(softmax: str, flags: Array) -> None:
    """softmax="bounded" has no fallback: FloatingPointError where its check failed."""
    if softmax == "bounded" and flags.any():
        heads = np.flatnonzero(flags.any(0)).tolist()
        raise FloatingPointError(
            f"softmax='bounded': row sums or results of the queries from head(s) {heads} on "
            "left the accurate range; softmax='auto' falls back to the exact softmax"
        )


def _covering_segment(segment: int, table_tokens: int) -> int:
    """`segment`, or less when SBUF or the block table holds less: whole tiles of 128 tokens."""
    return min(segment, LONGEST_SEGMENT, max(1, cdiv(table_tokens, PARTITIONS)) * PARTITIONS)


def _number(value: int) -> Array:
    """A runtime value as the kernels take it: [1, 1] int32."""
    return np.array([[value]], np.int32)
